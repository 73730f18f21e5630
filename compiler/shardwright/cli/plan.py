"""`shardwright plan R`: search the layouts and rank them. `plan MODEL --gpu G --nodes N` does it without a recipe."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwright.diagnostics import KeyPath, Location
    from shardwright.ir.estimate import Estimate
    from shardwright.ir.json_value import JsonObject, JsonValue
    from shardwright.ir.recipe import Recipe
    from shardwright.search.search import SearchResult

NAME = "<planned recipe>"
GPUS_PER_NODE = 8
STEPS = 1000
PRECISION = "bf16"
LONGEST_ASSUMED_SEQUENCE = 4096
TOKENS_PER_STEP = 4 * 2**20  # what models of 7 B to 400 B are pre-trained with (Llama 2 and 3: 4 M to 16 M)

# A configuration's names for its longest sequence.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_RECIPE_ENDINGS = (".yaml", ".yml", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE|MODEL", help="the recipe file; or a hub id or model folder, with --gpu and --nodes"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--top", type=_positive, default=10, metavar="N", help="how many plans to show (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    model = parser.add_argument_group("for a MODEL, in place of a recipe")
    model.add_argument("--gpu", metavar="NAME", help="a GPU of the catalogue, such as h100-sxm-80gb")
    model.add_argument("--nodes", type=_positive, metavar="N")
    model.add_argument("--gpus-per-node", type=_positive, metavar="N", help=f"default {GPUS_PER_NODE}")
    model.add_argument(
        "--sequence-length",
        type=_positive,
        metavar="S",
        help=f"default: the model's longest, at most {LONGEST_ASSUMED_SEQUENCE}",
    )
    model.add_argument(
        "--global-batch-size",
        type=_positive,
        metavar="B",
        help="sequences a step (default: about 4 M tokens, a multiple of the GPUs)",
    )
    model.add_argument("--precision", metavar="P", help=f"default {PRECISION}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Exit 1 where no layout is feasible; the rejected regions are printed all the same."""
    from shardwright.cli.console import error, print_refusal
    from shardwright.cli.estimate import model_and_cluster
    from shardwright.diagnostics import Refusal
    from shardwright.recipe.load import load_recipe

    model = _model(args)
    problem = _usage(args, model)
    if problem:
        error(problem)
        return 1
    text = ""
    if model is None:
        recipe = load_recipe(Path(args.recipe), args.overrides)
    else:
        text = recipe_text(args, model)
        recipe = _load(text, args.overrides)
    graph, cluster = model_and_cluster(recipe)
    from shardwright.search.search import baselines, choose, rank_key, search

    result = search(recipe, graph, cluster)
    # "What you would run today" is always shown: within the ranking where the pins allow it, below it otherwise.
    today = baselines(recipe, graph, cluster)
    top = list(result.ranked[: args.top])
    ranked = {e.strategy for e in result.ranked}
    top += [e for e in today if e.strategy in ranked and e not in top]
    top.sort(key=lambda e: rank_key(recipe, e))
    shown = [*top, *(e for e in today if e.strategy not in ranked)]
    if args.json:
        planned = {} if model is None else {"planned_as": _planned_as(recipe), "assumed": list(_assumed(args))}
        print(json.dumps({**_object(args.recipe, shown, result), **planned}))
    else:
        print("\n".join([*_heading(args, text), *_table(shown, result)]))
    if result.ranked:
        return 0
    try:
        choose(recipe, graph, cluster)
    except Refusal as refusal:
        print_refusal(refusal, recipe.source)
    return 1


def _model(args: argparse.Namespace) -> str | None:
    """The model.source that the argument names; None where it is a recipe."""
    from shardwright.model.popular.shipped import shipped_name

    name: str = args.recipe
    if os.path.isdir(name) and os.path.isfile(os.path.join(name, "config.json")):
        return os.path.abspath(name)
    if name == "-" or os.path.exists(name) or name.lower().endswith(_RECIPE_ENDINGS):
        return None
    if shipped := shipped_name(name):
        return shipped
    return name if _HUB_ID.fullmatch(name) or args.gpu is not None else None


_MODEL_FLAGS = ("gpu", "nodes", "gpus_per_node", "sequence_length", "global_batch_size", "precision")


def _usage(args: argparse.Namespace, model: str | None) -> str:
    """What is wrong with the flags, or ""."""
    given = ["--" + flag.replace("_", "-") for flag in _MODEL_FLAGS if getattr(args, flag) is not None]
    if model is None and given:
        return f"{', '.join(given)}: for a model's name only; a recipe has these, change one with --set KEY=VALUE"
    if model is not None and (args.gpu is None or args.nodes is None):
        where = "" if os.path.exists(args.recipe) else f"there is no file {args.recipe!r}; "
        return f"{where}planning a model without a recipe needs --gpu NAME and --nodes N"
    return ""


def recipe_text(args: argparse.Namespace, model: str) -> str:
    """The recipe that stands for the command line, as YAML, a section a line."""
    gpus_per_node = args.gpus_per_node or GPUS_PER_NODE
    world = args.nodes * gpus_per_node
    length = args.sequence_length or min(LONGEST_ASSUMED_SEQUENCE, _longest(model))
    batch = args.global_batch_size or max(1, round(TOKENS_PER_STEP / length / world)) * world
    quote = json.dumps  # of text: JSON's form is YAML's too
    return (
        "version: 1\n"
        "name: plan\n"
        # Weights are not looked at: a plan needs the configuration alone.
        f"model: {{source: {quote(model)}, weights: random}}\n"
        f"cluster: {{nodes: {args.nodes}, gpus_per_node: {gpus_per_node}, gpu: {quote(args.gpu)}}}\n"
        f"training: {{sequence_length: {length}, global_batch_size: {batch}, steps: {STEPS}, "
        f"precision: {quote(args.precision or PRECISION)}}}\n"
    )


def _longest(model: str) -> int:
    """The longest sequence that the model's configuration names; where it names none, there is no limit."""
    from shardwright.diagnostics import Refusal
    from shardwright.model.popular.hub import hub_config, read_config_file

    try:
        config = read_config_file(Path(model) / "config.json") if os.path.isabs(model) else hub_config(model)
    except Refusal:
        config = {}  # stage 2 refuses it again, together with what is wrong elsewhere
    lengths = [config[key] for key in _LENGTH_KEYS if key in config]
    return next((n for n in lengths if isinstance(n, int) and n > 0), LONGEST_ASSUMED_SEQUENCE)


def _load(text: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of `text`, whose lines diagnostics show under a name of its own: there is no file of it."""
    import dataclasses

    from shardwright.diagnostics import Refusal, Source
    from shardwright.recipe.layers import STDIN
    from shardwright.recipe.load import load_recipe

    def renamed(source: Source) -> Source:
        def places(table: Mapping[KeyPath, Location]) -> dict[KeyPath, Location]:
            return {key: dataclasses.replace(p, file=NAME) if p.file == STDIN else p for key, p in table.items()}

        return Source(
            file=NAME,
            locations=places(source.locations),
            key_locations=places(source.key_locations),
            texts={NAME if file == STDIN else file: body for file, body in source.texts.items()},
        )

    try:
        recipe = load_recipe(Path("-"), overrides, stdin_text=text)
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=refusal.source and renamed(refusal.source)) from None
    return dataclasses.replace(recipe, source=renamed(recipe.source))


def _assumed(args: argparse.Namespace) -> tuple[str, ...]:
    """The recipe keys that neither the command line's flags nor its --set give."""
    sections = {"gpus_per_node": "cluster"}
    keys = {f"{sections.get(flag, 'training')}.{flag}": getattr(args, flag) for flag in _MODEL_FLAGS[2:]}
    keys["training.steps"] = None
    overridden = {override.partition("=")[0].strip() for override in args.overrides}
    return tuple(key for key, value in keys.items() if value is None and key not in overridden)


def _planned_as(recipe: Recipe) -> JsonObject:
    """The sections that the command line stands for, with --set applied and every default filled in."""
    return {key: recipe.document[key] for key in ("model", "cluster", "training", "parallelism")}


def _heading(args: argparse.Namespace, text: str) -> list[str]:
    """The recipe in place of which the model was planned, and what of it was assumed; nothing for a recipe."""
    if not text:
        return []
    assumed = ", ".join(_assumed(args)) or "nothing"
    lines = [f"planned as this recipe (assumed: {assumed})", *(f"  {line}" for line in text.splitlines()[2:])]
    return [*lines, *(f"  --set {override}" for override in args.overrides), ""]


def _object(path: str, plans: list[Estimate], result: SearchResult) -> dict[str, JsonValue]:
    import dataclasses

    from shardwright.cli.estimate import estimate_object

    return {
        "recipe": path,
        "plans": [estimate_object(path, estimate) for estimate in plans],
        "rejected": [dataclasses.asdict(region) for region in result.rejected],
        "search_seconds": result.seconds,
    }


HEADER = (
    *("tensor", "pipeline", "data", "zero", "micro", "accum", "checkpointing", "schedule"),
    *("step s", "tokens/s/GPU", "MFU", "idle", "GiB", ""),
)


def _table(plans: list[Estimate], result: SearchResult) -> list[str]:
    ranked = {estimate.strategy for estimate in result.ranked}
    rows = [HEADER, *(_row(estimate, estimate.strategy in ranked) for estimate in plans)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", f"{len(result.ranked)} layouts run, searched in {result.seconds:.2f} s"]
    if result.rejected:
        lines.append("ruled out:")
        lines += [f"  {region.count:6}  {region.code}  e.g. {region.reason}" for region in result.rejected]
    return lines


def _row(estimate: Estimate, ranked: bool) -> tuple[str, ...]:
    """The last cell marks what is shown for comparison only: outside the pins, or not feasible."""
    broken = ",".join(d.code for d in estimate.diagnostics if d.severity == "error")
    s, time = estimate.strategy, estimate.time
    return (
        *(str(n) for n in (s.tensor, s.pipeline, s.data, s.zero_stage, s.micro_batch_size)),
        str(s.gradient_accumulation_steps),
        s.activation_checkpointing,
        s.schedule,
        f"{time.step_seconds:.4g}",
        f"{time.tokens_per_second_per_gpu:.0f}",
        f"{time.mfu:.1%}",
        f"{time.bubble_fraction:.1%}",
        f"{estimate.memory.peak_bytes / 2**30:.1f}",
        broken or ("" if ranked else "not as pinned"),
    )
