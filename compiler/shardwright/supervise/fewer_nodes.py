"""Plan a compiled folder's recipe again for fewer nodes, in a folder inside run/ that shares its
run and its checkpoints (compiler/decisions/050-supervisor.md). No torch in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.compile.compiled_folder import RESOLVED_RECIPE
from shardwright.diagnostics import Diagnostic, Refusal, refusal
from shardwright.engines.engine_table import engine_of, recipe_for_engine
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph_json import read_graph
from shardwright.plan.folder_paths import MODEL_DIRECTORY, SETUP_SCRIPT
from shardwright.plan.plan import Plan
from shardwright.recipe.measurements import MEASURED_FILE
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import DataSection, with_resolved_kernels
from shardwright.search.layout_search import choose_layout
from shardwright.search.recovery_goodput import DEGREES, KEPT_PINS
from shardwright.utils.child_processes import shardwright_command
from shardwright.utils.file_io import parse_json, read_regular_file, write_atomically
from shardwright.utils.json_values import strict_json

PLANS_FOLDER = "run/plans"


class FewerNodes:
    """Plans of a compiled folder for fewer nodes, each made once.

    estimates: the layouts, by the number of nodes; refusals: why there is none
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.estimates: dict[int, Estimate] = {}
        self.refusals: dict[int, tuple[Diagnostic, ...]] = {}
        self._recipes: dict[int, Path] = {}

    def can_plan(self, nodes: int) -> bool:
        """Return whether a layout on so many nodes trains the same global batch."""
        if nodes not in self._recipes and nodes not in self.refusals:
            errors: tuple[Diagnostic, ...] = ()
            for parallelism in self._parallelism_choices():
                path = self._write_recipe(nodes, parallelism)
                try:
                    self.estimates[nodes] = self._choose_layout(path)
                except Refusal as refused:
                    errors = errors or refused.diagnostics
                    continue
                self._recipes[nodes] = path
                return True
            self.refusals[nodes] = errors
        return nodes in self._recipes

    def compile(self, nodes: int) -> Path:
        """Return the compiled folder for so many nodes, which can_plan has accepted. Raises
        Refusal, SW6325, where the compile fails."""
        target, recipe = self.folder / PLANS_FOLDER / f"nodes-{nodes}", self._recipes[nodes]
        if not (target / "plan.json").is_file():
            shutil.rmtree(target, ignore_errors=True)
            done = subprocess.run(
                shardwright_command("compile", str(recipe), "-o", str(target)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if done.returncode != 0:
                print(done.stderr, end="", file=sys.stderr, flush=True)
                message = f"the compile for {nodes} nodes ended with code {done.returncode}"
                raise refusal("SW6325", message, f"Try `shardwright compile {recipe} -o DIR`.")
        self._link(target)
        return target

    def _parallelism_choices(self) -> Iterator[dict[str, Any]]:
        """Yield the recipe's degrees with data free, then without pinned degrees, then without any
        key that a degree could contradict."""
        given = dict(self._document()["parallelism"] or {})
        yield {**given, "data": "auto"}
        yield {**given, **dict.fromkeys(DEGREES, "auto")}
        yield {key: given[key] for key in KEPT_PINS if key in given}

    def _document(self) -> dict[str, Any]:
        document = parse_json(read_regular_file(self.folder / RESOLVED_RECIPE))
        assert isinstance(document, dict), "compile wrote it"
        return document

    def _write_recipe(self, nodes: int, parallelism: dict[str, Any]) -> Path:
        """Write the recipe for so many nodes. What compile settled of `auto`, and the files that it
        copied or found, are taken from the plan: relative paths began at the recipe's folder."""
        plan, document = self.plan, self._document()
        training, launch = dict(document["training"]), dict(document["launch"])
        cluster, model = dict(document["cluster"]), dict(document["model"])
        training["days_at_most"] = None
        if training["gradient_accumulation_dtype"] == "auto":
            dtype = plan.training.gradient_accumulation_dtype
            training["gradient_accumulation_dtype"] = dtype or "auto"
        if cluster["measured"] is not None:
            cluster["measured"] = {
                **cluster["measured"],
                "file": str((self.folder / MEASURED_FILE).resolve()),
            }
        if model["source"] is not None:
            model |= {"source": self._model_folder(), "weights": plan.model.weights}
            if model["trust_remote_code"] is not None:
                model["trust_remote_code"] = model["source"]
        launch |= {"launcher": plan.launch.launcher, "hostfile": None}
        slurm = plan.launch.slurm
        if slurm is not None and slurm.container is not None:
            # The links to run/ and to the checkpoints lead out of the new folder.
            mounts = [*slurm.container.mounts, str(self.folder.resolve())]
            container = {**launch["slurm"]["container"], "mounts": mounts}
            launch["slurm"] = {**launch["slurm"], "container": container}
        if launch["setup_script"] is not None:
            launch["setup_script"] = str((self.folder / SETUP_SCRIPT).resolve())
        document |= {
            "target": plan.target,
            "training": training,
            "cluster": {**cluster, "nodes": nodes},
            "model": model,
            "launch": {**launch, "recovery": None},
            "parallelism": parallelism,
            "data": self._data(document["data"], plan.data),
            "checkpoint": {
                **document["checkpoint"],
                "every_steps": plan.checkpoint.every_steps,
                **_memory_interval(plan),
            },
        }
        held_out = plan.validation
        if held_out is not None and held_out.data is not None:
            document["validation"] = self._data(document["validation"], held_out.data)
        path = self.folder / PLANS_FOLDER / f"nodes-{nodes}.recipe.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, strict_json(document) + "\n")
        return path

    def _model_folder(self) -> str:
        """Return the folder of the weights, or of the configuration where weights are random."""
        return self.plan.model.weights_path or str((self.folder / MODEL_DIRECTORY).resolve())

    def _data(self, document: dict[str, Any] | None, data: DataSection) -> dict[str, Any] | None:
        """Return a data section with the plan's absolute paths."""
        if document is None:
            return None
        found = dict(document)
        if "mixture" in found:
            pairs = zip(found["mixture"], data.mixture, strict=True)
            return {**found, "mixture": [self._data(part, own) for part, own in pairs]}
        if data.path is not None:
            found["path"] = data.path
        if data.tokenizer is not None and (self.folder / data.tokenizer).is_dir():
            found["tokenizer"] = str((self.folder / data.tokenizer).resolve())
        if data.images is not None and data.images.folder is not None:
            found["images"] = {**found["images"], "folder": data.images.folder}
        return found

    def _choose_layout(self, path: Path) -> Estimate:
        """Search the recipe's layouts. Raises Refusal."""
        recipe = load_recipe(path)
        recipe = with_resolved_kernels(
            recipe_for_engine(recipe, engine_of(self.plan)), self.plan.model.kernels
        )
        cluster = resolve_cluster(recipe.cluster)
        cluster.verify()
        problem = Problem(recipe=recipe, graph=read_graph(self.folder), cluster=cluster)
        return choose_layout(problem)

    def _link(self, target: Path) -> None:
        """Let the plan's run/ and checkpoint folder be the run's own."""
        names = ["run"]
        directory = Path(self.plan.checkpoint.directory)
        if not directory.is_absolute():
            names.append(directory.parts[0])
            (self.folder / directory).mkdir(parents=True, exist_ok=True)
        for name in names:
            link, own = target / name, (self.folder / name).resolve()
            if link.is_symlink() and os.readlink(link) == str(own):
                continue
            if link.is_dir() and not link.is_symlink():
                link.rmdir()  # compile makes an empty run/ for Slurm's log
            link.unlink(missing_ok=True)
            link.symlink_to(own, target_is_directory=True)


def _memory_interval(plan: Plan) -> dict[str, int | None]:
    if not plan.checkpoint.in_memory:
        return {}
    return {"in_memory_every": plan.checkpoint.in_memory_every}


def unplannable_text(nodes: int, errors: tuple[Diagnostic, ...]) -> str:
    """Return why the run cannot be planned for so many nodes, in one line."""
    first = errors[0] if errors else None
    why = "" if first is None else f": {first.code} {first.message}"
    return f"the run cannot be planned again for {nodes} nodes{why}"
