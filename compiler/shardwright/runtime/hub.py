"""Rank 0's ear: every rank holds a connection to it, and one that breaks without a word is a rank that is gone.

A killed process closes its connections at once; a dead host stops answering the kernel's keepalive. So no rank has to
send anything in time, and a rank that computes for an hour is not taken for dead.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import threading
import time
from pathlib import Path

from shardwright.plan.plan import Plan
from shardwright.runtime.events import Event, emit, first_cause
from shardwright.runtime.journal import write_status
from shardwright.runtime.stall import Stack, culprits, describe

GRACE_SECONDS = 3.0
"""From the first sign of trouble to the end of all ranks: the cause shall arrive before its echoes are cut off."""
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 5, 3, 4
"""A host that lost power or network is noticed after 5 + 3 x 4 = 17 seconds."""
ABSENT_SECONDS = 60.0
STALL_SECONDS = float(os.environ.get("SHARDWRIGHT_STALL_SECONDS", "600"))
STACK_SECONDS = 5.0
HEARTBEAT_SECONDS = 5.0


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        # For what was sent and not acknowledged: keepalive does not run then.
        (socket.TCP_USER_TIMEOUT, 1000 * (KEEPALIVE_IDLE_SECONDS + KEEPALIVE_INTERVAL_SECONDS * KEEPALIVE_PROBES)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send(connection: socket.socket, message: Event) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """Whole lines out of what arrives on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def read(self) -> list[Event] | None:
        """What one recv brings; None once the other side is gone."""
        try:
            chunk = self.connection.recv(65536)
        except OSError:
            return None
        if not chunk:
            return None
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        try:
            return [json.loads(line) for line in whole]
        except ValueError:  # a stranger on the port
            return None


class _Peer:
    """One connection. rank is None until it has said hello."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.lines = connection, Lines(connection)
        self.rank: int | None = None
        self.host = ""
        self.pid = 0
        self.said_why = False


class Hub(threading.Thread):
    """Serves until every rank has said goodbye, or one is lost."""

    def __init__(self, plan: Plan, folder: Path, attempt: int, output: int, server: socket.socket, token: str) -> None:
        super().__init__(name="hub", daemon=True)
        self.plan, self.folder, self.attempt, self.output = plan, folder, attempt, output
        self._server, self._token = server, token
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._came: set[int] = set()
        self._events: list[Event] = []
        self._began = self._moved = time.monotonic()
        self._steps: dict[int, int] = {}
        self._stacks: dict[int, Stack] | None = None
        self._dumped_at = self._ends_at = self._beat_at = 0.0
        self._told_absent = False
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor per rank

    def run(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(timeout=0.5):
                if key.fileobj is self._server:
                    connection, _ = self._server.accept()
                    keep_alive(connection)
                    self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))
                else:
                    self._hear(key.data)
            now = time.monotonic()
            self._check_absent(now)
            self._check_stall(now)
            if now - self._beat_at > HEARTBEAT_SECONDS:
                self._beat_at = now
                (self.folder / "run" / "heartbeat").touch()
            if self._ends_at and now > self._ends_at:
                self._end()

    def _hear(self, peer: _Peer) -> None:
        messages = peer.lines.read()
        if messages is None:
            self._forget(peer)
            if peer.rank is not None and not peer.said_why:
                self._lost(peer)
            return
        for message in messages:
            if peer.rank is None and message.get("token") != self._token:
                self._forget(peer)  # not one of ours
                return
            self._take(peer, message)

    def _take(self, peer: _Peer, message: Event) -> None:
        kind = message["kind"]
        if kind == "hello":
            peer.rank, peer.host, peer.pid = int(str(message["rank"])), str(message["host"]), int(str(message["pid"]))
            self._peers[peer.rank] = peer
            self._came.add(peer.rank)
            self._moved = time.monotonic()
        elif kind == "step" and peer.rank is not None:
            self._advance(peer.rank, int(str(message["step"])))
        elif kind == "stack" and peer.rank is not None and self._stacks is not None:
            self._stacks[peer.rank] = Stack.from_message(message)
        elif kind == "failed":
            peer.said_why = True
            self._events.append(message)
            self._trouble()
        elif kind == "bye":
            peer.said_why = True

    def _advance(self, rank: int, step: int) -> None:
        before = min(self._steps.values(), default=-1)
        self._steps[rank] = step
        if min(self._steps.values()) > before:
            self._moved = time.monotonic()
            if self._dumped_at:
                self._dumped_at = 0.0
                write_status(self.folder, "running", self.attempt)

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            self._peers.pop(peer.rank, None)

    def _lost(self, peer: _Peer) -> None:
        assert peer.rank is not None
        stage = self.plan.ranks[peer.rank].pipeline
        event: Event = {"kind": "lost", "rank": peer.rank, "host": peer.host, "stage": stage, "pid": peer.pid}
        self._events.append(event)
        emit(self.output, event)
        self._trouble()

    def _trouble(self) -> None:
        if not self._ends_at:
            self._ends_at = time.monotonic() + GRACE_SECONDS

    def _end(self) -> None:
        """Every rank ends itself; rank 0, in whose process this runs, hears of it as the others do."""
        first = first_cause(self._events) or {}
        cause = str(first.get("cause") or "went away without a word")
        where: Event = {name: first.get(name) for name in ("rank", "host", "stage")}
        write_status(self.folder, "failed", self.attempt, **where, cause=cause)
        self._tell_all({"kind": "end", "cause": f"rank {where['rank']} on {where['host']}: {cause}"})
        self._ends_at = 0.0

    def _tell_all(self, message: Event) -> None:
        for peer in list(self._peers.values()):
            try:
                send(peer.connection, message)
            except OSError:
                self._forget(peer)

    def _check_absent(self, now: float) -> None:
        if self._told_absent or now - self._began < ABSENT_SECONDS:
            return
        self._told_absent = True
        absent = [r for r in self.plan.ranks if r.rank not in self._came]
        if not absent:
            return
        nodes = sorted({r.node + 1 for r in absent})
        ranks = ", ".join(str(r.rank) for r in absent[:8]) + (", ..." if len(absent) > 8 else "")
        lines = ", ".join(map(str, nodes[:8])) + (", ..." if len(nodes) > 8 else "")
        text = f"rank {ranks} (host {lines} of the hostfile) not there after {ABSENT_SECONDS:.0f} s"
        emit(self.output, {"kind": "note", "text": f"{text}; `shardwright doctor` tries every host"})

    def _check_stall(self, now: float) -> None:
        if self._stacks is not None and (
            len(self._stacks) == len(self._peers) or now - self._dumped_at > STACK_SECONDS
        ):
            self._report_stall(self._stacks)
            self._stacks = None
        elif not self._dumped_at and not self._ends_at and self._peers and now - self._moved > STALL_SECONDS:
            self._dumped_at, self._stacks = now, {}
            self._tell_all({"kind": "dump"})

    def _report_stall(self, stacks: dict[int, Stack]) -> None:
        hosts = {rank: peer.host for rank, peer in self._peers.items()}
        blamed = culprits(stacks, set(hosts))
        text = describe(stacks, blamed, hosts, STALL_SECONDS)
        emit(self.output, {"kind": "stalled", "ranks": list(blamed), "text": text})
        first = blamed[0] if blamed else None
        write_status(
            self.folder,
            "running",
            self.attempt,
            stalled=text,
            rank=first,
            host=hosts.get(first) if first is not None else None,
            stage=self.plan.ranks[first].pipeline if first is not None else None,
        )


def open_server(address: str) -> socket.socket:
    """On the rendezvous address only, where this host has it; a translated address is somebody else's card."""
    try:
        return socket.create_server((address, 0), backlog=1024)
    except OSError:
        return socket.create_server(("", 0), backlog=1024)
