"""Which checkpoints a compiled folder has and which one a run continues from. No torch here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from shardwright.checkpoint.lineage import Line, branch, continued, current_line, line_of
from shardwright.checkpoint.manifest import checksum, damage, is_finite, read_manifest
from shardwright.checkpoint.step_folders import published_steps, step_name, step_of
from shardwright.checkpoint.store import CheckpointStore
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.recipe import DataSection
from shardwright.plan.plan import Plan
from shardwright.plan.resume import other_adapters
from shardwright.plan.serialize import read_plan
from shardwright.watch.journal import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """notes: what the user should know about the choice, a line each, warnings first. line: what the attempt that goes
    on from it writes."""

    path: Path
    step: int
    line: Line
    notes: tuple[str, ...]


def checkpoint_root(plan: Plan, folder: Path) -> Path:
    return folder / plan.checkpoint.directory


def choose_checkpoint(plan: Plan, folder: Path, resume: str) -> Chosen | None:
    """auto: the newest whole one with a finite loss, else the newest whole one, if any; never: none; else the named
    folder. Every byte is checked. What is here in part or not at all is fetched from checkpoint.upload_to, where this
    run copied it there.

    Raises Refusal: SW6201 not whole, SW6203 another model, SW6204 another tokenizer.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume).resolve()
        if why := damage(path, contents=True):
            raise Refusal(_not_whole(path, why))
        step = read_manifest(path).step
        notes = () if is_finite(path) else (_diverged(path),)
        line = branch(line_of(path), step)
        return Chosen(path=path, step=step, line=line, notes=(*notes, *check_fits(plan, folder, path)))
    return _choose_newest(plan, folder)


def _choose_newest(plan: Plan, folder: Path) -> Chosen | None:
    root = checkpoint_root(plan, folder)
    skipped: list[str] = []
    diverged: tuple[Path, int, Line] | None = None
    store = CheckpointStore(plan.checkpoint.upload_to) if plan.checkpoint.upload_to else None
    here = dict(published_steps(root))
    if (begun := _begun_from(folder, root)) is not None:  # an attempt that ended before its first checkpoint
        here.setdefault(*begun)
    current = current_line(folder)
    copies = _copies(store, current or (None if here else store.current())) if store else set()
    for step in sorted({*here, *copies}, reverse=True):
        path = here.get(step, root / step_name(step))
        why = damage(path, contents=True)
        if why and store and step in copies and path.parent == root:
            why = _fetched(store, path, why)
        if why is not None:
            skipped.append(f"warning[SW6206]: {path.name} is skipped: {why}")
            continue
        line = continued(current, written := line_of(path), step)
        foreign = current is not None and not current.holds(written, step)
        if foreign and skipped:
            continue  # not instead of one of its own
        if not is_finite(path):
            diverged = diverged or (path, step, line)
            skipped.append(f"{_diverged(path)}; it is skipped")
            continue
        if foreign:
            skipped.append(f"warning[SW6206]: {path.name} was written by another run than this folder's last one")
        return Chosen(path=path.resolve(), step=step, line=line, notes=(*skipped, *check_fits(plan, folder, path)))
    if diverged is not None:  # none is better
        path, step, line = diverged
        notes = (_diverged(path), *check_fits(plan, folder, path))
        return Chosen(path=path.resolve(), step=step, line=line, notes=notes)
    if skipped:
        raise Refusal(
            Diagnostic(
                code="SW6201",
                message=f"none of the {len(skipped)} checkpoints in {str(root)!r} is whole; "
                f"{skipped[0].split(': ', 1)[1]}",
                help="Bring a copy back, or start again with --resume never, which moves them aside.",
            )
        )
    return None


def _begun_from(folder: Path, root: Path) -> tuple[int, Path] | None:
    """What the last attempt went on from, where that lies outside of checkpoint.directory."""
    begun = read_json(folder / "run" / "attempt.json")
    path = Path(str(begun.get("resume") or root))
    step = begun.get("step")
    return (step, path) if isinstance(step, int) and path.parent != root.resolve() and path != root else None


def _copies(store: CheckpointStore, line: Line | None) -> set[int]:
    """Steps of the whole copies on this line; of all, where the line is not known."""
    steps = {step_of(Path(name)): name for name in store.steps()}
    return {step for step, name in steps.items() if line is None or line.holds(store.line_of(name), step)}


def _fetched(store: CheckpointStore, path: Path, why: str) -> str | None:
    """What is wrong with it now."""
    print(f"fetching {path.name} from {store.url}: {why}", flush=True)
    try:
        store.fetch(path.name, path.parent)
    except Refusal as refusal:
        return refusal.diagnostics[0].message
    return damage(path, contents=True)


def tell(chosen: Chosen | None) -> None:
    """The notes, to the user: warnings to standard error."""
    for note in chosen.notes if chosen else ():
        print(note, file=sys.stderr if note.startswith("warning") else sys.stdout, flush=True)


def _diverged(path: Path) -> str:
    return f"warning[SW6212]: {path.name} was written after a loss, or holds weights, that are no finite numbers"


def _not_whole(path: Path, why: str) -> Diagnostic:
    return Diagnostic(
        code="SW6201",
        message=f"{str(path)!r} is not a whole checkpoint: {why}",
        help="Give one `step-XXXXXXXX` folder, or start again with --resume never.",
    )


def check_fits(plan: Plan, folder: Path, checkpoint: Path) -> tuple[str, ...]:
    """What is different but can go on. Raises Refusal where `checkpoint` is of another model or tokenizer."""
    try:
        saved = read_plan(checkpoint)
    except (OSError, ValueError) as error:
        raise Refusal(_not_whole(checkpoint, str(error).splitlines()[0])) from None
    if saved.model.config_hash != plan.model.config_hash:
        raise Refusal(
            Diagnostic(
                code="SW6203",
                message=f"{checkpoint.name} holds another model ({saved.model.architecture}, config "
                f"{saved.model.config_hash[:12]}; this plan has {plan.model.config_hash[:12]})",
                help="Resume from a checkpoint of this model, or start again with --resume never.",
            )
        )
    if adapters := other_adapters(saved.lora, plan.lora):
        raise Refusal(
            Diagnostic(
                code="SW6254",
                message=f"{checkpoint.name} is of another run: {adapters}",
                help="Compile with the `lora` section that it was trained with, or export it and start from there.",
            )
        )
    if why := _other_tokenizer(plan, saved, folder, checkpoint):
        raise Refusal(
            Diagnostic(
                code="SW6204",
                message=f"{checkpoint.name} was trained with another tokenizer: {why}",
                help="Compile with the tokenizer that it was trained with, or start again with --resume never.",
            )
        )
    notes = []
    if changed := _other_samples(plan, saved):
        notes.append(f"warning[SW6207]: the order of the samples is another than {checkpoint.name} had: {changed}")
    if changed := _other_layout(plan, saved):
        notes.append(f"{checkpoint.name} was written under another layout: {changed}")
    return tuple(notes)


def same_ranks(plan: Plan, saved: Plan) -> bool:
    """Whether each rank has the layers and the shards that it had."""
    here, there = plan.strategy, saved.strategy
    keys = ("tensor", "pipeline", "data", "schedule")
    return plan.boundaries == saved.boundaries and all(getattr(here, k) == getattr(there, k) for k in keys)


def _other_layout(plan: Plan, saved: Plan) -> str:
    here, there = plan.strategy, saved.strategy
    keys = ("tensor", "pipeline", "data", "zero_stage", "schedule")
    changed = [f"{k} {getattr(there, k)} -> {getattr(here, k)}" for k in keys if getattr(there, k) != getattr(here, k)]
    if saved.boundaries != plan.boundaries and not changed:
        changed = [f"stage boundaries {saved.boundaries} -> {plan.boundaries}"]
    if saved.training.precision != plan.training.precision:
        changed.append(f"precision {saved.training.precision} -> {plan.training.precision}")
    return ", ".join(changed)


def _other_samples(plan: Plan, saved: Plan) -> str:
    """A step's number stands for the samples before it: true where these are the same."""
    changed = [
        f"training.{key} {getattr(saved.training, key)} -> {getattr(plan.training, key)}"
        for key in ("global_batch_size", "sequence_length", "seed")
        if getattr(saved.training, key) != getattr(plan.training, key)
    ]
    return ", ".join(changed + _other_data(plan.data, saved.data, "data"))


def _other_data(here: DataSection, there: DataSection, key: str) -> list[str]:
    """Tokenizers are compared by what is in them, not by where they lie."""
    if len(here.mixture) != len(there.mixture):
        return [f"{key} has {len(here.mixture) or 1} parts, not {len(there.mixture) or 1}"]
    names = [f.name for f in fields(here) if f.name not in ("tokenizer", "mixture")]
    pairs = ((name, getattr(there, name), getattr(here, name)) for name in names)
    changed = [f"{key}.{name} {before} -> {now}" for name, before, now in pairs if before != now]
    for number, parts in enumerate(zip(here.mixture, there.mixture, strict=True)):
        changed += _other_data(*parts, f"{key}.mixture.{number}")
    return changed


def _other_tokenizer(plan: Plan, saved: Plan, folder: Path, checkpoint: Path) -> str | None:
    here, there = _tokenizer(plan.data), _tokenizer(saved.data)
    if here is None or there is None:  # token ids came from elsewhere
        return None
    if "byte" in (here, there):
        return None if here == there else f"{there!r} there, {here!r} here"
    ours, theirs = _digests(folder / here), _digests(checkpoint / there)
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"{differing[0]} differs" if differing else None


def _tokenizer(data: DataSection) -> str | None:
    """All parts of a mixture have the same one."""
    return data.tokenizer or next((part.tokenizer for part in data.mixture if part.tokenizer), None)


def _digests(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    return {str(path.relative_to(folder)): checksum(path) for path in folder.rglob("*") if path.is_file()}
