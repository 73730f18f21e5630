"""Compiled folders whose ranks fail at a planned step, for runs under a supervisor."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.monitor.attempt_records import read_attempts
from shardwright.utils.numeric_difference import max_series_diff
from tests.parity.harness import STEPS, Case, metrics, must, recipe, shardwright, write_inputs

EVERY = 2
LOSS_TOLERANCE = 1e-6
RESTART_SECONDS = 60.0
"""Limits the time from the last step to the start of the next attempt."""

PLANT = """
import dataclasses, math, os, signal, time
from shardwright.train.training_session import Session
_train = Session.train
def _planted(self, step, *rest):
    for at, attempts, rank, act in {faults!r}:
        if step == at and (not attempts or self.attempt in attempts):
            if act == "nan":
                whole = self._trainer.step
                def stepped(*a):
                    return dataclasses.replace(whole(*a), loss=math.nan)
                self._trainer.step = stepped
            elif rank == self.rank:
                if act == "kill": os.kill(os.getpid(), signal.SIGKILL)
                if act == "raise": raise RuntimeError("planted")
                if act == "hang": time.sleep(3600)
                if act == "preempt": os.kill(os.getpid(), signal.SIGUSR1)
                if act == "slow": time.sleep(1)
    return _train(self, step, *rest)
Session.train = _planted
"""
POISON = """
import dataclasses, math, torch
from torch import distributed as dist
from shardwright.train.training_session import Session
_build = Session.__init__
def _built(self, *rest):
    _build(self, *rest)
    whole = self._trainer.step
    def stepped(batches, rate):
        found = any(bool((b.input_ids == {token}).any()) for b in batches)
        flag = torch.tensor([float(found)])
        dist.all_reduce(flag)
        result = whole(batches, rate)
        if not flag.item():
            return result
        for shard in self._trainer.owned_shards():
            for values in (shard.live, *shard.states.values()):
                values.mul_(math.nan)
        return dataclasses.replace(result, loss=math.nan)
    self._trainer.step = stepped
Session.__init__ = _built
"""
"""Ranks whose weights and loss are NaN after a step that trains the token."""

Fault = tuple[int, tuple[int, ...], int, str]
"""(step, attempts or () for all, rank, kill | raise | hang | preempt | slow | nan)."""


def write_supervised_recipe(
    case: Case, folder: Path, recovery: dict[str, Any] | None = None, **training: Any
) -> Path:
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"] |= training
    document["checkpoint"] = {"every_steps": EVERY}
    document["launch"]["recovery"] = recovery or {}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(document))
    return path


def compile_with_faults(path: Path, out: Path, *faults: Fault) -> Path:
    must(shardwright("compile", path, "-o", out))
    if faults:
        script = out / "train.py"
        script.write_text(PLANT.format(faults=list(faults)) + script.read_text())
    return out


def status(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "run" / "status.json").read_text())
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartSeconds:
    """Hold the parts of a restart.

    noticed: from the last step to the end of the attempt; None where the attempt trained no step.
    decided: from there to the start of the next attempt. started: from there to its first step.
    """

    noticed: float | None
    decided: float
    started: float

    def check(self) -> None:
        """Assert that the restart took a minute at most, without its start-up."""
        assert (self.noticed or 0) + self.decided <= RESTART_SECONDS, self

    def figures(self) -> dict[str, float]:
        return {
            f"seconds_{name}": round(getattr(self, name) or 0.0, 1)
            for name in ("noticed", "decided", "started")
        }


def restart_seconds(out: Path) -> Iterator[RestartSeconds]:
    """Yield the parts of each restart of a run whose last attempt trained."""
    attempts = read_attempts(out)
    for before, after in itertools.pairwise(attempts):
        end, last = before["end"]["time"], before["end"]["last_step_time"]
        start, first = after["start"]["time"], after["end"]["first_step_time"]
        if first is not None:
            yield RestartSeconds(
                noticed=None if last is None else end - last,
                decided=start - end,
                started=first - start,
            )


def check_same_losses(out: Path, whole: Path, *, relative: bool = False) -> float:
    """One line a step, and the losses of the run that was not interrupted. Return the largest
    difference.

    relative: of another layout, whose sums are rounded in another order
    """
    lines, wanted = metrics(out), metrics(whole)
    assert [m["step"] for m in lines] == list(range(1, len(wanted) + 1))
    off = max_series_diff(
        [m["loss"] for m in lines], [m["loss"] for m in wanted], relative=relative
    )
    assert off <= LOSS_TOLERANCE, off
    return off


__all__ = [
    "EVERY",
    "STEPS",
    "RestartSeconds",
    "check_same_losses",
    "compile_with_faults",
    "restart_seconds",
    "status",
]
