"""Under the `deepspeed` launcher: what a save makes of masters that are not the live weights, on
every kind of engine.

A case whose folder's name ends in "round-robin" has DeepSpeed rearrange them; in the others one
element is planted. Of pretrained weights the masters are, before the first step, the file's numbers
bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM

from shardwright.checkpoint.checkpoint_loader import CheckpointReader
from shardwright.checkpoint.checkpoint_saver import check_master_weights, save_checkpoint
from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.diagnostics import Refusal
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.plan.plan import Plan
from shardwright.search.rule_registry import RUNTIME_RULES
from tests.parity.cases_worker import compiled, main, train
from tests.parity.harness import Case


def refused(plan: Plan, folder: Path, trainer: Trainer) -> str:
    with pytest.raises(Refusal) as refusal:
        save_checkpoint(plan, folder, trainer, 2)
    assert not published_steps(folder / "checkpoints")
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == "SW6210"
    return diagnostic.message


def saved_as_stored(plan: Plan, folder: Path, trainer: Trainer) -> dict[str, float]:
    """A checkpoint before the first step, gathered, against the file; live weights are the file's,
    rounded once."""
    save_checkpoint(plan, folder, trainer, 1)
    dist.barrier()
    stored = AutoModelForCausalLM.from_pretrained(
        folder / "weights", dtype=torch.float32
    ).state_dict()
    rounded = 0
    with CheckpointReader(folder / "checkpoints" / "step-00000001") as reader:
        assert set(reader.manifest.tensors) <= set(stored)
        for name in reader.manifest.tensors:
            gathered = reader.whole(name, "fp32")
            assert torch.equal(gathered, stored[name]), (
                name,
                (gathered - stored[name]).abs().max(),
            )
            rounded += int((gathered != gathered.bfloat16().float()).sum())
    assert rounded > 0, "the file holds nothing that is rounded"
    return {}


def measure(case: Case, folder: Path) -> dict[str, float]:
    get_accelerator().is_fp16_supported = lambda: True  # a CPU's is slow, and does
    RUNTIME_RULES.pop("SW3119", None)
    plan = compiled(case, folder)
    if folder.name.endswith("round-robin"):
        path = folder / "ds_config.json"
        config = json.loads(path.read_text())
        config["zero_optimization"]["round_robin_gradients"] = True
        dist.barrier()
        path.write_text(json.dumps(config))
    dist.barrier()
    trainer = build_trainer(plan, folder)
    if folder.name.endswith("round-robin"):
        train(plan, folder, trainer, 1, 2)
        assert "so this checkpoint would be wrong" in refused(plan, folder, trainer)
        return {}
    check_master_weights(trainer.owned_shards())
    if case.pretrained:
        return saved_as_stored(plan, folder, trainer)
    train(plan, folder, trainer, 1, 2)
    check_master_weights(trainer.owned_shards())
    *_, planted = [f for f in trainer.owned_shards() if "fp32" in f.states]
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, planted.name)
    if dist.get_rank() == 1:
        planted.states["fp32"][-1] += 1.0
    message = refused(plan, folder, trainer)
    assert (
        message.startswith(f"rank 1: the fp32 master copy of {names[1]} differs")
        and " in 1 of " in message
    ), message
    return {}


if __name__ == "__main__":
    main(measure)
