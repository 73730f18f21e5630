"""The link to a store, measured over real sockets; who measures joins nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shardwright.diloco import link_probe
from shardwright.diloco.link_probe import MAX_BURST_BYTES, measure_link
from shardwright.diloco.outer_store_channel import (
    FrameKind,
    open_channel,
)
from shardwright.diloco.outer_store_server import OuterStore
from shardwright.diloco.round_membership import Membership
from shardwright.utils.authenticated_socket import ChannelError, WrongSecret, read_exactly

SECRET = b"k" * 32


@pytest.fixture
def store() -> Iterator[tuple[OuterStore, str]]:
    listener = socket.create_server(("127.0.0.1", 0))
    made = OuterStore(
        Membership(2, 2, 5.0, "fp32"), SECRET, "plan", lambda line: None, lambda line: None
    )
    threading.Thread(target=made.serve, args=(listener,), daemon=True).start()
    yield made, f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def slowed(address: str, bytes_per_second: float, *, is_up: bool) -> str:
    """The address of a relay that lets no more through in one direction, all connections
    together."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, _, port = address.rpartition(":")
    lock, free_at = threading.Lock(), [0.0]

    def pump(source: socket.socket, target: socket.socket, *, slow: bool) -> None:
        try:
            while data := source.recv(16384):
                if slow:
                    with lock:
                        free_at[0] = (
                            max(free_at[0], time.monotonic()) + len(data) / bytes_per_second
                        )
                        wait = free_at[0] - time.monotonic()
                    time.sleep(max(0.0, wait))
                target.sendall(data)
        except OSError:
            pass
        for each in (source, target):
            each.close()

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection((host, int(port)))
            for source, target, slow in ((near, far, is_up), (far, near, not is_up)):
                threading.Thread(
                    target=pump, args=(source, target), kwargs={"slow": slow}, daemon=True
                ).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_who_measures_joins_nothing(
    store: tuple[OuterStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, address = store
    monkeypatch.setattr(link_probe, "ENOUGH_SECONDS", 0.05)
    found = measure_link(address, SECRET, "plan", 2)
    assert found.has_same_plan and found.connected_islands == () and found.connections == 2
    assert 0 < found.round_trip_seconds < 1
    assert min(found.up_bytes_per_second, found.down_bytes_per_second) > 1e6
    assert not made.membership.islands and made.membership.base is None
    assert not measure_link(address, SECRET, "another", 1).has_same_plan


@pytest.mark.parametrize("is_up", [True, False])
def test_a_slow_direction_is_measured(store: tuple[OuterStore, str], is_up: bool) -> None:
    rate = 2e6
    found = measure_link(slowed(store[1], rate, is_up=is_up), SECRET, "plan", 2)
    slow, fast = found.up_bytes_per_second, found.down_bytes_per_second
    slow, fast = (slow, fast) if is_up else (fast, slow)
    assert rate / 2 < slow < 1.3 * rate
    assert fast > 2 * slow


def test_without_the_secret_nothing_is_measured(store: tuple[OuterStore, str]) -> None:
    with pytest.raises(WrongSecret):
        measure_link(store[1], b"x" * 32, "plan", 1)
    with pytest.raises(ChannelError):
        measure_link("127.0.0.1:1", SECRET, "plan", 1)


@pytest.mark.parametrize(
    "asked", [{"up": 0, "down": MAX_BURST_BYTES + 1}, {"up": -1, "down": 0}, {"up": "x"}, {}]
)
def test_a_store_bounds_what_it_sends(
    store: tuple[OuterStore, str], asked: dict[str, object]
) -> None:
    host, _, port = store[1].rpartition(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        link = open_channel(connection, SECRET, as_store=False)
        link.send_document(FrameKind.PROBE, {"plan": "plan"})
        assert link.receive()[0] == FrameKind.PROBED
        link.send_document(FrameKind.PROBE, asked)
        with pytest.raises(ChannelError, match="closed"):
            read_exactly(connection, 1)
