"""Which checkpoints a compiled folder has and which one a run continues from. No torch here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.checkpoint_compatibility import check_resumable, incomplete_checkpoint
from shardwright.checkpoint.checkpoint_manifest import damage, is_finite, read_manifest
from shardwright.checkpoint.checkpoint_store import CheckpointStore
from shardwright.checkpoint.diloco_resume import check_other_island_counts, check_round_complete
from shardwright.checkpoint.run_history import (
    RunHistory,
    branch_run_history,
    continue_run_history,
    current_run_history,
    run_history_of,
)
from shardwright.checkpoint.step_folders import published_steps, step_name, step_of
from shardwright.diagnostics import Refusal, refusal
from shardwright.monitor.run_files import read_attempt_record
from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """notes: what the user should know about the choice, a line each, warnings first. line: what
    the attempt that goes on from it writes."""

    path: Path
    step: int
    line: RunHistory
    notes: tuple[str, ...]


def checkpoint_root(plan: Plan, folder: Path) -> Path:
    return folder / plan.checkpoint.directory


def choose_checkpoint(plan: Plan, folder: Path, resume: str) -> ResumePoint | None:
    """auto: the newest whole one with a finite loss, else the newest whole one, if any; never:
    none; else the named folder. Every byte is checked. What is here in part or not at all is
    fetched from checkpoint.upload_to, where this run copied it there.

    Raises Refusal: SW6201 not whole, SW6203 another model, SW6204 another tokenizer, SW6218 where
    another number of islands has trained further.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume).resolve()
        if why := damage(path, contents=True):
            raise incomplete_checkpoint(path, why)
        step = read_manifest(path).step
        check_round_complete(plan, path)
        notes = () if is_finite(path) else (_diverged(path),)
        line = branch_run_history(run_history_of(path), step)
        return ResumePoint(
            path=path, step=step, line=line, notes=(*notes, *check_resumable(plan, folder, path))
        )
    return _choose_newest(plan, folder)


def _choose_newest(plan: Plan, folder: Path) -> ResumePoint | None:
    root = checkpoint_root(plan, folder)
    skipped: list[str] = []
    diverged: tuple[Path, int, RunHistory] | None = None
    store = CheckpointStore(plan.checkpoint.upload_to) if plan.checkpoint.upload_to else None
    here = dict(published_steps(root))
    if (
        begun := _named_checkpoint(folder, root)
    ) is not None:  # an attempt that ended before its first checkpoint
        here.setdefault(*begun)
    current = current_run_history(folder)
    copies = _copies(store, current or (None if here else store.current())) if store else set()
    check_other_island_counts(plan, folder, root, max((*here, *copies), default=0))
    for step in sorted({*here, *copies}, reverse=True):
        path = here.get(step, root / step_name(step))
        why = damage(path, contents=True)
        if why and store and step in copies and path.parent == root:
            why = _fetched(store, path, why)
        if why is not None:
            skipped.append(f"warning[SW6206]: {path.name} is skipped: {why}")
            continue
        line = continue_run_history(current, written := run_history_of(path), step)
        foreign = current is not None and not current.holds(written, step)
        if foreign and skipped:
            continue  # not instead of one of its own
        if not is_finite(path):
            diverged = diverged or (path, step, line)
            skipped.append(f"{_diverged(path)}; it is skipped")
            continue
        if foreign:
            skipped.append(
                f"warning[SW6206]: {path.name} was written by another run than this folder's "
                "last one"
            )
        return ResumePoint(
            path=path.resolve(),
            step=step,
            line=line,
            notes=(*skipped, *check_resumable(plan, folder, path)),
        )
    if diverged is not None:  # none is better
        path, step, line = diverged
        notes = (_diverged(path), *check_resumable(plan, folder, path))
        return ResumePoint(path=path.resolve(), step=step, line=line, notes=notes)
    if skipped:
        raise refusal(
            "SW6201",
            (
                f"none of the {len(skipped)} checkpoints in {str(root)!r} is whole; "
                f"{skipped[0].split(': ', 1)[1]}"
            ),
            "Bring a copy back, or start again with --resume never, which moves them aside.",
        )
    return None


def _named_checkpoint(folder: Path, root: Path) -> tuple[int, Path] | None:
    """What the last attempt went on from, where that lies outside of checkpoint.directory."""
    begun = read_attempt_record(folder)
    path, step = Path(begun.resume or root), begun.step
    return (
        (step, path)
        if step is not None and path.parent != root.resolve() and path != root
        else None
    )


def _copies(store: CheckpointStore, line: RunHistory | None) -> set[int]:
    """Steps of the whole copies on this line; of all, where the line is not known."""
    steps = {step_of(Path(name)): name for name in store.steps()}
    return {
        step
        for step, name in steps.items()
        if line is None or line.holds(store.run_history_of(name), step)
    }


def _fetched(store: CheckpointStore, path: Path, why: str) -> str | None:
    """What is wrong with it now."""
    print(f"fetching {path.name} from {store.url}: {why}", flush=True)
    try:
        store.fetch(path.name, path.parent)
    except Refusal as refusal:
        return refusal.diagnostics[0].message
    return damage(path, contents=True)


def print_resume_notes(chosen: ResumePoint | None) -> None:
    """The notes, to the user: warnings to standard error."""
    for note in chosen.notes if chosen else ():
        print(note, file=sys.stderr if note.startswith("warning") else sys.stdout, flush=True)


def _diverged(path: Path) -> str:
    return (
        f"warning[SW6212]: {path.name} was written after a loss, or holds weights, that are no "
        "finite numbers"
    )
