"""Tune: run the best layouts of a plan and the baselines for a few steps each."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.calibrate.calibration import cores
from shardwright.calibrate.measurement_job import cpu_name, versions
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe, resolve_recipe
from shardwright.cost.calibrated_costs import calibration_for, measured_over_predicted
from shardwright.diagnostics import Refusal, refusal
from shardwright.layout.axes import AXES
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.measurements import (
    KIND,
    VERSION,
    MeasuredMachine,
    MeasuredValue,
    Measurements,
    RunMeasurement,
)
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_search import baselines, search
from shardwright.utils.child_processes import end_processes, shardwright_command
from shardwright.utils.json_lines import read_json_lines

WARM_UP_STEPS = 3
"""Steps left out of the measurement, as in train/training_metrics.py."""
REMAINING_STEPS = 1_000_000
"""Steps still left when a run is stopped, as the last step would save a checkpoint."""
LAUNCH_SECONDS, MAX_SLOWDOWN = 900, 50
"""Time limit of a launch (s), and of a step as a multiple of the prediction."""
LOOK_SECONDS = 0.2
END_SECONDS = 30
_PEAK = re.compile(r"peak memory ([0-9.]+) GiB")
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTrial:
    """Hold one layout's trial.

    predicted_seconds: the plan's step time (s).
    is_baseline: whether it is a ZeRO baseline.
    run: None where it did not run, as `why` says.
    """

    estimate: Estimate
    predicted_seconds: float
    is_baseline: bool
    run: RunMeasurement | None
    why: str = ""

    @property
    def strategy(self) -> Layout:
        return self.estimate.strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """Hold all trials, as the plan ranks them; baselines outside the pins come last."""

    problem: Problem
    trials: tuple[LayoutTrial, ...]
    found: Measurements

    @property
    def winner(self) -> LayoutTrial:
        return min(
            (t for t in self.trials if t.run),
            key=lambda t: t.run.step_seconds.value if t.run else 0.0,
        )


def tune(
    recipe: Recipe,
    top: int,
    steps: int,
    report_progress: ProgressCallback,
    parent: Path | None = None,
) -> TuningResult:
    """Run the best layouts of a recipe.

    parent: folder for the runs' temporary folders.
    Raises what the recipe is refused for, and SW5503 (no layout ran).
    """
    problem, _ = resolve_recipe(recipe)
    rows = layouts_to_try(problem, top)
    if not rows:
        raise refusal(
            "SW5503", "no layout of the recipe can run", "Run `shardwright plan` for the reasons."
        )
    trials = []
    for place, (estimate, is_baseline) in enumerate(rows, start=1):
        report_progress(f"{place} of {len(rows)}: {estimate.strategy.describe()}")
        trials.append(_tried(problem, estimate, is_baseline, steps, parent))
        report_progress(
            f"  {trials[-1].why}"
            if trials[-1].run is None
            else f"  {trials[-1].run.step_seconds.value:.4g} s a step"
        )
    runs = tuple(t.run for t in trials if t.run is not None)
    if not runs:
        why = f"none of {len(rows)} layouts ran: {trials[0].why}"
        raise refusal(
            "SW5503", why, "Run `shardwright compile` and `run` of the recipe for the full output."
        )
    return TuningResult(problem=problem, trials=tuple(trials), found=add_runs(problem, runs))


def layouts_to_try(problem: Problem, top: int) -> list[tuple[Estimate, bool]]:
    """Return (layout, whether it is a baseline), each once: the search's best, then the baselines
    that can run."""
    is_baseline = {e.strategy: e for e in baselines(problem)}
    best = {e.strategy: e for e in search(problem).ranked[:top]}
    return [
        (e, s in is_baseline)
        for s, e in (best | {s: e for s, e in is_baseline.items() if s not in best}).items()
    ]


def _tried(
    problem: Problem, estimate: Estimate, is_baseline: bool, steps: int, parent: Path | None
) -> LayoutTrial:
    predicted = estimate.time.step_seconds
    broken = [d for d in estimate.diagnostics if d.severity == "error"]
    if broken:
        why = f"not run: {broken[0].code}: {broken[0].message}"
        return LayoutTrial(
            estimate=estimate,
            predicted_seconds=predicted,
            is_baseline=is_baseline,
            run=None,
            why=why,
        )
    folder = Path(tempfile.mkdtemp(prefix="shardwright-tune-", dir=parent))
    run, why = None, ""
    try:
        compiled = compile_recipe(recipe_for(problem.recipe, estimate.strategy, steps))
        write_folder(folder / "out", compiled.files)
        limit = LAUNCH_SECONDS + MAX_SLOWDOWN * predicted * (steps + WARM_UP_STEPS)
        seconds, peak, why = launch(folder / "out", steps + WARM_UP_STEPS, limit)
        if len(seconds) > WARM_UP_STEPS:
            factor = measured_over_predicted(problem.recipe, problem.graph, estimate.strategy)
            run = RunMeasurement(
                pins=estimate.strategy.pins(),
                step_seconds=step_seconds_figure(seconds[WARM_UP_STEPS:]),
                predicted_step_seconds=estimate.time.step_seconds / factor,
                peak_bytes=peak,
            )
    except Refusal as refused:
        first = refused.diagnostics[0]
        why = f"{first.code}: {first.message}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return LayoutTrial(
        estimate=estimate, predicted_seconds=predicted, is_baseline=is_baseline, run=run, why=why
    )


def step_seconds_figure(seconds: Sequence[float]) -> MeasuredValue:
    """Return the median, as in run/summary.json."""
    middle = statistics.median(seconds)
    if len(seconds) == 1:
        return MeasuredValue(value=middle, n=1, spread=0.0)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return MeasuredValue(value=middle, n=len(seconds), spread=(high - low) / middle)


def recipe_for(recipe: Recipe, s: Layout, steps: int) -> Recipe:
    """Return the recipe with this layout for a few steps, without validation, checkpoints or
    tracking."""
    pins = {axis.name: getattr(s, axis.name) for axis in AXES if axis.section == "parallelism"}
    constant = dataclasses.replace(
        recipe.training.scheduler,
        name="constant",
        warmup_steps=0,
        warmup_ratio=None,
        decay_steps=None,
    )
    endless = steps + WARM_UP_STEPS + REMAINING_STEPS
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, loss=s.loss),
        parallelism=dataclasses.replace(recipe.parallelism, **pins),
        training=dataclasses.replace(
            recipe.training,
            scheduler=constant,
            steps=endless,
            tokens=None,
            epochs=None,
            days_at_most=None,
        ),
        validation=None,
        checkpoint=dataclasses.replace(
            recipe.checkpoint, directory="checkpoints", every_steps=None, upload_to=None
        ),
        tracking=dataclasses.replace(recipe.tracking, tensorboard=False, wandb=None),
    )


def launch(out: Path, steps: int, limit_seconds: float) -> tuple[list[float], int | None, str]:
    """Run `shardwright run` and stop it after `steps`; return (step seconds, peak bytes, why there
    are too few steps).

    An interrupt ends the run and is raised again.
    """
    with (out.parent / "output").open("w+b") as output:
        process = subprocess.Popen(
            shardwright_command("run", str(out), "--resume", "never"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ends, why = time.monotonic() + limit_seconds, ""
        try:
            while process.poll() is None and len(step_seconds(out)) < steps:
                if time.monotonic() > ends:
                    why = f"given up after {limit_seconds:.0f} s"
                    break
                time.sleep(LOOK_SECONDS)
        finally:
            # As a person would: the interrupt first, which ends the ranks of every host.
            end_processes([process], signal.SIGINT, END_SECONDS)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    seconds, peaks = step_seconds(out), _PEAK.findall(text)
    peak = int(float(peaks[-1]) * 2**30) if peaks else None
    if len(seconds) >= steps:
        return seconds[:steps], peak, ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error[")]
    cause = (errors or lines[-1:] or [f"exit code {process.returncode}"])[0]
    return seconds, peak, why or f"did not run: {cause}"[:300]


def step_seconds(out: Path) -> list[float]:
    """Return the seconds of each step so far."""
    return [float(line["step_seconds"]) for line in read_json_lines(out / "run" / "metrics.jsonl")]


def add_runs(problem: Problem, runs: Sequence[RunMeasurement]) -> Measurements:
    """Return the recipe's measurements with these runs in place of earlier ones of the same
    layouts.

    Measurements of a different model are dropped, the constants kept.
    """
    recipe, graph = problem.recipe, problem.graph
    measured, calibration = recipe.cluster.measured, calibration_for(recipe, graph)
    fresh = [run.pins for run in runs]
    earlier = (
        [] if calibration is None else [run for run in calibration.runs if run.pins not in fresh]
    )
    cluster = problem.cluster
    machine = MeasuredMachine(
        device=cpu_name() if cluster.gpu.is_cpu else cluster.gpu.name,
        is_cpu=cluster.gpu.is_cpu,
        cores=cores(),
        nodes=cluster.nodes,
        ranks=cluster.world_size,
        threads=max(1, cores() // cluster.gpus_per_node),
        precision=recipe.training.precision,
        versions=versions(),
    )
    return Measurements(
        kind=KIND,
        version=VERSION,
        machine=measured.found.machine if measured else machine,
        model=graph.config_hash,
        target=recipe.target,
        sequence_length=recipe.training.sequence_length,
        constants=measured.found.constants if measured else {},
        layers=calibration.layers if calibration else (),
        engine=calibration.engine if calibration else (),
        samples=measured.found.samples if measured else (),
        runs=(*earlier, *runs),
    )
