"""Log rank 0's metrics to TensorBoard and Weights & Biases.

No torch at module level: `run` checks the packages first. A run has one id for all its attempts
(run/tracking.json). Steps behind a resumed checkpoint are removed where the library can
(TensorBoard's purge_step) and overwritten elsewhere. An exception in a tracker never ends training.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Diagnostic, found
from shardwright.monitor.run_files import read_json, write_json
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import WandbSection
from shardwright.utils.installation import install_command

Tracker = Callable[[int, Mapping[str, float]], None]
"""Logs a step's values by name."""


def missing_trackers(plan: Plan) -> tuple[Diagnostic, ...]:
    """Return SW6501 for each package that the plan's tracking needs and this environment lacks."""
    tracking = plan.tracking
    wanted = {
        "tensorboard": tracking is not None and tracking.tensorboard,
        "wandb": tracking is not None and tracking.wandb is not None,
    }
    return tuple(
        found(
            "SW6501",
            None,
            f"tracking.{name} needs the package {name}, which is not installed",
            f"{install_command(name)}, or remove it from the recipe and compile again.",
        )
        for name, asked in wanted.items()
        if asked and importlib.util.find_spec(name) is None
    )


class ExperimentTrackers:
    """Log to every tracker of the plan; to none where the plan has none."""

    def __init__(self, plan: Plan, folder: Path, resumed_step: int) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._closers: list[Callable[[], object]] = []
        tracking = plan.tracking
        if tracking is None or not (tracking.tensorboard or tracking.wandb):
            return
        run_id = _run_id(folder, fresh=resumed_step == 0)
        if tracking.tensorboard:
            with self._disabled_on_error("tensorboard"):
                self._trackers["tensorboard"] = self._tensorboard(folder, resumed_step)
        if tracking.wandb is not None:
            with self._disabled_on_error("wandb"):
                self._trackers["wandb"] = self._wandb(tracking.wandb, plan, folder, run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._disabled_on_error(name):
                tracker(step, values)

    def close(self) -> None:
        for close in self._closers:
            with self._disabled_on_error("tracking"):
                close()

    @contextmanager
    def _disabled_on_error(self, name: str) -> Iterator[None]:
        """Turn a tracker off where it raises."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(
                f"warning: {name} is turned off, the run continues: {what}",
                file=sys.stderr,
                flush=True,
            )

    def _tensorboard(self, folder: Path, resumed_step: int) -> Tracker:
        from torch.utils.tensorboard import SummaryWriter

        purge = resumed_step + 1 if resumed_step else None
        writer: Any = SummaryWriter(str(folder / "run" / "tensorboard"), purge_step=purge)
        self._closers.append(writer.close)

        def log(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return log

    def _wandb(self, section: WandbSection, plan: Plan, folder: Path, run_id: str) -> Tracker:
        import wandb

        run: Any = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or plan.name,
            id=run_id,
            resume="allow",
            dir=str(folder / "run"),
            config={
                "recipe_hash": plan.recipe_hash,
                "strategy": asdict(plan.strategy),
                "gpu": plan.gpu,
                "nodes": plan.nodes,
            },
        )
        # A step that is trained again after a crash is logged again: the step is a value, not
        # wandb's own counter.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._closers.append(run.finish)
        return lambda step, values: run.log({"step": step, **values})


def _run_id(folder: Path, *, fresh: bool) -> str:
    """Return the run's id over all attempts; a new one where training starts from scratch."""
    path = folder / "run" / "tracking.json"
    known = read_json(path).get("run_id")
    if known and not fresh:
        return str(known)
    run_id = secrets.token_hex(8)
    write_json(path, {"run_id": run_id})
    return run_id
