"""Which checkpoints a compiled folder has and which one a run continues from. No torch here."""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import read_plan

STATE = "state"
"""Folder of DeepSpeed's own files inside a checkpoint."""

_STEP = re.compile(r"step-(\d{8})")


def checkpoint_root(plan: Plan, folder: Path) -> Path:
    return folder / plan.checkpoint.directory


def published_steps(root: Path) -> list[tuple[int, Path]]:
    """Whole checkpoints under `root`, oldest first: the rename is what publishes one."""
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _STEP.fullmatch(p.name)) and (p / "plan.json").is_file()]
    return sorted(found)


def choose_checkpoint(plan: Plan, folder: Path, resume: str) -> Path | None:
    """auto: the newest one, if any; never: none; else the named folder. Refusal where it does not fit the plan."""
    if resume == "never":
        return None
    if resume == "auto":
        steps = published_steps(checkpoint_root(plan, folder))
        if not steps:
            return None
        path = steps[-1][1]
    else:
        path = Path(resume)
    try:
        saved = read_plan(path)
    except (OSError, ValueError) as error:
        raise Refusal(
            Diagnostic(
                code="SW6201",
                message=f"{str(path)!r} is not a whole checkpoint: {str(error).splitlines()[0]}",
                help="Give one `step-XXXXXXXX` folder, or start again with --resume never.",
            )
        ) from None
    check_same_layout(plan, saved, path)
    return path.resolve()


def check_same_layout(plan: Plan, saved: Plan, checkpoint: Path) -> None:
    """Raises Refusal unless `checkpoint` was written by this model under this layout."""
    if saved.model.config_hash != plan.model.config_hash:
        raise Refusal(
            Diagnostic(
                code="SW6203",
                message=f"{checkpoint.name} holds another model ({saved.model.architecture}, config "
                f"{saved.model.config_hash[:12]}; this plan has {plan.model.config_hash[:12]})",
                help="Resume from a checkpoint of this model, or start again with --resume never.",
            )
        )
    here, there = plan.strategy, saved.strategy
    keys = ("tensor", "pipeline", "data", "zero_stage", "schedule")
    changed = [f"{k} {getattr(there, k)} -> {getattr(here, k)}" for k in keys if getattr(there, k) != getattr(here, k)]
    if saved.boundaries != plan.boundaries and not changed:
        changed = [f"stage boundaries {saved.boundaries} -> {plan.boundaries}"]
    if saved.training.precision != plan.training.precision:
        changed.append(f"precision {saved.training.precision} -> {plan.training.precision}")
    if changed:
        raise Refusal(
            Diagnostic(
                code="SW6202",
                message=f"{checkpoint.name} was written under another layout: {', '.join(changed)}",
                help="This version resumes on the layout that wrote the checkpoint. Compile with that layout pinned, "
                "or `shardwright export` the checkpoint and start from its weights.",
            )
        )


def set_aside(plan: Plan, folder: Path, attempt: int) -> None:
    """A fresh start keeps older checkpoints out of the way, and loses none: they move to a dot folder."""
    root = checkpoint_root(plan, folder)
    old = published_steps(root)
    if old:
        aside = root / f".before-attempt-{attempt}"
        aside.mkdir(parents=True, exist_ok=True)
        for _, path in old:
            path.rename(aside / path.name)
