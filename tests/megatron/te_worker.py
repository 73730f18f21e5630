"""test_transformer_engine.py's process: Megatron-Core's layers of Transformer Engine, which the
stand-in beside this file stands for. Reads {"configs": [...], "plan": plan.json}, prints a line an
answer, the plan's last."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
warnings.simplefilter("ignore")

from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

patch_torch_for_cpu()

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed as dist

from shardwright.engines.megatron import (
    megatron_equivalence_process,
    megatron_model,
    transformer_engine_layers,
)
from shardwright.engines.megatron.megatron_trainer import MegatronOptimizerStates
from shardwright.engines.megatron.megatron_weight_mapping import hf_config
from shardwright.plan.plan import plan_from_json

BUILD = megatron_model.build_model


def numbers(document: dict[str, Any]) -> dict[str, Any]:
    """What the compile's proof finds of these layers, and their classes."""
    built: list[Any] = []

    def build_model(*args: Any, **more: Any) -> Any:
        built.append(BUILD(*args, **more, transformer_engine=True))
        return built[-1]

    megatron_model.build_model = build_model
    try:
        found = megatron_equivalence_process._compare_tiny_copy(document)
    finally:
        megatron_model.build_model = BUILD
    layers = built[0].decoder.layers
    return {
        "found": found,
        "classes": sorted({type(m).__name__ for layer in layers for m in layer.modules()}),
    }


def chosen(document: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What a rank of the plan takes, and Hugging Face's names with the elements that it holds of
    each, of both."""
    plan = plan_from_json(json.dumps(document))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    taken = transformer_engine_layers.uses_transformer_engine(plan)
    named = hf_config(config)
    held: list[dict[str, int]] = []
    for kind in taken, False:
        settings = megatron_model.transformer_config(named, params_dtype=torch.bfloat16, bf16=True)
        (model,) = megatron_model.build_model_chunks(
            named, settings, None, length=16, pipeline_rank=0, transformer_engine=kind
        )
        sizes: dict[str, int] = {}
        for piece in megatron_model.parameter_ranges(named, model, tensor_rank=0, tied={}):
            sizes[piece.name] = sizes.get(piece.name, 0) + piece.numel
        held.append(sizes)
    fused = [name for name, _ in model.named_parameters() if "layer_norm" in name]
    told = transformer_engine_layers.layers_log_line(plan, taken=taken)
    return {"taken": taken, "told": told, "same": held[0] == held[1], "fused in the last": fused}


class FusedAdam(torch.optim.Optimizer):
    """Counts as Transformer Engine's and Apex's do: a group has no number before its first
    update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                for moment in ("exp_avg", "exp_avg_sq"):
                    self.state[p].setdefault(moment, torch.zeros_like(p))


class Part:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = FusedAdam([self.weight])
        self.param_groups = self.optimizer.param_groups


def counted() -> list[int]:
    """Updates of a fused AdamW: before any, after two, and of another one that is given these."""
    part, other = Part(), Part()
    mine, theirs = MegatronOptimizerStates(part), MegatronOptimizerStates(other)
    counts = [mine.updates]
    for _ in range(2):
        part.optimizer.step()
    counts.append(mine.updates)
    theirs.updates = mine.updates
    other.optimizer.step()
    return [*counts, theirs.updates]


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    for config in asked["configs"]:
        print(json.dumps(numbers(config)), flush=True)
    print(json.dumps({**chosen(asked["plan"], asked["config"]), "updates": counted()}), flush=True)
