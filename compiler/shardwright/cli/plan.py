"""`shardwright plan R`: search the layouts and rank them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.ir.estimate import Estimate
    from shardwright.ir.json_value import JsonValue
    from shardwright.search.search import SearchResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe file")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--top", type=_positive, default=10, metavar="N", help="how many plans to show (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Exit 1 where no layout is feasible; the rejected regions are printed all the same."""
    from shardwright.cli.console import print_refusal
    from shardwright.cli.estimate import model_and_cluster
    from shardwright.diagnostics import Refusal
    from shardwright.recipe.load import load_recipe

    recipe = load_recipe(Path(args.recipe), args.overrides)
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
        print(json.dumps(_object(args.recipe, shown, result)))
    else:
        print("\n".join(_table(shown, result)))
    if result.ranked:
        return 0
    try:
        choose(recipe, graph, cluster)
    except Refusal as refusal:
        print_refusal(refusal, recipe.source)
    return 1


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
