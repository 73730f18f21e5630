"""Under gloo, one process a rank: rows cut over the ranks of the world against one process, every
gradient.

Arguments: rank, ranks, the port to meet at, the folder for results.
"""

from __future__ import annotations

import datetime
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.packed_attention import emulate_flash_attention
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL, contiguous_shard
from shardwright.parallel.distributed_losses import (
    CausalLoss,
    ChunkedLoss,
    micro_batch_loss,
    wrap_chunked_loss,
)
from shardwright.parallel.layer_compile_and_recompute import checkpoint_layers
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from shardwright.train.training_worker import leave
from tests.zoo.configs import tiny_config

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-eager": {"attention": "eager"},
    "llama-flash": {"attention": FLASH_ATTENTION_2},
    "llama-one-key-head": {"config": {"num_key_value_heads": 1}},
    "llama-packed": {"packed": True},
    "llama-packed-flash": {"packed": True, "attention": FLASH_ATTENTION_2},
    "llama-packed-chunked": {"packed": True, "chunked": True},
    "llama-recomputed": {"recompute": "full"},
    "qwen2": {},
    "gpt2": {},
    "gpt2-packed": {"packed": True},
    "gpt2-selective": {"recompute": "selective"},
    "gemma2": {"attention": "eager"},
    "gemma2-packed": {"attention": "eager", "packed": True},
    "mistral": {},
    "mistral-packed-eager": {"attention": "eager", "packed": True},
    "gpt_oss": {"attention": "eager"},
    "deepseek_v3": {},
}
"""The model type is what stands before the first "-"."""
SHAPE = (2, 24)


def model_of(name: str, config: dict[str, Any], attention: str) -> nn.Module:
    document = tiny_config(name.split("-")[0]) | config
    torch.manual_seed(3)
    with emulate_flash_attention() if attention == FLASH_ATTENTION_2 else nullcontext():
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**document), attn_implementation=attention, dtype=torch.float32
        )
    with torch.no_grad():
        for parameter in model.parameters():  # biases that are zero would hide where they belong
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.train()
    return model  # type: ignore[no-any-return]


def batch_of(packed: bool) -> MicroBatch:
    """Some tokens are no labels. Packed: a border of the first row lies inside each piece, one of
    the second on it."""
    ids = torch.randint(3, 100, SHAPE)
    labels = ids.clone()
    labels[:, 3:5] = -100
    if not packed:
        return MicroBatch(input_ids=ids, labels=labels, position_ids=None)
    places = torch.stack(
        [torch.cat([torch.arange(n) for n in row]) for row in ((7, 12, 5), (12, 1, 11))]
    )
    labels[places == 0] = -100
    return MicroBatch(input_ids=ids, labels=labels, position_ids=places)


def run(
    model: nn.Module,
    batch: MicroBatch,
    attention: str,
    chunked: bool,
    recompute: Checkpointing,
    scale: float,
) -> torch.Tensor:
    stack: Any = model.get_submodule(
        "transformer.h" if hasattr(model, "transformer") else "model.layers"
    )
    checkpoint_layers(list(stack), recompute, "attn" if hasattr(stack[0], "attn") else "self_attn")
    loss = ChunkedLoss() if chunked else CausalLoss()
    loss.scale, loss.shifted = scale, batch.shifted
    if isinstance(loss, ChunkedLoss):
        wrap_chunked_loss(model, loss)
    with emulate_flash_attention() if attention == FLASH_ATTENTION_2 else nullcontext():
        value = micro_batch_loss(model, loss, batch, attention, torch.device("cpu"))
        value.backward()
    return value.detach()


def measure(
    name: str,
    rank: int,
    ranks: int,
    *,
    config: dict[str, Any] | None = None,
    attention: str = "sdpa",
    packed: bool = False,
    chunked: bool = False,
    recompute: Checkpointing = "none",
) -> dict[str, float]:
    """The largest differences from one process: of the loss, and of each gradient as a share of its
    largest value."""
    whole, mine = (model_of(name, config or {}, attention) for _ in range(2))
    torch.manual_seed(5)
    batch = batch_of(packed)
    scale = 1 / batch.predicted
    wanted = run(whole, batch, attention, chunked, recompute, scale)
    CONTEXT_PARALLEL.use(dist.group.WORLD)
    try:
        piece = contiguous_shard(batch, rank, ranks)
        total = run(mine, piece, attention, chunked, recompute, scale).clone()
    finally:
        CONTEXT_PARALLEL.use(None)
    counted = torch.tensor(piece.predicted)
    dist.all_reduce(counted)
    assert int(counted) == batch.predicted
    dist.all_reduce(total)
    worst, gradients, reference = 0.0, 0, dict(whole.named_parameters())
    for path, parameter in mine.named_parameters():
        want, got = reference[path].grad, parameter.grad
        if want is None and got is None:
            continue
        assert want is not None and got is not None, path
        dist.all_reduce(got)
        off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
        gradients += 1
        if not off <= worst:
            worst = off
        if worst != worst:
            break
    return {"loss": abs(float(total - wanted)), "gradient": worst, "gradients": gradients}


def main(rank: int, ranks: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    found = {name: measure(name, rank, ranks, **case) for name, case in CASES.items()}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    rank, ranks, port = map(int, sys.argv[1:4])
    main(rank, ranks, port, Path(sys.argv[4]))
