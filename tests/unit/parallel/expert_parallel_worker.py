"""Under gloo, one process a rank: experts over the ranks of the world against one process, every
gradient.

Arguments: rank, ranks, the port to meet at, the folder for results.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.mixture_of_experts import number_of_experts
from shardwright.parallel.expert_parallel import ExpertSharder
from shardwright.train.training_worker import leave
from tests.zoo.configs import tiny_config

TYPES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
CASES = {
    **{name: (name, "eager", (4, 12)) for name in TYPES},
    "grouped": ("qwen3_moe", "grouped_mm", (4, 12)),
    # Fewer tokens than experts: a rank receives none in some layer of some case.
    "starved": ("mixtral", "eager", (2, 1)),
}
"""(model type, how transformers multiplies, rows x tokens of the whole batch)."""


def model_of(model_type: str, implementation: str) -> nn.Module:
    config = AutoConfig.for_model(**tiny_config(model_type))
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # biases that are zero would hide where they belong
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.train()
    return model  # type: ignore[no-any-return]


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def measure(
    model_type: str, implementation: str, shape: tuple[int, int], rank: int, ranks: int
) -> dict[str, float]:
    """The largest differences from one process, as shares of the largest value: of the loss, of
    each gradient."""
    whole, mine = model_of(model_type, implementation), model_of(model_type, implementation)
    ids = torch.randint(3, 100, shape)
    loss = loss_of(whole, ids)
    loss.backward()
    paths = [path for path, module in mine.named_modules() if number_of_experts(module)]
    experts: set[int] = set()
    spreader = ExpertSharder(
        mine, paths, dist.group.WORLD, lambda parameter: experts.add(id(parameter))
    )
    stack = "model.layers"
    for layer in (f"{stack}.{name}" for name, _ in mine.get_submodule(stack).named_children()):
        spreader.cut(layer)
        spreader.dispatch(layer)
    own = loss_of(mine, ids.chunk(ranks)[rank]) / ranks
    own.backward()
    total = own.detach().clone()
    dist.all_reduce(total)
    worst, wanted = 0.0, dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        want, got = wanted[name].grad, parameter.grad
        if want is None and got is None:
            continue
        assert want is not None and got is not None, name
        if id(parameter) in experts:
            want = want.chunk(ranks)[rank]
            assert got.shape == want.shape, name
        else:
            dist.all_reduce(got)
        off = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
        worst = off if off != off else max(worst, off)
        if worst != worst:
            break
    return {
        "loss": abs(float(total - loss.detach())),
        "gradient": worst,
        "modules": len(paths),
        "cut": len(experts),
    }


def main(rank: int, ranks: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    torch.manual_seed(5)
    found = {name: measure(*case, rank, ranks) for name, case in CASES.items()}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    rank, ranks, port = map(int, sys.argv[1:4])
    main(rank, ranks, port, Path(sys.argv[4]))
