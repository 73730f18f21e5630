"""Options that several commands have, in the same words."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.layout.gpu_cluster import Cluster
    from shardwright.layout.layout_estimate import Estimate
    from shardwright.models.model_graph import ModelGraph
    from shardwright.monitor.run_files import SaveStatistics
    from shardwright.plan.plan import Plan
    from shardwright.recipe.recipe_types import Recipe


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add --set; args.overrides is a list of KEY=VALUE."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as training.steps=10; repeatable",
    )


def positive(text: str) -> int:
    """Parse an option that is a count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def add_folder(parser: argparse.ArgumentParser, help: str = "a compiled folder") -> None:
    """Add DIR; args.folder is a path."""
    parser.add_argument("folder", metavar="DIR", type=Path, help=help)


def add_hostfile(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add --hostfile; args.hostfile is a path, or None. purpose: what the hosts are for."""
    help = f"the hosts to {purpose}: one `name slots=N` per line"
    parser.add_argument("--hostfile", type=Path, help=help)


def add_recipe_output(parser: argparse.ArgumentParser) -> None:
    """Add -o; args.output is a path, or None for standard output."""
    help = "where to write the recipe; an existing file is never replaced"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=help)


def add_json(
    parser: argparse.ArgumentParser, help: str = "print one JSON object instead of text"
) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=help)


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Add --trust-code; args.trust_code is a fingerprint, or None."""
    parser.add_argument(
        "--trust-code",
        metavar="SHA256",
        help=(
            "allow the model's own Python code to run; the refusal lists the files and the "
            "fingerprint"
        ),
    )


def gpu_from_catalogue(name: str) -> str:
    """Return the catalogue's GPU that --gpu means, and say on stderr which one a short name took.

    A name that matches none is returned as it is: the recipe's check refuses it.
    """
    from shardwright.cli.terminal import error
    from shardwright.layout.gpu_cluster import gpus_named

    chosen, *others = gpus_named(name) or (name,)
    if chosen != name:
        other = f" (the catalogue has {', '.join(others)} too)" if others else ""
        error(f"--gpu {name}: taken as {chosen}{other}")
    return chosen


def add_island(
    parser: argparse.ArgumentParser,
    metavar: str = "K",
    help: str = "with cluster.islands: which of them, from 0",
) -> None:
    """Add --island; args.island is the word, or None."""
    parser.add_argument("--island", metavar=metavar, help=help)


def island_folder(args: argparse.Namespace) -> Path:
    """Return args.folder, or the folder in it of the island that args.island names. Raises Refusal:
    SW6001, SW6014."""
    from shardwright.diagnostics import refusal
    from shardwright.plan.island_plans import select_island_folder
    from shardwright.plan.plan import load_plan

    folder: Path = args.folder
    if args.island is not None and not args.island.isdecimal():
        raise refusal(
            "SW6014",
            f"--island {args.island} is no number",
            "Give the number of an island, from 0.",
        )
    return select_island_folder(
        load_plan(folder), folder, None if args.island is None else int(args.island)
    )


# What `explain` and `diff` look at: a recipe, or a compiled folder, which has all that it takes in
# its own files.


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRecipe:
    """estimate: of the chosen layout, by this version's cost model. plan: where it is a compiled
    folder. has_stale_prediction: the plan's own prediction is another one. saves: of the folder's
    run."""

    name: str
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    estimate: Estimate
    plan: Plan | None
    has_stale_prediction: bool
    saves: SaveStatistics | None = None


def read_priced_recipe(name: str, overrides: Sequence[str] = ()) -> PricedRecipe:
    """Raises Refusal: read_folder's, and all that a recipe can be refused for."""
    from shardwright.utils.json_values import copy_shared_fields

    if os.path.isdir(name):
        from shardwright.compile.compiled_folder import read_folder
        from shardwright.monitor.run_files import read_save_statistics

        return copy_shared_fields(
            PricedRecipe, read_folder(Path(name)), name=name, saves=read_save_statistics(Path(name))
        )
    from shardwright.compile.recipe_compiler import estimate_recipe
    from shardwright.recipe.recipe_loader import load_recipe

    problem, estimate = estimate_recipe(load_recipe(Path(name), overrides))
    return copy_shared_fields(
        PricedRecipe,
        problem,
        name=name,
        estimate=estimate,
        plan=None,
        has_stale_prediction=False,
        saves=None,
    )
