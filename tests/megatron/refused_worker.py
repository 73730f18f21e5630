"""What Megatron-Core itself does with layouts that its parser lets through: prints {code: its
error} as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

warnings.simplefilter("ignore")
patch_torch_for_cpu()

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from shardwright.engines.megatron.megatron_model import build_model, transformer_config

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 32}


@contextmanager
def ranks(world: int, **degrees: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(**degrees, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def piped(virtual: int) -> TransformerConfig:
    return TransformerConfig(
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        **SHAPE,
    )


def layers(virtual: int) -> None:
    with ranks(4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=virtual):
        get_num_layers_to_build(piped(virtual), vp_stage=0)


def micro_batches(count: int) -> None:
    with ranks(4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2):
        chunk: Any = torch.nn.Linear(2, 2)
        chunk.config = piped(2)
        get_forward_backward_func()(
            forward_step_func=lambda *_: (_ for _ in ()).throw(
                KeyError("the first forward pass begins")
            ),
            data_iterator=[iter(()), iter(())],
            model=[chunk, chunk],
            num_microbatches=count,
            seq_length=8,
            micro_batch_size=1,
            forward_only=False,
        )


def experts(count: int) -> None:
    with ranks(
        16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        expert_model_parallel_size=count,
    ):
        pass


def sequence(cut: bool) -> None:
    config = AutoConfig.for_model("mixtral", **MIXTRAL)
    with ranks(2, tensor_model_parallel_size=2):
        parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": cut}
        model = build_model(config, transformer_config(config, **parallel), None, length=8)
        layer = model.decoder.layers[-1].mlp
        layer.train()
        layer(torch.zeros(4, 1, config.hidden_size))


def heads(tensor: int) -> None:
    shape = {"hidden_size": 768, "num_attention_heads": 12, "num_layers": 2}
    TransformerConfig(tensor_model_parallel_size=tensor, **shape)


def router(experts: int) -> None:
    topk_routing_with_score_function(torch.zeros(2, experts), topk=8)


MIXTRAL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 64,
}
CASES: dict[str, tuple[Callable[[Any], None], Any, Any]] = {
    "SW4921": (layers, 3, 4),
    "SW4922": (micro_batches, 6, 8),
    "SW4923": (experts, 8, 2),
    "SW4924": (sequence, False, True),
    "SW4946": (heads, 8, 4),
    "SW4947": (router, 4, 8),
}
"""Code -> what asks Megatron, its argument in the example and in what `explain` says instead."""


def told(ask: Callable[[Any], None], value: Any) -> str:
    try:
        ask(value)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


if __name__ == "__main__":
    found = {
        code: [told(ask, example), told(ask, instead)]
        for code, (ask, example, instead) in CASES.items()
    }
    sys.stdout.write(json.dumps(found) + "\n")
