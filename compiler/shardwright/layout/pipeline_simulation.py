"""Simulate one step as discrete events: each pipeline rank runs its instruction stream.

DeepSpeed sends and receives in order and blocks (runtime/pipe/p2p.py: dist.send, dist.recv). A
message starts when both ranks have reached it, and holds both until it has arrived, with gloo as
with NCCL on one stream. DualPipeV launches its queued messages and waits for all of them
(batch_isend_irecv). Messages of one direction follow each other on their link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.recipe.literal_types import Schedule

# DeepSpeed's instruction streams, one a pipeline rank, without DeepSpeed (its
# runtime/pipe/schedule.py, 0.19.8).
#
# m micro-batches over p pipeline ranks. A test compares them with those of the installed DeepSpeed.


FORWARD, BACKWARD, COMMIT = "ForwardPass", "BackwardPass", "CommitP2P"
SEND_ACTIVATION, RECV_ACTIVATION = "SendActivation", "RecvActivation"
SEND_GRADIENT, RECV_GRADIENT = "SendGrad", "RecvGrad"


class Instruction(NamedTuple):
    """Hold one instruction of a pipeline rank.

    name: DeepSpeed's name
    micro_batch: -1 for a CommitP2P (DualPipeV), which launches the messages before it and waits for
        all
    phase: 0, or 1 for the half of DualPipeV on which micro-batches travel back to rank 0
    """

    name: str
    micro_batch: int
    phase: int = 0


def instruction_stream(
    schedule: Schedule, ranks: int, rank: int, micro_batches: int
) -> tuple[Instruction, ...]:
    """Return what one pipeline rank executes, loading and the optimizer not included.

    DualPipeV needs at least 2 x ranks micro-batches.
    """
    return tuple(_INSTRUCTIONS[schedule](ranks, rank, micro_batches))


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield DeepSpeed's TrainSchedule.

    Step t is a forward pass where t and the rank are both even or both odd, else a backward pass.
    Both ends of a boundary exchange before the step: the gradient first, then the activation.
    """
    previous = None
    for step in range(2 * (micro_batches + ranks - 1)):
        forward = (step + rank) % 2 == 0
        number = (step - rank) // 2 if forward else (step + rank + 1) // 2 - ranks
        current = number if 0 <= number < micro_batches else None
        if forward and rank > 0:
            if previous is not None:
                yield Instruction(SEND_GRADIENT, previous)
            if current is not None:
                yield Instruction(RECV_ACTIVATION, current)
        if not forward and rank < ranks - 1:
            if current is not None:
                yield Instruction(RECV_GRADIENT, current)
            if previous is not None:
                yield Instruction(SEND_ACTIVATION, previous)
        if current is not None:
            yield Instruction(FORWARD if forward else BACKWARD, current)
        previous = current


def _dualpipev(ranks: int, rank: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield DualPipeVSchedule (github.com/deepseek-ai/DualPipe) in its eight steps.

    Weight gradients are computed inside the backward pass.
    """
    v = _Vee(first=rank == 0, last=rank == ranks - 1)
    after = ranks - rank - 1
    for _ in range(2 * after):
        yield from v.forward(0)
    yield from v.message(RECV_ACTIVATION, 0)
    for i in range(rank + 1):
        yield from v.forward(0, receive=False, send=False)
        yield from v.message(RECV_ACTIVATION, 0)
        yield from v.forward(1, send=not v.last or i < rank)
        yield from v.message(SEND_ACTIVATION, 0)
    for _ in range(after):
        yield from v.backward(1)
        yield from v.message(RECV_ACTIVATION, 1)
        yield _COMMIT
        yield from v.forward(1, receive=False)
    for i in range(micro_batches - 2 * ranks + rank + 1):
        if i == 0 and v.last:
            yield from v.forward(0, receive=False, send=False)
            yield from v.message(SEND_ACTIVATION, 1)
            yield from v.backward(1, send=False)
            yield from v.message(SEND_ACTIVATION, 0)
            yield from v.message(SEND_GRADIENT, 1)
        else:
            yield from v.both(0, 1, receive=i > 0)
        yield from v.both(1, 0)
    for _ in range(after):
        yield from v.backward(1)
        yield from v.both(1, 0)
    for _ in range(rank + 1):
        yield from v.backward(1)
        yield from v.backward(0)
    for _ in range(after):
        yield _COMMIT
        yield from v.backward(0)
    for _ in range(rank + 2):
        yield _COMMIT


_COMMIT = Instruction(COMMIT, -1)


class _Vee:
    """Number the passes of one DualPipeV rank; each method returns the next ones with their
    messages."""

    def __init__(self, *, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        self._counts: dict[tuple[str, int], int] = {}

    def forward(self, phase: int, *, receive: bool = True, send: bool = True) -> list[Instruction]:
        before = self.message(RECV_ACTIVATION, phase) if receive else []
        middle = [_COMMIT, self._one(FORWARD, phase)]
        return before + middle + (self.message(SEND_ACTIVATION, phase) if send else [])

    def backward(self, phase: int, *, send: bool = True) -> list[Instruction]:
        before = self.message(RECV_GRADIENT, phase)
        after = [_COMMIT, self._one(BACKWARD, phase)]
        return before + after + (self.message(SEND_GRADIENT, phase) if send else [])

    def both(self, ahead: int, back: int, *, receive: bool = True) -> list[Instruction]:
        before = self.message(RECV_ACTIVATION, ahead) if receive else []
        before += self.message(RECV_GRADIENT, back)
        middle = [_COMMIT, self._one(FORWARD, ahead), self._one(BACKWARD, back)]
        return (
            before
            + middle
            + self.message(SEND_ACTIVATION, ahead)
            + self.message(SEND_GRADIENT, back)
        )

    def message(self, name: str, phase: int) -> list[Instruction]:
        """Return the message, or nothing at the ends of the model and at its turn on the last
        rank."""
        is_at_input = name in (RECV_ACTIVATION, SEND_GRADIENT)
        has_no_peer = self.last if is_at_input == (phase == 1) else self.first
        return [] if has_no_peer else [self._one(name, phase)]

    def _one(self, name: str, phase: int) -> Instruction:
        number = self._counts.get((name, phase), 0)
        self._counts[name, phase] = number + 1
        return Instruction(name, number, phase)


Link = tuple[int, int]
"""Names the sending and the receiving pipeline rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInterval:
    """Time one pass of one micro-batch over one stage's layers.

    name: ForwardPass | BackwardPass
    """

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWait:
    """Time messages that a rank waits for together.

    ready_seconds: when the rank reaches them
    start_seconds, stop_seconds: when they are transferred
    """

    ready_seconds: float
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """Hold the step of every pipeline rank.

    seconds: the step
    ranks: each rank's passes, in order; it waits between them
    exchanges: each rank's messages, in order
    """

    seconds: float
    ranks: tuple[tuple[ComputeInterval, ...], ...]
    exchanges: tuple[tuple[MessageWait, ...], ...]


@dataclass(slots=True)
class _Message:
    """Follow one message.

    ready: when the sender and the receiver reached it
    started, arrived: None until both have
    """

    ready: list[float | None]
    started: float | None = None
    arrived: float | None = None


def simulate(
    schedule: Schedule,
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    send_seconds: Sequence[float],
) -> PipelineTimeline:
    """Simulate one step and return its timeline.

    forward_seconds, backward_seconds: one micro-batch by stage, recomputation included; 1f1b has p
        stages, dualpipev 2 p, whose rank r holds r and 2 p - 1 - r
    send_seconds: one message, by boundary between pipeline ranks

    Raises ValueError where ranks wait for each other in a circle.
    """
    stages = len(forward_seconds)
    count = PIPELINE_SCHEDULES[schedule].ranks(stages)
    links = _Links(send_seconds)
    ranks = [
        _Rank(
            number=rank,
            program=message_groups(
                instruction_stream(schedule, count, rank, micro_batches), schedule
            ),
            seconds={FORWARD: forward_seconds, BACKWARD: backward_seconds},
            stages=(rank, stages - 1 - rank),
        )
        for rank in range(count)
    ]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.advance(links):
                moved = True
    if any(rank.waiting is not None for rank in ranks):
        raise ValueError(
            f"{schedule} over {count} ranks and {micro_batches} micro-batches deadlocks"
        )
    return PipelineTimeline(
        seconds=max(rank.now for rank in ranks),
        ranks=tuple(tuple(rank.done) for rank in ranks),
        exchanges=tuple(tuple(rank.exchanged) for rank in ranks),
    )


class _Links:
    """Hold every message of the step by its link, where messages follow each other."""

    def __init__(self, send_seconds: Sequence[float]) -> None:
        self._send_seconds = send_seconds
        self._messages: dict[Link, list[_Message]] = defaultdict(list)
        self._posted: dict[tuple[Link, int], int] = defaultdict(int)

    def post(self, rank: int, now: float, instruction: Instruction) -> _Message:
        """Record that a rank reaches a message now; the message starts once the other end has
        reached it too."""
        link, end = link_and_end(instruction, rank)
        number, messages = self._posted[link, end], self._messages[link]
        self._posted[link, end] += 1
        if number == len(messages):
            messages.append(_Message([None, None]))
        message = messages[number]
        message.ready[end] = now
        sender_ready, receiver_ready = message.ready
        if sender_ready is not None and receiver_ready is not None:
            previous = messages[number - 1].arrived if number else None
            message.started = max(sender_ready, receiver_ready, previous or 0.0)
            message.arrived = message.started + self._send_seconds[min(link)]
        return message


@dataclass(slots=True, kw_only=True)
class _Rank:
    """Follow one pipeline rank through its program.

    stages: the rank's stages, by an instruction's phase
    seconds: seconds of each stage, by an instruction's name
    at: index of the next instruction
    waiting: the messages that the next instruction waits for
    """

    number: int
    program: list[Instruction | tuple[Instruction, ...]]
    stages: tuple[int, int]
    seconds: Mapping[str, Sequence[float]]
    now: float = 0.0
    at: int = 0
    waiting: list[_Message] | None = None
    done: list[ComputeInterval] = field(default_factory=list)
    exchanged: list[MessageWait] = field(default_factory=list)

    def advance(self, links: _Links) -> bool:
        """Run one instruction or one group of messages; return False where the rank waits or is
        done."""
        if self.waiting is not None:
            arrived = [m.arrived for m in self.waiting if m.arrived is not None]
            if len(arrived) < len(self.waiting):
                return False
            stop = max([self.now, *arrived])
            if self.waiting:
                started = min(m.started for m in self.waiting if m.started is not None)
                self.exchanged.append(
                    MessageWait(
                        ready_seconds=self.now,
                        start_seconds=max(self.now, started),
                        stop_seconds=stop,
                    )
                )
            self.now, self.waiting = stop, None
            return True
        if self.at == len(self.program):
            return False
        step = self.program[self.at]
        self.at += 1
        if isinstance(step, Instruction):
            start, stage = self.now, self.stages[step.phase]
            self.now += self.seconds[step.name][stage]
            self.done.append(
                ComputeInterval(
                    name=step.name,
                    stage=stage,
                    micro_batch=step.micro_batch,
                    start_seconds=start,
                    stop_seconds=self.now,
                )
            )
        else:
            self.waiting = [links.post(self.number, self.now, message) for message in step]
        return True


def message_groups(
    instructions: tuple[Instruction, ...], schedule: Schedule
) -> list[Instruction | tuple[Instruction, ...]]:
    """Group messages that are waited for together: one by one, or up to a commit; keep passes as
    they are."""
    groups: list[Instruction | tuple[Instruction, ...]] = []
    queued: list[Instruction] = []
    for instruction in instructions:
        if instruction.name in (FORWARD, BACKWARD):
            groups.append(instruction)
        elif instruction.name == COMMIT:
            groups.append(tuple(queued))
            queued = []
        elif PIPELINE_SCHEDULES[schedule].groups_messages:
            queued.append(instruction)
        else:
            groups.append((instruction,))
    return groups


def link_and_end(instruction: Instruction, rank: int) -> tuple[Link, int]:
    """Return a message's link and which end this rank is: 0 sends, 1 receives."""
    # Activations go to the next rank in phase 0 and back in phase 1, gradients the other way.
    towards_next = instruction.name in (SEND_ACTIVATION, RECV_GRADIENT)
    peer = rank + 1 if towards_next == (instruction.phase == 0) else rank - 1
    if instruction.name in (SEND_ACTIVATION, SEND_GRADIENT):
        return (rank, peer), 0
    return (peer, rank), 1


_INSTRUCTIONS: Mapping[Schedule, Callable[[int, int, int], Iterator[Instruction]]] = {
    "1f1b": _one_forward_one_backward,
    "dualpipev": _dualpipev,
}
