"""Which checkpoints a compiled folder has and which one a run continues from. No torch here."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.plan.plan import Plan, PlanData
from shardwright.plan.serialize import read_plan
from shardwright.runtime.checkpoint_manifest import checksum, damage, read_manifest
from shardwright.runtime.checkpoint_store import CheckpointStore

_STEP = re.compile(r"step-(\d{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """notes: what the user should know about the choice, a line each, warnings first."""

    path: Path
    notes: tuple[str, ...]


def checkpoint_root(plan: Plan, folder: Path) -> Path:
    return folder / plan.checkpoint.directory


def step_of(checkpoint: Path) -> int:
    """Of a published folder's name; 0 for another."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def published_steps(root: Path) -> list[tuple[int, Path]]:
    """Step folders under `root`, oldest first: a rename publishes one, so that only later damage makes one bad."""
    if not root.is_dir():
        return []
    return sorted((int(m[1]), p) for p in root.iterdir() if (m := _STEP.fullmatch(p.name)) and p.is_dir())


def choose_checkpoint(plan: Plan, folder: Path, resume: str) -> Chosen | None:
    """auto: the newest whole one, if any; never: none; else the named folder. Every byte is checked. What is here in
    part or not at all is fetched from checkpoint.upload_to, if it is there.

    Raises Refusal: SW6201 not whole, SW6203 another model, SW6204 another tokenizer.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume).resolve()
        if why := damage(path, contents=True):
            raise Refusal(_not_whole(path, why))
        return Chosen(path=path, notes=check_fits(plan, folder, path))
    root = checkpoint_root(plan, folder)
    skipped: list[str] = []
    store = CheckpointStore(plan.checkpoint.upload_to) if plan.checkpoint.upload_to else None
    copies = set(store.steps()) if store else set()
    for name in sorted({path.name for _, path in published_steps(root)} | copies, reverse=True):
        path = root / name
        why = damage(path, contents=True)
        if why and store and name in copies:
            print(f"fetching {name} from {store.url}: {why}", flush=True)
            store.fetch(name, root)
            why = damage(path, contents=True)
        if why is None:
            return Chosen(path=path.resolve(), notes=(*skipped, *check_fits(plan, folder, path)))
        skipped.append(f"warning[SW6206]: {path.name} is skipped: {why}")
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


def tell(chosen: Chosen | None) -> None:
    """The notes, to the user: warnings to standard error."""
    for note in chosen.notes if chosen else ():
        print(note, file=sys.stderr if note.startswith("warning") else sys.stdout, flush=True)


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
    if saved.lora != plan.lora:
        raise Refusal(
            Diagnostic(
                code="SW6254",
                message=f"{checkpoint.name} {_adapters(saved)}, this plan {_adapters(plan)}",
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


def _adapters(plan: Plan) -> str:
    lora = plan.lora
    if lora is None:
        return "trains all parameters"
    return f"trains adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.target_modules)}"


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


def _other_data(here: PlanData, there: PlanData, key: str) -> list[str]:
    """Tokenizers are compared by what is in them, not by where they lie."""
    if len(here.mixture) != len(there.mixture):
        return [f"{key} has {len(here.mixture) or 1} parts, not {len(there.mixture) or 1}"]
    names = [f.name for f in fields(here) if f.name not in ("tokenizer", "mixture")]
    pairs = ((name, getattr(there, name), getattr(here, name)) for name in names)
    changed = [f"{key}.{name} {before} -> {now}" for name, before, now in pairs if before != now]
    for number, parts in enumerate(zip(here.mixture, there.mixture, strict=True)):
        changed += _other_data(*parts, f"{key}.mixture.{number}")
    return changed


def other_rows(checkpoint: Path, rows: tuple[int, ...]) -> tuple[str, ...]:
    """The same paths can hold other data by now. rows: training sequences of each part."""
    saved = read_manifest(checkpoint).rows
    if not saved or saved == rows:
        return ()
    had, has = (" + ".join(f"{n:,}" for n in counts) for counts in (saved, rows))
    return (
        f"warning[SW6207]: the order of the samples is another than {checkpoint.name} had: the data had {had} "
        f"sequences and has {has}; some will be seen twice, others not at all",
    )


def _other_tokenizer(plan: Plan, saved: Plan, folder: Path, checkpoint: Path) -> str | None:
    here, there = plan.data.tokenizer, saved.data.tokenizer
    if here is None or there is None:  # token ids came from elsewhere
        return None
    if "byte" in (here, there):
        return None if here == there else f"{there!r} there, {here!r} here"
    ours, theirs = _digests(folder / here), _digests(checkpoint / there)
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"{differing[0]} differs" if differing else None


def _digests(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    return {str(path.relative_to(folder)): checksum(path) for path in folder.rglob("*") if path.is_file()}


def set_aside(plan: Plan, folder: Path, attempt: int, newer_than: int = 0) -> None:
    """An attempt that goes on from an earlier step (or from none) keeps the later checkpoints out of its way, and
    loses none: they move to a dot folder."""
    root = checkpoint_root(plan, folder)
    old = [path for step, path in published_steps(root) if step > newer_than]
    if old:
        aside = root / f".before-attempt-{attempt}"
        aside.mkdir(parents=True, exist_ok=True)
        for path in old:
            path.rename(aside / path.name)
