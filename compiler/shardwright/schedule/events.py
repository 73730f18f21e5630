"""One step as discrete events: each pipeline rank runs its instruction stream; messages wait for both their ends.

DeepSpeed sends and receives in order and blocks (runtime/pipe/p2p.py: dist.send, dist.recv): a message starts when both
ranks have come to it and holds both until it has arrived, with gloo as with NCCL on one stream. DualPipeV launches what
it has queued and waits for all of it (batch_isend_irecv). Messages of one direction follow each other on their link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.schedule.streams import (
    BACKWARD,
    COMMIT,
    FORWARD,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Instruction,
    stream,
)

Link = tuple[int, int]
"""Sending and receiving pipeline rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One pass of one micro-batch over one stage's layers. name: ForwardPass | BackwardPass."""

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Messages that a rank waits for together: it comes at ready, they move from start to stop."""

    ready_seconds: float
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """ranks: what each pipeline rank computes, in order; exchanges: its messages. It waits in the gaps."""

    seconds: float
    ranks: tuple[tuple[Interval, ...], ...]
    exchanges: tuple[tuple[Exchange, ...], ...]


@dataclass(slots=True)
class _Message:
    """ready: when each end came to it (sender, receiver); started, arrived: None until both have."""

    ready: list[float | None]
    started: float | None = None
    arrived: float | None = None


def simulate(
    schedule: str,
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    send_seconds: Sequence[float],
) -> Timeline:
    """forward, backward: per stage, one micro-batch, recomputation included; send: per boundary between pipeline ranks,
    one message. Stages are p for 1f1b and 2 p for dualpipev, whose rank r holds r and 2 p - 1 - r."""
    stages = len(forward_seconds)
    ranks = stages // 2 if schedule == "dualpipev" else stages
    programs = [grouped(stream(schedule, ranks, rank, micro_batches), schedule) for rank in range(ranks)]
    messages: dict[Link, list[_Message]] = defaultdict(list)
    posted: dict[tuple[Link, int], int] = defaultdict(int)
    waiting: list[list[_Message] | None] = [None] * ranks
    now, at = [0.0] * ranks, [0] * ranks
    done: list[list[Interval]] = [[] for _ in range(ranks)]
    exchanged: list[list[Exchange]] = [[] for _ in range(ranks)]

    def post(rank: int, group: tuple[Instruction, ...]) -> list[_Message]:
        found = []
        for instruction in group:
            link, end = link_of(instruction, rank)
            number = posted[link, end]
            posted[link, end] = number + 1
            if number == len(messages[link]):
                messages[link].append(_Message([None, None]))
            message = messages[link][number]
            message.ready[end] = now[rank]
            sent, taken = message.ready
            if sent is not None and taken is not None:
                before = messages[link][number - 1].arrived if number else None
                message.started = max(sent, taken, before or 0.0)
                message.arrived = message.started + send_seconds[min(link)]
            found.append(message)
        return found

    def advance(rank: int) -> bool:
        """One instruction (or one group of messages) further; False where the rank has to wait, or is done."""
        pending = waiting[rank]
        if pending is not None:
            arrived = [m.arrived for m in pending if m.arrived is not None]
            if len(arrived) < len(pending):
                return False
            if pending:
                exchanged[rank].append(
                    Exchange(
                        ready_seconds=now[rank],
                        start_seconds=max(now[rank], min(m.started for m in pending if m.started is not None)),
                        stop_seconds=max([now[rank], *arrived]),
                    )
                )
            now[rank] = max([now[rank], *arrived])
            waiting[rank] = None
            return True
        if at[rank] == len(programs[rank]):
            return False
        step = programs[rank][at[rank]]
        at[rank] += 1
        if not isinstance(step, Instruction):
            waiting[rank] = post(rank, step)
            return True
        stage = stages - 1 - rank if step.phase else rank
        seconds = (forward_seconds if step.name == FORWARD else backward_seconds)[stage]
        done[rank].append(
            Interval(
                name=step.name,
                stage=stage,
                micro_batch=step.micro_batch,
                start_seconds=now[rank],
                stop_seconds=now[rank] + seconds,
            )
        )
        now[rank] += seconds
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while advance(rank):
                moved = True
    if any(w is not None for w in waiting):
        raise ValueError(f"{schedule} over {ranks} ranks and {micro_batches} micro-batches waits for itself")
    return Timeline(
        seconds=max(now),
        ranks=tuple(tuple(intervals) for intervals in done),
        exchanges=tuple(tuple(exchanges) for exchanges in exchanged),
    )


def grouped(instructions: tuple[Instruction, ...], schedule: str) -> list[Instruction | tuple[Instruction, ...]]:
    """Passes as they are; messages in the groups that are waited for together: one by one, or up to a commit."""
    out: list[Instruction | tuple[Instruction, ...]] = []
    queued: list[Instruction] = []
    for instruction in instructions:
        if instruction.name in (FORWARD, BACKWARD):
            out.append(instruction)
        elif instruction.name == COMMIT:
            out.append(tuple(queued))
            queued = []
        elif schedule == "dualpipev":
            queued.append(instruction)
        else:
            out.append((instruction,))
    return out


def link_of(instruction: Instruction, rank: int) -> tuple[Link, int]:
    """The link of a message, and which end of it this rank is: 0 sends, 1 receives."""
    # Activations go to the next rank in phase 0 and back in phase 1, gradients the other way.
    towards_next = instruction.name in (SEND_ACTIVATION, RECV_GRADIENT)
    peer = rank + 1 if towards_next == (instruction.phase == 0) else rank - 1
    if instruction.name in (SEND_ACTIVATION, SEND_GRADIENT):
        return (rank, peer), 0
    return (peer, rank), 1
