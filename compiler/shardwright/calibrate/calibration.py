"""Calibrate: compile shallow copies of the model, measure in separate processes, and fit
constants."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.calibrate.calibration_file import measurements
from shardwright.calibrate.measurement_job import (
    EngineJob,
    Job,
    LayerJob,
    MeasurementPlan,
    ProcessResult,
    measurement_plan,
    versions,
)
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe, resolve_recipe
from shardwright.diagnostics import Refusal, refusal
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.measurements import MeasuredMachine, Measurements
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_search import baselines, search
from shardwright.utils.child_processes import end_processes
from shardwright.utils.json_values import JsonObject

# Shallow copies of the recipe's model for the measuring processes. Widths, heads and vocabulary are
# the model's own, so each layer is unchanged.


MODEL = "model"
SHORT = 16
"""Sequence length (tokens) for measuring the engine's own time."""
ACCUMULATION = (1, 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """Describe a copy that one process builds.

    places: decoder layers of the full model, as indices into its layers (0 is the embedding).
    """

    tensor: int = 1
    zero_stage: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    length: int
    places: tuple[int, ...]
    checkpointing: Checkpointing = "none"


def shallow_model(graph: ModelGraph, places: Sequence[int], folder: Path) -> Path:
    """Write a folder with only the configuration, which is enough for random weights."""
    from shardwright.models.tiny_config import truncate_layers

    folder.mkdir(parents=True, exist_ok=True)
    config = {**graph.config, **truncate_layers(graph.config, tuple(place - 1 for place in places))}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def document_of(recipe: Recipe, shape: CopyShape, model: Path) -> JsonObject:
    """Return a recipe of the copy on one node, without the data, launcher and checkpoints of the
    original."""
    document = recipe.document
    training: JsonObject = dict(document["training"])  # type: ignore[arg-type]
    cluster: JsonObject = dict(document["cluster"])  # type: ignore[arg-type]
    kept = ("gpu", "intra_node_gbytes_per_second", "inter_node_gbits_per_second")
    return {
        "version": 1,
        "name": "calibrate",
        "target": recipe.target,
        "model": {
            "source": str(model),
            "weights": "random",
            "attention": recipe.model.attention,
            "loss": "full",
        },
        "cluster": {
            "nodes": 1,
            "gpus_per_node": shape.tensor,
            **{key: cluster[key] for key in kept},
        },
        "training": {
            "sequence_length": shape.length,
            "global_batch_size": shape.micro_batch * shape.accumulation,
            "steps": 1,
            "precision": training["precision"],
            "gradient_accumulation_dtype": training["gradient_accumulation_dtype"],
            "optimizer": training["optimizer"],
            "gradient_clipping": training["gradient_clipping"],
        },
        "data": {"kind": "synthetic"},
        "parallelism": {
            "tensor": shape.tensor,
            "pipeline": 1,
            "data": 1,
            "zero_stage": shape.zero_stage,
            "micro_batch_size": shape.micro_batch,
            "activation_checkpointing": shape.checkpointing,
        },
    }


def compile_copy(recipe: Recipe, shape: CopyShape, model: Path, folder: Path) -> Path:
    """Compile a copy. Raises Refusal as `compile` does: it does not fit, or the engine does not run
    it on one rank."""
    folder.mkdir(parents=True)
    path = folder / "recipe.json"
    path.write_text(json.dumps(document_of(recipe, shape, model)), encoding="utf-8")
    write_folder(folder / "out", compile_recipe(load_recipe(path)).files)
    return folder / "out"


GRACE_SECONDS = 240
"""Time (s) for imports, models and minimum repeats, on a machine that may be busy."""
ProgressCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Hold the measurements.

    skipped: what could not be measured, and why.
    """

    found: Measurements
    skipped: tuple[str, ...]


def calibrate(recipe: Recipe, seconds: float, report_progress: ProgressCallback) -> Calibration:
    """Calibrate this machine for a recipe.

    seconds: time to measure, without building the copies.
    Raises what the recipe is refused for, SW5501 (not the recipe's machine), SW5502 (a measuring
    process fails).
    """
    problem, _ = resolve_recipe(recipe)
    check_preflight(problem)
    plan = measurement_plan(problem, (*search(problem).ranked, *baselines(problem)))
    folder = Path(tempfile.mkdtemp(prefix="shardwright-calibrate-"))
    try:
        job, skipped = _job(problem, plan, folder, seconds, report_progress)
        report_progress(
            f"measuring with {job.ranks} process{'' if job.ranks == 1 else 'es'} for "
            f"{seconds:.0f} s"
        )
        results = _measured(job, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    machine = MeasuredMachine(
        device=results[0].device,
        is_cpu=job.is_cpu,
        cores=cores(),
        nodes=1,
        ranks=job.ranks,
        threads=job.threads,
        precision=job.precision,
        versions=versions(),
    )
    found = measurements(problem, machine, results)
    every = (*skipped, *dict.fromkeys(each for one in results for each in one.skipped))
    return Calibration(found=found, skipped=every)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """Count GPUs in a separate process, so that CUDA is not initialized in this one."""
    ask = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0


def check_preflight(problem: Problem) -> None:
    """Raise SW5501 where the recipe is for a GPU and this machine has none."""
    if problem.cluster.gpu.is_cpu or visible_gpus():
        return
    raise refusal(
        "SW5501",
        f"the recipe is for {problem.cluster.gpu.name}, and this machine has no GPU",
        "Measure on a node of the cluster, or set `gpu: cpu` to measure this CPU.",
        ("cluster", "gpu"),
    )


def _job(
    problem: Problem,
    plan: MeasurementPlan,
    folder: Path,
    seconds: float,
    report_progress: ProgressCallback,
) -> tuple[Job, tuple[str, ...]]:
    recipe, graph = problem.recipe, problem.graph
    is_cpu = problem.cluster.gpu.is_cpu
    ranks = (
        problem.cluster.gpus_per_node
        if is_cpu
        else min(visible_gpus(), problem.cluster.gpus_per_node)
    )
    threads = max(1, cores() // ranks)
    skipped: list[str] = []
    report_progress("building shallow copies of the model")
    layers: list[LayerJob] = []
    engine: list[EngineJob] = []
    if recipe.model.trust_remote_code is None:
        length, last = recipe.training.sequence_length, len(graph.layers) - 1
        model = shallow_model(graph, plan.places, folder / "kinds")
        for each in plan.layers:
            shape = CopyShape(tensor=each.tensor, length=length, places=plan.places)
            with _collect_errors(skipped, f"layers at tensor {each.tensor}"):
                out = compile_copy(recipe, shape, model, folder / f"tensor-{each.tensor}")
                layers.append(
                    LayerJob(
                        folder=str(out),
                        tensor=each.tensor,
                        micro_batches=each.micro_batches,
                        checkpointing=each.checkpointing,
                        places=plan.places,
                        last=last,
                    )
                )
        for stage in plan.zero_stages:
            with _collect_errors(skipped, f"the engine at ZeRO-{stage}"):
                engine.append(
                    EngineJob(
                        zero_stage=stage, folders=_engine_folders(problem, plan, stage, folder)
                    )
                )
    else:
        skipped.append("layers and engine: the model has its own Python code")
    job = Job(
        is_cpu=is_cpu,
        precision=recipe.training.precision,
        threads=threads,
        uses_cpu_time=is_cpu and threads == 1,
        seconds=seconds,
        ranks=ranks,
        ranks_per_node=ranks,
        products=plan.products,
        attention=plan.attention,
        heads=graph.attention_heads,
        head_dim=graph.head_dim,
        layers=tuple(layers),
        engine=tuple(engine),
    )
    return job, tuple(skipped)


def _engine_folders(
    problem: Problem, plan: MeasurementPlan, stage: int, folder: Path
) -> tuple[str, ...]:
    """Compile copies with one and two decoder layers of the first kind, and one and several
    micro-batches."""
    folders = []
    for layers in (1, 2):
        places = plan.places[:1] * layers
        model = shallow_model(problem.graph, places, folder / f"layers-{layers}")
        for accumulation in ACCUMULATION:
            shape = CopyShape(
                zero_stage=stage,
                accumulation=accumulation,
                length=SHORT,
                places=places,
            )
            where = folder / f"zero-{stage}-{layers}-{accumulation}"
            folders.append(str(compile_copy(problem.recipe, shape, model, where)))
    return tuple(folders)


@contextlib.contextmanager
def _collect_errors(skipped: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        first = refusal.diagnostics[0]
        skipped.append(f"{what}: {first.code}: {first.message}")


def _measured(job: Job, folder: Path) -> list[ProcessResult]:
    """Run the measuring processes, and return their results. Raises SW5502."""
    job.write(folder)
    logs = [folder / f"log-{rank}" for rank in range(job.ranks)]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_SIZE": str(job.ranks),
        "OMP_NUM_THREADS": str(job.threads),
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "shardwright.calibrate.calibration_process",
                            str(folder),
                        ],
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _wait(processes, job.seconds + GRACE_SECONDS * job.ranks)
    finally:
        end_processes(processes)
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        text = logs[failed[0]].read_text("utf-8", "replace").strip().splitlines() or ["no output"]
        why = f"measuring process {failed[0]} failed: {' '.join(text[-1].split())[:300]}"
        raise refusal(
            "SW5502",
            why,
            "Give more time with --minutes; `shardwright doctor` checks the machine.",
        )
    return [ProcessResult.read(folder, rank) for rank in range(job.ranks)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all are done, one has failed, or the time is up."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes) or any(code not in (0, None) for code in codes):
            return
        time.sleep(0.1)
