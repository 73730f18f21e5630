"""Under the `deepspeed` launcher, two ranks: every case of extra_keys.py trained and saved, and
gone on from on another layout.

SHARDWRIGHT_EXTRA_CASES: JSON, [[KEY, LAYOUT]...]. SHARDWRIGHT_EXTRA_OUT: folder for figures.json:
"KEY LAYOUT" -> losses, norms and updates of the run itself, and the losses, norms and updates of
the run that went on.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import traceback
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_saver import check_master_weights, save_checkpoint
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.deepspeed.ds_config import ds_config
from shardwright.engines.trainer_protocol import StepResult, Trainer
from shardwright.plan.plan import Plan, read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.launch import extra_keys
from tests.launch.extra_keys import LAST, LAYOUTS, RESUMED_ON, SAVED
from tests.parity.cases_worker import begin, train
from tests.parity.harness import write_inputs

OUT = Path(os.environ["SHARDWRIGHT_EXTRA_OUT"])


def compiled(key: str, layout: str) -> tuple[Plan, Path]:
    folder = OUT / f"{key or 'plain'}-{layout}"
    case = LAYOUTS[layout]
    half = case.precision == "fp16"
    if dist.get_rank() == 0 and not folder.exists():
        write_inputs(dataclasses.replace(case, precision="fp32") if half else case, folder)
        document = json.loads((folder / "recipe.yaml").read_text())
        document["extra"] = extra_keys.extra(key) if key and not half else {}
        (folder / "recipe.yaml").write_text(json.dumps(document))
        write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.yaml")).files)
    dist.barrier()
    plan = read_plan(folder / "out")
    if half:
        plan = in_fp16(plan, folder / "out", extra_keys.extra(key) if key else {})
    return plan, folder / "out"


def in_fp16(plan: Plan, folder: Path, extra: dict[str, Any]) -> Plan:
    """Collective. DeepSpeed trains in fp16 on a CPU, slowly; compile leaves that to GPUs."""
    training = dataclasses.replace(
        plan.training, precision="fp16", gradient_accumulation_dtype="fp16"
    )
    plan = dataclasses.replace(plan, training=training, extra=extra)
    if dist.get_rank() == 0:
        (folder / "ds_config.json").write_text(json.dumps(ds_config(plan)))
    dist.barrier()
    return plan


def figures(results: list[StepResult], trainer: Trainer) -> dict[str, Any]:
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "updates": trainer.counters().updates,
    }


def measure(key: str, layout: str, plans: dict[str, tuple[Plan, Path]]) -> dict[str, Any]:
    plan, folder = compiled(key, layout)
    trainer = build_trainer(plan, folder)
    train(plan, folder, trainer, 1, SAVED)
    save_checkpoint(plan, folder, trainer, SAVED)
    found = {"run": figures(train(plan, folder, trainer, SAVED + 1, LAST), trainer)}
    check_master_weights(trainer.owned_shards())
    trainer.engine.destroy()
    other = RESUMED_ON[layout]
    plan, other_folder = plans[other] = plans.get(other) or compiled("", other)
    trainer = build_trainer(plan, other_folder)
    assert load_checkpoint(plan, trainer, folder / "checkpoints" / f"step-{SAVED:08d}") == SAVED
    found["resumed"] = figures(train(plan, other_folder, trainer, SAVED + 1, LAST), trainer)
    trainer.engine.destroy()
    return found


def main() -> None:
    begin()
    get_accelerator().is_fp16_supported = lambda: True
    found: dict[str, Any] = {}
    plans: dict[str, tuple[Plan, Path]] = {}
    os.chdir(OUT)  # where monitors write
    for key, layout in json.loads(os.environ["SHARDWRIGHT_EXTRA_CASES"]):
        try:
            found[extra_keys.name(key, layout)] = measure(key, layout, plans)
        except Exception:
            print(f"{extra_keys.name(key, layout)}: {traceback.format_exc()}", flush=True)
            os._exit(1)  # the other rank may be inside a collective
        gc.collect()
        if dist.get_rank() == 0:
            (OUT / "figures.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
