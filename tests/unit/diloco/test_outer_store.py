"""Rounds through a real store over sockets, by ranks that only send numbers."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from shardwright.diloco import outer_store_channel
from shardwright.diloco.outer_store_channel import (
    CHUNK_BYTES,
    MAGIC,
    FrameKind,
    open_channel,
)
from shardwright.diloco.outer_store_client import Link, RefusedByStore
from shardwright.diloco.outer_store_server import MOST_LINES_OF_AN_ADDRESS, OuterStore
from shardwright.diloco.round_membership import WINDOW_CHUNKS, IslandRank, Membership, chunk_sizes
from shardwright.utils.authenticated_socket import ChannelError
from tests.unit.diloco.island_threads import SECRET, SIZE, WORLD, Island, Running, begun


@pytest.fixture
def running() -> Iterator[Callable[..., Running]]:
    """Starts a store for so many islands."""
    closers: list[Callable[[], None]] = []

    def start(islands: int = 2, deadline: float = 5.0) -> Running:
        listener = socket.create_server(("127.0.0.1", 0))
        told: list[str] = []
        members = Membership(islands, WORLD, deadline, "fp32")
        store = OuterStore(members, SECRET, "plan", told.append, lambda line: None)
        ended = threading.Event()
        threading.Thread(target=store.serve, args=(listener,), daemon=True).start()
        threading.Thread(target=store.watch, args=(ended,), daemon=True).start()
        closers.extend((listener.close, ended.set))
        return Running(f"127.0.0.1:{listener.getsockname()[1]}", store, told)

    yield start
    for close in closers:
        close()


def test_a_round(running: Callable[..., Running]) -> None:
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    for step in (4, 8):
        asked = [a.outer(step - 4, step, 1.0), b.outer(step - 4, step, 4.0)]
        assert [each.result(20) for each in asked] == [[2.5, 2.5]] * 2
    assert here.members == [[0, 1], [0, 1]]
    for link in (*a.links, *b.links):
        link.leave(done=True)
    assert here.store._wait_for(lambda: here.store.is_over)


@pytest.mark.prove
def test_the_first_meeting_waits_for_all_and_no_longer_than_the_deadline(
    running: Callable[..., Running],
) -> None:
    here = running(deadline=1.0)
    a = Island(here, 0)
    begun(here, a)
    assert a.outer(0, 4, 3.0).result(20) == [3.0, 3.0]
    assert here.members == [[0]]


@pytest.mark.parametrize("at", ["before it arrives", "once it has arrived", "inside the sum"])
def test_an_island_that_is_killed_costs_the_others_nothing_but_time(
    running: Callable[..., Running], at: str
) -> None:
    here = running(islands=3)
    a, b, c = (Island(here, number) for number in range(3))
    begun(here, a, b, c)
    asked = [a.outer(0, 4, 1.0), c.outer(0, 4, 3.0)]
    if at != "before it arrives":
        came = b.arrive(0, 4, is_due=True, size=SIZE)
        if at == "inside the sum":
            attempt = came.result(20)[0].attempt
            b.links[0]._channel.send(FrameKind.DELTA, attempt, bytes(chunk_sizes(SIZE)[0]))
    b.kill()
    assert [each.result(20) for each in asked] == [[2.0, 2.0]] * 2
    assert here.members == [[0, 2]]
    assert any(line.startswith("island 1 is lost") for line in here.told)


def test_one_that_stays_away_is_waited_for_once(running: Callable[..., Running]) -> None:
    here = running(deadline=1.0)
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    assert a.outer(0, 4, 1.0).result(20) == [1.0, 1.0]
    with pytest.raises(ChannelError):
        b.outer(0, 4, 5.0).result(20)
    assert here.members == [[0]]


def test_one_that_stops_in_the_sum_is_given_up(running: Callable[..., Running]) -> None:
    """A link that swallows everything."""
    here = running(deadline=1.0)
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    asked = a.outer(0, 4, 1.0)
    attempt = b.arrive(0, 4, is_due=True, size=SIZE).result(20)[0].attempt
    b.links[0]._channel.send(FrameKind.DELTA, attempt, bytes(chunk_sizes(SIZE)[0]))
    assert asked.result(20) == [1.0, 1.0]
    assert here.members == [[0]]


@pytest.mark.prove
@pytest.mark.parametrize("stops", ["it sends", "it reads", "it waits"])
def test_one_that_falls_silent_costs_a_quarter_of_the_deadline(
    running: Callable[..., Running], stops: str
) -> None:
    """With more chunks than anyone may be ahead: who is held back must not take that for a break of
    its own."""
    deadline, size = 8.0, 32 * CHUNK_BYTES
    here = running(deadline=deadline)
    a, b = Island(here, 0, deadline=deadline), Island(here, 1, deadline=deadline)
    begun(here, a, b)
    came = b.arrive(0, 4, is_due=True, size=size)
    time.sleep(0.9 * deadline if stops == "it waits" else 0.0)
    asked, began = a.outer(0, 4, 1.0, size), time.monotonic()
    if stops != "it waits":
        attempt = came.result(20)[0].attempt
        for _ in range(5 if stops == "it sends" else WINDOW_CHUNKS):
            for link in b.links:
                link._channel.send(FrameKind.DELTA, attempt, bytes(chunk_sizes(size)[0]))
    assert asked.result(20) == [1.0, 1.0]
    assert time.monotonic() - began < 0.75 * deadline
    assert here.members == [[0]]
    assert not any("island 0 is lost" in line for line in here.told), here.told


@pytest.mark.prove
def test_an_outer_step_that_begins_again_has_what_is_left_of_its_deadline(
    running: Callable[..., Running],
) -> None:
    """One is late, another is lost in the sum, a third does not come again: the deadline is one for
    them all."""
    deadline = 3.0
    here = running(islands=3, deadline=deadline)
    a, b, c = (Island(here, number, deadline=deadline) for number in range(3))
    begun(here, a, b, c)
    asked, began = a.outer(0, 4, 1.0), time.monotonic()
    came = c.arrive(0, 4, is_due=True, size=SIZE)
    time.sleep(0.8 * deadline)
    b.arrive(0, 4, is_due=True, size=SIZE).result(20)
    came.result(20)
    b.kill()  # c is connected, and says nothing
    assert asked.result(20) == [1.0, 1.0]
    assert time.monotonic() - began < 1.25 * deadline + 1.0
    assert here.members == [[0]]


@pytest.mark.prove
def test_a_rank_hears_of_a_silent_store_in_half_the_deadline() -> None:
    """The other half is for reaching it again."""
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        channel = open_channel(listener.accept()[0], SECRET, as_store=True)
        channel.receive()
        channel.send_document(FrameKind.WELCOME, {})
        silent.append(channel)

    silent: list[Any] = []
    threading.Thread(target=greet, daemon=True).start()
    place = IslandRank(
        island=0, rank=0, world=WORLD, attempt=1, run="a", connection=0, plan="plan", data="data"
    )
    link = Link(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, place, 2.0)
    began = time.monotonic()
    with pytest.raises(ChannelError):
        link.exchange(
            1, memoryview(bytes(64 * CHUNK_BYTES)), memoryview(bytearray(64 * CHUNK_BYTES))
        )
    assert 0.9 < time.monotonic() - began < 1.8
    assert began - 1.0 < link.heard <= began + 0.1


def one_lost(here: Running) -> tuple[Island, Island]:
    """Island 0 after an outer step that it made alone, and island 1, which comes back."""
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    b.kill()
    assert a.outer(0, 4, 1.0).result(20) == [1.0, 1.0]
    return a, Island(here, 1, attempt=2)


def test_a_newcomer_takes_a_members_state_and_decides_nothing(
    running: Callable[..., Running],
) -> None:
    here = running()
    a, again = one_lost(here)
    joined = again.join(0, 2)
    assert here.store._wait_for(
        lambda: any(line.startswith("island 1 is behind") for line in here.told)
    )
    assert a.outer(4, 8, 6.0).result(20) == [6.0, 6.0]
    assert joined.result(20) == [(6.0, 17)] * WORLD
    both = [a.outer(8, 12, 1.0), again.outer(8, 12, 2.0)]
    assert [each.result(20) for each in both] == [[1.5, 1.5]] * 2
    assert here.members == [[0], [0], [0, 1]]
    assert [each["joined"] for each in here.store.membership.rounds] == [[], [1], []]


def test_who_gives_its_state_may_leave_at_once(running: Callable[..., Running]) -> None:
    """After the last outer step, while one rank of the newcomer still takes what is on its way."""
    size = 2**25
    here = running()
    a, again = one_lost(here)
    behind = again.arrive(0, 2)
    assert here.store._wait_for(
        lambda: any(line.startswith("island 1 is behind") for line in here.told)
    )

    def give(link: Link) -> None:
        answer = link.arrive(base=4, step=8, is_due=True, size=4, check=0)
        assert link.exchange(answer.attempt, memoryview(bytes(4)), memoryview(bytearray(4))) == [1]
        link.send_state(iter([memoryview(bytes(size))]), 17)
        link.leave(done=True)

    gave = a._ask(give)
    behind.result(20)
    first, second = again.links
    assert first.receive_state(iter([memoryview(bytearray(size))])) == 17
    time.sleep(0.5)  # rank 0 of the giver has left
    assert second.receive_state(iter([memoryview(bytearray(size))])) == 17
    gave.result(20)


def test_one_that_comes_back_in_time_is_a_member(running: Callable[..., Running]) -> None:
    """From a checkpoint of the last outer step."""
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    b.kill()
    again = Island(here, 1, attempt=2)
    begun(here, again)
    both = [a.outer(0, 4, 1.0), again.outer(0, 4, 2.0)]
    assert [each.result(20) for each in both] == [[1.5, 1.5]] * 2


def test_islands_that_resume_at_other_steps_start_from_the_furthest(
    running: Callable[..., Running],
) -> None:
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    behind = a.join(4, 4)
    begun(here, b, base=8)
    assert b.outer(8, 12, 5.0).result(20) == [5.0, 5.0]
    assert behind.result(20) == [(5.0, 17)] * WORLD


def test_weights_that_differ_make_one_a_newcomer(running: Callable[..., Running]) -> None:
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    drifted = b._ask(lambda link: link.arrive(base=0, step=4, is_due=True, size=SIZE, check=77))
    assert a.outer(0, 4, 1.0).result(20) == [1.0, 1.0]
    assert [answer.kind for answer in drifted.result(20)] == [FrameKind.RECEIVE] * WORLD
    assert here.members == [[0]]


def test_a_folder_made_anew_is_taken_where_nobody_else_is_the_island(
    running: Callable[..., Running],
) -> None:
    """It counts its starts from 1 again."""
    here = running()
    a, old = Island(here, 0), Island(here, 1, attempt=7)
    with pytest.raises(RefusedByStore):
        Island(here, 1, attempt=1, run="anew")
    begun(here, a, old)
    old.kill()
    assert here.store._wait_for(lambda: 1 not in here.store.membership.islands)
    begun(here, Island(here, 1, attempt=1, run="anew"))


def test_two_copies_of_a_folder_count_alike_and_are_not_one_island(
    running: Callable[..., Running],
) -> None:
    here = running()
    a, first = Island(here, 0), Island(here, 1, attempt=3, run="first")
    second = Island(here, 1, attempt=3, run="second")
    assert here.store.membership.islands[1].start.run == "second"
    with pytest.raises(RefusedByStore) as told:
        Island(here, 1, attempt=3, run="first", connection=1)
    assert told.value.code == "SW6319"
    begun(here, a, second)
    first.kill()


def test_the_old_self_of_an_island_is_turned_away(running: Callable[..., Running]) -> None:
    here = running()
    a, new = Island(here, 0), Island(here, 1, attempt=2)
    with pytest.raises(RefusedByStore) as told:
        Island(here, 1, attempt=1)
    assert told.value.code == "SW6319"
    begun(here, a, new)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"plan": "another"}, "SW6316"), ({"world": 3}, "SW6316"), ({"data": "another"}, "SW6316")],
)
def test_another_plan_or_data(
    running: Callable[..., Running], changes: dict[str, Any], code: str
) -> None:
    here = running()
    Island(here, 0)
    with pytest.raises(RefusedByStore) as told:
        Island(here, 1, **changes)
    assert told.value.code == code


def test_another_secret(running: Callable[..., Running]) -> None:
    here = running()
    place = IslandRank(
        island=0, rank=0, world=WORLD, attempt=1, run="a", connection=0, plan="plan", data="data"
    )
    with pytest.raises(RefusedByStore) as told:
        Link(here.address, b"x" * 32, place, 2.0)
    assert told.value.code == "SW6313"
    assert here.store._wait_for(lambda: any("SW6313" in line for line in here.told))


def test_a_stranger_ends_nothing(running: Callable[..., Running]) -> None:
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    host, port = here.address.split(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    begun(here, a, b)


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_comes_when_the_others_are_done_does_not_train_alone(
    running: Callable[..., Running], waits: bool
) -> None:
    """waits: it is connected before they are done, and arrives afterwards."""
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    b.kill()
    again = Island(here, 1, attempt=2) if waits else None
    assert a.outer(0, 4, 1.0).result(20) == [1.0, 1.0]
    joined = again.join(0, 2) if again else None
    for link in a.links:
        link.leave(done=True)
    assert here.store._wait_for(lambda: here.store.membership.final == 4)
    joined = joined or Island(here, 1, attempt=2).join(0, 2)
    with pytest.raises((RefusedByStore, ChannelError)) as told:
        joined.result(20)
    lost = "island 1 is lost: island 0 has trained to step 4"
    assert here.store._wait_for(lambda: any(lost in line for line in here.told)), here.told
    if isinstance(told.value, RefusedByStore):
        assert told.value.code == "SW6320"
    assert here.members == [[0]]


def test_who_has_the_last_step_may_come_back(running: Callable[..., Running]) -> None:
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b, base=12)
    for link in a.links:
        link.leave(done=True)
    begun(here, Island(here, 0, attempt=2), base=12)


def test_an_outer_step_is_on_record_before_anyone_applies_it(
    running: Callable[..., Running],
) -> None:
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    seen: list[int] = []

    def slow(line: dict[str, Any]) -> None:
        time.sleep(0.2)
        seen.append(sum(each.done() for each in asked))

    here.store._record = slow
    asked = [a.outer(0, 4, 1.0), b.outer(0, 4, 4.0)]
    assert [each.result(20) for each in asked] == [[2.5, 2.5]] * 2
    assert seen == [0]


def test_an_outer_step_that_cannot_be_put_on_record_is_not_made(
    running: Callable[..., Running],
) -> None:
    """A full disk, at the second one: no rank hears of a commit, and the store stops."""
    here = running()
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    assert [each.result(20) for each in (a.outer(0, 4, 1.0), b.outer(0, 4, 4.0))] == [
        [2.5, 2.5]
    ] * 2

    outcomes: list[str | None] = []

    def full(line: dict[str, Any]) -> None:
        found = here.store.membership.round
        outcomes.append(None if found is None else found.outcome)
        raise OSError(errno.ENOSPC, "No space left on device")

    here.store._record = full
    for asked in (a.outer(4, 8, 1.0), b.outer(4, 8, 4.0)):
        with pytest.raises(ChannelError):
            asked.result(20)
    # A round that is committed is sent to the ranks, whatever comes of its record.
    assert outcomes and "committed" not in outcomes
    assert isinstance(here.store.failure, OSError) and here.store.failure.errno == errno.ENOSPC
    assert here.members == [[0, 1]] and here.store.membership.base != 8
    with pytest.raises(ChannelError):
        Island(here, 0, attempt=2)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), ValueError("closed file")]
)
def test_output_that_nobody_reads_costs_no_outer_step(
    running: Callable[..., Running], error: Exception
) -> None:
    def broken(line: str) -> None:
        raise error

    here = running()
    here.store._log_line = broken
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    assert [each.result(20) for each in (a.outer(0, 4, 1.0), b.outer(0, 4, 4.0))] == [
        [2.5, 2.5]
    ] * 2
    b.kill()
    assert a.outer(4, 8, 1.0).result(20) == [1.0, 1.0]


@pytest.mark.prove
def test_a_handshake_has_one_deadline_however_often_a_byte_comes(
    running: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = outer_store_channel.open_channel.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "within", 0.6)
    here = running()
    host, port = here.address.split(":")
    began, sent = time.monotonic(), 0
    with socket.create_connection((host, int(port))) as slow, pytest.raises(OSError):
        while time.monotonic() < began + 5:
            slow.sendall(MAGIC[sent : sent + 1])
            sent += 1
            time.sleep(0.1)
    assert time.monotonic() - began < 2.5
    assert here.store._wait_for(lambda: len(here.store._unauthenticated) == 0)


def test_connections_that_prove_nothing_keep_no_island_out(running: Callable[..., Running]) -> None:
    """Silent ones, many more than may be open at once."""
    here = running()
    host, port = here.address.split(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(400)]
    a, b = Island(here, 0), Island(here, 1)
    begun(here, a, b)
    most = here.store._unauthenticated.max_per_address
    assert here.store._wait_for(lambda: sum(map(is_open, crowd)) <= most < 100)
    assert [each.result(20) for each in (a.outer(0, 4, 1.0), b.outer(0, 4, 4.0))] == [
        [2.5, 2.5]
    ] * 2
    assert (
        sum("closed before a valid hello" in line for line in here.told) <= MOST_LINES_OF_AN_ADDRESS
    )
    for each in crowd:
        each.close()


def is_open(connection: socket.socket) -> bool:
    """Whether the store has not closed it."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


FEW_DESCRIPTORS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
from shardwright.diloco.round_membership import Membership
from shardwright.diloco.outer_store_server import MOST_LINES_OF_AN_ADDRESS, OuterStore
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
store = OuterStore(Membership(2, 2, 5.0, "fp32"), b"k" * 32, "plan", lambda line: None, lambda line: None)
if sys.argv[1] == "uncapped":
    store._unauthenticated.most = store._unauthenticated.max_per_address = 1000
store.serve(listener)
"""  # noqa: E501


@pytest.mark.parametrize("cap", ["capped", "uncapped"])
def test_a_store_without_free_descriptors_goes_on(cap: str) -> None:
    """uncapped: it runs out of them, as on a host where others hold them all."""
    command = [sys.executable, "-c", FEW_DESCRIPTORS, cap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        try:
            assert store.stdout is not None
            port = int(store.stdout.readline())
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]
            here = Running(f"127.0.0.1:{port}", cast(Any, None))
            first = patient(here)
            begun(here, *first)
            for each in crowd:
                each.close()
            begun(here, *patient(here, attempt=2))
        finally:
            store.kill()


def patient(here: Running, attempt: int = 1) -> list[Island]:
    """Both islands, which try again as their ranks do."""
    found: list[Island] = []
    end = time.monotonic() + 20
    while len(found) < 2:
        try:
            found.append(Island(here, len(found), attempt=attempt))
        except ChannelError:
            assert time.monotonic() < end
            time.sleep(0.2)
    return found
