"""Under the `deepspeed` launcher: many model types in one launch, each on the real engine, against
a plain process.

SHARDWRIGHT_ZOO_TYPES names the types, SHARDWRIGHT_ZOO_LAYOUT keys of `parallelism` ("tensor=2"),
SHARDWRIGHT_ZOO_OUT the folder for results. SHARDWRIGHT_ZOO_KIND, where set, is what is to be proved
of tensor parallelism (sharded, fallback) instead of what is proved already.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed import comm as dist
from deepspeed import ops
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.data.dataset import open_dataset
from shardwright.diagnostics import Refusal
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import OwnedShard
from shardwright.models import graph_trace
from shardwright.models.layer_trace import ModelTrace
from shardwright.models.model_graph import PipelineSplit, name_pattern
from shardwright.models.tensor_parallel_plan import proved, unsplit_parameters
from shardwright.parallel.expert_parallel import local_expert_range
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.parallel.parameter_names import is_padding
from shardwright.plan.plan import Plan
from shardwright.train.training_session import check_parameters
from shardwright.train.training_worker import leave
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff
from shardwright.verify.reference_run import mean_loss
from tests.figures import training_apart
from tests.parity.engine_groups import compile_folder, from_rank_0, share_groups
from tests.parity.reference import Reference, token_rows, train
from tests.zoo.configs import TEXT_VOCABULARY, base_type, build, tiny_config

STEPS, LENGTH, BATCH = 3, 24, 4
BETAS, CLIPPING = (0.9, 0.95), 0.5
KIND = os.environ.get("SHARDWRIGHT_ZOO_KIND", "")
LAYOUT: dict[str, Any] = {
    "tensor": 1,
    "pipeline": 1,
    "data": 1,
    "expert": 1,
    "context": 1,
    "zero_stage": 1,
    "micro_batch_size": 2,
    "activation_checkpointing": "none",
}
for _pair in os.environ["SHARDWRIGHT_ZOO_LAYOUT"].split(","):
    _key, _value = _pair.split("=")
    LAYOUT[_key] = int(_value) if _value.isdecimal() else _value


def recipe(model_type: str, folder: Path) -> dict[str, Any]:
    """Pretrained weights, so that no bias is zero and no norm one; two micro-batches a step."""
    return {
        "version": 1,
        "name": "zoo",
        "model": {"source": str(folder / "weights"), "weights": "pretrained"},
        "cluster": {"nodes": 1, "gpus_per_node": dist.get_world_size(), "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {
                "name": "adamw",
                "lr": 1e-3,
                "betas": list(BETAS),
                "eps": 1e-3,
                "weight_decay": 0.1,
            },
            "scheduler": {"name": "cosine", "warmup_steps": 2},
            "gradient_clipping": CLIPPING,
        },
        "data": {"kind": "tokens", "path": str(folder / "tokens.npy"), "shuffle": False},
        "parallelism": LAYOUT,
    }


def measure(model_type: str, folder: Path) -> dict[str, Any]:
    """Differences from the plain run, or the refusal."""
    rank = dist.get_rank()
    tokens = np.random.default_rng(0).integers(3, TEXT_VOCABULARY, (STEPS * BATCH, LENGTH))
    if rank == 0:
        folder.mkdir(parents=True)
        build(model_type).save_pretrained(folder / "weights")
        # The class of a composite type may keep its text part only, of a type that is no causal LM
        # by name (emu3, mllama); a published checkpoint has the whole configuration.
        AutoConfig.for_model(**tiny_config(model_type)).save_pretrained(folder / "weights")
        np.save(folder / "tokens.npy", tokens)
        (folder / "recipe.yaml").write_text(json.dumps(recipe(model_type, folder)))
    if KIND:
        proved()[base_type(model_type)] = KIND
        unsplit_parameters().pop(base_type(model_type), None)
    plan = compile_folder(folder)
    if KIND and plan.tensor_parallel.kind != KIND:
        return {
            "refused": "SW3123",
            "reason": "transformers has no tensor-parallel plan for it, nor has this project",
        }
    trainer = build_trainer(plan, folder)
    check_parameters(plan, dist.get_rank(), trainer.parameter_shards(), trainer.transposed)
    batches = TrainingBatches(plan, open_dataset(plan, folder))
    results, moments = [], []
    for k in range(1, STEPS + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, k)
        results.append(trainer.step(batches.micro_batches(k, plan.ranks[rank].data), rate))
        moments += first_moments(trainer.owned_shards()) if k == 1 and shares(plan) else []
    wanted, gradients = from_rank_0(lambda: plain_run(plan, folder, tokens))
    off, cut, total = [], 0, 0
    for name, p in trainer.engine.module.named_parameters():
        if is_padding(p) or (name in wanted.unused and p.requires_grad):
            continue
        if p.ndim >= 2 and name.startswith(plan.model.cut.stack):
            total += wanted.weights[name].numel()
            # A copy of a shard is one, too; a whole parameter has all its elements on this rank.
            cut += wanted.weights[name].numel() if p.numel() < wanted.weights[name].numel() else 0
        off.append(nearest(p, own_part(plan, name, wanted.weights[name])))
    gradient = [
        of_a_range(moment / (1 - BETAS[0]), start, own_part(plan, name, gradients[name]))
        for name, start, moment in moments
        if name not in wanted.unused
    ]
    return {
        **training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted),
        "weights": largest_difference(off),
        **({"gradient": largest_difference(gradient)} if shares(plan) else {}),
        "unused": len(wanted.unused),
        "sharded": cut / max(1, total),
        "payload": [
            *plan.model.cut.payload,
            *(f"output {place}" for place in plan.model.cut.carried),
        ],
        "together": [list(r) for r in plan.model.cut.together],
        "own_loss": plan.model.cut.loss,
        "causal": plan.model.cut.causal,
        "kind": plan.tensor_parallel.kind,
        "whole": whole_patterns(plan),
    }


def shares(plan: Plan) -> bool:
    """Whether ranks share out experts or rows. A wrong gradient of theirs may hardly show in the
    losses."""
    return plan.strategy.expert > 1 or plan.strategy.context > 1


def first_moments(fragments: Iterable[OwnedShard]) -> list[tuple[str, int, torch.Tensor]]:
    """(name, first element of the flattened shard, Adam's mean of the gradients) of this rank's
    fragments."""
    trained = (f for f in fragments if "exp_avg" in f.states)
    return [(f.name, f.start, f.states["exp_avg"].detach().clone()) for f in trained]


def plain_run(
    plan: Plan, folder: Path, tokens: np.ndarray
) -> tuple[Reference, dict[str, torch.Tensor]]:
    """One process over all steps; and the gradients of the first one, clipped."""
    own_loss = plan.model.cut.loss == "next_token"

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32).train()

    gradients = {}
    if shares(plan):
        first = model()
        mean_loss(first, token_rows(tokens, 1, BATCH), own_loss=own_loss).backward()
        gradients = clipped(first)
    wanted = train(
        model(),
        [token_rows(tokens, k, BATCH) for k in range(1, STEPS + 1)],
        lr=1e-3,
        betas=BETAS,
        eps=1e-3,
        weight_decay=0.1,
        warmup=2,
        clipping=CLIPPING,
        own_loss=own_loss,
    )
    return wanted, gradients


def clipped(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its gradients, of the norm that the optimizer is given."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    return {name: g * min(1.0, CLIPPING / (norm + 1e-6)) for name, g in gradients.items()}


def own_part(plan: Plan, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's experts of a parameter, and its tensor-parallel shard of those."""
    rank = plan.ranks[dist.get_rank()]
    experts = local_expert_range(plan, rank, name, whole.shape[0]) if whole.ndim else None
    part = whole if experts is None else whole.narrow(0, *experts)
    split = next(p for m in plan.tensor_parallel.modules for p in m.parameters if p.name == name)
    if split.dimension is None:
        return part
    return torch.cat(
        [part.narrow(split.dimension, *piece) for piece in split.shard_ranges(rank.tensor)],
        dim=split.dimension,
    )


def of_a_range(values: torch.Tensor, start: int, whole: torch.Tensor) -> float:
    """How far values are from a flattened tensor's elements from `start`, the Conv1D's way round or
    not."""
    views = (whole, whole.t()) if whole.ndim == 2 else (whole,)
    return min(
        max_abs_diff(values, view.reshape(-1)[start : start + len(values)]) for view in views
    )


def nearest(parameter: torch.Tensor, whole: torch.Tensor) -> float:
    """The runtime keeps a Conv1D's weight transposed; a square one does not show it by its
    shape."""
    return min(
        max_abs_diff(parameter, view)
        for view in ((whole, whole.t()) if whole.ndim == 2 else (whole,))
    )


def whole_patterns(plan: Plan) -> list[str]:
    """The decoder-layer parameters that no style names, by their path inside a layer."""
    inside = name_pattern(f"{plan.model.cut.stack}.0") + "."
    names = {
        name_pattern(p.name)
        for m in plan.tensor_parallel.modules
        if m.style in ("replicated", "local_params")
        for p in m.parameters
        if p.dimension is None
    }
    return sorted(n.removeprefix(inside) for n in names if n.startswith(inside))


def untraced(model: torch.nn.Module, cut: PipelineSplit, attention_module: str) -> ModelTrace:
    """What the layers cost is no matter here (test_flops.py), and takes longer than the steps."""
    return ModelTrace(
        layers=("not here",) * (len(list(model.get_submodule(cut.stack).children())) + 2),
        context=(),
    )


def main(measure: Callable[[str, Path], dict[str, Any]] = measure) -> None:
    patch.object(graph_trace, "trace_model", untraced).start()
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    share_groups()
    out, rank = Path(os.environ["SHARDWRIGHT_ZOO_OUT"]), dist.get_rank()
    for model_type in os.environ["SHARDWRIGHT_ZOO_TYPES"].split(","):
        try:
            figures = measure(model_type, out / "work" / model_type)
        except Refusal as refusal:  # the same on every rank: the compile is deterministic
            d = refusal.diagnostics[0]
            figures = {"refused": d.code, "reason": d.message}
        except Exception:
            figures = {"error": traceback.format_exc()}
        with (out / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"type": model_type, **figures}) + "\n")
        if "error" in figures:
            sys.stdout.flush()
            os._exit(
                1
            )  # the other rank may be inside a collective: the next launch goes on behind this type
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
