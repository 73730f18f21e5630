"""Find a compiled folder's checkpoints, and choose the one that a run resumes. No torch here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.checkpoint_compatibility import check_resumable, incomplete_checkpoint
from shardwright.checkpoint.checkpoint_manifest import MANIFEST, damage, is_finite, read_manifest
from shardwright.checkpoint.checkpoint_storage import (
    CheckpointStore,
    published_steps,
    step_name,
    step_of,
)
from shardwright.checkpoint.run_history import (
    RunHistory,
    branch_run_history,
    continue_run_history,
    current_run_history,
    run_history_of,
)
from shardwright.diagnostics import Refusal, refusal
from shardwright.monitor.run_files import ATTEMPT_FILE, read_attempt_record
from shardwright.plan.plan import Plan

# What a run resumes where its recipe was compiled again with another number of islands, or none
# (docs/islands.md).

OUTER_MOMENTUM = "outer_momentum"
_OUTER, _ISLAND = "outer_", "island-"


def check_other_island_counts(plan: Plan, folder: Path, root: Path, own: int) -> None:
    """Raise Refusal, SW6218, where another number of islands trained further since this run began.

    own: the newest step that this run could resume

    A new island beside others that have trained takes a member's state, and is not refused.
    """
    directory = Path(plan.checkpoint.directory)
    is_apart = directory.is_absolute()
    parent = (
        (root if is_apart else folder)
        if plan.islands == 1
        else (root.parent if is_apart else folder.parent)
    )
    islands = sorted(
        (p for p in parent.glob(f"{_ISLAND}*") if p.name.removeprefix(_ISLAND).isdecimal()),
        key=lambda p: int(p.name.removeprefix(_ISLAND)),
    )
    of_islands = [each if is_apart else each / directory for each in islands]
    places = of_islands if plan.islands == 1 else [parent if is_apart else parent / directory]
    newest = [found for place in places if (found := _newest(place)) is not None]
    if not newest:  # a newer checkpoint may have been saved between two outer steps
        steps = [path for place in places for step, path in published_steps(place) if step > own]
        if steps:
            path = max(steps, key=step_of)
            raise _unfinished_round_refusal(path, " `--resume never` starts from scratch.")
        return
    path = max(newest, key=step_of)  # of the lowest island that has it
    if plan.islands > 1:
        own = max(
            [
                own,
                *(step_of(found) for place in of_islands if (found := _newest(place)) is not None),
            ]
        )
    if step_of(path) > own and _written(path / MANIFEST) > _written(folder / ATTEMPT_FILE):
        who, where = (
            ("several islands", "") if plan.islands == 1 else ("one world", ", on each island")
        )
        raise refusal(
            "SW6218",
            f"{str(path)!r} was written by {who}, and is newer than this run's checkpoints",
            (
                f"`--resume {path}` continues from its weights and Adam's moments{where}. "
                "`--resume never` starts from scratch."
            ),
        )


def _unfinished_round_refusal(path: Path, more: str = "") -> Refusal:
    return refusal(
        "SW6218",
        (
            f"{str(path)!r} was written between two outer steps: it has the weights of one "
            "island alone"
        ),
        "Resume from a checkpoint after an outer step. Islands write one when they are compiled "
        "again with their number and `overlap_steps: 0`, and train on to "
        f"checkpoint.every_steps.{more}",
    )


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def check_round_complete(plan: Plan, checkpoint: Path) -> None:
    """Raise Refusal, SW6218, where one world would resume from the middle of a round of islands.

    The other islands' steps would be lost without a warning.
    """
    if plan.islands == 1 and not is_after_outer_step(checkpoint):
        raise _unfinished_round_refusal(checkpoint)


def _newest(place: Path) -> Path | None:
    """Return the newest complete checkpoint there that ends a round."""
    for _, path in reversed(published_steps(place)):
        if damage(path, contents=False) is None and is_after_outer_step(path):
            return path
    return None


def is_after_outer_step(checkpoint: Path) -> bool:
    """Return whether the checkpoint holds no state of an unfinished outer step."""
    try:
        tensors = read_manifest(checkpoint).tensors.values()
    except (OSError, ValueError):
        return True  # reported elsewhere
    states = {state for tensor in tensors for state in tensor.states}
    return not any(state.startswith(_OUTER) and state != OUTER_MOMENTUM for state in states)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Describe the checkpoint that a run resumes.

    notes: what the user should know about the choice, a line each, warnings first
    line: the run history that the resuming attempt writes
    """

    path: Path
    step: int
    line: RunHistory
    notes: tuple[str, ...]


def checkpoint_root(plan: Plan, folder: Path) -> Path:
    return folder / plan.checkpoint.directory


def choose_checkpoint(plan: Plan, folder: Path, resume: str) -> ResumePoint | None:
    """Choose the checkpoint to resume; every byte of it is checked.

    resume: auto takes the newest complete one with a finite loss, else the newest complete one, if
    any; never takes none; anything else names a folder

    Missing files are downloaded from checkpoint.upload_to, where this run copied them. Raises
    Refusal: SW6201 (incomplete), SW6203 (another model), SW6204 (another tokenizer), SW6218
    (another number of islands trained further).
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
    # The last attempt may have resumed from a checkpoint elsewhere, and ended before its first one.
    begun = read_attempt_record(folder)
    named = Path(begun.resume or root)
    if begun.step is not None and named != root and named.parent != root.resolve():
        here.setdefault(begun.step, named)
    current = current_run_history(folder)
    copies: set[int] = set()
    if store is not None:
        # Complete copies of this run; of all runs, where this run is not known.
        line = current or (None if here else store.current())
        copies = {
            step_of(Path(name))
            for name in store.steps()
            if line is None or line.holds(store.run_history_of(name), step_of(Path(name)))
        }
    check_other_island_counts(plan, folder, root, max((*here, *copies), default=0))
    for step in sorted({*here, *copies}, reverse=True):
        path = here.get(step, root / step_name(step))
        why = damage(path, contents=True)
        if why and store and step in copies and path.parent == root:
            print(f"fetching {path.name} from {store.shown_url}: {why}", flush=True)
            try:
                store.fetch(path.name, path.parent)
                why = damage(path, contents=True)
            except Refusal as refused:
                why = refused.diagnostics[0].message
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
                f"none of the {len(skipped)} checkpoints in {str(root)!r} is complete; "
                f"{skipped[0].split(': ', 1)[1]}"
            ),
            "Restore a copy, or start again with --resume never, which moves them aside.",
        )
    return None


def print_resume_notes(chosen: ResumePoint | None) -> None:
    """Print the notes, warnings to standard error."""
    for note in chosen.notes if chosen else ():
        print(note, file=sys.stderr if note.startswith("warning") else sys.stdout, flush=True)


def _diverged(path: Path) -> str:
    return (
        f"warning[SW6212]: {path.name} was written after a loss that is not finite, or holds "
        "weights that are not"
    )
