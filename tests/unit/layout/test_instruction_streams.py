"""Our instruction streams against those of the installed DeepSpeed, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed_schedule

from shardwright.layout.pipeline_simulation import COMMIT, Instruction, instruction_stream
from shardwright.recipe.literal_types import Schedule

LEFT_OUT = ("LoadMicroBatch", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep")


def theirs(kind: str, ranks: int, rank: int, micro_batches: int) -> Iterator[tuple[str, int, int]]:
    """(name, buffer, phase) of DeepSpeed's own instructions."""
    make = (
        deepspeed_schedule.DualPipeVSchedule
        if kind == "dualpipev"
        else deepspeed_schedule.TrainSchedule
    )
    for step in make(micro_batches=micro_batches, stages=ranks, stage_id=rank).steps():
        for command in step:
            if command.name not in LEFT_OUT:
                yield (
                    command.name,
                    command.kwargs.get("buffer_id", -1),
                    command.kwargs.get("phase", 0),
                )


def in_buffers(
    kind: Schedule, found: Instruction, ranks: int, rank: int, micro_batches: int
) -> tuple[str, int, int]:
    """TrainSchedule reuses its buffers in turn; DualPipeV has one a phase and micro-batch."""
    if found.name == COMMIT:
        return found.name, -1, 0
    if kind == "dualpipev":
        return found.name, found.phase * micro_batches + found.micro_batch, found.phase
    buffers = max(2, min(ranks - rank, micro_batches))
    return found.name, found.micro_batch % buffers, 0


@pytest.mark.parametrize("kind", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13, 16])
def test_streams_are_deepspeeds(kind: Schedule, ranks: int) -> None:
    least = 2 * ranks if kind == "dualpipev" else 1
    for micro_batches in sorted({least, least + 1, 2 * ranks + 3, 5 * ranks}):
        for rank in range(ranks):
            ours = [
                in_buffers(kind, i, ranks, rank, micro_batches)
                for i in instruction_stream(kind, ranks, rank, micro_batches)
            ]
            assert ours == list(theirs(kind, ranks, rank, micro_batches)), (micro_batches, rank)
