"""List the pipeline schedules of `parallelism.schedule`, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.recipe.literal_types import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """Describe how a schedule differs from one stage a rank and one message at a time.

    stages_per_rank: stages that each pipeline rank holds
    is_v_shaped: stages go down the ranks and back, so that rank 0 holds the first and the last
    micro_batches_per_rank: the fewest in a step, by pipeline rank
    interleaves: ranks may hold virtual stages
    shards_messages: each tensor rank sends a share of an activation
    groups_messages: a rank waits for several messages at once
    retains_outputs: the last stage keeps micro-batches' outputs after their backward pass
    compiles_layers, takes_images: torch.compile and images are verified with it
    """

    stages_per_rank: int = 1
    is_v_shaped: bool = False
    micro_batches_per_rank: int = 0
    interleaves: bool = True
    shards_messages: bool = True
    groups_messages: bool = False
    retains_outputs: bool = True
    compiles_layers: bool = True
    takes_images: bool = True

    def min_micro_batches(self, ranks: int) -> int:
        """Return the fewest micro-batches that a step has over so many pipeline ranks."""
        return max(1, self.micro_batches_per_rank * ranks)

    def ranks(self, stages: int) -> int:
        """Return the pipeline ranks that hold so many stages."""
        return stages // self.stages_per_rank


PIPELINE_SCHEDULES: Mapping[Schedule, PipelineSchedule] = {
    "1f1b": PipelineSchedule(),
    # github.com/deepseek-ai/DualPipe; DeepSpeed sends whole tensors under it.
    "dualpipev": PipelineSchedule(
        stages_per_rank=2,
        is_v_shaped=True,
        micro_batches_per_rank=2,
        interleaves=False,
        shards_messages=False,
        groups_messages=True,
        retains_outputs=False,
        compiles_layers=False,
        takes_images=False,
    ),
}
