"""Does a checkpoint fit here? One answer: `run` acts on it, `diff` tells it beforehand. No torch
here."""

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
from shardwright.utils.json_records import copy_shared_fields

BYTE_TOKENIZER = "byte"
SHARDING_KEYS = tuple(axis.name for axis in axes_in_print_order() if axis.holds)
"""Keys of a strategy that decide which rank holds what; the others change what is computed on the
way."""
# ZeRO and offload move states about, and no layer or shard of the model.
_RANK_SHARDING_KEYS = tuple(key for key in SHARDING_KEYS if key not in ("zero_stage", "offload"))
_BATCH = "global_batch_size"
_SAMPLES = (_BATCH, "sequence_length", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """files: (name, sha256 hex) of each; () for the byte tokenizer; None where they are not on this
    machine."""

    name: str
    files: tuple[tuple[str, str], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequirements:
    """What of a run a checkpoint has to fit. boundaries: of its pipeline stages. tokenizer: None
    where the data are token ids already, or made up. samples: keys of `training` that decide their
    order. held_out: the share of the training data that is kept for validation."""

    architecture: str
    config_hash: str
    strategy: Layout
    boundaries: tuple[int, ...]
    precision: Precision
    lora: PlanLora | None
    frozen: tuple[str, ...]
    tokenizer: TokenizerFiles | None
    samples: tuple[tuple[str, int], ...]
    data: DataSection | None
    held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """A recipe's key, and both values where they say more than the key does."""

    key: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """refused: what keeps it from being loaded, "" where it can be. layout: what makes ranks hold
    other parts. samples: what makes them come in another order; a step's number stands for the
    samples before it."""

    refused: Literal["", "model", "adapters", "frozen", "tokenizer"] = ""
    why: str = ""
    layout: tuple[KeyChange, ...] = ()
    samples: tuple[KeyChange, ...] = ()


def resume_requirements(plan: Plan, folder: Path) -> ResumeRequirements:
    """folder: the compiled folder, or a checkpoint, which holds what a compiled folder holds."""
    return copy_shared_fields(
        ResumeRequirements,
        plan,
        architecture=plan.model.architecture,
        config_hash=plan.model.config_hash,
        precision=plan.training.precision,
        frozen=plan.model.frozen,
        tokenizer=_tokenizer(plan.data, folder),
        samples=sample_order(plan.training, plan.islands),
        held_out=(plan.validation and plan.validation.fraction) or 0.0,
    )


def sample_order(training: object, islands: int) -> tuple[tuple[str, int], ...]:
    """training: the plan's section, or the recipe's, of one island: a step takes the rows of all of
    them."""
    of_all = {_BATCH: islands}
    return tuple((key, getattr(training, key) * of_all.get(key, 1)) for key in _SAMPLES)


def compare_requirements(saved: ResumeRequirements, here: ResumeRequirements) -> Compatibility:
    """Of a checkpoint that `saved` wrote, under `here`."""
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
    if why := _other_tokenizer(saved.tokenizer, here.tokenizer):
        return Compatibility(refused="tokenizer", why=why)
    return Compatibility(
        layout=tuple(_other_layout(saved, here)), samples=tuple(_other_samples(saved, here))
    )


def check_resumable(plan: Plan, folder: Path, checkpoint: Path) -> tuple[str, ...]:
    """What is different but can go on. Raises Refusal where `checkpoint` is of another model or
    tokenizer."""
    try:
        written = read_plan(checkpoint)
    except (OSError, ValueError) as error:
        raise incomplete_checkpoint(checkpoint, str(error).splitlines()[0]) from None
    saved, here = resume_requirements(written, checkpoint), resume_requirements(plan, folder)
    answer = compare_requirements(saved, here)
    if answer.refused:
        raise _refusal(answer, saved, here, checkpoint.name)
    notes = []
    if changed := ", ".join(each.words for each in answer.samples):
        notes.append(
            f"warning[SW6207]: the order of the samples is another than {checkpoint.name} had: "
            f"{changed}"
        )
    if changed := ", ".join(each.words for each in answer.layout):
        notes.append(f"{checkpoint.name} was written under another layout: {changed}")
    return tuple(notes)


def same_sharding(plan: Plan, saved: Plan) -> bool:
    """Whether each rank has the layers and the shards that it had."""
    here, there = plan.strategy, saved.strategy
    return plan.boundaries == saved.boundaries and all(
        getattr(here, k) == getattr(there, k) for k in _RANK_SHARDING_KEYS
    )


def incomplete_checkpoint(
    path: Path,
    why: str,
    help: str = "Give one `step-XXXXXXXX` folder, or start again with --resume never.",
) -> Refusal:
    """SW6201, or SW6220 for a checkpoint of another program."""
    if not (path / MANIFEST).exists() and (other := foreign_checkpoint_error(path)) is not None:
        return Refusal(other)
    return refusal("SW6201", f"{str(path)!r} is not a whole checkpoint: {why}", help)


def _refusal(
    answer: Compatibility, saved: ResumeRequirements, here: ResumeRequirements, name: str
) -> Refusal:
    if answer.refused == "model":
        return refusal(
            "SW6203",
            f"{name} holds another model ({saved.architecture}, config {saved.config_hash[:12]}; "
            f"this plan has {here.config_hash[:12]})",
            "Resume from a checkpoint of this model, or start again with --resume never.",
        )
    if answer.refused == "adapters":
        help = (
            "Compile with the `lora` section that it was trained with, or export it and start "
            "from there."
        )
        return refusal("SW6254", f"{name} is of another run: {answer.why}", help)
    if answer.refused == "frozen":
        help = (
            "Compile with the `model.freeze` that it was trained with, or export it and start "
            "from its weights."
        )
        return refusal("SW6255", f"{name} is of another run: {answer.why}", help)
    help = (
        "Compile with the tokenizer that it was trained with, or start again with --resume never."
    )
    return refusal("SW6204", f"{name} was trained with another tokenizer: {answer.why}", help)


def _other_layout(saved: ResumeRequirements, here: ResumeRequirements) -> list[KeyChange]:
    pairs = [
        (key, getattr(saved.strategy, key), getattr(here.strategy, key)) for key in SHARDING_KEYS
    ]
    if saved.boundaries != here.boundaries and all(before == now for _, before, now in pairs):
        pairs.append(("stage boundaries", saved.boundaries, here.boundaries))
    pairs.append(("precision", saved.precision, here.precision))
    return _changed(pairs)


def _other_samples(saved: ResumeRequirements, here: ResumeRequirements) -> list[KeyChange]:
    before = dict(saved.samples)
    changed = _changed([(f"training.{key}", before[key], now) for key, now in here.samples])
    if saved.data is not None and here.data is not None:
        changed += _other_data(saved.data, here.data, "data")
    return changed + _changed([("validation.fraction", saved.held_out, here.held_out)])


def _other_data(saved: DataSection, here: DataSection, key: str) -> list[KeyChange]:
    """Tokenizers are compared by what is in them, not by where they lie."""
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
    """By what is in their files; by their names where those of one are not here."""
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
    """All parts of a mixture have the same one."""
    name = data.tokenizer or next((part.tokenizer for part in data.mixture if part.tokenizer), None)
    if name is None:
        return None
    if name == BYTE_TOKENIZER:
        return TokenizerFiles(name=name, files=())
    found = sorted(path for path in (folder / name).rglob("*") if path.is_file())
    return TokenizerFiles(
        name=name, files=tuple((str(p.relative_to(folder / name)), checksum(p)) for p in found)
    )
