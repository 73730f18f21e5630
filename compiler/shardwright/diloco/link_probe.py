"""The link between an island and the outer store, measured through the store's own protocol: a
PROBE in the place of a HELLO. Who probes takes no part in an outer step.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.diagnostics.host_check import MIN_BANDWIDTH_FRACTION, HostCheck, gbits, red
from shardwright.diloco.outer_store_channel import (
    CHUNK_BYTES,
    AuthenticatedChannel,
    FrameKind,
    document_of,
    open_channel,
    read_secret,
)
from shardwright.plan.island_plans import plan_digest
from shardwright.plan.plan import Plan
from shardwright.utils.authenticated_socket import ChannelError, WrongSecret, keep_alive

PROBE_TIMEOUT_SECONDS = 20.0
ROUND_TRIPS = 5
FIRST_BURST_BYTES, MAX_BURST_BYTES = 2**18, 2**26
"""Bounds a burst's bytes over all connections. Each burst is four times the one before, until one
takes ENOUGH_SECONDS."""
ENOUGH_SECONDS = 0.5
MOST_CONNECTIONS = 8
_MOST_REQUESTS = 64  # of one connection


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """up: from the island to the store; bytes per second over all connections at once. here: the
    islands that the store has. has_same_plan: the store was started for the island's own plan."""

    has_same_plan: bool
    connected_islands: tuple[int, ...]
    connections: int
    round_trip_seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float


def answer_probe(
    link: AuthenticatedChannel,
    first: dict[str, Any],
    digest: str,
    connected_islands: Callable[[], list[int]],
) -> None:
    """The store's side, until the other one leaves. Raises ChannelError."""
    link.set_timeout(PROBE_TIMEOUT_SECONDS)
    link.send_document(
        FrameKind.PROBED,
        {"has_same_plan": first.get("plan") == digest, "here": connected_islands()},
    )
    for _ in range(_MOST_REQUESTS):
        kind, _, payload = link.receive()
        if kind == FrameKind.BYE:
            return
        asked = document_of(payload)
        up, down = _burst(asked.get("up")), _burst(asked.get("down"))
        if kind != FrameKind.PROBE or up is None or down is None:
            raise ChannelError("an invalid probe")
        _receive_bytes(link, up)
        _send_bytes(link, down)
        link.send_document(FrameKind.PROBED, {})


def _burst(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= MAX_BURST_BYTES else None


def _send_bytes(link: AuthenticatedChannel, count: int) -> None:
    zeros = memoryview(bytes(min(count, CHUNK_BYTES)))
    for start in range(0, count, CHUNK_BYTES):
        link.send(FrameKind.DELTA, 0, zeros[: count - start])


def _receive_bytes(link: AuthenticatedChannel, count: int) -> None:
    while count > 0:
        kind, _, payload = link.receive()
        count -= len(payload)
        if kind != FrameKind.DELTA or not payload or count < 0:
            raise ChannelError("an invalid probe")


def measure_link(address: str, secret: bytes, digest: str, connections: int) -> MeasuredLink:
    """connections: as many as ranks of the island have, at most MOST_CONNECTIONS. Takes seconds: at
    most 2 x 85 MiB go over the link. Raises WrongSecret, or ChannelError where nobody answers."""
    links: list[AuthenticatedChannel] = []
    try:
        for _ in range(max(1, min(connections, MOST_CONNECTIONS))):
            links.append(_connected(address, secret))
            links[-1].send_document(FrameKind.PROBE, {"plan": digest, "is_first": len(links) == 1})
        told, *_ = [_probed(link) for link in links]
        trips = []
        for _ in range(ROUND_TRIPS):
            began = time.monotonic()
            _request(links[0], 0, 0)
            trips.append(time.monotonic() - began)
        trip = statistics.median(trips)
        return MeasuredLink(
            has_same_plan=told.get("has_same_plan") is True,
            connected_islands=tuple(int(number) for number in told.get("here", ())),
            connections=len(links),
            round_trip_seconds=trip,
            up_bytes_per_second=_rate(links, trip, is_up=True),
            down_bytes_per_second=_rate(links, trip, is_up=False),
        )
    finally:
        for link in links:
            with contextlib.suppress(ChannelError):
                link.send_document(FrameKind.BYE, {})
            link.close()


def _connected(address: str, secret: bytes) -> AuthenticatedChannel:
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), PROBE_TIMEOUT_SECONDS / 2)
    except OSError as error:
        raise ChannelError(str(error)) from None
    keep_alive(connection, PROBE_TIMEOUT_SECONDS)
    connection.settimeout(PROBE_TIMEOUT_SECONDS)
    try:
        return open_channel(connection, secret, as_store=False)
    except BaseException:
        connection.close()
        raise


def _probed(link: AuthenticatedChannel) -> dict[str, Any]:
    kind, _, payload = link.receive()
    if kind != FrameKind.PROBED:
        raise ChannelError(f"an unexpected {kind.name}")
    return document_of(payload)


def _request(link: AuthenticatedChannel, up: int, down: int) -> None:
    link.send_document(FrameKind.PROBE, {"up": up, "down": down})
    _send_bytes(link, up)
    _receive_bytes(link, down)
    _probed(link)


def _rate(links: list[AuthenticatedChannel], trip: float, *, is_up: bool) -> float:
    """Return the rate of the last burst, in bytes per second, without the round trip that requests
    it."""
    size = FIRST_BURST_BYTES
    with ThreadPoolExecutor(len(links)) as pool:
        while True:
            each = size // len(links)
            began = time.monotonic()
            up, down = (each, 0) if is_up else (0, each)
            list(pool.map(_request, links, [up] * len(links), [down] * len(links)))
            seconds = time.monotonic() - began
            if seconds >= ENOUGH_SECONDS or size >= MAX_BURST_BYTES:
                return each * len(links) / max(seconds - trip, seconds / 10)
            size *= 4


# The link between an island and the outer store, beside the rate that the recipe gives it.


NAME = "outer store"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLink:
    """outer_seconds: of an outer step at that rate; between_seconds: of the steps between two of
    them."""

    gbits_per_second: float
    outer_seconds: float
    between_seconds: float


def check_outer_store_link(plan: Plan, folder: Path, planned: PlannedLink) -> HostCheck:
    """Measure the link from this host to the outer store. folder: an island's."""
    address = str(plan.launch.outer_store)
    try:
        measured = measure_link(
            address, read_secret(folder), plan_digest(plan), plan.strategy.world_size
        )
    except Refusal as refusal:
        return _failed(*refusal.diagnostics)
    except WrongSecret:
        help = (
            "Copy run/outer.secret from the folder that `shardwright outer-store` serves to "
            "the same path here."
        )
        return _failed(red("SW6313", f"the outer store at {address} has another secret", help))
    except ChannelError as broken:
        help = (
            f"Start `shardwright outer-store DIR` where {address} leads to, on the compiled "
            "folder of all islands, and check that this host reaches that port "
            "(launch.outer_store)."
        )
        return _failed(
            red("SW6314", f"the outer store at {address} cannot be reached: {broken}", help)
        )
    if not measured.has_same_plan:
        help = "Compile once, and copy DIR/island-K to each site."
        return _failed(
            red("SW6316", f"the outer store at {address} was started for another plan", help)
        )
    slowest = min(measured.up_bytes_per_second, measured.down_bytes_per_second) * 8 / 1e9
    up, down = (
        gbits(rate) for rate in (measured.up_bytes_per_second, measured.down_bytes_per_second)
    )
    seconds = planned.outer_seconds * planned.gbits_per_second / slowest
    told = (
        f"{address} answers in {measured.round_trip_seconds * 1e3:.3g} ms; {up} Gbit/s "
        f"up, {down} down, {planned.gbits_per_second:g} planned; an outer step takes "
        f"{seconds:.3g} s, {planned.outer_seconds:.3g} planned, every "
        f"{planned.between_seconds:.3g} s; connected islands: "
        f"{', '.join(map(str, measured.connected_islands)) or 'none'}"
    )
    if slowest >= MIN_BANDWIDTH_FRACTION * planned.gbits_per_second:
        return HostCheck(name=NAME, told=told)
    message = (
        f"the link to the outer store at {address} gives {slowest:.3g} Gbit/s, but the "
        f"recipe has {planned.gbits_per_second:g}: an outer step takes {seconds:.3g} s, "
        f"not {planned.outer_seconds:.3g} s"
    )
    key = f"cluster.inter_island_gbits_per_second={slowest:.3g}"
    help = (
        f"If the link gives no more, compile again with --set {key}. With a larger "
        "training.outer.every_steps, training waits less often."
    )
    return HostCheck(
        name=NAME, told=told, problems=(found("SW5312", None, message, help, severity="warning"),)
    )


def _failed(*problems: Diagnostic) -> HostCheck:
    return HostCheck(name=NAME, told="", problems=problems)
