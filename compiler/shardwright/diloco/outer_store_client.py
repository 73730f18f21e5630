"""A rank's way to the outer store."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.diloco.delta_mean import WINDOW_CHUNKS
from shardwright.diloco.outer_store_channel import (
    CHUNK_BYTES,
    HANDSHAKE_SECONDS,
    AuthenticatedChannel,
    ChannelError,
    FrameKind,
    WrongSecret,
    authenticate,
    document_of,
    set_unacknowledged_timeout,
    silence_limit_seconds,
)
from shardwright.diloco.round_membership import chunk_sizes

CONNECT_SECONDS = 10.0


class RefusedByStore(Exception):
    """The store does not take this rank. code: of the diagnostic."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandRank:
    """Who is calling. attempt: of the island's folder, which counts each start. run: a random word
    of this start. connection: how often its ranks have connected since. plan, data: digests that
    all islands share."""

    island: int
    rank: int
    world: int
    attempt: int
    run: str
    connection: int
    plan: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReply:
    """kind: GO, EXCHANGE or RECEIVE. members, attempt: of an exchange. step: of it, or of the state
    to be taken."""

    kind: FrameKind
    members: tuple[int, ...] = ()
    attempt: int = 0
    step: int = 0


class Link:
    """One connection, made anew after each loss. Its methods raise Broken, also where the store,
    which gives a sign of life every sixteenth of the deadline, is silent for half of it: the other
    half is for reaching it again."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        place: IslandRank,
        deadline_seconds: float,
        within: float = CONNECT_SECONDS,
    ) -> None:
        """within: seconds that the store has for each answer. Raises Broken where nobody answers,
        Refused where the store does not take it."""
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), min(CONNECT_SECONDS, within))
        except OSError as error:
            raise ChannelError(f"{address}: {error}") from None
        silent = 2 * silence_limit_seconds(deadline_seconds)
        set_unacknowledged_timeout(connection, silent)
        try:
            self._channel = self._authenticate(
                connection, secret, place, min(within, HANDSHAKE_SECONDS)
            )
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
        """When the store's last bytes came, by the monotonic clock."""
        return self._channel.heard

    @staticmethod
    def _authenticate(
        connection: socket.socket, secret: bytes, place: IslandRank, within: float
    ) -> AuthenticatedChannel:
        channel = authenticate(connection, secret, as_store=False, within=within)
        names = ("island", "rank", "world", "attempt", "run", "connection", "plan", "data")
        channel.send_document(FrameKind.HELLO, {name: getattr(place, name) for name in names})
        kind, _, payload = channel.receive()
        if kind == FrameKind.REFUSED:
            raise _refused(payload)
        if kind != FrameKind.WELCOME:
            raise ChannelError(f"an unexpected {kind.name}")
        return channel

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
        """To the islands that a commit named."""
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
