"""Whether a checkpoint of one plan resumes under another one, and how. What `run` does; here it is told beforehand."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardwright.ir.json_value import JsonObject
from shardwright.ir.recipe import Recipe
from shardwright.layout.hpz import HPZ
from shardwright.layout.strategy import Strategy
from shardwright.plan.plan import PlanLora, Versions

BIT_FOR_BIT, SAME_RANKS, CONVERTED, NO = "bit for bit", "same ranks", "converted", "no"
# Keys that decide which rank holds what; the others change what is computed on the way.
_PLACEMENT = ("tensor", "pipeline", "data", "zero_stage", "schedule", "offload")
# Keys that change when bytes move, and no number.
_TRAFFIC = ("hpz_partition_size",)
_SAMPLES = ("sequence_length", "global_batch_size", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """files: (name, sha256 hex) of each; () for the byte tokenizer; None where they are not on this machine."""

    name: str
    files: tuple[tuple[str, str], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """What of a run a checkpoint has to fit. boundaries: of its pipeline stages; attention: as the model runs it;
    tokenizer: None where the data are token ids already, or made up; versions: None where not compiled."""

    recipe: Recipe
    strategy: Strategy
    boundaries: tuple[int, ...]
    config_hash: str
    attention: str
    tokenizer: TokenizerFiles | None
    lora: PlanLora | None
    versions: Versions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """verdict: bit for bit (the run goes on as if nothing had happened), same ranks (each rank loads its own files),
    converted (the state is cut anew as it is loaded, by itself), no. notes: what else the resumed run would notice."""

    verdict: str
    how: str
    notes: tuple[str, ...]


def resume_under(a: Resumable, b: Resumable) -> Resume:
    """Of a checkpoint that `a` wrote, under `b`."""
    if a.config_hash != b.config_hash:
        return _no(f"the model is another one (its configuration {a.config_hash[:12]}, there {b.config_hash[:12]})")
    if why := other_adapters(a.lora, b.lora):
        return _no(why)
    if why := _other_tokenizer(a.tokenizer, b.tokenizer):
        return _no(f"the tokenizer is another one ({why})")
    notes = (*_samples(a.recipe, b.recipe), *_settings(a.recipe, b.recipe))
    moved = [k for k in _PLACEMENT if getattr(a.strategy, k) != getattr(b.strategy, k)]
    if a.boundaries != b.boundaries and not moved:
        moved = ["stage boundaries"]
    precision = a.recipe.training.precision != b.recipe.training.precision
    if moved or precision:
        changed = ", ".join([*moved, *["precision"] * precision])
        how = f"`run` cuts weights and optimizer states anew as it loads them, by itself; other are {changed}"
        return Resume(verdict=CONVERTED, how=how, notes=notes)
    order = [k for k in _compute_keys(a.strategy) if getattr(a.strategy, k) != getattr(b.strategy, k)]
    order += ["attention"] * (a.attention != b.attention) + ["extra"] * (_extra(a.recipe) != _extra(b.recipe))
    if order or notes or a.versions != b.versions:
        why = ", ".join(order) or ("what is noted" if notes else "the versions")
        how = f"each rank loads its own files; sums may round differently ({why})"
        return Resume(verdict=SAME_RANKS, how=how, notes=notes)
    return Resume(verdict=BIT_FOR_BIT, how="the layout is the same: each rank loads its own files", notes=())


def _no(why: str) -> Resume:
    return Resume(verdict=NO, how=f"{why}; `shardwright export` gives its weights", notes=())


def _compute_keys(strategy: Strategy) -> tuple[str, ...]:
    return tuple(field.name for field in fields(strategy) if field.name not in (*_PLACEMENT, *_TRAFFIC))


def _other_tokenizer(a: TokenizerFiles | None, b: TokenizerFiles | None) -> str:
    """By what is in their files, as `run` does it; by their names where the files of one are not here."""
    if a is None or b is None:
        return ""
    if a.files is None or b.files is None:
        return "" if a.name == b.name else f"{a.name}, there {b.name}"
    return f"{a.name}, there {b.name}: other files" if a.files != b.files else ""


def _extra(recipe: Recipe) -> JsonObject:
    """Without what changes no number."""
    zero = recipe.extra.get("zero_optimization")
    if not isinstance(zero, dict):
        return recipe.extra
    kept: JsonObject = {key: value for key, value in zero.items() if key != HPZ}
    rest: JsonObject = {key: value for key, value in recipe.extra.items() if key != "zero_optimization"}
    return {**rest, "zero_optimization": kept} if kept else rest


def _samples(a: Recipe, b: Recipe) -> tuple[str, ...]:
    """A step's number stands for the samples before it: true where these are the same."""
    changed = [f"training.{k}" for k in _SAMPLES if getattr(a.training, k) != getattr(b.training, k)]
    if a.data is not None and b.data is not None:
        names = [field.name for field in fields(a.data) if field.name != "tokenizer"]
        changed += [f"data.{k}" for k in names if getattr(a.data, k) != getattr(b.data, k)]
    if _held_out(a) != _held_out(b):
        changed.append("validation.fraction")
    if not changed:
        return ()
    return (f"the samples come in another order ({', '.join(changed)}): some may be seen twice, some not at all",)


def _held_out(recipe: Recipe) -> float:
    """The share of the training data that is kept for validation."""
    return (recipe.validation and recipe.validation.fraction) or 0.0


def _settings(a: Recipe, b: Recipe) -> tuple[str, ...]:
    """The optimizer's settings and the learning rate's curve are the new recipe's, from the next step on."""
    names = ("optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_dtype", "steps", "tokens", "epochs")
    changed = [f"training.{k}" for k in names if getattr(a.training, k) != getattr(b.training, k)]
    if a.lora is not None and b.lora is not None and a.lora.dropout != b.lora.dropout:
        changed.append("lora.dropout")
    return (f"from the resumed step on these are the new ones: {', '.join(changed)}",) if changed else ()


def other_adapters(saved: PlanLora | None, here: PlanLora | None) -> str:
    """Why what one run trains is not what the other one does; "" where it is. `run` refuses by it, too."""
    return "" if _trained(saved) == _trained(here) else f"it {_trained(saved)}, this one {_trained(here)}"


def _trained(lora: PlanLora | None) -> str:
    if lora is None:
        return "trains all parameters"
    return f"trains adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(sorted(lora.target_modules))}"
