"""The bubble in closed form against DeepSpeed's own instruction streams, played through as discrete events."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule

from shardwright.cost.timing import bubble_divisor
from shardwright.ir.strategy import Strategy


def makespan(kind: str, pipeline: int, micro_batches: int, forward: float, backward: float) -> float:
    """Seconds of a step whose every pipeline rank needs `forward` and `backward` per micro-batch."""
    stream = schedule.TrainSchedule if kind == "1f1b" else schedule.DualPipeVSchedule
    programs = [
        [c for step in stream(micro_batches=micro_batches, stages=pipeline, stage_id=rank) for c in step]
        for rank in range(pipeline)
    ]
    stages = pipeline if kind == "1f1b" else 2 * pipeline
    seconds = {"ForwardPass": forward * pipeline / stages, "BackwardPass": backward * pipeline / stages}
    now, at, done = [0.0] * pipeline, [0] * pipeline, {}
    counts: dict[tuple[int, str, int], int] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                command = program[at[rank]]
                name = type(command).__name__
                if name in seconds:
                    stage = rank if getattr(command, "phase", 0) == 0 else stages - 1 - rank
                    number = counts.get((rank, name, stage), 0)
                    if name == "ForwardPass":
                        needs = ("ForwardPass", stage - 1, number) if stage else None
                    elif stage == stages - 1:
                        needs = ("ForwardPass", stage, number)
                    else:
                        needs = ("BackwardPass", stage + 1, number)
                    if needs is not None and needs not in done:
                        break
                    now[rank] = max(now[rank], done.get(needs, 0.0)) + seconds[name]
                    done[name, stage, number] = now[rank]
                    counts[rank, name, stage] = number + 1
                at[rank] += 1
                moved = True
    assert all(i == len(p) for i, p in zip(at, programs, strict=True)), "the streams deadlock"
    return max(now)


@pytest.mark.parametrize("kind", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 8])
def test_closed_form_meets_the_instruction_streams(kind: str, pipeline: int, rounds: int) -> None:
    micro_batches = rounds * pipeline
    strategy = Strategy(
        tensor=1,
        pipeline=pipeline,
        data=1,
        zero_stage=1,
        micro_batch_size=1,
        gradient_accumulation_steps=micro_batches,
        activation_checkpointing="none",
        schedule=kind,
        offload="none",
    )
    closed = 3.0 * micro_batches + 3.0 * (pipeline - 1) / bubble_divisor(strategy)
    assert makespan(kind, pipeline, micro_batches, 1.0, 2.0) == pytest.approx(closed)
