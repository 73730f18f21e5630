"""Rank 0's ear: every rank holds a connection to it, and one that breaks without a word is a rank
that is gone.

What is said on it is monitor_protocol.py's. Anybody can connect; who cannot prove to be a rank is
dropped and changes nothing.

A killed process closes its connections at once; a dead host stops answering the kernel's keepalive.
So no rank has to send anything in time, and a rank that computes for an hour is not taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from shardwright.monitor import monitor_protocol
from shardwright.monitor.monitor_protocol import delete_token
from shardwright.monitor.rank_events import (
    RankFailed,
    RankLost,
    RankStack,
    RunNotice,
    RunStalled,
    emit,
    first_failure,
    stall_text,
    suspect_ranks,
)
from shardwright.monitor.run_files import write_status
from shardwright.plan.plan import Plan
from shardwright.utils.authenticated_socket import (
    Handshake,
    UnauthenticatedConnections,
    WrongSecret,
    is_out_of_descriptors,
    keep_alive,
    raise_descriptor_limit,
)
from shardwright.utils.json_values import JsonValue

GRACE_SECONDS = 3.0
"""Separates the first sign of trouble from the end of all ranks, so that the cause arrives before
secondary failures are cut off."""
JOIN_WARNING_SECONDS = 60.0
STALL_SECONDS = float(os.environ.get("SHARDWRIGHT_STALL_SECONDS", "600"))
STACK_TIMEOUT_SECONDS = 5.0
TURN_SECONDS = 0.5
MAX_UNAUTHENTICATED = 256
"""Connections at once, beside one for each rank, that have not said who they are; a rank needs
milliseconds for it."""
MAX_LOGGED_PROBLEMS = 20
HEARTBEAT_SECONDS = 5.0


class _RankConnection:
    """Holds one connection. hello: the rank's, once it has authenticated."""

    def __init__(self, connection: socket.socket, token: str, connected_at: float) -> None:
        self.connection, self.connected_at = connection, connected_at
        self.handshake = Handshake(
            monitor_protocol.PROTOCOL, monitor_protocol.token_bytes(token), is_server=True
        )
        self.lines = monitor_protocol.LineReader(connection)
        self.hello: monitor_protocol.Hello | None = None
        self.explained_its_exit = False


class MonitorServer(threading.Thread):
    """Serves for as long as the process lives, whatever a peer or a full disk does."""

    def __init__(
        self, plan: Plan, folder: Path, attempt: int, output: int, server: socket.socket, token: str
    ) -> None:
        super().__init__(name="hub", daemon=True)
        self.plan, self.folder, self.attempt, self.output = plan, folder, attempt, output
        self._server, self._token = server, token
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._unauthenticated_peers: UnauthenticatedConnections[_RankConnection] = (
            UnauthenticatedConnections(
                len(plan.ranks), MAX_UNAUTHENTICATED, raise_descriptor_limit()
            )
        )
        self._peers: dict[int, _RankConnection] = {}
        self._connected_ranks: set[int] = set()
        self._causes: list[RankFailed | RankLost] = []
        self._began = self._last_progress = time.monotonic()
        self._steps: dict[int, int] = {}
        self._stacks: dict[int, RankStack] | None = None
        self._dumped_at = self._ends_at = self._last_heartbeat = 0.0
        self._warned_missing_ranks = False
        self._logged_problems = 0

    def run(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        while True:
            try:
                self._poll()
            except Exception:  # of ours, or of the disk's: the ranks are watched all the same
                self._log_problem(traceback.format_exc())
                time.sleep(TURN_SECONDS)

    def _poll(self) -> None:
        for key, _ in self._selector.select(timeout=TURN_SECONDS):
            try:
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read_messages(key.data)
            except Exception:  # whatever one peer brings about, the others are heard
                self._log_problem(traceback.format_exc())
        now = time.monotonic()
        for peer in [
            p
            for p in self._unauthenticated_peers
            if now - p.connected_at > monitor_protocol.HELLO_TIMEOUT_SECONDS
        ]:
            self._close_connection(peer)
        self._warn_missing_ranks(now)
        self._check_stall(now)
        if now - self._last_heartbeat > HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            with contextlib.suppress(OSError):  # a full disk, say
                (self.folder / "run" / "heartbeat").touch()
        if self._ends_at and now > self._ends_at:
            self._end()

    def _accept(self) -> None:
        """Takes what has come. Where more are unauthenticated than may be at once, the oldest have
        no hello to say."""
        for _ in range(MAX_UNAUTHENTICATED // 2):  # then the others are heard
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # most often no descriptor is free
                self._log_problem(f"cannot accept a connection: {error}")
                if (
                    is_out_of_descriptors(error)
                    and (oldest := self._unauthenticated_peers.pop()) is not None
                ):
                    self._close_connection(oldest)
                time.sleep(0.05)
                return
            peer = _RankConnection(connection, self._token, time.monotonic())
            for crowded_out in self._unauthenticated_peers.add(peer, address[0]):
                self._close_connection(crowded_out)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            try:
                connection.setblocking(False)
                keep_alive(connection, monitor_protocol.LOST_HOST_SECONDS)
                connection.sendall(peer.handshake.output)
            except OSError:
                self._close_connection(peer)

    def _read_messages(self, peer: _RankConnection) -> None:
        if peer.hello is None:
            if not self._authenticate(peer):
                self._close_connection(peer)
            return
        rank, stage = peer.hello.rank, self.plan.ranks[peer.hello.rank].pipeline
        lines = peer.lines.read()
        for line in lines or ():
            # A kind that a rank may not send is ignored.
            match monitor_protocol.decode(line):
                case monitor_protocol.StepDone(step=step):
                    before = min(self._steps.values(), default=-1)
                    self._steps[rank] = step
                    if min(self._steps.values()) > before:
                        self._last_progress = time.monotonic()
                        if self._dumped_at:
                            self._dumped_at = 0.0
                            self._write_status("running")
                case monitor_protocol.StackReport(stack=stack):
                    if self._stacks is not None:
                        self._stacks[rank] = stack
                case monitor_protocol.Failed(cause=cause):
                    peer.explained_its_exit = True
                    failed = RankFailed(rank=rank, host=peer.hello.host, stage=stage, cause=cause)
                    self._causes.append(failed)
                    self._schedule_shutdown()
                case monitor_protocol.Bye():
                    peer.explained_its_exit = True
        if lines is None:
            self._close_connection(peer)
            if not peer.explained_its_exit:
                lost = RankLost(rank=rank, host=peer.hello.host, stage=stage, pid=peer.hello.pid)
                self._causes.append(lost)
                emit(self.output, lost)
                self._schedule_shutdown()

    def _authenticate(self, peer: _RankConnection) -> bool:
        """Continue the handshake with what has arrived. Return whether the peer may stay."""
        handshake = peer.handshake
        try:
            received = peer.connection.recv(handshake.missing_bytes)
            handshake.feed(received)
        except BlockingIOError:
            return True
        except WrongSecret:
            hello = monitor_protocol.decode(handshake.hello)
            rank = hello.rank if isinstance(hello, monitor_protocol.Hello) else "?"
            self._log_problem(
                f"dropped a connection as rank {rank}: it does not have this run's token"
            )
            return False
        except OSError:
            return False
        if not handshake.is_complete:
            return bool(received)
        hello = monitor_protocol.decode(handshake.hello)
        if not isinstance(hello, monitor_protocol.Hello):
            return False
        if not 0 <= hello.rank < len(self.plan.ranks) or hello.rank in self._connected_ranks:
            self._log_problem(
                f"dropped a connection as rank {hello.rank}: that rank is connected already or "
                "does not exist"
            )
            return False
        try:
            peer.connection.sendall(handshake.output)
        except OSError:
            return False
        self._unauthenticated_peers.remove(peer)
        peer.hello = hello
        self._peers[hello.rank] = peer
        self._connected_ranks.add(hello.rank)
        self._last_progress = time.monotonic()
        if len(self._connected_ranks) == len(self.plan.ranks):
            delete_token(self.folder)
        return True

    def _close_connection(self, peer: _RankConnection) -> None:
        self._unauthenticated_peers.remove(peer)
        if peer.hello is not None:
            self._peers.pop(peer.hello.rank, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _log_problem(self, text: str) -> None:
        """Print a problem on rank 0's own output, a limited number of times."""
        self._logged_problems += 1
        if self._logged_problems <= MAX_LOGGED_PROBLEMS:
            with contextlib.suppress(OSError):
                print(f"monitor: {text}", file=sys.stderr, flush=True)

    def _schedule_shutdown(self) -> None:
        if not self._ends_at:
            self._ends_at = time.monotonic() + GRACE_SECONDS

    def _end(self) -> None:
        """Tell every rank to exit. Rank 0, in whose process this runs, gets the same message."""
        self._ends_at = 0.0
        first = first_failure(self._causes)
        if first is None:
            return
        cause = (
            first.cause if isinstance(first, RankFailed) else ""
        ) or "lost without an error message"
        self._write_status(
            "failed", rank=first.rank, host=first.host, stage=first.stage, cause=cause
        )
        self._broadcast(monitor_protocol.End(cause=f"rank {first.rank} on {first.host}: {cause}"))

    def _write_status(self, status: str, **more: JsonValue) -> None:
        try:
            write_status(self.folder, status, self.attempt, **more)
        except OSError as error:
            self._log_problem(f"run/status.json cannot be written: {error}")

    def _broadcast(self, message: monitor_protocol.Message) -> None:
        """A rank that is stopped reads no more; its buffer holds what is ever said to it."""
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):  # one that is gone is heard of when its line is read
                peer.connection.sendall(monitor_protocol.encode(message))

    def _warn_missing_ranks(self, now: float) -> None:
        if self._warned_missing_ranks or now - self._began < JOIN_WARNING_SECONDS:
            return
        self._warned_missing_ranks = True
        absent = [r for r in self.plan.ranks if r.rank not in self._connected_ranks]
        if not absent:
            return
        nodes = sorted({r.node + 1 for r in absent})
        ranks = ", ".join(str(r.rank) for r in absent[:8]) + (", ..." if len(absent) > 8 else "")
        lines = ", ".join(map(str, nodes[:8])) + (", ..." if len(nodes) > 8 else "")
        text = (
            f"rank {ranks} (host {lines} of the hostfile) has not connected after "
            f"{JOIN_WARNING_SECONDS:.0f} s"
        )
        emit(self.output, RunNotice(text=f"{text}; `shardwright doctor` checks every host"))

    def _check_stall(self, now: float) -> None:
        if self._stacks is not None and (
            len(self._stacks) == len(self._peers) or now - self._dumped_at > STACK_TIMEOUT_SECONDS
        ):
            stacks, self._stacks = self._stacks, None
            hosts = {
                rank: peer.hello.host
                for rank, peer in self._peers.items()
                if peer.hello is not None
            }
            blamed = suspect_ranks(stacks, set(hosts))
            text = stall_text(stacks, blamed, hosts, STALL_SECONDS)
            emit(self.output, RunStalled(ranks=tuple(blamed), text=text))
            first = blamed[0] if blamed else None
            self._write_status(
                "running",
                stalled=text,
                rank=first,
                host=hosts.get(first) if first is not None else None,
                stage=self.plan.ranks[first].pipeline if first is not None else None,
            )
        elif (
            not self._dumped_at
            and not self._ends_at
            and self._peers
            and now - self._last_progress > STALL_SECONDS
        ):
            self._dumped_at, self._stacks = now, {}
            self._broadcast(monitor_protocol.Dump())


def open_server(address: str) -> socket.socket:
    """Listen on the rendezvous address alone, where this host has it: a translated address belongs
    to another network card."""
    try:
        return socket.create_server((address, 0), backlog=1024)
    except OSError:
        return socket.create_server(("", 0), backlog=1024)
