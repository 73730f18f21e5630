"""DeepSpeed's instruction streams, one a pipeline rank, without DeepSpeed (its
runtime/pipe/schedule.py, 0.19.8).

m micro-batches over p pipeline ranks. A test compares them with those of the installed DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
    schedule: str, ranks: int, rank: int, micro_batches: int
) -> tuple[Instruction, ...]:
    """What one pipeline rank executes, loading and the optimizer left out. DualPipeV needs m >= 2
    p."""
    generate = _dualpipev if schedule == "dualpipev" else _one_forward_one_backward
    return tuple(generate(ranks, rank, micro_batches))


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
