"""Compare a checkpoint with a plan: `run` acts on the result, `diff` reports it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from shardwright.checkpoint.checkpoint_manifest import MANIFEST, checksum
from shardwright.diagnostics import Refusal, refusal
from shardwright.layout.layout import Layout, axes_in_print_order
from shardwright.plan.plan import Plan, PlanLora, read_plan
from shardwright.recipe.foreign_checkpoints import foreign_checkpoint_error
from shardwright.recipe.literal_types import Precision
from shardwright.recipe.recipe_types import DataSection
from shardwright.utils.json_values import copy_shared_fields

BYTE_TOKENIZER = "byte"
SHARDING_KEYS = tuple(axis.name for axis in axes_in_print_order() if axis.affects_rank_state)
"""Keys of a layout that decide which rank holds what."""
# ZeRO and offload move optimizer states, but no layers or shards.
_RANK_SHARDING_KEYS = tuple(key for key in SHARDING_KEYS if key not in ("zero_stage", "offload"))
_BATCH = "global_batch_size"
_SAMPLES = (_BATCH, "sequence_length", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Identify a tokenizer.

    files: (name, sha256 hex) of each; () for the byte tokenizer; None where they are not on this
        machine.
    """

    name: str
    files: tuple[tuple[str, str], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequirements:
    """Hold what of a run a checkpoint has to match.

    boundaries: of its pipeline stages.
    tokenizer: None where the data is token ids or synthetic.
    samples: keys of `training` that decide the samples' order.
    held_out: share of the training data held out for validation.
    """

    architecture: str
    config_hash: str
    strategy: Layout
    boundaries: tuple[int, ...]
    precision: Precision
    lora: PlanLora | None
    frozen: tuple[str, ...]
    optimizer: str
    tokenizer: TokenizerFiles | None
    samples: tuple[tuple[str, int], ...]
    data: DataSection | None
    held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """Describe a changed recipe key."""

    key: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """Hold the result of a comparison.

    refused: what prevents loading, "" where nothing does.
    why: the difference, in words.
    layout: changes that move parts to other ranks.
    samples: changes of the samples' order, as a step's number stands for the samples before it.
    """

    refused: Literal["", "model", "adapters", "frozen", "optimizer", "tokenizer"] = ""
    why: str = ""
    layout: tuple[KeyChange, ...] = ()
    samples: tuple[KeyChange, ...] = ()


def resume_requirements(plan: Plan, folder: Path) -> ResumeRequirements:
    """Return the requirements of a plan.

    folder: the compiled folder or a checkpoint, which has the same files.
    """
    return copy_shared_fields(
        ResumeRequirements,
        plan,
        architecture=plan.model.architecture,
        config_hash=plan.model.config_hash,
        precision=plan.training.precision,
        frozen=plan.model.frozen,
        optimizer=plan.optimizer.name,
        tokenizer=_tokenizer(plan.data, folder),
        samples=sample_order(plan.training, plan.islands),
        held_out=(plan.validation and plan.validation.fraction) or 0.0,
    )


def sample_order(training: object, islands: int) -> tuple[tuple[str, int], ...]:
    """Return the keys that decide the samples' order.

    training: section of the plan or recipe of one island; a step takes the sequences of all
        islands.
    """
    of_all = {_BATCH: islands}
    return tuple((key, getattr(training, key) * of_all.get(key, 1)) for key in _SAMPLES)


def compare_requirements(saved: ResumeRequirements, here: ResumeRequirements) -> Compatibility:
    """Compare a checkpoint written by `saved` with `here`."""
    if saved.config_hash != here.config_hash:
        why = f"its configuration {saved.config_hash[:12]}, there {here.config_hash[:12]}"
        return Compatibility(refused="model", why=why)
    if (theirs := _trained_parameters(saved.lora)) != (ours := _trained_parameters(here.lora)):
        return Compatibility(refused="adapters", why=f"it {theirs}, this one {ours}")
    if saved.frozen != here.frozen:
        names = {
            n for n in (*saved.frozen, *here.frozen) if (n in saved.frozen) != (n in here.frozen)
        }
        why = f"{min(names)} is frozen {'there' if min(names) in saved.frozen else 'here'} alone"
        return Compatibility(refused="frozen", why=why)
    if saved.optimizer != here.optimizer:
        why = f"it holds the states of {saved.optimizer}, this plan trains with {here.optimizer}"
        return Compatibility(refused="optimizer", why=why)
    if why := _other_tokenizer(saved.tokenizer, here.tokenizer):
        return Compatibility(refused="tokenizer", why=why)
    layout = [
        (key, getattr(saved.strategy, key), getattr(here.strategy, key)) for key in SHARDING_KEYS
    ]
    if saved.boundaries != here.boundaries and all(before == now for _, before, now in layout):
        layout.append(("stage boundaries", saved.boundaries, here.boundaries))
    layout.append(("precision", saved.precision, here.precision))
    before = dict(saved.samples)
    samples = _changed([(f"training.{key}", before[key], now) for key, now in here.samples])
    if saved.data is not None and here.data is not None:
        samples += _other_data(saved.data, here.data, "data")
    samples += _changed([("validation.fraction", saved.held_out, here.held_out)])
    return Compatibility(layout=tuple(_changed(layout)), samples=tuple(samples))


def check_resumable(plan: Plan, folder: Path, checkpoint: Path) -> tuple[str, ...]:
    """Return the changes that do not prevent resuming. Raises Refusal for another model or
    tokenizer."""
    try:
        written = read_plan(checkpoint)
    except (OSError, ValueError) as error:
        raise incomplete_checkpoint(checkpoint, str(error).splitlines()[0]) from None
    saved, here = resume_requirements(written, checkpoint), resume_requirements(plan, folder)
    comparison = compare_requirements(saved, here)
    if comparison.refused:
        raise _refusal(comparison, saved, here, checkpoint.name)
    notes = []
    if changed := ", ".join(each.words for each in comparison.samples):
        notes.append(
            f"warning[SW6207]: the order of the samples differs from {checkpoint.name}'s: {changed}"
        )
    if changed := ", ".join(each.words for each in comparison.layout):
        notes.append(f"{checkpoint.name} was written under another layout: {changed}")
    return tuple(notes)


def same_sharding(plan: Plan, saved: Plan) -> bool:
    """Return whether each rank has the layers and shards that it had."""
    here, there = plan.strategy, saved.strategy
    return plan.boundaries == saved.boundaries and all(
        getattr(here, k) == getattr(there, k) for k in _RANK_SHARDING_KEYS
    )


def incomplete_checkpoint(
    path: Path,
    why: str,
    help: str = "Name a `step-XXXXXXXX` folder, or start again with --resume never.",
) -> Refusal:
    """Build SW6201, or SW6220 for a checkpoint of another program."""
    if not (path / MANIFEST).exists() and (other := foreign_checkpoint_error(path)) is not None:
        return Refusal(other)
    return refusal("SW6201", f"{str(path)!r} is not a complete checkpoint: {why}", help)


def _refusal(
    comparison: Compatibility, saved: ResumeRequirements, here: ResumeRequirements, name: str
) -> Refusal:
    if comparison.refused == "model":
        return refusal(
            "SW6203",
            f"{name} holds a different model ({saved.architecture}, config "
            f"{saved.config_hash[:12]}; this plan has {here.config_hash[:12]})",
            "Resume from a checkpoint of this model, or start again with --resume never.",
        )
    if comparison.refused == "adapters":
        help = (
            "Compile with the checkpoint's `lora` section, or export the checkpoint and start "
            "from there."
        )
        return refusal("SW6254", f"{name} is of a different run: {comparison.why}", help)
    if comparison.refused == "frozen":
        help = (
            "Compile with the checkpoint's `model.freeze`, or export the checkpoint and start "
            "from its weights."
        )
        return refusal("SW6255", f"{name} is of a different run: {comparison.why}", help)
    if comparison.refused == "optimizer":
        help = (
            f"Compile with `training.optimizer: {{name: {saved.optimizer}}}`, or export the "
            "checkpoint and start from its weights."
        )
        return refusal("SW6260", f"{name} is of a different run: {comparison.why}", help)
    help = "Compile with the checkpoint's tokenizer, or start again with --resume never."
    return refusal(
        "SW6204", f"{name} was trained with a different tokenizer: {comparison.why}", help
    )


def _other_data(saved: DataSection, here: DataSection, key: str) -> list[KeyChange]:
    """Compare data sections; tokenizers are compared by content elsewhere."""
    if len(here.mixture) != len(saved.mixture):
        return [
            KeyChange(
                key=key,
                words=f"{key} has {len(here.mixture) or 1} parts, not {len(saved.mixture) or 1}",
            )
        ]
    names = [f.name for f in fields(here) if f.name not in ("tokenizer", "mixture")]
    changed = _changed(
        [(f"{key}.{name}", getattr(saved, name), getattr(here, name)) for name in names]
    )
    for number, parts in enumerate(zip(saved.mixture, here.mixture, strict=True)):
        changed += _other_data(*parts, f"{key}.mixture.{number}")
    return changed


def _changed(pairs: list[tuple[str, object, object]]) -> list[KeyChange]:
    return [
        KeyChange(key=key, words=f"{key} {before} -> {now}")
        for key, before, now in pairs
        if before != now
    ]


def _trained_parameters(lora: PlanLora | None) -> str:
    if lora is None:
        return "trains all parameters"
    return (
        f"trains adapters of rank {lora.rank}, alpha {lora.alpha:g}, on "
        f"{', '.join(sorted(lora.target_modules))}"
    )


def _other_tokenizer(saved: TokenizerFiles | None, here: TokenizerFiles | None) -> str:
    """Compare tokenizers by their files, by their names where files are missing."""
    if saved is None or here is None:  # token ids came from elsewhere
        return ""
    unknown = saved.files is None or here.files is None
    if unknown or BYTE_TOKENIZER in (saved.name, here.name):
        return "" if saved.name == here.name else f"{saved.name!r} there, {here.name!r} here"
    there, ours = dict(saved.files or ()), dict(here.files or ())
    differing = sorted(
        name for name in ours.keys() | there.keys() if ours.get(name) != there.get(name)
    )
    return f"{differing[0]} differs" if differing else ""


def _tokenizer(data: DataSection, folder: Path) -> TokenizerFiles | None:
    """Return the tokenizer's files; all parts of a mixture share it."""
    name = data.tokenizer or next((part.tokenizer for part in data.mixture if part.tokenizer), None)
    if name is None:
        return None
    if name == BYTE_TOKENIZER:
        return TokenizerFiles(name=name, files=())
    paths = sorted(path for path in (folder / name).rglob("*") if path.is_file())
    return TokenizerFiles(
        name=name, files=tuple((str(p.relative_to(folder / name)), checksum(p)) for p in paths)
    )
