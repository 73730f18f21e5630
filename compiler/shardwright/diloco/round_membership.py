"""Decide which islands take part in which outer step. The store decides, under one lock.

An island is current when its weights at the last outer step are those of the last committed round.
Rounds wait for the current islands alone. An island that is behind decides nothing, and takes a
member's state after the next commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.diloco.outer_store_channel import (
    CHUNK_BYTES,
    AuthenticatedChannel,
    FrameKind,
    silence_limit_seconds,
)

# Means of deltas, chunk by chunk, in the order of the islands: the same bytes whoever came
# first.


WINDOW_CHUNKS = 8
"""Chunks that a rank may send ahead of the means that it has got back, and get ahead of the slowest
member."""
_BF16_NAN = np.uint16(0x7FC0)


class RoundAborted(Exception):
    """The round has lost a member."""


def decode_chunk(payload: bytes | bytearray, precision: str) -> npt.NDArray[np.float32]:
    if precision == "fp32":
        return np.frombuffer(payload, dtype="<f4")
    return (np.frombuffer(payload, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def encode_chunk(values: npt.NDArray[np.float32], precision: str) -> bytes:
    """bf16: rounded to the nearest, ties to even; what is no number stays none."""
    if precision == "fp32":
        return values.astype("<f4", copy=False).tobytes()
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _BF16_NAN, rounded).astype("<u2").tobytes()


def mean(parts: Sequence[bytes | bytearray], precision: str) -> bytes:
    """Return the mean of equally long payloads: added in fp32 in their order, divided once."""
    total = decode_chunk(parts[0], precision).copy()
    for part in parts[1:]:
        total += decode_chunk(part, precision)
    return encode_chunk(total / np.float32(len(parts)), precision)


class ChunkMeans:
    """Averages the chunks that the ranks of one number, one in each member, send in a round."""

    def __init__(self, members: Sequence[int], sizes: Sequence[int], precision: str) -> None:
        """sizes: bytes of each chunk."""
        self.members, self.sizes, self.precision = tuple(members), tuple(sizes), precision
        self._parts: dict[int, dict[int, bytearray]] = {}
        self._means: dict[int, bytes] = {}
        self._deposited = dict.fromkeys(self.members, 0)
        self._sent = dict.fromkeys(self.members, 0)
        self._aborted = False
        self._change = threading.Condition()

    @property
    def complete(self) -> bool:
        """Return whether all chunks of every member have arrived."""
        return all(count == len(self.sizes) for count in self._deposited.values())

    def deposited(self, member: int) -> int:
        """Chunks that it has brought."""
        return self._deposited[member]

    def deposit(self, member: int, number: int, payload: bytearray) -> None:
        """Raises Aborted, or ValueError for a chunk that is not due."""
        with self._change:
            if number != self._deposited[member] or len(payload) != self.sizes[number]:
                raise ValueError(f"chunk {number} of {len(payload)} bytes")
            if self._aborted:
                raise RoundAborted
            parts = self._parts.setdefault(number, {})
            parts[member] = payload
            self._deposited[member] = number + 1
            whole = len(parts) == len(self.members)
        if whole:  # the last one adds; nobody else touches these parts
            found = mean([parts[each] for each in self.members], self.precision)
            with self._change:
                del self._parts[number]
                self._means[number] = found
                self._change.notify_all()

    def take(self, number: int, seconds: float) -> bytes | None:
        """The mean of a chunk, once it is there and the slowest member is near; None where it is
        not after so long. Raises Aborted."""

        def is_due() -> bool:
            return number in self._means and number < min(self._sent.values()) + WINDOW_CHUNKS

        with self._change:
            due = self._change.wait_for(lambda: self._aborted or is_due(), seconds)
            if self._aborted:
                raise RoundAborted
            return self._means[number] if due else None

    def lagging_members(self) -> set[int]:
        """Members that could bring a chunk now."""
        with self._change:
            return {
                m
                for m, n in self._deposited.items()
                if n < min(len(self.sizes), self._sent[m] + WINDOW_CHUNKS)
            }

    def sent(self, member: int, number: int) -> None:
        """`member` has got the mean of the chunk."""
        with self._change:
            self._sent[member] = number + 1
            floor = min(self._sent.values())
            for done in [n for n in self._means if n < floor]:
                del self._means[done]
            self._change.notify_all()

    def abort(self) -> None:
        with self._change:
            self._aborted = True
            self._change.notify_all()


_SMALLEST_CHUNK, _CHUNKS = 2**16, 64


@dataclass(slots=True, kw_only=True)
class RankArrival:
    """Holds one rank's arrival.

    base: the step of the last outer step that its weights have. step: the step it is at. is_due: it
    comes for an outer step. size: bytes of its deltas. check: a sum over its anchor's bits.
    """

    base: int
    step: int
    is_due: bool
    size: int
    check: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandRank:
    """Holds a rank's hello.

    attempt: of the island's folder, which counts each start. run: a random word of this start.
    connection: how often its ranks have connected since. plan, data: digests that all islands
    share.
    """

    island: int
    rank: int
    world: int
    attempt: int
    run: str
    connection: int
    plan: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandStart:
    """Identifies one start of an island, without any clock.

    attempt: its folder's count of starts. run: a random word of this start, as two copies of a
    folder count alike. connection: how often its ranks have connected since.
    """

    attempt: int
    run: str
    connection: int


@dataclass(slots=True, kw_only=True, eq=False)
class Island:
    """A connected one. current: see above."""

    number: int
    start: IslandStart
    links: dict[int, AuthenticatedChannel] = field(default_factory=dict)
    arrivals: dict[int, RankArrival] = field(default_factory=dict)
    since: float = 0.0  # of its first arrival
    decision: RoundDecision | None = None
    told: set[int] = field(default_factory=set)  # the ranks that have heard it
    current: bool = False
    left: set[int] = field(default_factory=set)  # the ranks that have said goodbye
    dropped: str = ""

    @property
    def first(self) -> RankArrival:
        return self.arrivals[0]

    @property
    def heard(self) -> float:
        """Return when the last bytes of any of its ranks came."""
        return max(link.heard for link in self.links.values())

    @property
    def checks(self) -> list[int]:
        return [self.arrivals[rank].check for rank in sorted(self.arrivals)]


@dataclass(slots=True, kw_only=True, eq=False)
class OuterRound:
    """cells: a rank's number -> what the members' ranks of that number send. receivers: who takes a
    member's state after the commit; the provider is the first member."""

    attempt: int
    step: int
    members: tuple[Island, ...]
    chunk_means: dict[int, ChunkMeans]
    began: float
    outcome: str = ""  # committed | aborted
    receivers: tuple[Island, ...] = ()
    expecting: set[tuple[int, int]] = field(
        default_factory=set
    )  # (receiver, rank) that has been told
    forwarded_ranks: set[int] = field(
        default_factory=set
    )  # the provider's ranks whose state has been passed on

    def abort(self) -> None:
        self.outcome = self.outcome or "aborted"
        for cell in self.chunk_means.values():
            cell.abort()


@dataclass(slots=True, kw_only=True, eq=False)
class RoundDecision:
    """kind: GO, EXCHANGE or RECEIVE; round: of the last two."""

    kind: FrameKind
    round: OuterRound | None = None


class Membership:
    """Decides the rounds. Every method is called under the store's lock.

    base: None until islands have met. rounds: every committed one, for the record.
    """

    def __init__(self, islands: int, world: int, deadline_seconds: float, precision: str) -> None:
        self.count, self.world, self.deadline, self.precision = (
            islands,
            world,
            deadline_seconds,
            precision,
        )
        self.base: int | None = None
        self.islands: dict[int, Island] = {}
        self.newest: dict[int, IslandStart] = {}
        self.superseded_runs: dict[
            int, set[str]
        ] = {}  # island -> runs of it that a later start took the place of
        self.attempts = 0
        self.round: OuterRound | None = None
        self.rounds: list[dict[str, Any]] = []
        self.final: int | None = None  # the last step, once an island is trained to it
        self._meeting_since: float | None = None
        self._due_since: float | None = None  # the first arrival for the outer step that comes next

    def join(
        self, number: int, start: IslandStart, rank: int, link: AuthenticatedChannel
    ) -> Island | None:
        """Add a rank's connection to its island. Returns None for a start that a later one has
        superseded."""
        if self._is_superseded(number, start):
            return None
        island = self.islands.get(number)
        if island is None or island.start != start:
            if island is not None:
                self.drop(island, "a newer run of it has started")
            newest = self.newest.get(number, start)
            if newest.run != start.run:
                self.superseded_runs.setdefault(number, set()).add(newest.run)
            island = self.islands[number] = Island(number=number, start=start)
            self.newest[number] = start
        island.links[rank] = link
        return island

    def _is_superseded(self, number: int, start: IslandStart) -> bool:
        """A folder that was made anew counts its starts from 1 again: it is taken where nobody else
        is the island."""
        newest = self.newest.get(number, start)
        if start.run == newest.run:
            return start.connection < newest.connection
        if start.attempt > newest.attempt:
            return False
        is_older_beside_another = start.attempt < newest.attempt and number in self.islands
        return is_older_beside_another or start.run in self.superseded_runs.get(number, ())

    def drop(self, island: Island, why: str) -> list[AuthenticatedChannel]:
        """The links to be closed. The round that it is in begins again without it."""
        if island.dropped:
            return []
        island.dropped = why
        if self.islands.get(island.number) is island:
            del self.islands[island.number]
        if self.round is not None and island in self.round.members and not self.round.outcome:
            self.round.abort()
        if not any(each.current for each in self.islands.values()):
            self.base, self._meeting_since, self._due_since = (
                None,
                None,
                None,
            )  # who is left meets anew
        return list(island.links.values())

    def finish(self) -> None:
        """An island leaves with the last step trained."""
        self.final = self.final if self.base is None else self.base

    def is_late(self, island: Island) -> bool:
        """Return whether an island comes for an outer step that the finished others make no more.
        Alone it would end with weights of its own."""
        ended = self.final is not None and island.decision is None and not island.current
        return ended and any(a.base != self.final or a.is_due for a in island.arrivals.values())

    def is_behind(self, island: Island) -> bool:
        """Return whether an island waits for the others' next outer step, to take a member's
        state."""
        arrived = len(island.arrivals) == self.world and island.decision is None
        return arrived and self.base is not None and not island.current

    def arrive(self, island: Island, rank: int, arrival: RankArrival) -> None:
        if not island.arrivals:
            island.since = time.monotonic()
        island.arrivals[rank] = arrival

    def take_decision(self, island: Island, rank: int) -> RoundDecision | None:
        """The decision about it, heard by this rank; None where there is none yet, or this rank has
        heard it already: it has come again, before its neighbours heard of the first time."""
        found = island.decision
        if found is None or rank in island.told:
            return None
        island.told.add(rank)
        del island.arrivals[rank]
        if len(island.told) == self.world:
            island.decision, island.told = None, set()
        return found

    def advance(self) -> list[tuple[Island, str]]:
        """Decides what can be decided now. Returns the islands that have to go, and why."""
        ready = [
            i for i in self._in_order() if len(i.arrivals) == self.world and i.decision is None
        ]
        bad = [
            i for i in ready if len({(a.base, a.step, a.is_due) for a in i.arrivals.values()}) > 1
        ]
        if bad:
            return [(i, "its ranks are not at the same step") for i in bad]
        if not ready:
            return []
        if self.base is None and self.final is not None:
            self.base = self.final  # who comes back to what is trained has nobody to meet
        if self.base is None and not self._first_meeting_is_over(ready):
            return []
        for island in ready:
            if island.first.base == self.base and not island.first.is_due:
                island.current, island.decision = True, RoundDecision(kind=FrameKind.GO)
        return self._begin_round(
            [i for i in ready if i.decision is None and i.first.base == self.base]
        )

    def _in_order(self) -> list[Island]:
        return [self.islands[number] for number in sorted(self.islands)]

    def _first_meeting_is_over(self, ready: list[Island]) -> bool:
        """The first meeting waits for every island, at most the deadline: the one that is furthest
        decides."""
        now = time.monotonic()
        self._meeting_since = now if self._meeting_since is None else self._meeting_since
        if len(ready) < self.count and now < self._meeting_since + self.deadline:
            return False
        self.base, self._meeting_since = max(i.first.base for i in ready), None
        for island in ready:
            island.current = island.first.base == self.base
        return True

    def _begin_round(self, callers: list[Island]) -> list[tuple[Island, str]]:
        """callers: who comes for the outer step that is due."""
        if not callers or (self.round is not None and not self.round.outcome):
            return []
        waited = [i for i in self._in_order() if i.current and i not in callers]
        first = min(i.since for i in callers)
        self._due_since = first if self._due_since is None else self._due_since
        # A round that begins again waits for what is left of the deadline, and for who was told so
        # a moment ago.
        late = max(self._due_since + self.deadline, first + silence_limit_seconds(self.deadline))
        if waited and time.monotonic() < late:
            return []
        reference = next((i for i in callers if i.current), callers[0])
        same = [
            i
            for i in callers
            if (i.first.step, i.checks) == (reference.first.step, reference.checks)
        ]
        for island in callers:
            island.current = island in same
            if island not in same:  # it takes a member's state, as if it were behind
                for arrival in island.arrivals.values():
                    arrival.base = -1
        sizes = {rank: a.size for rank, a in same[0].arrivals.items()}
        chunk_means = {
            rank: ChunkMeans([i.number for i in same], chunk_sizes(size), self.precision)
            for rank, size in sizes.items()
        }
        self.attempts += 1
        self.round = OuterRound(
            attempt=self.attempts,
            step=same[0].first.step,
            members=tuple(same),
            chunk_means=chunk_means,
            began=time.monotonic(),
        )
        for island in same:
            island.decision = RoundDecision(kind=FrameKind.EXCHANGE, round=self.round)
        return [
            (i, f"it has not arrived at the outer step for {self.deadline:g} s") for i in waited
        ]

    def stalled_members(self) -> list[tuple[Island, str]]:
        """Members of the round that bring nothing any more, and hold the others up."""
        found, now = self.round, time.monotonic()
        if found is None or found.outcome:
            return []
        late = {number for cell in found.chunk_means.values() for number in cell.lagging_members()}
        silent = silence_limit_seconds(self.deadline)
        gone = [
            i
            for i in found.members
            if i.number in late and now > max(i.heard, found.began) + silent
        ]
        return [(i, f"it has sent nothing for {silent:g} s of an outer step") for i in gone]

    def try_commit(
        self, found: OuterRound, record: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any] | None:
        """Commits the round once every rank of every member has brought everything. Returns its
        line, or None.

        record: writes the line to where it lasts. What it raises leaves the round without an
        outcome: no island applies an outer step that is not on record.
        """
        if found.outcome or not all(cell.complete for cell in found.chunk_means.values()):
            return None
        waiting = [
            i for i in self._in_order() if len(i.arrivals) == self.world and i.decision is None
        ]
        receivers = tuple(
            i for i in waiting if i.first.base != found.step and i not in found.members
        )
        line = {
            "step": found.step,
            "members": [i.number for i in found.members],
            "joined": [i.number for i in receivers],
            "attempt": found.attempt,
            "bytes": sum(sum(cell.sizes) for cell in found.chunk_means.values()),
            "seconds": time.monotonic() - found.began,
        }
        record(line)
        found.outcome, self.base, self._due_since = "committed", found.step, None
        found.receivers = receivers
        for island in receivers:
            island.decision = RoundDecision(kind=FrameKind.RECEIVE, round=found)
        self.rounds.append(line)
        return line


def chunk_sizes(size: int) -> list[int]:
    """Bytes of each chunk of a rank's deltas: averages come back while the rest goes up, and the
    last one alone comes when nothing goes up any more."""
    each = min(max(size // _CHUNKS // 4 * 4, _SMALLEST_CHUNK), CHUNK_BYTES)
    whole, rest = divmod(size, each)
    return [each] * whole + [rest] * bool(rest)
