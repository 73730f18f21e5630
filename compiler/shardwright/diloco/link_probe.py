"""The link between an island and the outer store, measured through the store's own protocol: a
PROBE in the place of a HELLO. Who probes takes no part in an outer step."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardwright.diloco.outer_store_channel import (
    CHUNK_BYTES,
    AuthenticatedChannel,
    ChannelError,
    FrameKind,
    authenticate,
    document_of,
    set_unacknowledged_timeout,
)

PROBE_TIMEOUT_SECONDS = 20.0
ROUND_TRIPS = 5
FIRST_BURST_BYTES, MAX_BURST_BYTES = 2**18, 2**26
"""Of a burst, over all connections: each is four times the one before, until one takes
ENOUGH_SECONDS."""
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
    """The store's side, until the other one leaves. Raises Broken."""
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
            raise ChannelError("a probe that is none")
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
            raise ChannelError("a probe that is none")


def measure_link(address: str, secret: bytes, digest: str, connections: int) -> MeasuredLink:
    """connections: as many as ranks of the island have, at most MOST_CONNECTIONS. Takes seconds: at
    most 2 x 85 MiB go over the link. Raises WrongSecret, or Broken where nobody answers."""
    links: list[AuthenticatedChannel] = []
    try:
        for _ in range(max(1, min(connections, MOST_CONNECTIONS))):
            links.append(_connected(address, secret))
            links[-1].send_document(FrameKind.PROBE, {"plan": digest, "is_first": len(links) == 1})
        told, *_ = [_probed(link) for link in links]
        trip = _round_trip(links[0])
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
    set_unacknowledged_timeout(connection, PROBE_TIMEOUT_SECONDS)
    connection.settimeout(PROBE_TIMEOUT_SECONDS)
    try:
        return authenticate(connection, secret, as_store=False)
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


def _request_all(
    pool: ThreadPoolExecutor, links: list[AuthenticatedChannel], up: int, down: int
) -> None:
    list(pool.map(lambda link: _request(link, up, down), links))


def _round_trip(link: AuthenticatedChannel) -> float:
    trips = []
    for _ in range(ROUND_TRIPS):
        began = time.monotonic()
        _request(link, 0, 0)
        trips.append(time.monotonic() - began)
    return statistics.median(trips)


def _rate(links: list[AuthenticatedChannel], trip: float, *, is_up: bool) -> float:
    """Of the last burst, without the round trip that asks for it."""
    size = FIRST_BURST_BYTES
    with ThreadPoolExecutor(len(links)) as pool:
        while True:
            each = size // len(links)
            began = time.monotonic()
            _request_all(pool, links, *((each, 0) if is_up else (0, each)))
            seconds = time.monotonic() - began
            if seconds >= ENOUGH_SECONDS or size >= MAX_BURST_BYTES:
                return each * len(links) / max(seconds - trip, seconds / 10)
            size *= 4
