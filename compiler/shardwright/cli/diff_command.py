"""`shardwright diff A B`: what changed between two recipes or compiled folders, what it does, and
whether checkpoints of A resume under B.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.checkpoint.checkpoint_compatibility import (
    SHARDING_KEYS,
    Compatibility,
    ResumeRequirements,
    compare_requirements,
)
from shardwright.cli.command_options import add_json
from shardwright.cli.terminal import table_lines, title
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.layout.zero_settings import HPZ
from shardwright.models.model_files import TOKENIZER_PATTERNS
from shardwright.recipe.plain_secrets import mask_secrets, secrets_of_document
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonDocument, JsonObject, strict_json
from shardwright.utils.number_format import GIB

if TYPE_CHECKING:
    from shardwright.checkpoint.checkpoint_compatibility import TokenizerFiles
    from shardwright.cli.command_options import PricedRecipe
    from shardwright.layout.layout_estimate import Estimate
    from shardwright.utils.json_values import JsonValue


Change = tuple[str, "JsonValue", "JsonValue"]
"""(key, A's value, B's value)"""
SECTIONS = {
    "recipe": "Recipe",
    "strategy": "Layout",
    "stages": "Stages",
    "model": "Model",
    "versions": "Versions",
}
"""Recipe: dotted keys; stages: the layers of each pipeline stage; model: keys of the Hugging Face
configuration."""


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a recipe or a compiled folder")
    parser.add_argument(
        "b", metavar="B", help="another one; a recipe can be compared with a folder"
    )
    add_json(parser)


def run_diff(args: argparse.Namespace) -> int:
    """Exit 0 whether or not anything differs; a recipe that cannot be read is refused."""
    from shardwright.cli.command_options import read_priced_recipe
    from shardwright.cli.estimate_command import diagnostics_json

    try:
        a, b = read_priced_recipe(args.a), read_priced_recipe(args.b)
    except Refusal as refusal:
        if not args.json:
            raise
        print(strict_json({"diagnostics": diagnostics_json(refusal.diagnostics)}), flush=True)
        return 1
    found = compare_plans(a, b)
    print(
        strict_json(comparison_json(a, b, found)) if args.json else comparison_page(a, b, found),
        flush=True,
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """Holds what differs. changes: by the keys of SECTIONS."""

    changes: Mapping[str, tuple[Change, ...]]
    resume: ResumeVerdict

    @property
    def is_none(self) -> bool:
        return not any(self.changes.values())


def compare_plans(a: PricedRecipe, b: PricedRecipe) -> PlanDifference:
    ours, theirs = resume_side(a), resume_side(b)
    found = {
        "recipe": recipe_changes(a.recipe.document, b.recipe.document),
        "strategy": changes(
            dataclasses.asdict(ours.facts.strategy), dataclasses.asdict(theirs.facts.strategy)
        ),
        "stages": changes(_stages(a, ours), _stages(b, theirs)),
        "model": changes(a.graph.config, b.graph.config),
        "versions": changes(ours.versions, theirs.versions),
    }
    return PlanDifference(changes=found, resume=resume_verdict_of(ours, theirs))


def resume_side(subject: PricedRecipe) -> ResumeSide:
    """Return what decides a resume; a recipe counts as compiled by what is installed."""
    from shardwright.engines.engine_table import ENGINES
    from shardwright.plan.plan_builder import installed_versions

    packages = ENGINES[subject.recipe.target].packages
    return ResumeSide(
        recipe=subject.recipe,
        facts=_facts(subject),
        attention=subject.graph.attention,
        versions=subject.plan.versions
        if subject.plan is not None
        else installed_versions(packages),
    )


def _facts(subject: PricedRecipe) -> ResumeRequirements:
    """Return what `run` requires of a checkpoint, but for a folder's tokenizer: its name is the
    recipe's."""
    from shardwright.checkpoint.checkpoint_compatibility import resume_requirements, sample_order
    from shardwright.models.trainable_parameters import frozen_parameter_patterns
    from shardwright.plan.plan_builder import plan_data, plan_lora

    recipe, graph = subject.recipe, subject.graph
    # All parts of the data share one tokenizer.
    name = next((part.tokenizer for _, part in recipe.tokenized()), None)
    if subject.plan is not None:
        facts = resume_requirements(subject.plan, Path(subject.name))
        if facts.tokenizer is None or name is None:
            return facts
        return dataclasses.replace(facts, tokenizer=dataclasses.replace(facts.tokenizer, name=name))
    too_few_layers_error = any(d.code == "SW3106" for d in subject.estimate.diagnostics)
    return ResumeRequirements(
        architecture=graph.architecture,
        config_hash=graph.config_hash,
        strategy=subject.estimate.strategy,
        boundaries=() if too_few_layers_error else subject.estimate.boundaries,
        precision=recipe.training.precision,
        lora=plan_lora(recipe, graph),
        frozen=frozen_parameter_patterns(graph, recipe.model.freeze),
        optimizer=recipe.training.optimizer.name,
        tokenizer=None if name is None else _tokenizer_files(name),
        samples=sample_order(recipe.training, recipe.cluster.islands),
        data=None if recipe.data is None else plan_data(recipe.data),
        held_out=(recipe.validation and recipe.validation.fraction) or 0.0,
    )


def _tokenizer_files(name: str) -> TokenizerFiles:
    """Hash a tokenizer folder of this machine; files of a Hugging Face name are not looked for."""
    from shardwright.checkpoint.checkpoint_compatibility import BYTE_TOKENIZER, TokenizerFiles

    if name == BYTE_TOKENIZER:
        return TokenizerFiles(name=name, files=())
    folder = Path(name)
    found = {
        path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern) if path.is_file()
    }
    if not found or not folder.is_absolute():
        return TokenizerFiles(name=name, files=None)
    digests = ((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(found))
    return TokenizerFiles(name=name, files=tuple(digests))


def recipe_changes(a: JsonObject, b: JsonObject) -> tuple[Change, ...]:
    """Return the changed keys of two recipes, with secrets masked."""
    secrets = (*secrets_of_document(a), *secrets_of_document(b))
    return tuple(
        (key, mask_secrets(ours, secrets), mask_secrets(theirs, secrets))
        for key, ours, theirs in changes(a, b)
    )


def changes(a: JsonObject, b: JsonObject) -> tuple[Change, ...]:
    """Keys in A's order, those that B alone has last; mappings key by key, lists as one value."""
    ours, theirs = dict(_leaves(a, b)), dict(_leaves(b, a))
    return tuple(
        (key, ours.get(key), theirs.get(key))
        for key in dict.fromkeys([*ours, *theirs])
        if json.dumps(ours.get(key)) != json.dumps(theirs.get(key))
    )


def _leaves(
    value: JsonObject, counterpart: JsonValue, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, JsonValue]]:
    """Yield dotted keys and values. counterpart: the other side's value. A mapping of one key, as
    {full: 3} beside full, counts as one value."""
    for key, below in value.items():
        other = counterpart.get(key) if isinstance(counterpart, dict) else None
        if isinstance(below, dict) and below and not (isinstance(other, str) and len(below) == 1):
            yield from _leaves(below, other, (*path, key))
        else:
            yield ".".join((*path, key)), below


def _stages(subject: PricedRecipe, resume_side: ResumeSide) -> JsonObject:
    names = [layer.name for layer in subject.graph.layers]
    found: dict[str, JsonValue] = {}
    for i, (start, stop) in enumerate(itertools.pairwise(resume_side.facts.boundaries)):
        span = f"{stop - start} layers: {names[start]} ... {names[stop - 1]}"
        found[f"stage {i}"] = names[start] if stop - start == 1 else span
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Holds one figure of both. change: B's over A's, less 1; None where A's is 0 or either is
    unknown."""

    name: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        return None if not self.a or self.b is None else self.b / self.a - 1


def effects(a: Estimate, b: Estimate) -> tuple[Effect, ...]:
    from shardwright.search.layout_comparison import PARTS

    figures = {
        "memory": ("peak_bytes", "capacity_bytes"),
        "time": (
            "step_seconds",
            *PARTS,
            "tokens_per_second_per_gpu",
            "model_tflops_per_gpu",
            "mfu",
        ),
        "training": ("steps", "days", "gpu_hours", "cost"),
    }
    return tuple(
        Effect(name=name, a=getattr(getattr(a, part), name), b=getattr(getattr(b, part), name))
        for part, names in figures.items()
        for name in names
    )


# Words, what a figure is divided by, and its format; {} is in_layer_collectives_text() of both
# layouts.
_FIGURE_FORMATS = {
    "peak_bytes": ("peak memory, GiB", GIB, ".2f"),
    "capacity_bytes": ("memory of a GPU, GiB", GIB, ".1f"),
    "step_seconds": ("step, s", 1, ".4g"),
    "compute_seconds": ("  computation, s", 1, ".4g"),
    "tensor_comm_seconds": ("  {} collectives, s", 1, ".4g"),
    "pipeline_comm_seconds": ("  sends between stages, s", 1, ".4g"),
    "data_comm_seconds": ("  data-parallel collectives, s", 1, ".4g"),
    "outer_comm_seconds": ("  the outer step between islands, s", 1, ".4g"),
    "optimizer_seconds": ("  the optimizer, s", 1, ".4g"),
    "bubble_seconds": ("  the pipeline's idle time, s", 1, ".4g"),
    "tokens_per_second_per_gpu": ("tokens/s per GPU", 1, ",.0f"),
    "mfu": ("MFU", 1, ".1%"),
    "steps": ("steps", 1, ",.0f"),
    "days": ("days", 1, ".3g"),
    "gpu_hours": ("GPU hours", 1, ",.1f"),
    "cost": ("cost", 1, ",.0f"),
}
LONGEST = 60  # characters of a value in the page; --json has all


def comparison_page(a: PricedRecipe, b: PricedRecipe, found: PlanDifference) -> str:
    from shardwright.layout.layout import in_layer_collectives_text

    lines = [f"A  {_who(a)}", f"B  {_who(b)}", ""]
    if found.is_none:
        lines += ["nothing differs", ""]
    for section, words in SECTIONS.items():
        cells = [(key, _say(ours), _say(theirs)) for key, ours, theirs in found.changes[section]]
        if cells:
            lines += [
                title(words),
                *table_lines(("key", "A", "B"), cells, text=(0, 1, 2), indent="  "),
                "",
            ]
    on_cpu = a.cluster.gpu.is_cpu and b.cluster.gpu.is_cpu
    shown = [
        e for e in effects(a.estimate, b.estimate) if e.name in _FIGURE_FORMATS and (e.a or e.b)
    ]
    inside = in_layer_collectives_text(a.estimate.strategy, b.estimate.strategy)
    figures = []
    for effect in shown:
        words, unit, form = _FIGURE_FORMATS[effect.name]
        words = words.format(inside).replace("GPU", "rank" if on_cpu else "GPU")
        values = ("-" if x is None else format(x / unit, form) for x in (effect.a, effect.b))
        change = effect.change
        told = "" if change is None else "same" if change == 0 else f"{change:+.1%}"
        figures.append((words, *values, told))
    lines += [
        title("Effect"),
        *table_lines(("", "A", "B", "change"), figures, text=(0,), indent="  "),
    ]
    for name, subject in (("A", a), ("B", b)):
        broken = [d for d in subject.estimate.diagnostics if d.severity == "error"]
        lines += [f"  {name} does not run: {d.code}: {d.message}" for d in broken]
        other = b if subject is a else a
        if subject.recipe.cluster.islands == 1 and other.recipe.cluster.islands > 1:
            asked = (
                f"`explain {'B' if subject is a else 'A'} --why-not islands=1` prices it over "
                "the links of islands"
            )
            lines.append(
                f"  {name} is priced with the links of one cluster between all its nodes; {asked}"
            )
        if subject.has_stale_prediction:
            lines.append(
                f"  {name} was compiled by another version; its figures here are this version's"
            )
    resume = found.resume
    verdict = "no" if resume.verdict == "no" else f"yes, {resume.verdict}"
    lines += ["", title("Checkpoints of A under B"), f"  {verdict}: {resume.how}"]
    lines += [f"  {note}" for note in resume.notes]
    return "\n".join(lines)


def _who(subject: PricedRecipe) -> str:
    kind = "recipe" if subject.plan is None else "compiled folder"
    return f"{escape_control_characters(subject.name)} ({kind} {subject.recipe.name})"


def _say(value: JsonValue) -> str:
    text = (
        "-"
        if value is None
        else escape_control_characters(value if isinstance(value, str) else json.dumps(value))
    )
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def comparison_json(a: PricedRecipe, b: PricedRecipe, found: PlanDifference) -> JsonDocument:
    from shardwright.cli.estimate_command import estimate_json

    def side(subject: PricedRecipe) -> JsonDocument:
        return {
            **estimate_json(subject.name, subject.estimate),
            "kind": "recipe" if subject.plan is None else "folder",
            "name": subject.recipe.name,
        }

    return {
        "a": side(a),
        "b": side(b),
        "identical": found.is_none,
        "changes": {
            section: [{"key": key, "a": ours, "b": theirs} for key, ours, theirs in rows]
            for section, rows in found.changes.items()
        },
        "effect": {
            e.name: {"a": e.a, "b": e.b, "change": e.change}
            for e in effects(a.estimate, b.estimate)
        },
        "resume": found.resume,
    }


# How a checkpoint of one run resumes under another: `diff` tells it beforehand.


BIT_FOR_BIT, SAME_RANKS, CONVERTED, NO = "bit for bit", "same ranks", "converted", "no"
# Keys that change when bytes move, and no number.
_TRAFFIC_ONLY_KEYS = ("hpz_partition_size",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSide:
    """Holds what decides a resume on one side. attention: as the model runs it. versions: what it
    is compiled with."""

    recipe: Recipe
    facts: ResumeRequirements
    attention: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeVerdict:
    """verdict: bit for bit (the run goes on as if nothing had happened), same ranks (each rank
    loads its own files), converted (the state is cut anew as it is loaded, by itself), no. notes:
    what else the resumed run would notice."""

    verdict: str
    how: str
    notes: tuple[str, ...]


def resume_verdict_of(a: ResumeSide, b: ResumeSide) -> ResumeVerdict:
    """Return how a checkpoint that `a` wrote resumes under `b`."""
    answer = compare_requirements(a.facts, b.facts)
    if answer.refused:
        why = f"the {answer.refused} is another one ({answer.why})"
        why = answer.why if answer.refused == "adapters" else why
        how = f"{why}; `shardwright export` gives its weights"
        return ResumeVerdict(verdict=NO, how=how, notes=())
    notes = _resume_notes(a.recipe, b.recipe, answer)
    if answer.layout:
        changed = ", ".join(each.key for each in answer.layout)
        how = (
            "`run` cuts weights and optimizer states anew as it loads them, by itself; what "
            f"differs: {changed}"
        )
        return ResumeVerdict(verdict=CONVERTED, how=how, notes=notes)
    ours, theirs = a.facts.strategy, b.facts.strategy
    order = [
        field.name
        for field in fields(ours)
        if field.name not in (*SHARDING_KEYS, *_TRAFFIC_ONLY_KEYS)
        and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    order += ["attention"] * (a.attention != b.attention) + ["extra"] * (
        _extra(a.recipe) != _extra(b.recipe)
    )
    if order or notes or a.versions != b.versions:
        why = ", ".join(order) or ("what is noted" if notes else "the versions")
        how = f"each rank loads its own files; sums may round differently ({why})"
        return ResumeVerdict(verdict=SAME_RANKS, how=how, notes=notes)
    return ResumeVerdict(
        verdict=BIT_FOR_BIT, how="the layout is the same: each rank loads its own files", notes=()
    )


def _extra(recipe: Recipe) -> JsonObject:
    """Return the recipe's `extra` without the keys that change no number."""
    zero = recipe.extra.get("zero_optimization")
    if not isinstance(zero, dict):
        return recipe.extra
    kept: JsonObject = {key: value for key, value in zero.items() if key != HPZ}
    rest: JsonObject = {
        key: value for key, value in recipe.extra.items() if key != "zero_optimization"
    }
    return {**rest, "zero_optimization": kept} if kept else rest


def _resume_notes(a: Recipe, b: Recipe, answer: Compatibility) -> tuple[str, ...]:
    """Return what the resumed run would notice beside its layout, a sentence each."""
    notes = []
    ours, theirs = a.cluster.islands, b.cluster.islands
    if ours != theirs and min(ours, theirs) == 1:  # docs/islands.md
        which = "after an outer step" if ours > 1 else "on each island"
        notes.append(
            f"with --resume PATH: the newest checkpoint {which}; without it `run` names that "
            "checkpoint and stops (SW6218)"
        )
    if answer.samples:
        changed = ", ".join(each.key for each in answer.samples)
        notes.append(
            f"the samples come in another order ({changed}): some may be seen twice, some not at "
            "all"
        )
    names = (
        "optimizer",
        "scheduler",
        "gradient_clipping",
        "gradient_accumulation_dtype",
        "steps",
        "tokens",
        "epochs",
    )
    settings = [f"training.{k}" for k in names if getattr(a.training, k) != getattr(b.training, k)]
    if a.lora is not None and b.lora is not None and a.lora.dropout != b.lora.dropout:
        settings.append("lora.dropout")
    if settings:
        notes.append(f"B's values apply from the resumed step on: {', '.join(settings)}")
    return tuple(notes)
