"""Rank 0's ear under attack: whoever is no rank changes nothing, and a rank that goes away is heard
of all the same."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.monitor import monitor_protocol
from shardwright.monitor import monitor_server as hub_module
from shardwright.monitor.monitor_protocol import (
    MAX_LINE_BYTES,
    PROTOCOL,
    TOKEN_IN_ENVIRONMENT,
    TOKEN_VARIABLE,
    Bye,
    End,
    Failed,
    Hello,
    LineReader,
    StackReport,
    StepDone,
    connect_to_server,
    decode,
    delete_token,
    encode,
    find_token,
    make_token,
)
from shardwright.monitor.monitor_server import MAX_UNAUTHENTICATED, MonitorServer, open_server
from shardwright.monitor.rank_events import Event, RankLost, RankStack, read_events
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.authenticated_socket import (
    MAX_HELLO_BYTES,
    ChannelError,
    Handshake,
    UnauthenticatedConnections,
    WrongSecret,
    authenticate,
)

TOKEN = "the run's own"
STACK = RankStack(
    step=3, phase="in step 4", where="x.py:1 in f", current_collective=None, counts={"0": 7}
)


class Ear:
    """A hub of four ranks in this process. Its folder has no run/ yet, as that of a first launch by
    hand."""

    def __init__(self, plan: Plan, folder: Path, server: socket.socket | None = None) -> None:
        self.folder = folder
        self.output = os.open(folder / "output", os.O_CREAT | os.O_RDWR)
        self.hub = MonitorServer(
            plan, folder, 1, self.output, server or open_server("127.0.0.1"), TOKEN
        )
        self.port = self.hub._server.getsockname()[1]
        self.hub.start()

    def rank(self, rank: int, token: str = TOKEN) -> socket.socket:
        line = connect_to_server("127.0.0.1", self.port, token, rank, f"host-{rank}", 100 + rank)
        line.settimeout(10)
        return line

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def events(self) -> list[Event]:
        return read_events((self.folder / "output").read_text().splitlines())

    def still_hears(self, ranks: dict[int, socket.socket]) -> None:
        """Rank 2 goes away without a word: the others are told to end, and the files name it."""
        assert self.hub.is_alive() and not self.events()
        assert not (self.folder / "run" / "status.json").exists()
        (self.folder / "run").mkdir(exist_ok=True)
        ranks.pop(2).close()
        for line in ranks.values():
            assert end_of(line) == End(cause="rank 2 on host-2: lost without an error message")
        (lost,) = self.events()
        assert isinstance(lost, RankLost) and (lost.rank, lost.host, lost.stage) == (2, "host-2", 1)
        status = json.loads((self.folder / "run" / "status.json").read_text())
        assert (status["status"], status["rank"], status["host"], status["stage"]) == (
            "failed",
            2,
            "host-2",
            1,
        )


def end_of(line: socket.socket) -> object:
    return decode((line.makefile("rb").readline()).rstrip())


def is_dropped(line: socket.socket) -> bool:
    """Within the socket's time-out; what it was told before does not matter."""
    with contextlib.suppress(ConnectionResetError):
        while line.recv(65536):
            pass
    return True


@pytest.fixture
def plan(write_recipe: Callable[..., Path]) -> Plan:
    return compile_recipe(load_recipe(write_recipe())).plan


@pytest.fixture
def ear(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ear]:
    monkeypatch.setattr(hub_module, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(hub_module, "TURN_SECONDS", 0.05)
    yield Ear(plan, tmp_path)


@pytest.fixture
def ranks(ear: Ear) -> dict[int, socket.socket]:
    return {rank: ear.rank(rank) for rank in range(4)}


HELLO = {"kind": "hello", "rank": 1, "host": "h", "pid": 1}
GREETING = PROTOCOL + b"n" * 32
HOSTILE = {
    "a list": b"[]\n",
    "nothing": b"\n",
    "not JSON": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "deep": b"[" * 4000 + b"\n",
    "a number": b"1e999\n",
    "no kind": b"{}\n",
    "an unknown kind": b'{"kind": "shutdown"}\n',
    "the end of the run": encode(End(cause="x")),
    "a rank's death": encode(Failed(cause="x")),
    "a step": encode(StepDone(step=1)),
    "another version": PROTOCOL.replace(b"2", b"1") + b"n" * 32,
    "a wrong proof": GREETING + b"\0\2{}" + b"p" * 32,
    "a wrong proof without a hello": GREETING + b"\0\0" + b"p" * 32,
    "lines in the place of a hello": GREETING + b'{"kind": "bye"}\n' * 10000,
    "a hello without an end": GREETING + b"\xff" * 2**20,
    "a long hello": GREETING + (MAX_HELLO_BYTES + 1).to_bytes(2, "big") + b"x" * 2**14,
    "a line of 1 MiB": b"x" * 2**20 + b"\n",
    "1 MiB without an end": b"x" * 2**20,
    "many lines": b'{"kind": "bye"}\n' * 10000,
}


def test_who_is_no_rank_is_dropped_and_changes_nothing(
    ear: Ear, ranks: dict[int, socket.socket]
) -> None:
    for name, said in HOSTILE.items():
        line = ear.stranger()
        with contextlib.suppress(OSError):  # it may be dropped before it has said it all
            line.sendall(said)
        assert is_dropped(line), name
        with pytest.raises(PermissionError):
            ear.rank(1, token="another run's")
    ear.still_hears(ranks)


HELLOS = {
    "nothing": b"",
    "not JSON": b"GET / HTTP/1.1",
    "not UTF-8": b"\xff\xfe\x00",
    "a list": b"[]",
    "deep": b"[" * 4000,
    "another message": encode(Bye()),
    "a rank that is none": json.dumps({**HELLO, "rank": "1"}).encode(),
    "a huge rank": json.dumps({**HELLO, "rank": 10**30}).encode(),
    "no rank": json.dumps({"kind": "hello", "host": "h", "pid": 1}).encode(),
    "more than a rank": json.dumps({**HELLO, "proof": "p"}).encode(),
}


@pytest.mark.parametrize("token", [TOKEN, "another run's"])
@pytest.mark.parametrize("name", HELLOS)
def test_a_hello_that_is_none_is_dropped_also_with_the_token(
    ear: Ear, ranks: dict[int, socket.socket], name: str, token: str
) -> None:
    line = ear.stranger()
    handshake = Handshake(PROTOCOL, token.encode(), is_server=False, hello=HELLOS[name])
    with pytest.raises(WrongSecret):
        authenticate(line, handshake)
    ear.still_hears(ranks)


def test_who_comes_before_the_ranks_takes_no_rank_s_place(ear: Ear) -> None:
    """Each rank is still to come, so that nothing but its proof tells it from a stranger."""
    for rank in range(4):
        with pytest.raises(PermissionError):
            ear.rank(rank, token="another run's")
    ear.still_hears({rank: ear.rank(rank) for rank in range(4)})


def test_a_rank_is_taken_once_and_there_are_no_others(
    ear: Ear, ranks: dict[int, socket.socket]
) -> None:
    for number in (0, 2, 3, 4, 99, -1):
        with pytest.raises(PermissionError):
            ear.rank(number)
    ear.still_hears(ranks)


def test_a_peer_that_stops_in_a_line_is_dropped_after_a_while(
    ear: Ear, ranks: dict[int, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_protocol, "HELLO_TIMEOUT_SECONDS", 0.3)
    silent, half, in_its_hello = ear.stranger(), ear.stranger(), ear.stranger()
    half.sendall(PROTOCOL[:5])
    in_its_hello.sendall(GREETING + b"\1\0" + b"{")
    assert is_dropped(in_its_hello)
    assert is_dropped(silent) and is_dropped(half)
    ear.still_hears(ranks)


def test_five_hundred_connections_do_not_keep_a_rank_out(ear: Ear) -> None:
    crowd = [ear.stranger() for _ in range(500)]
    ranks = {rank: ear.rank(rank) for rank in range(4)}
    assert len(ear.hub._unauthenticated_peers) <= MAX_UNAUTHENTICATED + 4
    assert len(ear.hub._selector.get_map()) <= MAX_UNAUTHENTICATED + 4 + 4 + 1
    ear.still_hears(ranks)
    for line in crowd:
        line.close()


def test_an_address_that_crowds_pushes_out_its_own_connections() -> None:
    """Never those of another host, which may be a rank that is about to prove itself."""
    found: UnauthenticatedConnections[str] = UnauthenticatedConnections(
        expected=4, others=8, limit=10**6
    )
    assert found.add("a rank", "10.0.0.2") == []
    gone = [
        each
        for number in range(100)
        for each in found.add(f"noise {number}", f"10.0.1.{number % 3}")
    ]
    assert "a rank" in found and len(found) == found.most == 12
    assert gone[0] == "noise 0" and found.pop() != "a rank"
    few: UnauthenticatedConnections[str] = UnauthenticatedConnections(
        expected=512, others=256, limit=48
    )
    assert few.most == 4


def test_what_a_rank_may_not_say_is_passed_over(ear: Ear, ranks: dict[int, socket.socket]) -> None:
    """It has proved to be one of ours; a message of another version is no reason to end a run."""
    ranks[1].sendall(
        b'[]\n\xff\n{"kind": "news"}\n'
        + encode(Hello(rank=2, host="h", pid=1))
        + encode(StackReport(stack=STACK))
    )
    ranks[1].sendall(encode(StepDone(step=5)))
    until(lambda: ear.hub._steps == {1: 5})
    ear.still_hears(ranks)


def test_a_rank_that_says_why_is_the_cause(ear: Ear, ranks: dict[int, socket.socket]) -> None:
    (ear.folder / "run").mkdir(exist_ok=True)
    ranks[3].sendall(encode(Bye()))
    ranks.pop(3).close()
    ranks[1].sendall(encode(Failed(cause="ValueError: \udcff")))
    ranks.pop(1).close()
    assert end_of(ranks[0]) == End(cause="rank 1 on host-1: ValueError: ?")
    assert not ear.events()  # it has written its own, and nobody is lost


def test_nothing_ends_the_thread(
    ear: Ear,
    ranks: dict[int, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake of ours, a full disk: the ranks are watched all the same."""

    def broken(*_: object) -> None:
        raise RuntimeError("a mistake")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("_read_messages", "_warn_missing_ranks"):
        with monkeypatch.context() as patch:
            patch.setattr(ear.hub, name, broken)
            ranks[1].sendall(encode(StepDone(step=1)))
            until(lambda: ear.hub._logged_problems > 0)
            ear.hub._logged_problems = 0
    assert "RuntimeError: a mistake" in capsys.readouterr().err
    monkeypatch.setattr(hub_module, "write_status", full)
    ranks.pop(2).close()
    assert end_of(ranks[0]) == End(cause="rank 2 on host-2: lost without an error message")


class Exhausted(socket.socket):
    """A server in a process without free descriptors, for its first ten attempts."""

    attempts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        Exhausted.attempts += 1
        if Exhausted.attempts <= 10:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_without_free_descriptors_goes_on(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub_module, "GRACE_SECONDS", 0.1)
    server = Exhausted()
    server.bind(("127.0.0.1", 0))
    server.listen()
    ear = Ear(plan, tmp_path, server)
    ear.still_hears({rank: ear.rank(rank) for rank in range(4)})
    assert Exhausted.attempts > 10 and "Too many open files" in capsys.readouterr().err


def test_a_rank_does_not_take_a_stranger_for_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for said in (
            GREETING + b"x" * 32,
            GREETING,
            encode(End(cause="x")),
            b"hello\n",
        ):
            error = PermissionError if said.startswith(GREETING) else ConnectionError
            with pytest.raises(error):
                answered(
                    server, said, lambda: connect_to_server("127.0.0.1", port, TOKEN, 0, "h", 1)
                )


def answered(server: socket.socket, said: bytes, call_it: Callable[[], object]) -> None:
    """What a client makes of a server that says only this."""

    def serve() -> None:
        connection, _ = server.accept()
        connection.sendall(said)
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.recv(4096)
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        call_it()
    finally:
        thread.join()


def test_a_proof_is_of_one_connection_and_of_all_that_is_said() -> None:
    hello, other = (encode(Hello(rank=1, host="h", pid=pid)) for pid in (7, 8))

    def server(token: str = TOKEN) -> Handshake:
        return Handshake(PROTOCOL, token.encode(), is_server=True)

    def answered_by(client: Handshake, to: Handshake) -> bytes:
        """What the client says to this server: its greeting, its hello and its proof."""
        return client.output + client.feed(to.output)

    def takes(to: Handshake, said: bytes) -> bool:
        """Byte by byte."""
        for at in range(len(said)):
            to.feed(said[at : at + 1])
        return to.is_complete

    def client(token: str = TOKEN) -> Handshake:
        return Handshake(PROTOCOL, token.encode(), is_server=False, hello=hello)

    mine = server()
    said = answered_by(client(), mine)
    assert takes(mine, said) and mine.hello == hello
    for to, changed in (
        (server(), said),  # overheard, said again
        ((its := server()), answered_by(client(), its).replace(hello, other)),
        ((its := server()), answered_by(client(), its)[:-1] + b"x"),
        ((its := server()), answered_by(client("another"), its)),
        ((its := server("another")), answered_by(client(), its)),
    ):
        with pytest.raises(WrongSecret):
            takes(to, changed)
    asks, its = client(), server()
    takes(its, answered_by(asks, its))
    with pytest.raises(WrongSecret):  # sent back what it has heard
        asks.feed(said[-32:])
    assert its.output != said[-32:]


@pytest.mark.parametrize(
    "message",
    [Hello(rank=1, host="h", pid=1), StepDone(step=2**40), StackReport(stack=STACK), Bye()],
)
def test_a_message_comes_back_from_its_line(message: Any) -> None:
    assert decode(encode(message).removesuffix(b"\n")) == message


def test_lines_are_put_together_and_none_is_endless() -> None:
    ours, theirs = socket.socketpair()
    lines = LineReader(ours, MAX_LINE_BYTES)
    theirs.sendall(b"one\ntw")
    assert lines.read() == [b"one"]
    theirs.sendall(b"o\n")
    assert lines.read() == [b"two"]
    ours.setblocking(False)
    assert lines.read() == []
    lines.most_bytes = 3
    theirs.sendall(b"four\n")
    assert lines.read() is None
    theirs.close()
    assert LineReader(ours, 3).read() is None


def test_the_token_is_a_file_for_this_user_or_comes_with_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.monitor.monitor_protocol.SHARED_FILE_TIMEOUT_SECONDS", 0.0)
    (tmp_path / "run").mkdir()
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    stale, _ = make_token(tmp_path)
    token, where = make_token(tmp_path)
    (path,) = (tmp_path / "run").iterdir()
    assert (path.name, path.stat().st_mode & 0o777, path.read_text()) == (where, 0o600, token)
    assert token != stale and token not in where
    assert find_token(tmp_path, where) == token
    assert find_token(tmp_path, TOKEN_IN_ENVIRONMENT) is None
    for lie in (
        "../plan.json",
        ".token-0",
        where + "/../" + where,
    ):  # said by whoever wrote to the store
        assert find_token(tmp_path, lie) is None
    path.write_text("planted")
    assert find_token(tmp_path, where) is None
    delete_token(tmp_path)
    assert find_token(tmp_path, where) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "given")
    assert make_token(tmp_path) == ("given", TOKEN_IN_ENVIRONMENT)
    assert TOKEN_VARIABLE not in os.environ  # nothing that the rank starts, or prints, has it
    monkeypatch.setenv(TOKEN_VARIABLE, "given")
    assert find_token(tmp_path, TOKEN_IN_ENVIRONMENT) == "given"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_gives_up_on_a_server_that_sends_a_byte_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_protocol, "WELCOME_TIMEOUT_SECONDS", 0.5)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with contextlib.suppress(OSError):
                for byte in GREETING + b"x" * 32:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ChannelError, match="timed out"):
            connect_to_server("127.0.0.1", server.getsockname()[1], TOKEN, 0, "h", 1)
    assert time.monotonic() - began < 30
