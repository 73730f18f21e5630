"""Under `deepspeed --num_gpus 4`: what dropout does across ranks, and under recomputation. Rank 0
writes the figures.

Eager attention, so that every mask goes through torch.nn.functional.dropout and can be looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed import ops

from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.parallel.tensor_parallel_collectives import seed_dropout
from shardwright.plan.plan import Plan
from shardwright.train.training_worker import leave
from tests.parity.dropout_cases import LAYOUTS, MODELS
from tests.parity.engine_groups import compile_folder, share_groups

STEPS, LENGTH, BATCH = 2, 16, 4


def compiled(
    config: dict[str, Any], layout: dict[str, int], checkpointing: str, folder: Path
) -> Plan:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        tokens = np.random.default_rng(0).integers(3, 250, (STEPS * BATCH, LENGTH))
        np.save(folder / "tokens.npy", tokens)
        recipe = {
            "version": 1,
            "name": "dropout",
            "model": {"config": config, "weights": "random", "attention": "eager"},
            "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "cpu"},
            "training": {
                "sequence_length": LENGTH,
                "global_batch_size": BATCH,
                "steps": STEPS,
                "precision": "fp32",
                "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-3},
            },
            "data": {"kind": "tokens", "path": str(folder / "tokens.npy"), "shuffle": False},
            "parallelism": {
                "tensor": 1,
                "pipeline": 1,
                "data": 1,
                "zero_stage": 1,
                "micro_batch_size": 1,
                **layout,
                "activation_checkpointing": checkpointing,
            },
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return compile_folder(folder)


class Masks:
    """Records every dropout mask by the shape of its tensor, and every decoder layer's output."""

    def __init__(self, trainer: Trainer, stack: str) -> None:
        self.whole: list[
            str
        ] = []  # (B, S, H) and the like: hidden states, held whole by every tensor rank
        self.cut: list[str] = []  # (B, heads/t, S, S): attention weights of a rank's own heads
        self.outputs: list[str] = []
        self._plain = F.dropout
        for name, module in trainer.engine.module.named_modules():
            at = name.rsplit(f"{stack}.", 1)
            if len(at) == 2 and at[1].isdigit():
                module.register_forward_hook(self._output)

    def _output(self, module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.outputs.append(digest(hidden))

    def __enter__(self) -> Masks:
        def recording(
            x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> torch.Tensor:
            mask = self._plain(torch.ones_like(x), p, training)
            (self.cut if x.ndim == 4 else self.whole).append(digest(mask))
            return x * mask

        self._patch = patch.object(F, "dropout", recording)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest()


def gathered(value: object) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return every


def trained(plan: Plan, folder: Path, record: bool) -> tuple[list[float], str, Masks | None]:
    """Losses and norms of the steps, a digest of the final parameters, and what was recorded in the
    first step."""
    trainer = build_trainer(plan, folder)
    seed_dropout(plan, dist.get_rank())
    batches = TrainingBatches(plan, open_dataset(plan, folder))
    masks = Masks(trainer, plan.model.cut.stack) if record else None
    results = []
    for step in range(1, STEPS + 1):
        micro_batches = batches.micro_batches(step, plan.ranks[dist.get_rank()].data)
        if masks is not None and step == 1:
            with masks:
                results.append(trainer.step(micro_batches, 1e-3))
        else:
            results.append(trainer.step(micro_batches, 1e-3))
    assert all(p.isfinite().all() for p in trainer.engine.module.parameters()), (
        "equal bytes of NaN are no proof"
    )
    weights = "".join(digest(p) for p in trainer.engine.module.parameters())
    return [x for r in results for x in (r.loss, r.grad_norm)], weights, masks


def measure(config: dict[str, Any], layout: dict[str, int], folder: Path) -> dict[str, Any]:
    runs = {c: compiled(config, layout, c, folder / c) for c in ("none", "selective", "full")}
    found = {c: trained(plan, folder / c, record=False) for c, plan in runs.items()}
    _, _, masks = trained(runs["none"], folder / "none", record=True)
    assert masks is not None
    at = [(r.pipeline, r.data, r.tensor) for r in runs["none"].ranks]
    return {
        "numbers": gathered({c: f[0] for c, f in found.items()}),
        "weights": gathered({c: f[1] for c, f in found.items()}),
        "coordinates": at,
        "whole": gathered(masks.whole),
        "cut": gathered(masks.cut),
        "outputs": gathered(masks.outputs),
    }


def main() -> None:
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    share_groups()
    out = Path(os.environ["SHARDWRIGHT_DROPOUT_OUT"])
    figures = {
        f"{model} {layout}": measure(MODELS[model], LAYOUTS[layout], out / model / layout)
        for model in os.environ["SHARDWRIGHT_DROPOUT_MODELS"].split(",")
        for layout in LAYOUTS
    }
    if dist.get_rank() == 0:
        (out / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()
