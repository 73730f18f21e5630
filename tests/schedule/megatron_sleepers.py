"""Megatron-Core's own interleaved schedule on this machine's CPU, with chunks that sleep: `python
-m tests.schedule.megatron_sleepers RANKS CASES OUT`.

Reads a JSON list of cases from a file and writes the seconds of each, measured on the slowest rank.
Sleeping ranks overlap truly however few the cores. One group of ranks serves all cases.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

warnings.simplefilter("ignore")
patch_torch_for_cpu()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from tests.schedule.sleep import Sleep  # noqa: E402

WIDTH, TIMES = 8, 2


class SleepingChunk(nn.Module):
    """As Megatron's schedules use a model: what arrives is set before the forward pass."""

    def __init__(self, config: Any, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.config, self.forward_seconds, self.backward_seconds = (
            config,
            forward_seconds,
            backward_seconds,
        )
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage: int | None = None
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.arrived: torch.Tensor | None = None

    def set_input_tensor(self, arrived: Any) -> None:
        self.arrived = arrived[0] if isinstance(arrived, list) else arrived

    def forward(self) -> torch.Tensor:
        x = torch.zeros(1, 1, WIDTH) if self.arrived is None else self.arrived
        sleep: Callable[..., torch.Tensor] = Sleep.apply
        return sleep(x * self.scale, self)


def _loss(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return out.sum(), torch.tensor(1, dtype=torch.int), {}


def measure(case: dict[str, Any], rank: int, ranks: int) -> float:
    """Seconds of one step, from a barrier to the end of the slowest rank's."""
    virtual = len(case["forward_seconds"]) // ranks
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    config = TransformerConfig(
        num_layers=ranks * virtual,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=True,
    )
    parts = range(rank, ranks * virtual, ranks)
    chunks = [
        SleepingChunk(config, case["forward_seconds"][p], case["backward_seconds"][p])
        for p in parts
    ]
    dist.barrier()
    start = time.perf_counter()
    get_forward_backward_func()(
        forward_step_func=lambda feed, chunk, *_: (chunk(), _loss),
        data_iterator=[iter(())] * virtual,
        model=chunks,
        num_microbatches=case["micro_batches"],
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run_rank(rank: int, ranks: int, cases: list[dict[str, Any]], out: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(out.with_suffix(f".store-{ranks}")), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=2,
        create_gloo_process_groups=False,
    )
    seconds = []
    for case in cases:
        seconds.append(min(measure(case, rank, ranks) for _ in range(TIMES)))
        if rank == 0:
            out.write_text(json.dumps(seconds))
    dist.barrier()
    os._exit(0)


def main(ranks: int, file: Path, out: Path) -> int:
    """Forked ranks share one import."""
    cases = json.loads(file.read_text())
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                run_rank(rank, ranks, cases, out)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
