"""`shardwright estimate R...`: what the pinned layout costs. One JSON object a recipe with --json, else a page."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.arguments import add_json, add_overrides
from shardwright.ir.recipe import AssumeSection
from shardwright.strict_json import strict_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.diagnostics import Diagnostic
    from shardwright.ir.json_value import JsonValue
    from shardwright.ir.recipe import Recipe
    from shardwright.layout.estimate import Estimate, Training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="recipe files")
    add_overrides(parser)
    add_json(parser, "print one JSON object per recipe, one per line, in order")


def run(args: argparse.Namespace) -> int:
    """Exit 1 if any recipe is infeasible, after all of them."""
    code = 0
    for path in args.recipes:
        feasible = _json_line(path, args.overrides) if args.json else _page(path, args.overrides)
        code = code if feasible else 1
    return code


def estimate_object(path: str, estimate: Estimate) -> dict[str, JsonValue]:
    """The object of each plan of `plan --json`; `estimate --json` adds what the recipe assumes."""
    return {
        "recipe": path,
        "feasible": estimate.feasible,
        "diagnostics": diagnostic_objects(estimate.diagnostics),
        "strategy": dataclasses.asdict(estimate.strategy),
        "memory": dataclasses.asdict(estimate.memory),
        "time": dataclasses.asdict(estimate.time),
        "training": dataclasses.asdict(estimate.training),
        "error": dataclasses.asdict(estimate.error),
        "flops_source": estimate.flops_source,
    }


def diagnostic_objects(diagnostics: Sequence[Diagnostic]) -> list[JsonValue]:
    return [
        {"code": d.code, "severity": d.severity, "message": d.message, "help": d.help, "valid": list(d.valid)}
        for d in diagnostics
    ]


def _json_line(path: str, overrides: Sequence[str]) -> bool:
    from shardwright.compile import estimate_recipe
    from shardwright.diagnostics import Refusal
    from shardwright.recipe.load import load_recipe

    try:
        problem, estimate = estimate_recipe(load_recipe(Path(path), overrides))
        line = {**estimate_object(path, estimate), "assume": dataclasses.asdict(problem.recipe.assume)}
        feasible = estimate.feasible
    except Refusal as refusal:
        # No "memory" and no "time": there was nothing to count.
        line, feasible = (
            {"recipe": path, "feasible": False, "diagnostics": diagnostic_objects(refusal.diagnostics)},
            False,
        )
    print(strict_json(line), flush=True)
    return feasible


def _page(path: str, overrides: Sequence[str]) -> bool:
    from shardwright.cli.console import print_diagnostics, print_refusal
    from shardwright.compile import estimate_recipe
    from shardwright.diagnostics import Refusal
    from shardwright.recipe.load import load_recipe

    try:
        problem, estimate = estimate_recipe(load_recipe(Path(path), overrides))
    except Refusal as refusal:
        print_refusal(refusal)
        return False
    recipe = problem.recipe
    print("\n".join([path, *_lines(estimate, recipe), ""]), flush=True)
    print_diagnostics(estimate.diagnostics, recipe.source)
    return estimate.feasible


def layout_text(estimate: Estimate) -> str:
    s = estimate.strategy
    micro_batch = f"micro_batch_size={s.micro_batch_size}"
    return s.describe().replace(micro_batch, f"{micro_batch} accumulation={s.gradient_accumulation_steps}")


def training_words(recipe: Recipe, training: Training) -> str:
    """Steps, time, GPU hours and cost."""
    from shardwright.figures import device_hours, duration

    if not training.steps:
        return f"{recipe.training.epochs:g} epochs: the steps are known once the data is prepared"
    cost = "" if training.cost is None else f", cost {training.cost:,.0f}"
    hours = device_hours(training.gpu_hours, is_cpu=recipe.cluster.gpu == "cpu")
    return f"{training.steps:,} steps, {duration(training.days)}, {hours}{cost}"


def _lines(estimate: Estimate, recipe: Recipe) -> list[str]:
    from shardwright.cost.measured import error_words, flops_words
    from shardwright.figures import device, rate

    time, memory, assume = estimate.time, estimate.memory, recipe.assume
    is_cpu = recipe.cluster.gpu == "cpu"
    gib = 2**30
    from shardwright.search.compare import hpz_words

    hpz, flops = hpz_words(estimate.strategy), flops_words(estimate.flops_source)
    lines = [
        f"  layout   {layout_text(estimate)}",
        *([f"  weights  {hpz}"] if hpz else []),
        f"  memory   {memory.peak_bytes / gib:.1f} of {memory.capacity_bytes / gib:.1f} GiB, "
        f"{'fits' if memory.fits else 'does not fit'}",
        f"  step     {time.step_seconds:.4g} s, {rate(time.tokens_per_second_per_gpu, is_cpu=is_cpu)}, "
        f"{time.model_tflops_per_gpu:.4g} TFLOP/s per {device(is_cpu=is_cpu)}, MFU {time.mfu:.1%}",
        f"  of it    compute {time.compute_seconds:.4g} s, tensor {time.tensor_comm_seconds:.4g} s, "
        f"pipeline {time.pipeline_comm_seconds:.4g} s, data {time.data_comm_seconds:.4g} s, "
        f"optimizer {time.optimizer_seconds:.4g} s, bubble {time.bubble_seconds:.4g} s "
        f"({time.bubble_fraction:.1%} idle)",
    ]
    lines.append(f"  error    {error_words(estimate.error)}")
    lines += [f"  FLOPs    {flops}"] if flops else []
    lines.append(f"  training {training_words(recipe, estimate.training)}")
    if assume != AssumeSection(kernels="auto", mfu=None, ignore_memory=False):
        given = (f"{name}={value}" for name, value in dataclasses.asdict(assume).items())
        lines.append(f"  assumed  {' '.join(given)}")
    return lines
