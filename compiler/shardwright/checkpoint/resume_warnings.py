"""What is another now than when a checkpoint was written, and can go on all the same. For rank 0,
once the data is prepared and its epochs are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from shardwright.checkpoint.checkpoint_manifest import read_manifest
from shardwright.parallel.learning_rate import learning_rate
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import read_plan


def data_changes(
    checkpoint: Path, rows: tuple[int, ...], data: Mapping[str, str]
) -> tuple[str, ...]:
    """The same paths can hold other data by now. rows: training sequences of each part; data:
    data.path -> digest."""
    saved = read_manifest(checkpoint)
    changed = []
    if saved.rows and saved.rows != rows:
        had, has = (" + ".join(f"{n:,}" for n in counts) for counts in (saved.rows, rows))
        changed.append(f"the data had {had} sequences and has {has}")
    if names := [
        repr(name) for name, digest in data.items() if saved.data.get(name, digest) != digest
    ]:
        changed.append(f"{', '.join(names)} {'holds' if len(names) == 1 else 'hold'} other content")
    if not changed:
        return ()
    return (
        f"warning[SW6207]: the order of the samples is another than {checkpoint.name} had: "
        f"{'; '.join(changed)}; some will be seen twice, others not at all",
    )


def schedule_changes(plan: Plan, checkpoint: Path, step: int) -> tuple[str, ...]:
    """plan: with its epochs counted, as the checkpoint's own is. step: the one that was closed."""
    saved = read_plan(checkpoint)
    was, now = _schedule(saved), _schedule(plan)
    changed = [
        f"training.{key} {_said(was[key])} -> {_said(now[key])}"
        for key in now
        if was[key] != now[key]
    ]
    if not changed:
        return ()
    before, after = (
        learning_rate(p.optimizer, p.scheduler, p.training.steps, step + 1) for p in (saved, plan)
    )
    return (
        f"warning[SW6217]: the learning rate follows another curve than before {checkpoint.name} "
        f"({', '.join(changed)}): it is {after:.4g} at step {step + 1:,}, where it would have been "
        f"{before:.4g}",
    )


def _schedule(plan: Plan) -> dict[str, object]:
    """By the recipe's keys, below `training`."""
    steps = {
        "epochs": plan.training.epochs,
        "steps": plan.training.steps,
        "optimizer.lr": plan.optimizer.lr,
    }
    return steps | {
        f"scheduler.{f.name}": getattr(plan.scheduler, f.name) for f in fields(plan.scheduler)
    }


def _said(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
