"""Checkpoints: DeepSpeed's own state of every rank, published by one rename; `step-%08d` folders only."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import plan_to_json
from shardwright.runtime.checkpoint_index import STATE, checkpoint_root, published_steps


def save_checkpoint(plan: Plan, folder: Path, engine: Any, step: int) -> None:
    """Collective. Everything goes to a dot folder; global rank 0 renames it and prunes to `keep`."""
    root = checkpoint_root(plan, folder)
    name, rank = f"step-{step:08d}", dist.get_rank()
    partial = root / f".{name}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    engine.save_checkpoint(str(partial), tag=STATE, client_state={"step": step}, save_latest=False)
    torch.save(_random_state(), partial / f"random-rank-{rank:05d}.pt")
    if rank == 0:
        for script in partial.glob("zero_*.py"):
            script.unlink()  # DeepSpeed's converters: they fail on pipeline checkpoints, `shardwright export` does not
        for part in ("model", "tokenizer"):
            if (folder / part).is_dir():
                shutil.copytree(folder / part, partial / part)
        (partial / "plan.json").write_text(plan_to_json(plan), encoding="utf-8")
        (partial / "step.json").write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root / name, ignore_errors=True)
        os.rename(partial, root / name)
        for _, old in published_steps(root)[: -plan.checkpoint.keep] if plan.checkpoint.keep else []:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load_checkpoint(plan: Plan, engine: Any, checkpoint: Path) -> int:
    """Collective. Returns the step that the checkpoint closed."""
    rank = dist.get_rank()
    path, client = engine.load_checkpoint(str(checkpoint), tag=STATE)
    if path is None:
        raise Refusal(
            Diagnostic(
                code="SW6201",
                message=f"DeepSpeed found no state to load in {checkpoint}",
                help="Resume from another step folder, or start again with --resume never.",
            )
        )
    _set_random_state(torch.load(checkpoint / f"random-rank-{rank:05d}.pt", weights_only=False))
    return int(client["step"])


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
