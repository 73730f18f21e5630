"""`shardwright init`, `import`, `schema` and `check`: write recipes, and check them. None of them
imports torch."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import (
    add_json,
    add_overrides,
    add_recipe_output,
    gpu_from_catalogue,
)
from shardwright.cli.recipe_writer import (
    GPUS_PER_NODE,
    StarterSettings,
    flags_by_recipe_key,
    load_model_recipe,
    starter_recipe_yaml,
)
from shardwright.cli.terminal import error, print_diagnostics, shell_quoted
from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, Source, found, refusal
from shardwright.diagnostics.diagnostic_rendering import (
    diagnostic_to_json,
    escape_control_characters,
)
from shardwright.recipe.recipe_types import weights_summary
from shardwright.utils.json_values import strict_json

if TYPE_CHECKING:
    from shardwright.migrate.config_import import ImportedRecipe
    from shardwright.recipe.recipe_types import Recipe


MAX_RECIPE_NODES = 1024
"""Bounds the powers of two that are tried to find how many nodes the model needs."""


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a hub id, such as Qwen/Qwen3-8B, or a model folder"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="a GPU from the catalogue, such as h100-sxm-80gb, h100 or cpu"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=GPUS_PER_NODE,
        metavar="N",
        help="GPUs on each node (default %(default)s)",
    )
    add_recipe_output(parser)


def run_init(args: argparse.Namespace) -> int:
    """Prints the recipe, or writes it with -o. Raises Refusal: SW1442, SW1443, and for an unknown
    model or GPU."""
    from shardwright.models.model_sources import match_catalog_id

    output: Path | None = args.output
    if output is not None and os.path.lexists(output):
        raise _exists(output)
    gpu = args.gpu or _ask_gpu()
    if gpu is None:
        error(
            "--gpu is missing; `--gpu cpu` is this machine, and `shardwright completion` completes "
            "the others"
        )
        return 1
    gpu = gpu_from_catalogue(gpu)
    folder = os.path.isfile(os.path.join(args.model, "config.json"))
    last = os.path.basename(os.path.normpath(args.model)).lower()
    slots = f"{args.gpus_per_node}x" if args.nodes == 1 else f"{args.nodes}x{args.gpus_per_node}"
    cluster = f"{slots}{gpu.split('-')[0]}"
    settings = StarterSettings(
        model=_relative(args.model, output)
        if folder
        else match_catalog_id(args.model) or args.model,
        has_weights=folder
        and any(
            next(Path(args.model).glob(pattern), None)
            for pattern in ("*.safetensors", "pytorch_model*.bin")
        ),
        name=re.sub(r"[^A-Za-z0-9._-]", "-", f"{last}-{cluster}")[:64].strip("-"),
        gpu=gpu,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
    )
    source = os.path.abspath(args.model) if folder else settings.model
    text = starter_recipe_yaml(settings, source)
    words = flags_by_recipe_key(args, args.model) | {("cluster", "gpu"): f"--gpu {gpu}"}
    _check(text, words, None if output is None else output.parent)
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _exists(output) from None
    except OSError as problem:
        error(f"cannot write {output}: {problem.strerror}")
        return 1
    print(f"written {output}; next: shardwright plan {output}", file=sys.stderr)
    return 0


def _ask_gpu() -> str | None:
    """Ask for the GPU on a terminal; return None in a pipe, where nobody answers."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    from shardwright.layout.gpu_cluster import catalogue

    print(f"Known GPUs: {', '.join(catalogue()['gpus'])}", file=sys.stderr)
    print("gpu: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or None


def _relative(folder: str, output: Path | None) -> str:
    """Return the path from the recipe's own folder, with a leading dot, so that it is read as a
    folder."""
    path = os.path.relpath(folder, output.parent if output is not None else ".")
    return path if path.startswith("..") else f"./{path}"


def _exists(output: Path) -> Refusal:
    why = f"{str(output)!r} is there already, and init replaces nothing"
    return refusal("SW1442", why, "Give -o another name, or remove the file first.")


def _check(text: str, words: dict[KeyPath, str], directory: Path | None) -> None:
    """Refuses what `check` or `plan` would: an unknown name, or a model that fits on no layout of
    the cluster."""
    from shardwright.compile.recipe_compiler import read_problem
    from shardwright.search.layout_search import choose_layout

    recipe = load_model_recipe(text, (), words)
    source = recipe.model.source
    if directory is not None and source is not None and os.path.isabs(source):
        # A relative model folder is relative to where the recipe will stand.
        folder = os.path.join(directory, os.path.relpath(source, os.getcwd()))
        model = dataclasses.replace(recipe.model, source=os.path.abspath(folder))
        recipe = dataclasses.replace(recipe, model=model)
    problem = read_problem(recipe)
    cluster = problem.cluster
    try:
        choose_layout(problem)
    except Refusal as refusal:
        enough = _fewest_nodes_that_fit(recipe)
        fewest = (
            f"{enough} nodes of {cluster.gpus_per_node} would have one."
            if enough
            else "No number of nodes helps."
        )
        there = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
        help = f"{fewest} A GPU with more memory or a smaller model would do, too."
        unplanned = found(
            "SW1443", None, f"no layout runs on {there}, so no recipe is written", help
        )
        raise Refusal(*refusal.diagnostics, unplanned) from None


def _fewest_nodes_that_fit(recipe: Recipe) -> int | None:
    from shardwright.compile.recipe_compiler import read_problem
    from shardwright.search.layout_search import search

    nodes = 2 * (recipe.cluster.nodes or 1)
    while nodes <= MAX_RECIPE_NODES:
        section = dataclasses.replace(recipe.cluster, nodes=nodes)
        batch = max(recipe.training.global_batch_size, nodes * section.gpus_per_node)
        training = dataclasses.replace(recipe.training, global_batch_size=batch)
        there = dataclasses.replace(recipe, cluster=section, training=training)
        if search(read_problem(there)).ranked:
            return nodes
        nodes *= 2
    return None


# `shardwright import FILE [--launch "..."]`: a recipe out of what starts a training: a file of any
# kind that migrate/file_kinds.py lists, and a command. Imports neither torch nor DeepSpeed, and
# runs nothing.


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a ds_config.json, a settings file of Accelerate, LLaMA-Factory, Axolotl, ms-swift, "
        "TRL or the Trainer, a shell script, or a checkpoint folder; - is standard input "
        "(default: the file that --launch names)",
    )
    parser.add_argument(
        "--launch",
        metavar="COMMAND",
        help="the command that starts training, in quotes, as it is typed: deepspeed, accelerate "
        "launch, torchrun, python, llamafactory-cli, axolotl, swift or trl, with its arguments",
    )
    parser.add_argument(
        "--model", metavar="M", help="a hub id or model folder, if the command does not name one"
    )
    add_recipe_output(parser)


def run_import(args: argparse.Namespace) -> int:
    """Prints the recipe, or writes it with -o. Raises Refusal: SW1451 to SW1456, SW6220, and
    lint's of a file."""
    from shardwright.migrate.config_import import convert_config
    from shardwright.migrate.recipe_draft import draft_yaml

    output: Path | None = args.output
    if args.file is None and args.launch is None:
        error("give the file that a training is started with, or its command as --launch")
        return 1
    if output is not None and os.path.lexists(output):
        raise _unwritten(output, "it is there already, and import replaces nothing")
    folder = os.path.abspath(output.parent if output is not None else ".")
    imported = convert_config(args.file, args.launch, args.model, folder)
    of = " and ".join(imported.files) or "a launch command"
    lines = [f"Made by `shardwright import` of {of}. Behind each value stands where it comes from."]
    if imported.draft.fill:
        lines.append(
            f"FILL_IN: {', '.join(imported.draft.fill)}; `shardwright check` names what is left."
        )
    text = draft_yaml(imported.draft, imported.name, lines)
    if output is None:
        sys.stdout.write(text)
    else:
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            raise _unwritten(output, problem.strerror or str(problem)) from None
    _report(imported, text, output)
    return 0


def _report(imported: ImportedRecipe, text: str, output: Path | None) -> None:
    """Print what was done to standard error, because the recipe may be on standard output."""
    from shardwright.recipe.recipe_loader import load_recipe

    draft = imported.draft
    name = "the recipe" if output is None else shell_quoted(str(output))
    print(
        f"{len(draft.carried)} settings carried, {len(draft.left)} not: a comment each says why",
        file=sys.stderr,
    )
    if draft.left:
        print(escape_control_characters(f"not carried: {', '.join(draft.left)}"), file=sys.stderr)
    if draft.fill:
        print("fill in:", file=sys.stderr)
        for key, what in draft.fill.items():
            print(escape_control_characters(f"  {key}  {what}"), file=sys.stderr)
    try:
        load_recipe(Path("-"), (), stdin_text=text)
    except Refusal as refusal:
        for problem in refusal.diagnostics:
            if problem.code != "SW1108":  # a value to fill in
                line = f"{problem.severity}[{problem.code}]: {problem.message}"
                print(escape_control_characters(line), file=sys.stderr)
    print(f"next: shardwright check {name}", file=sys.stderr)


def _unwritten(output: Path, why: str) -> Refusal:
    return refusal("SW1453", f"{str(output)!r} cannot be written: {why}", "Give -o another name.")


# schema [-o FILE]: the JSON Schema of a recipe.


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write it to this file instead of standard output",
    )


def run_schema(args: argparse.Namespace) -> int:
    from shardwright.recipe.recipe_schema import schema_text

    output: Path | None = args.output
    if output is None:
        sys.stdout.write(schema_text())
        return 0
    try:
        output.write_text(schema_text(), encoding="utf-8")
    except OSError as problem:
        error(f"cannot write {output}: {problem.strerror}")
        return 1
    return 0


# check R...: stage 1, the files that the recipe names, and what is known of its model without
# building it.


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE", help="a recipe file; - is standard input"
    )
    add_overrides(parser)
    add_json(parser, "print one JSON object per recipe, one per line")


def run_check(args: argparse.Namespace) -> int:
    from shardwright.recipe.recipe_loader import load_recipe

    refused, blocks = False, 0
    for name in args.recipes:
        source: Source | None = None
        diagnostics: tuple[Diagnostic, ...]
        try:
            recipe = load_recipe(Path(name), args.overrides)
            source, diagnostics = recipe.source, findings(recipe)
        except Refusal as refusal:
            source, diagnostics = refusal.source, refusal.diagnostics
        ok = not any(diagnostic.severity == "error" for diagnostic in diagnostics)
        refused |= not ok
        if args.json:
            found = [diagnostic_to_json(diagnostic, source) for diagnostic in diagnostics]
            print(strict_json({"recipe": name, "ok": ok, "diagnostics": found}), flush=True)
            continue
        if diagnostics and blocks:
            sys.stderr.write("\n")
        blocks += len(diagnostics)
        print_diagnostics(diagnostics, source)
        if ok:
            print(
                f"ok {escape_control_characters(name)}: {weights_summary(recipe.model.weights)}",
                flush=True,
            )
    return 1 if refused else 0


def findings(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return what compile would refuse of a loaded recipe, as far as that is known without
    torch."""
    from shardwright.engines.engine_table import engines_for
    from shardwright.launch.launchers.launcher_table import unexpanded_variables
    from shardwright.layout.gpu_cluster import gpu_errors, resolve_cluster
    from shardwright.models.model_check import check_model
    from shardwright.recipe.input_file_checks import check_files
    from shardwright.recipe.plain_secrets import plain_secret_warnings
    from shardwright.search.layout_rules import fp16_on_cpu_error, missing_peak_error
    from shardwright.search.runnable_recipes import check_tokenizers
    from shardwright.search.training_rules import engine_recipe_errors

    found = [*gpu_errors(recipe.cluster)]
    if not found:
        cluster, precision = resolve_cluster(recipe.cluster), recipe.training.precision
        found += [
            d
            for d in (missing_peak_error(precision, cluster), fp16_on_cpu_error(precision, cluster))
            if d is not None
        ]
    found += [*check_files(recipe), *check_model(recipe), *check_tokenizers(recipe)]
    found += [*plain_secret_warnings(recipe), *unexpanded_variables(recipe)]
    refused = [engine_recipe_errors(engine, recipe) for engine in engines_for(recipe.target)]
    found += refused[0] if all(refused) else ()
    if recipe.cluster.measured is not None:
        from shardwright.cost.calibrated_costs import calibration_errors

        found += calibration_errors(recipe)
    by_code_and_key: dict[tuple[str, object], Diagnostic] = {}
    for diagnostic in found:
        by_code_and_key.setdefault((diagnostic.code, diagnostic.key), diagnostic)
    return tuple(by_code_and_key.values())
