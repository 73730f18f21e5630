"""Train a small Llama for a few steps under torch's profiler: one process, or ranks over gloo.

usage: profiled_loop_worker.py FOLDER PLANTED; writes FOLDER/RANK.json. PLANTED is "layer" (layer 2
sleeps in each forward pass), "rank" (rank 1 sleeps before each step) or "none".
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import LlamaConfig, LlamaForCausalLM

SLEEP_SECONDS = 0.4
SLOW_LAYER, LATE_RANK = 2, 1
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
ROWS, LENGTH = 2, 64


def main(folder: str, planted: str) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world > 1:
        dist.init_process_group("gloo")
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
    if planted == "layer":
        _sleep_before(model.model.layers[SLOW_LAYER])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    tokens = torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH))

    def step() -> None:
        if planted == "rank" and rank == LATE_RANK:
            time.sleep(SLEEP_SECONDS)
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2),
        record_shapes=True,  # gloo's collectives have no sizes without
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/{rank}.json"),
    ) as profiled:
        for _ in range(3):
            step()
            profiled.step()
    if world > 1:
        dist.destroy_process_group()


def _sleep_before(layer: torch.nn.Module) -> None:
    forward = layer.forward

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLEEP_SECONDS)
        return forward(*arguments, **options)

    layer.forward = slow


if __name__ == "__main__":
    main(*sys.argv[1:])
