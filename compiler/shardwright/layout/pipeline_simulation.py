"""One step as discrete events: each pipeline rank runs its instruction stream; messages wait for
both their ends.

DeepSpeed sends and receives in order and blocks (runtime/pipe/p2p.py: dist.send, dist.recv): a
message starts when both ranks have come to it and holds both until it has arrived, with gloo as
with NCCL on one stream. DualPipeV launches what it has queued and waits for all of it
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
    """name: DeepSpeed's. phase: 0, or 1 for the half of DualPipeV on which micro-batches travel
    back to rank 0.

    A CommitP2P (DualPipeV) launches the sends and receives before it and waits for all; it has
    micro_batch -1.
    """

    name: str
    micro_batch: int
    phase: int = 0


def instruction_stream(
    schedule: Schedule, ranks: int, rank: int, micro_batches: int
) -> tuple[Instruction, ...]:
    """What one pipeline rank executes, loading and the optimizer left out. DualPipeV needs m >= 2
    p."""
    return tuple(_INSTRUCTIONS[schedule](ranks, rank, micro_batches))


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> Iterator[Instruction]:
    """TrainSchedule: step t is a forward pass where t and the rank are both even or both odd, else
    a backward pass.

    Both ends of a boundary exchange before the step: the gradient first, then the activation.
    """
    before = None
    for step in range(2 * (micro_batches + ranks - 1)):
        forward = (step + rank) % 2 == 0
        number = (step - rank) // 2 if forward else (step + rank + 1) // 2 - ranks
        current = number if 0 <= number < micro_batches else None
        if forward and rank > 0:
            if before is not None:
                yield Instruction(SEND_GRADIENT, before)
            if current is not None:
                yield Instruction(RECV_ACTIVATION, current)
        if not forward and rank < ranks - 1:
            if current is not None:
                yield Instruction(RECV_GRADIENT, current)
            if before is not None:
                yield Instruction(SEND_ACTIVATION, before)
        if current is not None:
            yield Instruction(FORWARD if forward else BACKWARD, current)
        before = current


def _dualpipev(ranks: int, rank: int, micro_batches: int) -> Iterator[Instruction]:
    """DualPipeVSchedule (github.com/deepseek-ai/DualPipe): its eight steps, weight gradients inside
    the backward."""
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
    """One rank of DualPipeV. Each method gives the next such passes with their messages;
    micro-batches are counted by instruction and phase."""

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
        """Nothing at either end of the model, and where it turns around on the last rank."""
        comes = name in (RECV_ACTIVATION, SEND_GRADIENT)  # at the border where activations come in
        border = (
            (self.last if phase else self.first) if comes else (self.first if phase else self.last)
        )
        return [] if border else [self._one(name, phase)]

    def _one(self, name: str, phase: int) -> Instruction:
        number = self._counts.get((name, phase), 0)
        self._counts[name, phase] = number + 1
        return Instruction(name, number, phase)


Link = tuple[int, int]
"""Sending and receiving pipeline rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInterval:
    """One pass of one micro-batch over one stage's layers. name: ForwardPass | BackwardPass."""

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWait:
    """Messages that a rank waits for together: it comes at ready, they move from start to stop."""

    ready_seconds: float
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """ranks: what each pipeline rank computes, in order; exchanges: its messages. It waits in the
    gaps."""

    seconds: float
    ranks: tuple[tuple[ComputeInterval, ...], ...]
    exchanges: tuple[tuple[MessageWait, ...], ...]


@dataclass(slots=True)
class _Message:
    """ready: when each end came to it (sender, receiver); started, arrived: None until both
    have."""

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
    """forward, backward: per stage, one micro-batch, recomputation included; send: per boundary
    between pipeline ranks, one message. Stages are p for 1f1b and 2 p for dualpipev, whose rank r
    holds r and 2 p - 1 - r."""
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
            f"{schedule} over {count} ranks and {micro_batches} micro-batches waits for itself"
        )
    return PipelineTimeline(
        seconds=max(rank.now for rank in ranks),
        ranks=tuple(tuple(rank.done) for rank in ranks),
        exchanges=tuple(tuple(rank.exchanged) for rank in ranks),
    )


class _Links:
    """Every message of the step, by its link. Those of one link follow each other."""

    def __init__(self, send_seconds: Sequence[float]) -> None:
        self._send_seconds = send_seconds
        self._messages: dict[Link, list[_Message]] = defaultdict(list)
        self._posted: dict[tuple[Link, int], int] = defaultdict(int)

    def post(self, rank: int, now: float, instruction: Instruction) -> _Message:
        """The message, which the rank has come to now; it starts where the other end has, too."""
        link, end = link_and_end(instruction, rank)
        number, messages = self._posted[link, end], self._messages[link]
        self._posted[link, end] += 1
        if number == len(messages):
            messages.append(_Message([None, None]))
        message = messages[number]
        message.ready[end] = now
        sent, taken = message.ready
        if sent is not None and taken is not None:
            before = messages[number - 1].arrived if number else None
            message.started = max(sent, taken, before or 0.0)
            message.arrived = message.started + self._send_seconds[min(link)]
        return message


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One pipeline rank: where its program stands, and what it has done. stages: by an
    instruction's phase. seconds: by its name, of all stages. waiting: messages that the next
    instruction waits for."""

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
        """One instruction (or one group of messages) further; False where the rank has to wait, or
        is done."""
        if self.waiting is not None:
            return self._receive(self.waiting)
        if self.at == len(self.program):
            return False
        step = self.program[self.at]
        self.at += 1
        if isinstance(step, Instruction):
            self._compute(step)
        else:
            self.waiting = [links.post(self.number, self.now, message) for message in step]
        return True

    def _receive(self, pending: list[_Message]) -> bool:
        """Whether all of them have arrived."""
        arrived = [m.arrived for m in pending if m.arrived is not None]
        if len(arrived) < len(pending):
            return False
        stop = max([self.now, *arrived])
        if pending:
            started = min(m.started for m in pending if m.started is not None)
            self.exchanged.append(
                MessageWait(
                    ready_seconds=self.now, start_seconds=max(self.now, started), stop_seconds=stop
                )
            )
        self.now, self.waiting = stop, None
        return True

    def _compute(self, step: Instruction) -> None:
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


def message_groups(
    instructions: tuple[Instruction, ...], schedule: Schedule
) -> list[Instruction | tuple[Instruction, ...]]:
    """Passes as they are; messages in the groups that are waited for together: one by one, or up to
    a commit."""
    out: list[Instruction | tuple[Instruction, ...]] = []
    queued: list[Instruction] = []
    for instruction in instructions:
        if instruction.name in (FORWARD, BACKWARD):
            out.append(instruction)
        elif instruction.name == COMMIT:
            out.append(tuple(queued))
            queued = []
        elif PIPELINE_SCHEDULES[schedule].groups_messages:
            queued.append(instruction)
        else:
            out.append((instruction,))
    return out


def link_and_end(instruction: Instruction, rank: int) -> tuple[Link, int]:
    """The link of a message, and which end of it this rank is: 0 sends, 1 receives."""
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
