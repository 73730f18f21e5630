"""tune without a launcher: which layouts run, what is made of what they took, and that a failing
one costs itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.calibrate import layout_trials as tuning
from shardwright.calibrate.layout_trials import (
    add_runs,
    launch,
    layouts_to_try,
    recipe_for,
    step_seconds_figure,
    tune,
)
from shardwright.cli.main import main
from shardwright.cost.calibrated_costs import measured_run_of
from shardwright.diagnostics import Refusal
from shardwright.layout.layout import Layout
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_search import search
from tests.unit.calibrate.measurement_files import engine, layer, measurements, problem, ran, write
from tests.unit.calibrate.test_measurement_file import recipe_file

TOLD: list[str] = []


def test_the_best_and_todays_each_once() -> None:
    given = problem(None, 4)
    rows = layouts_to_try(given, 3)
    best = [e.strategy for e in search(given).ranked[:3]]
    assert [e.strategy for e, _ in rows][:3] == best
    assert len({e.strategy for e, _ in rows}) == len(rows) <= 5
    assert {e.strategy.zero_stage for e, is_baseline in rows if is_baseline} == {2, 3}


def test_the_recipe_of_a_run(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, None))
    s = Layout(
        tensor=2,
        pipeline=1,
        data=1,
        zero_stage=0,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        activation_checkpointing="full",
        schedule="1f1b",
        offload="none",
    )
    found = recipe_for(recipe, s, 10)
    pins = found.parallelism
    assert (pins.tensor, pins.data, pins.zero_stage, pins.activation_checkpointing) == (
        2,
        1,
        0,
        "full",
    )
    assert found.validation is None and found.checkpoint.every_steps is None
    assert (
        found.training.step_count_or_zero > 1000
    )  # it is ended before its last step, which saves a checkpoint


def write_metrics(out: Path, seconds: list[float]) -> None:
    (out / "run").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": i, "step_seconds": s}) for i, s in enumerate(seconds, start=1)]
    (out / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"step": 9')


def faked(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(tuning, "shardwright_command", lambda *arguments: [*command, *arguments])


def test_a_run_is_ended_after_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metrics(tmp_path / "out", [9.0, 9.0, 1.0, 2.0, 3.0])
    ended = "import signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
    faked(
        monkeypatch,
        ended
        + "print('0.3 s a step, peak memory 1.50 GiB (plan 2.00)', flush=True)\ntime.sleep(60)",
    )
    monkeypatch.setattr(tuning, "LOOK_SECONDS", 1.0)  # time to print
    seconds, peak, why = launch(tmp_path / "out", 6, 2.0)
    assert (seconds, peak) == (
        [9.0, 9.0, 1.0, 2.0, 3.0],
        int(1.5 * 2**30),
    ) and "given up after 2 s" in why
    seconds, _, why = launch(tmp_path / "out", 4, 60.0)
    assert seconds == [9.0, 9.0, 1.0, 2.0] and why == ""


def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(
        monkeypatch,
        "print('chatter'); print('error[SW6301]: rank 1: CUDA out of memory'); raise SystemExit(3)",
    )
    (tmp_path / "out").mkdir()
    assert launch(tmp_path / "out", 4, 60.0) == (
        [],
        None,
        "did not run: error[SW6301]: rank 1: CUDA out of memory",
    )


def test_an_interrupt_ends_the_run_and_is_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembered(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    faked(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", remembered)
    monkeypatch.setattr(time, "sleep", interrupted)
    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        launch(tmp_path / "out", 4, 60.0)
    assert started[0].poll() is not None


def test_steps_are_their_median() -> None:
    found = step_seconds_figure([1.0, 2.0, 3.0, 4.0, 90.0])
    assert (found.value, found.n) == (3.0, 5) and found.spread == pytest.approx(2 / 3)
    assert step_seconds_figure([2.0]).spread == 0


def test_runs_join_the_figures_that_the_recipe_names() -> None:
    first, second = {"tensor": 1}, {"tensor": 2}
    own = measurements(
        layers=(layer(1, 1, 1.0),),
        engine=(engine(1),),
        runs=(ran(first, 2.0, 1.0), ran(second, 3.0, 1.0)),
    )
    found = add_runs(problem(own), [ran(second, 5.0, 1.0)])
    assert [(dict(run.pins), run.factor) for run in found.runs] == [(first, 2.0), (second, 5.0)]
    assert (found.layers, found.engine, found.constants) == (own.layers, own.engine, own.constants)
    other = add_runs(problem(dataclasses.replace(own, model="another")), [ran(second, 5.0, 1.0)])
    assert (other.layers, len(other.runs), other.constants) == ((), 1, own.constants)
    assert add_runs(problem(None), [ran(second, 5.0, 1.0)]).machine.is_cpu


def slow_by(factor: float, fails: str = "") -> Any:
    """A launch in which every step takes so many times what was predicted, but for layouts of which
    this is a part."""

    def run(out: Path, steps: int, limit: float) -> tuple[list[float], int | None, str]:
        plan = json.loads((out / "plan.json").read_text())
        if fails and f"{plan['strategy']['zero_stage']}" in fails:
            return [], None, "did not run: out of memory"
        seconds = (
            plan["predicted"]["time"]["step_seconds"]
            * factor
            / plan["strategy"]["micro_batch_size"]
        )
        return [99.0] * 3 + [seconds] * (steps - 3), 10**9, ""

    return run


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured beside predicted, the file that cluster.measured names, and the winner pinned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "launch", slow_by(2.0, fails="3"))
    path = recipe_file(tmp_path, None)
    assert main(["tune", str(path), "--top", "2", "--steps", "4", "--pin", "-o", "tuned.json"]) == 0
    said = capsys.readouterr()
    assert (
        "fastest" in said.out
        and "did not run: out of memory" in said.out
        and "pinned in" in said.err
    )
    write_file = json.loads((tmp_path / "tuned.json").read_text())
    pinned = json.loads(path.read_text())["parallelism"]
    fastest = min(write_file["runs"], key=lambda run: run["step_seconds"]["value"])
    assert pinned == fastest["pins"] and fastest["step_seconds"]["n"] == 4
    document = json.loads(path.read_text())
    document["cluster"]["measured"] = "tuned.json"
    path.write_text(json.dumps(document))
    assert main(["plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["plans"][0]["time"]["step_seconds"] == pytest.approx(
        fastest["step_seconds"]["value"]
    )
    assert plan["measured"]["sha256"]
    assert main(["plan", str(path)]) == 0
    assert "was run here" in capsys.readouterr().out


def test_where_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "launch", lambda *_: ([], None, "did not run: no"))
    with pytest.raises(Refusal) as caught:
        tune(load_recipe(recipe_file(tmp_path, None)), 1, 4, TOLD.append)
    assert (
        caught.value.diagnostics[0].code == "SW5503"
        and "did not run: no" in caught.value.diagnostics[0].message
    )


def test_a_second_tuning_starts_from_the_models_own_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each one would correct the correction of the last."""
    monkeypatch.setattr(tuning, "launch", slow_by(2.0))
    write(tmp_path / "m.json", measurements())
    first = tune(load_recipe(recipe_file(tmp_path, "m.json")), 1, 4, TOLD.append)
    write(tmp_path / "m.json", first.found)
    again = tune(load_recipe(recipe_file(tmp_path, "m.json")), 1, 4, TOLD.append)
    s = first.trials[0].strategy
    found = measured_run_of(again.problem.recipe, again.problem.graph, s)
    assert found is not None
    assert again.found.runs[0].predicted_step_seconds == pytest.approx(
        first.found.runs[0].predicted_step_seconds
    )
    assert again.trials[0].predicted_seconds == pytest.approx(
        first.found.runs[0].step_seconds.value
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--pin", "--set", "training.steps=3"], "--pin and --set"),
        (["-o", "absent/tuned.json"], "absent is not a folder"),
        (["--folder", "absent"], "absent is not a folder"),
    ],
)
def test_usage(
    tmp_path: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(recipe_file(tmp_path, None)), *arguments]) == 1
    assert why in capsys.readouterr().err
