"""Plans each ready recipe: writes the golden text of its plan and its row of recipes/README.md."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.cli.plan_command import PlanRow, plan_table_rows, plan_text_lines
from shardwright.compile.recipe_compiler import estimate_recipe, read_problem, resolve_recipe
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_search import SearchResult, estimate_pinned_layout, search
from tools.generate.sections import replace_section

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
EXPECTED = ROOT / "tests/recipes/expected"
INDEX = RECIPES / "README.md"
BEGIN, END = "<!-- made by `make generated` -->", "<!-- end -->"
TOP = 3
GIB = 2**30
NAMES = tuple(sorted(path.stem for path in RECIPES.glob("*.yaml")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """text: what `plan --top 3 --wide` prints, less the seconds of the search and the path of this
    repository. summary: the arguments of plan_summary_lines, which prints the same without
    --wide."""

    recipe: Recipe
    summary: tuple[Problem, list[PlanRow], SearchResult]
    parameters: int
    best: Estimate
    text: str


@functools.cache
def planned(name: str) -> Planned:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    problem, _ = resolve_recipe(recipe)
    result = search(problem)
    rows = plan_table_rows(problem, result, TOP)
    text = "\n".join(plan_text_lines(problem, rows, result, None))
    return Planned(
        recipe=recipe,
        summary=(problem, rows, result),
        parameters=problem.graph.total_parameters,
        best=result.ranked[0],
        text=re.sub(r"; searched in [\d.]+ s", "", text).replace(f"{ROOT}{os.sep}", "") + "\n",
    )


Run = dict[str, Any]
"""An entry of recipes/published.toml."""


@functools.cache
def published(kind: str) -> tuple[Run, ...]:
    """Return the entries of a kind.

    kind: run, what others ran beside a recipe's own plan; best, the best layouts published for
        current models; argument, why a layout is what somebody who knows the field would take
    """
    return tuple(tomllib.loads((RECIPES / "published.toml").read_text(encoding="utf-8"))[kind])


def priced(run: Run) -> Estimate:
    """Our estimate of the layout that others ran."""
    pins = [f"parallelism.{key}={value}" for key, value in run["layout"].items()]
    recipe = load_recipe(RECIPES / f"{run['recipe']}.yaml", [*run.get("set", ()), *pins])
    return estimate_pinned_layout(read_problem(recipe))


def index() -> str:
    """recipes/README.md as it should be."""
    sections = {
        "Plans": _table(),
        "Published runs": _beside(),
        "Best published layouts": _best(),
        "Reasons": _argued(),
    }
    body = "\n\n".join(f"## {title}\n\n{table}" for title, table in sections.items())
    return replace_section(INDEX.read_text(encoding="utf-8"), BEGIN, END, body)


def _table() -> str:
    header = (
        *(
            "recipe",
            "model",
            "cluster",
            "run",
            "layout: TP x PP x DP, ZeRO, micro-batch, checkpointing",
        ),
        *("GiB of a GPU", "MFU", "days", "cost"),
    )
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    order = sorted(
        NAMES, key=lambda name: (_gpus(planned(name).recipe), planned(name).parameters, name)
    )
    return "\n".join([*lines, *(_row(name) for name in order)])


def _gpus(recipe: Recipe) -> tuple[bool, int]:
    cluster = recipe.cluster
    return cluster.gpu != "cpu", (cluster.nodes or 0) * cluster.gpus_per_node * cluster.islands


def _row(name: str) -> str:
    found = planned(name)
    e, cluster = found.best, found.recipe.cluster
    cost = "" if e.training.cost is None else f"{e.training.cost:,.0f}"
    islands = f"{cluster.islands} islands of " if cluster.islands > 1 else ""
    cells = (
        f"[{name}]({name}.yaml)",
        f"{_model(found.recipe)}, {_count(found.parameters)}",
        f"{islands}{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}",
        "fine-tuning" if found.recipe.model.weights == "pretrained" else "from scratch",
        layout(e),
        f"{e.memory.peak_bytes / GIB:.1f} of {e.memory.capacity_bytes / GIB:.0f}",
        f"{e.time.mfu:.1%}",
        f"{e.training.days:.3g}",
        cost,
    )
    return f"| {' | '.join(cells)} |"


def _model(recipe: Recipe) -> str:
    if recipe.model.source is not None:
        return recipe.model.source
    assert recipe.model.config is not None
    return str(recipe.model.config["model_type"])


def _count(parameters: int) -> str:
    if parameters >= 1e12:
        return f"{parameters / 1e12:.3g} T"
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def layout(e: Estimate) -> str:
    s = e.strategy
    words = f"{s.tensor} x {s.pipeline} x {s.data}, ZeRO-{s.zero_stage}, {s.micro_batch_size}, "
    words += str(s.activation_checkpointing)
    words += "" if s.schedule == "1f1b" else f", {s.schedule}"
    words += "" if s.expert == 1 else f", expert {s.expert}"
    words += "" if s.context == 1 else f", context {s.context}"
    words += "" if s.virtual_stages == 1 else f", {s.virtual_stages} virtual stages"
    words += ", sequence parallel" if s.sequence_parallel else ""
    return words + ("" if s.offload == "none" else f", offload {s.offload}")


def _beside() -> str:
    lines = [
        "| recipe | published layout | reported | our estimate of the published layout | "
        "our layout | step of our layout |",
        "|---|---|---|---|---|---|",
    ]
    for run in published("run"):
        found = planned(run["recipe"])
        keys = ", ".join(f"{key}={value}" for key, value in run["layout"].items())
        theirs = priced(run)
        estimate = (
            f"{theirs.time.step_seconds:.3g} s, {theirs.time.hardware_tflops_per_gpu:.0f} "
            "TFLOP/s and "
        )
        estimate += (
            f"{theirs.time.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, MFU "
            f"{theirs.time.mfu:.1%}"
        )
        broken = [d.code for d in theirs.diagnostics if d.severity == "error"]
        estimate += f" ({', '.join(broken)})" if broken else ""
        ours = (layout(found.best), f"{found.best.time.step_seconds:.3g} s")
        if any(key.startswith("model.config.") for key in run.get("set", ())):
            ours = ("none: another job", "")
        cells = (run["recipe"], f"{keys} ({run['source']})", run["measured"], estimate, *ours)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_OPEN_AXES = dict.fromkeys(("virtual_stages", "sequence_parallel", "expert_tensor"), "auto")


@functools.cache
def best_and_planned(number: int) -> tuple[Estimate, tuple[Estimate, ...]]:
    """Return our estimate of a best published layout, the entry of this number, and our ranked
    layouts of the same run, with its dispatcher."""
    run = published("best")[number]
    path = RECIPES / f"{run['recipe']}.yaml"
    dispatcher = [text for text in run["set"] if text.startswith("parallelism.")]
    others = [text for text in run["set"] if text not in dispatcher]
    fixed = ["model.weights=random", *others, "parallelism={}", *dispatcher]
    pins = [f"parallelism.{key}={value}" for key, value in run["layout"].items()]
    _, theirs = estimate_recipe(load_recipe(path, [*fixed, *pins]))
    axes = _OPEN_AXES if "target=megatron" in run["set"] else {}
    auto = [f"parallelism.{key}={value}" for key, value in axes.items()]
    problem, _ = resolve_recipe(load_recipe(path, [*fixed, *auto]))
    return theirs, search(problem).ranked


def _best() -> str:
    lines = [
        "| run | best published layout | measured | our estimate of the published layout | "
        "our first layout | step of our first layout | our fastest step, and its layout |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(published("best")):
        theirs, ranked = best_and_planned(number)
        fastest = min(ranked, key=lambda e: e.time.step_seconds)
        off = theirs.time.step_seconds / run["seconds"] - 1
        settings = "; ".join(text.partition(".")[2] or text for text in run["set"])
        fits = "" if theirs.memory.fits else ", does not fit"
        cells = (
            f"{run['recipe']} ({settings})",
            f"{layout(theirs)} ({run['source']})",
            f"{run['seconds']:.3g} s",
            f"{theirs.time.step_seconds:.3g} s ({off:+.0%}){fits}",
            layout(ranked[0]),
            f"{ranked[0].time.step_seconds:.3g} s",
            f"{fastest.time.step_seconds:.3g} s, {layout(fastest)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _argued() -> str:
    rows = [
        f"| {each['recipe']} | {layout(planned(each['recipe']).best)} | {each['why']} |"
        for each in published("argument")
    ]
    return "\n".join(["| job | our layout | why, beside what others do |", "|---|---|---|", *rows])


def main() -> None:
    EXPECTED.mkdir(exist_ok=True)
    for stale in {path.stem for path in EXPECTED.glob("*.txt")} - set(NAMES):
        (EXPECTED / f"{stale}.txt").unlink()
    for name in NAMES:
        (EXPECTED / f"{name}.txt").write_text(planned(name).text, encoding="utf-8")
    INDEX.write_text(index(), encoding="utf-8")
    print(json.dumps({"recipes": len(NAMES), "published": len(published("run"))}))


if __name__ == "__main__":
    main()
