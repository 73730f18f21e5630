"""Under the `deepspeed` launcher: weights in, checkpoint and export at once; five steps, export,
logits compared."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed import comm as dist
from deepspeed import ops
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from shardwright.checkpoint.checkpoint_saver import save_checkpoint
from shardwright.checkpoint.huggingface_export import export_checkpoint
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.models import graph_trace
from shardwright.models.layer_trace import ModelTrace
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.numeric_difference import max_abs_diff
from tests.launch.roundtrip import LAYOUTS
from tests.parity.engine_groups import share_groups
from tests.zoo.configs import TEXT_VOCABULARY, build

OUT = Path(os.environ["SHARDWRIGHT_ROUNDTRIP_OUT"])
STEPS, LENGTH, BATCH = 6, 24, 4


def recipe(layout: str) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "roundtrip",
        "model": {"source": "./weights", "weights": "pretrained"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-3},
        },
        "data": {"kind": "tokens", "path": "tokens.npy", "shuffle": False},
        "parallelism": {
            "tensor": 1,
            "pipeline": 1,
            "data": 1,
            "zero_stage": 1,
            "micro_batch_size": 2,
        }
        | {"activation_checkpointing": "none"}
        | LAYOUTS[layout],
    }


class Recorded:
    """The loss, and the logits of its first call."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.logits: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        scale: float = self.inner.scale
        return scale

    @scale.setter
    def scale(self, value: float) -> None:
        self.inner.scale = value

    def __call__(self, logits: torch.Tensor, labels: Any) -> torch.Tensor:
        if self.logits is None:
            self.logits = logits.detach().clone()
        loss: torch.Tensor = self.inner(logits, labels)
        return loss


def tensors(folder: Path) -> dict[str, bytes]:
    """Name -> type and bytes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, array in load_file(path).items():
            found[name] = array.dtype.str.encode() + array.tobytes()
    return found


def measure(model_type: str, layout: str) -> dict[str, Any]:
    rank, folder = dist.get_rank(), OUT / f"{model_type}-{layout}"
    if rank == 0:
        folder.mkdir()
        build(model_type).save_pretrained(folder / "weights")
        tokens = np.random.default_rng(0).integers(3, TEXT_VOCABULARY, (STEPS * BATCH, LENGTH))
        np.save(folder / "tokens.npy", tokens)
        (folder / "recipe.yaml").write_text(json.dumps(recipe(layout)))
        write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.yaml")).files)
    dist.barrier()
    plan = read_plan(folder / "out")
    trainer: Trainer = build_trainer(plan, folder / "out")
    save_checkpoint(plan, folder / "out", trainer, 0)
    batches = TrainingBatches(plan, open_dataset(plan, folder / "out"))
    steps = folder / "out" / "checkpoints"
    for step in range(1, STEPS):
        trainer.step(batches.micro_batches(step, plan.ranks[rank].data), 1e-3)
    save_checkpoint(plan, folder / "out", trainer, STEPS - 1)
    micro_batches = batches.micro_batches(STEPS, plan.ranks[rank].data)
    trainer.loss_fn = Recorded(trainer.loss_fn)  # type: ignore[attr-defined]
    trainer.step(micro_batches, 1e-3)
    if rank == 0:
        for name in ("step-00000000", f"step-{STEPS - 1:08d}"):
            export_checkpoint(steps / name, folder / name)
    dist.barrier()
    found = {"same_bytes": tensors(folder / "weights") == tensors(folder / "step-00000000")}
    logits = trainer.loss_fn.logits  # type: ignore[attr-defined]
    worst = 0.0
    if logits is not None:  # of the last stage
        model = AutoModelForCausalLM.from_pretrained(
            folder / f"step-{STEPS - 1:08d}", dtype=torch.float32
        )
        model.train()
        with torch.no_grad():
            wanted = model(micro_batches[0].input_ids, use_cache=False).logits
        sizes = plan.tensor_parallel.vocabulary_sizes
        if sizes:
            at = plan.ranks[rank].tensor
            wanted = wanted.narrow(-1, sum(sizes[:at]), sizes[at])
        worst = max_abs_diff(logits, wanted)
    figures = torch.tensor([worst])
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    trainer.engine.destroy()
    return {**found, "logits": figures.item()}


def untraced(model: torch.nn.Module, cut: Any, attention_module: str) -> ModelTrace:
    """What the layers cost is no matter here."""
    return ModelTrace(
        layers=("not here",) * (len(list(model.get_submodule(cut.stack).children())) + 2),
        context=(),
    )


def main() -> None:
    patch.object(graph_trace, "trace_model", untraced).start()
    os.environ["SHARDWRIGHT_CACHE"] = "off"
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    share_groups()
    found = {}
    for model_type, layout in json.loads((OUT / "cases.json").read_text()):
        found[f"{model_type} {layout}"] = measure(model_type, layout)
        gc.collect()
    if dist.get_rank() == 0:
        (OUT / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
