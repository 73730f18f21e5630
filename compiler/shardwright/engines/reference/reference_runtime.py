"""Implement the reference engine's Lowering and EngineRuntime, in a group of one process."""

from __future__ import annotations

from pathlib import Path

from shardwright.diagnostics import Diagnostic
from shardwright.engines.trainer_protocol import Trainer
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import JsonObject
from shardwright.utils.template_rendering import render_template


def zero_settings(plan: Plan) -> JsonObject:
    return {"stage": 0}


def files(plan: Plan, config: JsonObject) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    script = render_template("launch/process_train.py.j2", plan=plan)
    return {"train.py": script.encode("utf-8")}, ()


def prepare_process(plan: Plan, *, user_training_loop: bool) -> None:
    pass


def open_groups(plan: Plan) -> None:
    """Open a process group of this process alone, for code that talks to all ranks."""
    from torch import distributed

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def build_trainer(
    plan: Plan, folder: Path, *, resumes: bool = False, forward_only: bool = False
) -> Trainer:
    """Build the trainer. forward_only: its optimizer has no states where nothing is trained."""
    from shardwright.engines.reference.reference_trainer import build_trainer as build

    return build(plan, folder, resumes=resumes)


def close_groups() -> None:
    from torch import distributed

    distributed.destroy_process_group()
