"""The outer store: a process of its own, on no island's ranks. It decides who takes part in an
outer step, adds up what they send, and passes a member's state on to who is behind."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shardwright.diloco.link_probe import answer_probe
from shardwright.diloco.outer_store_channel import (
    AuthenticatedChannel,
    FrameKind,
    document_of,
    open_channel,
    silence_limit_seconds,
)
from shardwright.diloco.round_membership import (
    Island,
    IslandRank,
    IslandStart,
    Membership,
    OuterRound,
    RankArrival,
    RoundAborted,
    RoundDecision,
)
from shardwright.utils.authenticated_socket import (
    HANDSHAKE_SECONDS,
    ChannelError,
    UnauthenticatedConnections,
    WrongSecret,
    is_out_of_descriptors,
    keep_alive,
    raise_descriptor_limit,
    shutdown_connection,
)
from shardwright.utils.json_values import copy_shared_fields, read_record

MAX_UNAUTHENTICATED_CONNECTIONS = 256
"""Unauthenticated connections at once, beside one for each rank."""
MOST_LINES_OF_AN_ADDRESS, MOST_ADDRESSES = 10, 256
"""Lines about connections that were turned away, and addresses that they are counted for."""
TURN_SECONDS, RETRY_SECONDS = 0.5, 0.05
MOST_WAIT_SECONDS = 5.0
"""Bounds the time between two keepalives to a rank that waits."""


class _TrainingIsOver(Exception):
    """The others are done."""


class OuterStore:
    """failure: why no outer step can be put on record any more; None while all is well. Then no
    island is here."""

    def __init__(
        self,
        membership: Membership,
        secret: bytes,
        digest: str,
        log: Callable[[str], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """log: prints a line for a person; the store goes on whatever it raises. record: writes
        what a round was to where it lasts, before any island hears that the round is made; the
        store stops where it raises."""
        self.membership, self._secret, self._digest = membership, secret, digest
        self._log_line, self._record = log, record
        self.failure: Exception | None = None
        ranks = membership.count * membership.world
        self._unauthenticated: UnauthenticatedConnections[socket.socket] = (
            UnauthenticatedConnections(
                ranks, MAX_UNAUTHENTICATED_CONNECTIONS, raise_descriptor_limit()
            )
        )
        self._rejected_connections: Counter[str] = Counter()
        self._data_digest: str | None = None
        self._done: set[int] = set()
        self._change = threading.Condition()
        self._wait_seconds = min(MOST_WAIT_SECONDS, membership.deadline / 16)

    @property
    def is_over(self) -> bool:
        """Return whether an island has trained to the last step and all islands have left."""
        with self._change:
            return bool(self._done) and not self.membership.islands

    def _log(self, line: str) -> None:
        """Never raises: nobody may read the output any more, or its disk may be full."""
        with contextlib.suppress(Exception):
            self._log_line(line)

    def _log_rejected(self, address: str, line: str) -> None:
        """A few lines for each address: whoever finds the port shall not fill a disk."""
        self._rejected_connections[address] += 1
        count = self._rejected_connections[address]
        if count <= MOST_LINES_OF_AN_ADDRESS and len(self._rejected_connections) <= MOST_ADDRESSES:
            more = (
                "; nothing more is printed about this address"
                if count == MOST_LINES_OF_AN_ADDRESS
                else ""
            )
            self._log(line + more)
        elif len(self._rejected_connections) > MOST_ADDRESSES:
            self._rejected_connections.pop(address, None)

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections until the listener is closed, whatever fails meanwhile."""
        listener.settimeout(TURN_SECONDS)
        while True:
            try:
                connection, address = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if listener.fileno() < 0:
                    return
                # Errors of one connection, such as a peer that is gone already, end nothing.
                if (
                    is_out_of_descriptors(error)
                    and (oldest := self._unauthenticated.pop()) is not None
                ):
                    shutdown_connection(oldest)
                self._log_rejected("", f"warning: cannot accept a connection: {error}")
                time.sleep(RETRY_SECONDS)
                continue
            for crowded_out in self._unauthenticated.add(connection, address[0]):
                shutdown_connection(crowded_out)
            try:
                threading.Thread(
                    target=self._authenticate, args=(connection, address), daemon=True
                ).start()
            except RuntimeError as error:  # the system allows no more threads
                self._unauthenticated.remove(connection)
                connection.close()
                self._log_rejected("", f"a connection from {address[0]} is rejected: {error}")
                time.sleep(RETRY_SECONDS)

    def _authenticate(self, connection: socket.socket, address: tuple[str, int]) -> None:
        until = time.monotonic() + HANDSHAKE_SECONDS
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            keep_alive(connection, silence_limit_seconds(self.membership.deadline))
            link = open_channel(connection, self._secret, as_store=True)
            self._unauthenticated.remove(connection)
            kind, _, payload = link.receive(until)
            if kind == FrameKind.PROBE:
                asked = document_of(payload)
                if asked.get("is_first") is True:
                    self._log(f"{address[0]} measures its link")
                answer_probe(link, asked, self._digest, self._connected_islands)
                link.close()
                return
            if kind != FrameKind.HELLO:
                raise ChannelError("it sent no valid hello")
            self._admit(link, document_of(payload))
        except WrongSecret:
            line = (
                f"warning[SW6313]: a connection from {address[0]} has another secret and was "
                "rejected"
            )
            self._log_rejected(address[0], line)
        except (ChannelError, OSError) as error:
            self._log_rejected(
                address[0], f"a connection from {address[0]} closed before a valid hello: {error}"
            )
        finally:
            self._unauthenticated.remove(connection)
            connection.close()

    def _connected_islands(self) -> list[int]:
        with self._change:
            return sorted(self.membership.islands)

    def _admit(self, link: AuthenticatedChannel, hello: dict[str, Any]) -> None:
        try:
            caller = read_record(IslandRank, hello)
        except ValueError:
            raise ChannelError("it sent no valid hello") from None
        number, rank = caller.island, caller.rank
        why = self._refused(caller)
        island = None
        if not why:
            start = copy_shared_fields(IslandStart, caller)
            with self._change:
                if self.failure is not None:
                    raise ChannelError("the store stops")
                island = self.membership.join(number, start, rank, link)
                self._change.notify_all()
            why = "" if island else "SW6319 a newer run of this island has started"
        if island is None:
            link.send_document(FrameKind.REFUSED, {"why": why})
            link.close()
            self._log(f"island {number} rank {rank} was rejected: {why}")
            return
        if len(island.links) == self.membership.world:
            self._log(f"island {number} is connected")
        try:
            link.send_document(FrameKind.WELCOME, {})
            link.set_timeout(None)
            self._serve(link, island, rank)
            why = ""
        except _TrainingIsOver as late:
            why = str(late)
            with contextlib.suppress(ChannelError):
                link.send_document(FrameKind.REFUSED, {"why": f"SW6320 {why}"})
        except ChannelError as error:
            why = f"rank {rank} is lost ({error})"
        except Exception as error:  # a thread that ends in silence would leave the others waiting
            why = f"rank {rank}: {type(error).__name__}: {error}"
        self._drop(island, why)

    def _refused(self, caller: IslandRank) -> str:
        m = self.membership
        if (
            caller.plan != self._digest
            or caller.world != m.world
            or not (0 <= caller.island < m.count and 0 <= caller.rank < m.world)
        ):
            return "SW6316 its plan differs from the store's"
        with self._change:
            self._data_digest = self._data_digest or caller.data
            return (
                ""
                if caller.data == self._data_digest
                else "SW6316 its data differs from the other islands' data"
            )

    def _drop(self, island: Island, why: str) -> None:
        with self._change:
            known = island.dropped
            links = self.membership.drop(island, why or "it is done")
            self._change.notify_all()
        for link in links:
            link.close()
        if why and not known:
            self._log(f"island {island.number} is lost: {why}")

    def _serve(self, link: AuthenticatedChannel, island: Island, rank: int) -> None:
        """Raises ChannelError where the rank is lost, or the island with it."""
        while True:
            kind, tag, payload = link.receive()
            if kind == FrameKind.BYE:
                with self._change:
                    if document_of(payload).get("done"):
                        self._done.add(island.number)
                        self.membership.finish()
                    island.left.add(rank)
                    self._change.notify_all()
                    # What another rank of the island still passes on is not cut short.
                    self._change.wait_for(
                        lambda: len(island.left) == self.membership.world or bool(island.dropped)
                    )
                return
            if kind == FrameKind.ARRIVE:
                decision = self._wait_for_decision(link, island, rank, document_of(payload))
                found = decision.round
                if decision.kind == FrameKind.GO or found is None:
                    link.send(FrameKind.GO)
                elif decision.kind == FrameKind.EXCHANGE:
                    members = [i.number for i in found.members]
                    link.send_document(
                        FrameKind.EXCHANGE, {"members": members, "step": found.step}, found.attempt
                    )
                    threading.Thread(
                        target=self._send_means, args=(link, island, rank, found), daemon=True
                    ).start()
                else:
                    self._wait_for_state(link, island, rank, found)
            elif kind == FrameKind.STATE or kind == FrameKind.STATE_END:
                self._forward_state(island, rank, kind, payload)
            elif kind == FrameKind.DELTA:
                self._deposit(island, rank, tag, payload)
            else:
                raise ChannelError(f"an unexpected {kind.name}")

    def _wait_for_decision(
        self, link: AuthenticatedChannel, island: Island, rank: int, told: dict[str, Any]
    ) -> RoundDecision:
        try:
            arrival = read_record(RankArrival, told)
        except ValueError:
            raise ChannelError("an arrival without its step") from None
        with self._change:
            self.membership.arrive(island, rank, arrival)
            self._change.notify_all()
        said, noted = time.monotonic(), rank != 0
        while True:
            with self._change:
                gone = self.membership.advance()
                if gone:
                    self._change.notify_all()
                if island.dropped:
                    raise ChannelError(island.dropped)
                if self.membership.is_late(island):
                    done = ", ".join(map(str, sorted(self._done)))
                    raise _TrainingIsOver(
                        f"island {done} has trained to step {self.membership.final}, and this "
                        "one has not"
                    )
                behind = not noted and self.membership.is_behind(island)
                if (decision := self.membership.take_decision(island, rank)) is not None:
                    self._change.notify_all()
                elif not gone and not behind:
                    self._change.wait(self._wait_seconds)
            for each, why in gone:
                self._drop(each, why)
            if behind:
                noted = True
                self._log(
                    f"island {island.number} is behind, and waits for the others' next outer step"
                )
            if decision is not None:
                return decision
            if time.monotonic() - said >= self._wait_seconds:
                link.send(FrameKind.WAIT)
                said = time.monotonic()

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition until the next keepalive is due. Returns whether it holds."""
        with self._change:
            return self._change.wait_for(condition, self._wait_seconds)

    def watch(self, ended: threading.Event) -> None:
        """Drops members that hold a round up. Runs in a thread of its own, until `ended`."""
        while not ended.wait(self._wait_seconds):
            with self._change:
                gone = self.membership.stalled_members()
            for island, why in gone:
                self._drop(island, why)

    def _deposit(self, island: Island, rank: int, attempt: int, payload: bytearray) -> None:
        found = self.membership.round
        if (
            found is None
            or found.attempt != attempt
            or island not in found.members
            or found.outcome
        ):
            return  # of a round that was given up
        cell = found.chunk_means[rank]
        try:
            cell.deposit(island.number, cell.deposited(island.number), payload)
        except RoundAborted:
            return
        except (ValueError, IndexError) as error:
            raise ChannelError(f"deltas of another size: {error}") from None
        self._commit_if_complete(found)

    def _commit_if_complete(self, found: OuterRound) -> None:
        line: dict[str, Any] | None = None
        with self._change:
            if self.failure is None:
                try:
                    line = self.membership.try_commit(found, self._record)
                except Exception as error:
                    self.failure = error
                    found.abort()
            failed, islands = self.failure, list(self.membership.islands.values())
            self._change.notify_all()
        if failed is not None:
            for island in islands:
                self._drop(island, "the store stops")
        elif line is not None:
            joined = f"; {line['joined']} take its state" if line["joined"] else ""
            self._log(
                f"outer step at {line['step']}: islands {line['members']}, {line['seconds']:.3g} "
                f"s{joined}"
            )

    def _send_means(
        self, link: AuthenticatedChannel, island: Island, rank: int, found: OuterRound
    ) -> None:
        """A thread of its own: averages go down while deltas come up."""
        cell = found.chunk_means[rank]
        try:
            try:
                for number in range(len(cell.sizes)):
                    while (found_mean := cell.take(number, self._wait_seconds)) is None:
                        link.send(FrameKind.WAIT)
                    link.send(FrameKind.MEAN, found.attempt, found_mean)
                    cell.sent(island.number, number)
            except RoundAborted:
                pass
            self._commit_if_complete(found)  # where there was nothing to bring
            while not self._wait_for(lambda: bool(found.outcome)):
                link.send(FrameKind.WAIT)
            if found.outcome == "committed":
                receivers = (
                    [i.number for i in found.receivers] if found.members[0] is island else []
                )
                link.send_document(FrameKind.COMMIT, {"receivers": receivers}, found.attempt)
            else:
                link.send(FrameKind.RETRY, found.attempt)
        except ChannelError as error:
            self._drop(island, f"rank {rank} is lost ({error})")

    def _wait_for_state(
        self, link: AuthenticatedChannel, island: Island, rank: int, found: OuterRound
    ) -> None:
        """The provider's thread sends; this one waits until it has."""
        provider = found.members[0]
        link.send_document(FrameKind.RECEIVE, {"step": found.step, "provider": provider.number})
        with self._change:
            found.expecting.add((island.number, rank))
            self._change.notify_all()
        while not self._wait_for(
            lambda: bool(rank in found.forwarded_ranks or provider.dropped or island.dropped)
        ):
            link.send(FrameKind.WAIT)
        if rank not in found.forwarded_ranks:
            raise ChannelError("the island that sends its state is lost")

    def _await_receiver(self, found: OuterRound, receiver: Island, rank: int) -> None:
        """Until its rank has been told what comes."""
        told = (receiver.number, rank)
        with self._change:
            self._change.wait_for(lambda: told in found.expecting or bool(receiver.dropped))

    def _forward_state(
        self, island: Island, rank: int, kind: FrameKind, payload: bytearray
    ) -> None:
        found = self.membership.round
        if found is None or not found.members or found.members[0] is not island:
            return
        for receiver in found.receivers:
            self._await_receiver(found, receiver, rank)
            if receiver.dropped:
                continue
            try:
                receiver.links[rank].send(kind, found.attempt, payload)
            except ChannelError as error:
                self._drop(receiver, f"rank {rank} is lost ({error})")
        if kind == FrameKind.STATE_END:
            with self._change:
                found.forwarded_ranks.add(rank)
                if len(found.forwarded_ranks) == self.membership.world:
                    for receiver in found.receivers:
                        receiver.current = not receiver.dropped
                self._change.notify_all()
