"""`shardwright init MODEL --gpu G --nodes N --gpus-per-node M`: a commented first recipe, which
`check` accepts and `plan` plans."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_recipe_output
from shardwright.cli.recipe_writer import (
    STARTER_GPUS_PER_NODE,
    StarterSettings,
    starter_recipe_yaml,
)
from shardwright.cli.terminal import error
from shardwright.diagnostics import KeyPath, Refusal, found, refusal

if TYPE_CHECKING:
    from shardwright.recipe.recipe_types import Recipe

MAX_RECIPE_NODES = 1024
"""How many are tried, in powers of two, to say how many would do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a hub id, such as Qwen/Qwen3-8B, or a model folder"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="a GPU from the catalogue, such as h100-sxm-80gb or cpu"
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=STARTER_GPUS_PER_NODE,
        metavar="N",
        help="GPUs on each node (default %(default)s)",
    )
    add_recipe_output(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the recipe, or writes it with -o. Raises Refusal: SW1442 to SW1444, and for an unknown
    model or GPU."""
    from shardwright.cli.recipe_writer import flags_by_recipe_key
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
    folder = os.path.isfile(os.path.join(args.model, "config.json"))
    settings = StarterSettings(
        model=_relative(args.model, output)
        if folder
        else match_catalog_id(args.model) or args.model,
        has_weights=folder and _has_weights(Path(args.model)),
        name=_name(args.model, gpu, args.nodes, args.gpus_per_node),
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


def _has_weights(folder: Path) -> bool:
    """Any at all: what is cut off, or in a format that is not read, `compile` says, and nobody
    trains from scratch."""
    return any(
        next(folder.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin")
    )


def _ask_gpu() -> str | None:
    """On a terminal alone; in a pipe nobody answers."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    from shardwright.cluster.gpu_catalogue import catalogue

    print(f"Known GPUs: {', '.join(catalogue()['gpus'])}", file=sys.stderr)
    print("gpu: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or None


def _name(model: str, gpu: str, nodes: int, gpus_per_node: int) -> str:
    last = os.path.basename(os.path.normpath(model)).lower()
    cluster = (
        f"{gpus_per_node}x{gpu.split('-')[0]}"
        if nodes == 1
        else f"{nodes}x{gpus_per_node}{gpu.split('-')[0]}"
    )
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{last}-{cluster}")[:64].strip("-")


def _relative(folder: str, output: Path | None) -> str:
    """As the recipe's own folder sees it, always with a leading dot, so that it is read as a
    folder."""
    path = os.path.relpath(folder, output.parent if output is not None else ".")
    return path if path.startswith("..") else f"./{path}"


def _exists(output: Path) -> Refusal:
    why = f"{str(output)!r} is there already, and init replaces nothing"
    return refusal("SW1442", why, "Give -o another name, or remove the file first.")


def _check(text: str, words: dict[KeyPath, str], directory: Path | None) -> None:
    """Refuses what `check` or `plan` would: an unknown name, or a model that fits on no layout of
    the cluster."""
    from shardwright.cli.recipe_writer import load_model_recipe
    from shardwright.compile import read_problem
    from shardwright.search.layout_search import choose_layout

    recipe = _at(load_model_recipe(text, (), words), text, directory)
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


def _at(recipe: Recipe, text: str, directory: Path | None) -> Recipe:
    """A relative model folder is relative to where the recipe will stand."""
    source = recipe.model.source
    if directory is None or source is None or not os.path.isabs(source):
        return recipe
    folder = os.path.relpath(source, os.getcwd())
    model = dataclasses.replace(
        recipe.model, source=os.path.abspath(os.path.join(directory, folder))
    )
    return dataclasses.replace(recipe, model=model)


def _fewest_nodes_that_fit(recipe: Recipe) -> int | None:
    from shardwright.compile import read_problem
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
