"""test_low_precision.py's process: the linears of a plan's model that compute under Transformer
Engine's recipe, by the stand-in beside this file. Reads [{"config": ..., "plan": plan.json}],
prints a line an answer: {module of a layer: its recipe, or null} a layer, and Hugging Face's names
of the weights that a rank counts as in low precision."""

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

from shardwright.engines.megatron import megatron_model
from shardwright.engines.megatron.megatron_trainer import transformer_settings
from shardwright.engines.megatron.megatron_weight_mapping import hf_config
from shardwright.engines.megatron.transformer_engine_layers import (
    check_low_precision,
    uses_transformer_engine,
)
from shardwright.plan.plan import plan_from_json


def computed(document: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    plan, named = plan_from_json(json.dumps(document)), hf_config(config)
    taken = uses_transformer_engine(plan)
    check_low_precision(plan, taken=taken)
    settings = transformer_settings(plan, named)
    (model,) = megatron_model.build_model_chunks(
        named,
        settings,
        None,
        length=16,
        pipeline_rank=0,
        transformer_engine=taken,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    ids = torch.arange(32).reshape(2, 16)
    model(ids, torch.arange(16).expand(2, 16), None, labels=ids).sum().backward()
    assert not hasattr(model.output_layer, "computed_under")
    layers = [
        {
            name: module.computed_under
            for name, module in layer.named_modules()
            if hasattr(module, "computed_under")
        }
        for layer in model.decoder.layers
    ]
    if settings.is_hybrid_model:
        layers = [one | other for one, other in zip(layers[::2], layers[1::2], strict=True)]
    counted = megatron_model.low_precision_parameters(settings, [model])
    pieces = megatron_model.parameter_ranges(named, model, tensor_rank=0, tied={})
    held = {piece.name for piece in pieces if piece.parameter in counted}
    return {"layers": layers, "held": sorted(held), "count": len(counted)}


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(0)
    for question in json.loads(sys.stdin.read()):
        print(json.dumps(computed(question["plan"], question["config"])), flush=True)
