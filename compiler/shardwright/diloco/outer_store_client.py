"""A rank's way to the outer store."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist

from shardwright.diagnostics import Refusal, found, refusal
from shardwright.diloco.outer_store_channel import (
    CHUNK_BYTES,
    FrameKind,
    document_of,
    open_channel,
    read_secret,
    silence_limit_seconds,
)
from shardwright.diloco.round_membership import WINDOW_CHUNKS, IslandRank, chunk_sizes
from shardwright.plan.island_plans import plan_digest
from shardwright.plan.plan import Plan
from shardwright.utils.authenticated_socket import (
    HANDSHAKE_SECONDS,
    ChannelError,
    WrongSecret,
    keep_alive,
)

CONNECT_SECONDS = 10.0


class RefusedByStore(Exception):
    """The store does not take this rank. code: of the diagnostic."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReply:
    """kind: GO, EXCHANGE or RECEIVE. members, attempt: of an exchange. step: of it, or of the state
    to be taken."""

    kind: FrameKind
    members: tuple[int, ...] = ()
    attempt: int = 0
    step: int = 0


class Link:
    """Keeps one connection to the store, and opens it anew after each loss.

    The store sends a keepalive every sixteenth of the deadline. Where it is silent for half of the
    deadline, the methods raise ChannelError: the other half is for reaching it again.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        place: IslandRank,
        deadline_seconds: float,
        within: float = CONNECT_SECONDS,
    ) -> None:
        """within: seconds that the store has for each answer. Raises ChannelError where nobody
        answers, RefusedByStore where the store does not take it."""
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), min(CONNECT_SECONDS, within))
        except OSError as error:
            raise ChannelError(f"{address}: {error}") from None
        silent = 2 * silence_limit_seconds(deadline_seconds)
        keep_alive(connection, silent)
        try:
            channel = open_channel(
                connection, secret, as_store=False, within=min(within, HANDSHAKE_SECONDS)
            )
            channel.send_document(FrameKind.HELLO, asdict(place))
            kind, _, payload = channel.receive()
            if kind == FrameKind.REFUSED:
                raise _refused(payload)
            if kind != FrameKind.WELCOME:
                raise ChannelError(f"an unexpected {kind.name}")
            self._channel = channel
        except WrongSecret:
            connection.close()
            raise RefusedByStore(
                "SW6313", f"the outer store at {address} has another secret"
            ) from None
        except BaseException:
            connection.close()
            raise
        self._channel.set_timeout(silent)

    @property
    def heard(self) -> float:
        """Return when the store's last bytes came, by the monotonic clock."""
        return self._channel.heard

    def arrive(self, *, base: int, step: int, is_due: bool, size: int, check: int) -> RoundReply:
        """Waits as long as the store says that it is to."""
        told = {"base": base, "step": step, "is_due": is_due, "size": size, "check": check}
        self._channel.send_document(FrameKind.ARRIVE, told)
        while True:
            kind, attempt, payload = self._channel.receive()
            if kind == FrameKind.GO:
                return RoundReply(kind=kind)
            if kind in (FrameKind.EXCHANGE, FrameKind.RECEIVE):
                document = document_of(payload)
                members = tuple(int(number) for number in document.get("members", ()))
                return RoundReply(
                    kind=kind, members=members, attempt=attempt, step=int(document["step"])
                )
            if kind == FrameKind.REFUSED:
                raise _refused(payload)
            if kind not in (FrameKind.WAIT, FrameKind.RETRY):
                raise ChannelError(f"an unexpected {kind.name}")

    def exchange(self, attempt: int, deltas: memoryview, means: memoryview) -> list[int] | None:
        """Sends the deltas and fills in the means, as many bytes. Returns the islands that are to
        take this one's state now, or None where a member was lost: then nothing counts, and the
        rank arrives again."""
        ended, ahead = threading.Event(), threading.Semaphore(WINDOW_CHUNKS)

        def send() -> None:
            at = 0
            try:
                for size in chunk_sizes(len(deltas)):
                    ahead.acquire()
                    if ended.is_set():
                        return
                    self._channel.send(FrameKind.DELTA, attempt, deltas[at : at + size])
                    at += size
            except ChannelError:
                self._channel.close()  # the receiver hears of it

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        try:
            return self._receive_means(attempt, means, ahead)
        except ChannelError:
            self._channel.close()  # the sender hears of it
            raise
        finally:
            ended.set()
            ahead.release()
            sender.join()

    def _receive_means(
        self, attempt: int, means: memoryview, ahead: threading.Semaphore
    ) -> list[int] | None:
        sizes, at, number = chunk_sizes(len(means)), 0, 0
        while True:
            kind, tag, payload = self._channel.receive()
            if kind == FrameKind.WAIT or (
                kind in (FrameKind.MEAN, FrameKind.RETRY) and tag != attempt
            ):
                continue
            if kind == FrameKind.RETRY:
                return None
            if kind == FrameKind.COMMIT and number == len(sizes):
                return [int(each) for each in document_of(payload)["receivers"]]
            if kind != FrameKind.MEAN or number == len(sizes) or len(payload) != sizes[number]:
                raise ChannelError(f"an unexpected {kind.name}")
            means[at : at + len(payload)] = payload
            at, number = at + len(payload), number + 1
            ahead.release()

    def send_state(self, parts: Iterator[memoryview], updates: int) -> None:
        """Send this rank's state to the islands that a commit named."""
        for part in parts:
            for start in range(0, len(part), CHUNK_BYTES):
                self._channel.send(FrameKind.STATE, 0, part[start : start + CHUNK_BYTES])
        self._channel.send_document(FrameKind.STATE_END, {"updates": updates})

    def receive_state(self, parts: Iterator[memoryview]) -> int:
        """Fills the parts in, one behind the other. Returns `updates`."""
        for part in parts:
            at = 0
            while at < len(part):
                kind, _, payload = self._channel.receive()
                if kind == FrameKind.WAIT:
                    continue
                if kind != FrameKind.STATE or at + len(payload) > len(part):
                    raise ChannelError(f"an unexpected {kind.name}")
                part[at : at + len(payload)] = payload
                at += len(payload)
        while True:
            kind, _, payload = self._channel.receive()
            if kind == FrameKind.STATE_END:
                return int(document_of(payload)["updates"])
            if kind != FrameKind.WAIT:
                raise ChannelError(f"an unexpected {kind.name}")

    def leave(self, *, done: bool) -> None:
        """The others do not wait for it any more. done: it is trained to the last step."""
        with contextlib.suppress(ChannelError):
            self._channel.send_document(FrameKind.BYE, {"done": done})
        self._channel.close()

    def close(self) -> None:
        self._channel.close()


def _refused(payload: bytes | bytearray) -> RefusedByStore:
    code, _, why = str(document_of(payload).get("why")).partition(" ")
    return RefusedByStore(code, why)


# An island's connections to the outer store, one on each rank, made and lost together.


T = TypeVar("T")
RETRY_SECONDS = 0.5


class OuterStoreUnreachable(Exception):
    """The store was not reached for the deadline. refusal: once a checkpoint is saved."""

    def __init__(self, step: int, deadline_seconds: float, why: str) -> None:
        """step: the optimizer step that the outer step follows."""
        super().__init__(why)
        self.refusal = refusal(
            "SW6315",
            f"the outer store was not reached for {deadline_seconds:g} s at the outer step of "
            f"{step}: {why}",
            (
                "The island saved a checkpoint and stopped, because an island never trains "
                "alone. Start the store again or repair the link; `shardwright run` continues "
                "from the checkpoint."
            ),
        )


class OuterStoreConnections:
    """This rank's, and what the ranks have to know of each other's. A rank's part of a round raises
    ChannelError where its connection is lost: then the island connects anew on every rank."""

    def __init__(self, plan: Plan, folder: Path, rank: int, attempt: int, data_digest: str) -> None:
        """Collective. attempt: of the folder. Raises Refusal: SW6313 where this host has no
        secret."""
        assert plan.launch.outer_store is not None, "a plan with islands has one"
        self._address, self._deadline = plan.launch.outer_store, plan.diloco.deadline_seconds
        self._secret = read_secret(folder)
        run: list[Any] = [secrets.token_hex(8)]
        dist.broadcast_object_list(run, src=0)
        self._island_rank = IslandRank(
            island=plan.island,
            rank=rank,
            world=plan.strategy.world_size,
            attempt=attempt,
            run=run[0],
            connection=0,
            plan=plan_digest(plan),
            data=data_digest,
        )
        self._link: Link | None = None
        self._last_error = ""
        self._last_received = self._until = (
            0.0  # the store's last word, and when this island gives up
        )

    @property
    def link(self) -> Link:
        assert self._link is not None, "reached before"
        return self._link

    def run_on_all_ranks(self, step: int, part: Callable[[Link], T]) -> T:
        """Collective. This rank's part of a round, begun again until that of every rank has gone
        well. Raises OuterStoreUnreachable on every rank, and Refusal."""
        if (
            self._link is not None or not self._last_received
        ):  # else since the loss that this is about
            self._last_received = time.monotonic()
        while True:
            self._connect_all_ranks(step)
            result = self._gather_outcome(lambda: part(self.link))
            if result is not None:
                return result
            self._disconnect()

    def start_in_thread(self, part: Callable[[Link], T]) -> Future[T]:
        """The same, once, in a thread of its own; `ended` is to follow."""
        future: Future[T] = Future()
        link = self.link

        def work() -> None:
            try:
                future.set_result(part(link))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def wait_for_thread(self, future: Future[T]) -> T | None:
        """Collective. Waits for what was begun. None on every rank where it has to be begun
        again."""
        result = self._gather_outcome(future.result)
        if result is None:
            self._disconnect()
        return result

    def leave(self, *, done: bool) -> None:
        """done: trained to the last step."""
        if self._link is not None:
            self._link.leave(done=done)

    def _connect_all_ranks(self, step: int) -> None:
        """Collective. A connection on every rank. Raises OuterStoreUnreachable, or Refusal, on all:
        a deadline after the store's last word, or half of one where it was lost behind steps that
        overlap."""
        self._until = max(
            self._last_received + self._deadline, time.monotonic() + self._deadline / 2
        )
        while self._link is None:
            told = self._gather_outcome(self._connect)
            if told is not None:
                return
            self._disconnect()
            over: list[Any] = [time.monotonic() > self._until]
            dist.broadcast_object_list(over, src=0)
            if over[0]:
                raise OuterStoreUnreachable(step, self._deadline, self._last_error)
            time.sleep(RETRY_SECONDS)

    def _connect(self) -> bool:
        within = max(0.1, self._until - time.monotonic())
        self._link = Link(self._address, self._secret, self._island_rank, self._deadline, within)
        return True

    def _disconnect(self) -> None:
        if self._link is not None:
            self._last_received = max(self._last_received, self._link.heard)
            self._link.close()
        self._link = None
        self._island_rank = replace(self._island_rank, connection=self._island_rank.connection + 1)

    def _gather_outcome(self, work: Callable[[], T]) -> T | None:
        """Collective. What `work` gave this rank; None on every rank where the connection of one
        broke. Raises Refusal on all where the store does not take one."""
        mine: T | None = None
        error: tuple[str, str] | None = None
        try:
            mine = work()
        except RefusedByStore as refused:
            error = (refused.code, str(refused))
        except ChannelError as broken:
            error = ("", str(broken))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, error)
        failed = [each for each in everyone if each is not None]
        for code, why in failed:
            if code:
                raise Refusal(
                    found(
                        code,
                        None,
                        f"the outer store rejects this island: {why}",
                        _REFUSED.get(code, ""),
                    )
                )
        self._last_error = failed[0][1] if failed else ""
        return None if failed else mine


_REFUSED = {
    "SW6313": ("Copy run/outer.secret, which `outer-store` writes, to every island's folder."),
    "SW6316": (
        "Copy the island's folder from the compiled folder that the store serves, and "
        "use the same data."
    ),
    "SW6320": (
        "This island's weights lack the last outer steps. Use the newest checkpoint of "
        "an island that is done."
    ),
    "SW6319": "Stop one of the two runs: only one may train an island.",
}
