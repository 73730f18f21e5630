"""The one reader of a compiled folder: the plan, and the model and recipe that it came from.

plan.json has every decision and prediction. How its step runs and what else the search saw are not
in there: both are computed again from recipe.resolved.json and model_graph.json, by the planner's
own functions: no torch, no network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Diagnostic, Refusal, found, refusal
from shardwright.engines.engine_table import ENGINES, engine_of, lowering_of, recipe_for_engine
from shardwright.launch.launchers.launch_files import SCRIPT_NAMES, launch_files
from shardwright.layout.formats import accumulation_dtype
from shardwright.layout.gpu_cluster import Cluster, resolve_cluster
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph, config_sha256
from shardwright.models.model_graph_json import GRAPH_FILE, graph_to_json, read_graph
from shardwright.plan.folder_paths import (
    MODEL_DIRECTORY,
    PLAN_FILE,
    RUN_DIRECTORY,
    TOKENIZER_DIRECTORY,
)
from shardwright.plan.plan import Plan, load_plan, plan_to_json
from shardwright.recipe.measurements import MEASURED_FILE
from shardwright.recipe.plain_secrets import holds_secret, secrets_of_document
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import (
    DataSection,
    Recipe,
    with_resolved_kernels,
)
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.utils.file_io import parse_json, read_regular_file
from shardwright.utils.json_values import canonical_hash, json_bytes
from shardwright.utils.run_lease import is_locked_by_run, live_owner

# Stage 7: a Plan becomes files.


MARKER = ".shardwright"
RESOLVED_RECIPE = "recipe.resolved.json"
JOB_SCRIPT = "launch/job.sh"
MARKER_TEXT = b"This folder was written by shardwright compile, which may replace its files.\n"
EXECUTABLE_FILES = SCRIPT_NAMES


def compiled_files(
    plan: Plan, recipe: Recipe, graph: ModelGraph
) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """(path relative to the compiled folder -> content, without plan.json (`sealed`), warnings).
    Depends on nothing but its arguments and the templates."""
    own, warnings = lowering_of(recipe.target).files(plan, graph.config)
    files = {
        MARKER: MARKER_TEXT,
        RESOLVED_RECIPE: json_bytes(recipe.document),
        plan.model.config_file: json_bytes(graph.config),
        GRAPH_FILE: graph_to_json(graph).encode("utf-8"),
        **launch_files(plan),
        **own,  # also where an engine starts its ranks in a way of its own
    }
    return files, warnings


def with_file_digests(plan: Plan, files: Mapping[str, bytes]) -> tuple[Plan, dict[str, bytes]]:
    """The plan with the digests of what a run reads as data, and the files with plan.json. Scripts
    may be edited, a model's own code has digests of its own, and the rest is for readers."""
    own = {
        f"{MODEL_DIRECTORY}/{name}"
        for name, _ in (plan.model.remote_code.files if plan.model.remote_code else ())
    }
    inputs = engine_of(plan).inputs
    read = [
        name
        for name in files
        if name in inputs or name.split("/")[0] in (MODEL_DIRECTORY, TOKENIZER_DIRECTORY)
    ]
    digests = {name: hashlib.sha256(files[name]).hexdigest() for name in sorted(set(read) - own)}
    plan = replace(plan, digests=digests)
    return plan, {**files, PLAN_FILE: plan_to_json(plan).encode("utf-8")}


# Writes the compiled folder: all of it or nothing, and never over something that is not ours.


TEMPORARY = ".shardwright-"
_ENGINES = tuple(name for engine in ENGINES.values() for name in engine.artifacts)
ARTIFACT_FOLDERS: tuple[str, ...] = (
    *(name.removesuffix("/") for name in _ENGINES if name.endswith("/")),
    *("launch", MODEL_DIRECTORY, TOKENIZER_DIRECTORY),
)
ARTIFACT_ROOTS: tuple[str, ...] = (
    *(MARKER, PLAN_FILE, *(name for name in _ENGINES if not name.endswith("/"))),
    *(RESOLVED_RECIPE, MEASURED_FILE, GRAPH_FILE, "launch.sh", "train.py"),
    *ARTIFACT_FOLDERS,
)
"""First path components that `compile` may write, and therefore may replace or remove."""


def check_output_folder(directory: Path) -> None:
    """Raises Refusal unless `directory` is absent, empty, or an earlier output of ours. Writes
    nothing."""
    try:
        if not directory.exists():
            if directory.is_symlink():
                raise refusal(
                    "SW5101", f"{str(directory)!r} is a link to nothing", "Remove the link."
                )
            # Refused at once, not after the compile.
            nearest = next(path for path in directory.absolute().parents if path.exists())
            if not nearest.is_dir():
                raise refusal(
                    "SW5101",
                    f"{str(directory)!r} cannot be a folder: {str(nearest)!r} is a file",
                    "Give -o another name.",
                )
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise refusal(
                    "SW5103",
                    f"{str(directory)!r} cannot be written: no permission to write in "
                    f"{str(nearest)!r}",
                    "Give -o a folder that you may write to.",
                )
            return
        if not directory.is_dir():
            raise refusal(
                "SW5101", f"{str(directory)!r} is a file, not a folder", "Give -o another name."
            )
        entries = sorted(path.name for path in directory.iterdir())
        if entries and not _has_marker(directory):
            raise refusal(
                "SW5102",
                (
                    f"{str(directory)!r} is not empty and was not written by shardwright (it holds "
                    f"{entries[0]!r})"
                ),
                "Give -o a new folder, or empty this one yourself. Nothing was written.",
            )
        for root in ARTIFACT_ROOTS:
            path = directory / root
            is_folder_root = root in ARTIFACT_FOLDERS
            if path.is_symlink() or (path.exists() and path.is_dir() != is_folder_root):
                raise refusal(
                    "SW5104",
                    f"{str(path)!r} is not what compile wrote there",
                    "Remove it and compile again.",
                )
        # `run` holds a lock on this host while its ranks live; on any host they hold a lease.
        leases = (directory / RUN_DIRECTORY / name for name in ("lease", "supervisor.lease"))
        if is_locked_by_run(directory) or any(live_owner(lease) is not None for lease in leases):
            raise refusal(
                "SW5106",
                f"a run of {str(directory)!r} is alive, and its ranks read these files",
                "Wait for it or end it (`touch run/stop` in the folder), or give -o another name.",
            )
    except OSError as error:
        raise _os_refusal(directory, error) from None


def check_checkpoint_folder(directory: str) -> tuple[Diagnostic, ...]:
    """A checkpoint folder must not be, hold or lie inside what `compile` and `run` write."""
    parts = [part for part in directory.split("/") if part not in ("", ".")]
    taken = (*ARTIFACT_ROOTS, RUN_DIRECTORY)
    # "~" would be a folder of that name: nobody expands it on the nodes.
    own = (
        bool(parts) and parts[0] not in taken and ".." not in parts and not parts[0].startswith("~")
    )
    if directory.startswith("/") or own:
        return ()
    message = (
        f"checkpoint.directory: {directory!r} is not a folder of its own inside the compiled folder"
    )
    help = (
        "Use a name that compile and run do not write to, such as `checkpoints`, or an "
        "absolute path."
    )
    return (found("SW5105", "checkpoint.directory", message, help),)


def write_folder(directory: Path, files: Mapping[str, bytes]) -> None:
    """A new folder appears whole, by one rename. In our own folder every file is replaced by one
    rename each, artifacts that are no longer made go, and everything else (run/, checkpoints,
    notes) stays. There, plan.json goes first and comes back last: a folder that was cut off in
    between has no plan, so nothing runs a mixture. A file that holds a secret is readable by this
    user alone.
    """
    check_output_folder(directory)
    resolved = files.get(RESOLVED_RECIPE)
    plain = () if resolved is None else secrets_of_document(json.loads(resolved))
    created: list[Path] = []
    staged: Path | None = None
    try:
        # Inside the folder where it exists: a rename does not cross file systems, and the folder
        # may be a mount.
        parent = directory if directory.exists() else directory.parent
        for path in reversed([p for p in (parent, *parent.parents) if not p.exists()]):
            path.mkdir()
            created.append(path)
        staged = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        staged.mkdir()
        for name, content in files.items():
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if holds_secret(content, plain):
                path.touch(mode=0o600)
            path.write_bytes(content)
            if name in EXECUTABLE_FILES:
                mode = path.stat().st_mode
                path.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it
        if JOB_SCRIPT in files:  # Slurm opens run/slurm-%j.log before anything starts
            (staged / RUN_DIRECTORY).mkdir()
        with _signals_blocked():
            if parent is directory:
                if JOB_SCRIPT in files:
                    (directory / RUN_DIRECTORY).mkdir(exist_ok=True)
                # The marker first: a folder that is cut off half way is still known as ours. The
                # plan last.
                (directory / PLAN_FILE).unlink(missing_ok=True)
                for name in sorted(
                    files, key=lambda name: (name != MARKER, name == PLAN_FILE, name)
                ):
                    (directory / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(staged / name, directory / name)
                shutil.rmtree(staged)
                kept_roots = {name.split("/")[0] for name in files}
                for root in ARTIFACT_ROOTS:
                    path = directory / root
                    if root not in kept_roots and path.is_dir():
                        shutil.rmtree(path)
                    elif root not in kept_roots:
                        path.unlink(missing_ok=True)
                    elif path.is_dir():
                        for child in path.iterdir():
                            if f"{root}/{child.name}" not in files and not child.is_dir():
                                child.unlink()
            else:
                os.rename(staged, directory)
    except BaseException as error:  # Ctrl-C leaves nothing behind either
        if staged is not None:
            shutil.rmtree(staged, ignore_errors=True)
        for folder in reversed(created):
            if not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError):
            raise _os_refusal(directory, error) from None
        raise


def remove_surplus_island_plans(directory: Path, count: int) -> None:
    """Remove the plans of islands that an earlier compile made and this one does not. Their runs
    and checkpoints stay."""
    for path in directory.glob("island-*"):
        number = path.name.removeprefix("island-")
        if number.isdecimal() and int(number) >= count and path.is_dir() and _has_marker(path):
            (path / PLAN_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Signals that end the process wait until the renames are through."""
    previous = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _has_marker(directory: Path) -> bool:
    marker = directory / MARKER
    return marker.is_file() and marker.read_bytes() == MARKER_TEXT


def _os_refusal(directory: Path, error: OSError) -> Refusal:
    named = error.filename if isinstance(error.filename, str) else ""
    # Our own temporary folder means nothing to the reader.
    place = f" ({named})" if named and TEMPORARY not in named else ""
    return refusal(
        "SW5103",
        f"{str(directory)!r} cannot be written: {error.strerror or error}{place}".replace(
            "\n", "\\n"
        ),
        (
            "Give -o a folder that you may write to, on a disk with room. Earlier files there are "
            "unharmed."
        ),
    )


STEP_SECONDS_TOLERANCE = 1e-9
"""Relative, of the step time: the same formulas give the same figures but for the last digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFolder:
    """layout, estimate: the plan's strategy and placing, priced again by this version's cost
    model."""

    folder: Path
    plan: Plan
    recipe: Recipe
    layout: PricedLayout
    estimate: Estimate

    @property
    def graph(self) -> ModelGraph:
        return self.layout.graph

    @property
    def cluster(self) -> Cluster:
        return self.layout.cluster

    @property
    def has_stale_prediction(self) -> bool:
        """The plan's own prediction is another one: it was compiled by another version of the cost
        model."""
        then, now = self.plan.predicted, self.estimate
        steps = (then.time.step_seconds, now.time.step_seconds)
        return (
            then.memory != now.memory
            or abs(steps[0] - steps[1]) > STEP_SECONDS_TOLERANCE * steps[0]
        )


def read_folder(folder: Path) -> CompiledFolder:
    """Errors: SW6001 no compiled folder; SW3321, SW3322 its recipe or model is not the plan's;
    those of the recipe."""
    plan = load_plan(folder)
    path = folder / RESOLVED_RECIPE
    if not path.is_file():
        raise _mismatch("SW3321", f"{str(folder)!r} has no {RESOLVED_RECIPE}")
    recipe = load_recipe(path)
    if canonical_hash(recipe.document) != plan.recipe_hash:
        raise _mismatch(
            "SW3321", f"{str(path)!r} is not the recipe that plan.json was compiled from"
        )
    # What was auto of the engine, the nodes, every_steps and the sums was settled by the compile;
    # relative paths start where the recipe lay.
    held_out = recipe.validation
    if (
        held_out is not None
        and held_out.data is not None
        and plan.validation is not None
        and plan.validation.data
    ):
        held_out = dataclasses.replace(
            held_out, data=_with_plan_paths(held_out.data, plan.validation.data)
        )
    training = recipe.training
    if plan.training.gradient_accumulation_dtype != accumulation_dtype(training):
        dtype = plan.training.gradient_accumulation_dtype
        training = dataclasses.replace(training, gradient_accumulation_dtype=dtype)
    recipe = dataclasses.replace(
        with_resolved_kernels(recipe_for_engine(recipe, engine_of(plan)), plan.model.kernels),
        training=training,
        cluster=dataclasses.replace(recipe.cluster, nodes=plan.nodes),
        checkpoint=dataclasses.replace(
            recipe.checkpoint,
            every_steps=plan.checkpoint.every_steps,
            in_memory_every=plan.checkpoint.in_memory_every,
        ),
        data=None if recipe.data is None else _with_plan_paths(recipe.data, plan.data),
        validation=held_out,
    )
    try:
        graph = read_graph(folder)
        config = parse_json(read_regular_file(folder / plan.model.config_file))
        if not isinstance(config, dict):
            raise ValueError(f"{plan.model.config_file} is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        cause = " ".join(str(error).split())[:200]
        raise _mismatch("SW3322", f"the model of {str(folder)!r} cannot be read: {cause}") from None
    hashes = (graph.config_hash, config_sha256(graph.config), config_sha256(config))
    if any(each != plan.model.config_hash for each in hashes):
        raise _mismatch(
            "SW3322", f"the model of {str(folder)!r} is not the one that plan.json was compiled for"
        )
    cluster = resolve_cluster(recipe.cluster)
    layout, estimate = price_planned_layout(
        Problem(recipe=recipe, graph=graph, cluster=cluster), plan.strategy, plan.boundaries
    )
    return CompiledFolder(folder=folder, plan=plan, recipe=recipe, layout=layout, estimate=estimate)


def _with_plan_paths(data: DataSection, plan: DataSection) -> DataSection:
    parts = tuple(_with_plan_paths(*each) for each in zip(data.mixture, plan.mixture, strict=True))
    return dataclasses.replace(data, path=plan.path, mixture=parts)


def _mismatch(code: str, message: str) -> Refusal:
    help = (
        "Compile the folder again: `shardwright compile RECIPE -o DIR` keeps its run and "
        "checkpoints."
    )
    return refusal(code, message, help)
