"""Under the `deepspeed` launcher: many model types in one launch, each on the real engine, against a plain process.

SHARDWRIGHT_ZOO_TYPES names the types, SHARDWRIGHT_ZOO_LAYOUT the layout ("tensor=2"), SHARDWRIGHT_ZOO_OUT the
folder for results.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed import comm as dist
from deepspeed import ops
from transformers import AutoModelForCausalLM

from shardwright.compile import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.ir.partition import ParameterSplit
from shardwright.recipe.load import load_recipe
from shardwright.runtime.batches import Batches
from shardwright.runtime.corpus import open_rows
from shardwright.runtime.engine import build_trainer
from shardwright.runtime.schedule import learning_rate
from tests.parity.reference import token_rows, train
from tests.zoo.configs import TEXT_VOCABULARY, build

STEPS, LENGTH, BATCH = 3, 24, 4
LAYOUT: dict[str, int] = {"tensor": 1, "pipeline": 1, "data": 1, "zero_stage": 1, "micro_batch_size": 2} | {
    key: int(value) for key, value in (pair.split("=") for pair in os.environ["SHARDWRIGHT_ZOO_LAYOUT"].split(","))
}


def recipe(model_type: str, folder: Path) -> dict[str, Any]:
    """Pretrained weights, so that no bias is zero and no norm one; two micro-batches a step."""
    return {
        "version": 1,
        "name": "zoo",
        "model": {"source": str(folder / "weights"), "weights": "pretrained"},
        "cluster": {"nodes": 1, "gpus_per_node": LAYOUT["tensor"] * LAYOUT["pipeline"], "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1},
            "scheduler": {"name": "cosine", "warmup_steps": 2},
            "gradient_clipping": 0.5,
        },
        "data": {"kind": "tokens", "path": str(folder / "tokens.npy"), "shuffle": False},
        "parallelism": {**LAYOUT, "activation_checkpointing": "none"},
    }


def measure(model_type: str, folder: Path) -> dict[str, Any]:
    """Differences from the plain run, or the refusal."""
    rank = dist.get_rank()
    tokens = np.random.default_rng(0).integers(3, TEXT_VOCABULARY, (STEPS * BATCH, LENGTH))
    if rank == 0:
        folder.mkdir(parents=True)
        build(model_type).save_pretrained(folder / "weights")
        np.save(folder / "tokens.npy", tokens)
        (folder / "recipe.yaml").write_text(json.dumps(recipe(model_type, folder)))
    dist.barrier()
    compiled = compile_recipe(load_recipe(folder / "recipe.yaml"))
    if rank == 0:
        for name, content in compiled.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    dist.barrier()
    plan = compiled.plan
    trainer = build_trainer(plan, folder)
    batches = Batches(plan, open_rows(plan, folder))
    results = [
        trainer.step(batches.micro_batches(k, 0), learning_rate(plan.optimizer, plan.scheduler, STEPS, k))
        for k in range(1, STEPS + 1)
    ]
    plain = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32)
    wanted = train(
        plain,
        [token_rows(tokens, k, BATCH) for k in range(1, STEPS + 1)],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-3,
        weight_decay=0.1,
        warmup=2,
        clipping=0.5,
    )
    splits = {p.name: p for m in plan.tensor_parallel.modules for p in m.parameters}
    worst, cut, total = 0.0, 0, 0
    for name, p in trainer.engine.module.named_parameters():
        if name in wanted.unused:
            continue
        whole, split = wanted.weights[name], splits[name]
        if split.dimension is not None:
            whole = shard(whole, split, plan.ranks[rank].tensor)
        if p.ndim >= 2 and name.startswith(plan.model.cut.stack):
            total += p.numel()
            cut += p.numel() if split.dimension is not None else 0
        # The runtime keeps a Conv1D's weight transposed; a square one does not show it by its shape.
        views = [v for v in ((whole, whole.t()) if whole.ndim == 2 else (whole,)) if v.shape == p.shape]
        worst = max(worst, min((p.detach() - v).abs().max().item() for v in views))
    return {
        "loss": max(abs(r.loss - w) for r, w in zip(results, wanted.losses, strict=True)),
        "norm": max(abs(r.grad_norm / w - 1) for r, w in zip(results, wanted.grad_norms, strict=True)),
        "weights": worst,
        "unused": len(wanted.unused),
        "sharded": cut / max(1, total),
    }


def shard(whole: torch.Tensor, split: ParameterSplit, rank: int) -> torch.Tensor:
    """Tensor rank `rank`'s part, block by block."""
    assert split.dimension is not None
    if len(split.blocks) == 1:
        return whole.split(split.sizes, dim=split.dimension)[rank]
    blocks = whole.split(split.blocks, dim=split.dimension)
    return torch.cat([b.chunk(len(split.sizes), dim=split.dimension)[rank] for b in blocks], dim=split.dimension)


def share_groups() -> None:
    """One process group per set of ranks: every engine makes its own, and their threads poll."""
    made: dict[tuple[int, ...], Any] = {}
    new_group = dist.new_group

    def shared(ranks: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = new_group(list(key))
        return made[key]

    dist.new_group = shared


def main() -> None:
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
            os._exit(1)  # the other rank may be inside a collective: the next launch goes on behind this type
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
