"""Files of a folder that were cut short, edited by hand or written by somebody else: every command
that reads them says what is wrong, or goes on without them; none ends in a traceback, hangs or
writes escapes to a terminal."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.launch import launcher_process
from shardwright.launch.launcher_process import LauncherEnd
from tests.cli.command import shardwright
from tests.cli.damaged_files import Words, run_command, try_damages
from tests.conftest import SMALL_RECIPE
from tests.privileges import binds
from tests.unit.calibrate.measurement_files import engine, figure, layer, measurements, ran
from tests.unit.calibrate.test_measurement_file import recipe_file
from tools.pages.page_commands import ROOT

SAMPLE, ALL = 3, 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled folder with a run that failed, and a checkpoint of the whole model."""
    out = tmp_path_factory.mktemp("damaged") / "out"
    recipe = out.parent / "recipe.json"
    recipe.write_text(json.dumps(SMALL_RECIPE))
    assert main(["compile", str(recipe), "-o", str(out)]) == 0
    write_run(out)
    write_whole_model(out)
    return out


@pytest.fixture(scope="module")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two islands' folder, with runs and outer steps."""
    out = tmp_path_factory.mktemp("damaged-islands") / "out"
    assert main(["compile", str(ROOT / "recipes/tiny-llama-islands-cpu.yaml"), "-o", str(out)]) == 0
    for k in (0, 1):
        write_run(out / f"island-{k}")
        outer = {"members": [0, 1], "bytes": 1000, "seconds": 0.25, "attempt": 1}
        write_lines(
            out / f"island-{k}" / "run" / "outer.jsonl", [{"step": s, **outer} for s in (10, 20)]
        )
    (out / "run").mkdir(exist_ok=True)
    closed = {"members": [0, 1], "joined": [], "store": 1, "attempt": 1, "bytes": 9, "seconds": 0.2}
    write_lines(out / "run" / "rounds.jsonl", [{"step": s, **closed} for s in (10, 20)])
    return out


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(out: Path) -> None:
    """The files of an attempt that failed after step 20."""
    run = out / "run"
    run.mkdir(exist_ok=True)
    noise = {"gradient_square": 2.0, "row_variance": 32.0, "rows": 8}
    step = {"grad_norm": 1.5, "learning_rate": 1e-3, "tokens": 256, "step_seconds": 0.5}
    more = {"tokens_per_second": 512.0, "noise_scale": noise, "attempt": 1}
    write_lines(
        run / "metrics.jsonl",
        [{"step": s, "loss": 5.0 - s / 10, **step, "time": 9.0 + s, **more} for s in range(1, 21)],
    )
    start = {"event": "start", "time": 8.0, "step": 0, "nodes": 1, "layout": "data=2"}
    end = {"event": "end", "outcome": "failed", "code": "SW6301", "rank": 1, "step": 9}
    times = {"first_step_time": 9.5, "last_step_time": 20.0, "checkpoint": "step-00000008"}
    recovery = {"event": "recovery", "cause": "host", "host": "b", "action": "fewer"}
    begun_again = {**start, "time": 25.0, "step": 8, "discarded_seconds": 0.5}
    lines = [
        *({**start, "attempt": 1}, {**end, **times, "attempt": 1}),
        *({**recovery, "hosts": ["a"], "attempt": 1}, {**begun_again, "attempt": 2}),
    ]
    write_lines(run / "attempts.jsonl", lines)
    evaluation = {"loss": 4.0, "perplexity": 54.6, "tokens": 100, "seconds": 0.1, "attempt": 1}
    write_lines(run / "evaluation.jsonl", [{"step": s, **evaluation} for s in (10, 20)])
    save = {"seconds": 0.5, "bytes": 2000, "node_bytes": 1000, "attempt": 1}
    write_lines(run / "saves.jsonl", [{"step": s, **save} for s in (10, 20)])
    line = {"run": "0" * 16, "before": []}
    begun = {"attempt": 1, "resume": None, "step": 0, "steps": 60, "line": line, "lease": None}
    (run / "attempt.json").write_text(json.dumps(begun))
    failed = {"rank": 1, "host": "node-a", "stage": 0, "code": "SW6301", "help": "Look at the log."}
    status = {
        "status": "failed",
        "attempt": 1,
        "time": 1.0,
        "step": 20,
        "cause": "killed",
        **failed,
    }
    (run / "status.json").write_text(json.dumps(status))
    (run / "summary.json").write_text(json.dumps({"measured": {"peak_bytes": 10**6}}))


def write_whole_model(out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from shardwright.parallel.model_loading import load_config
    from shardwright.plan.plan import read_plan
    from tests.unit.checkpoint.written_checkpoints import write_model_checkpoint

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config(read_plan(out), out))
    write_model_checkpoint(out, dict(model.named_parameters()))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the damaged copy of a folder is. `run` launches nothing."""
    monkeypatch.setattr(launcher_process, "_launch", lambda *_: LauncherEnd(1))
    return tmp_path / "copy"


def look(out: Path, rng: random.Random) -> list[Words]:
    """`status`, and another command that reads what a run has written."""
    quick: list[Words] = [["explain", out], ["explain", out, "--json"], ["run", out], ["stop", out]]
    quick += [["autopsy", out], ["autopsy", out, "--json"]]
    more: Words = rng.choice(quick) if rng.random() < 0.9 else report_of(out)
    return [["status", out], ["status", out, "--json"], more]


def report_of(out: Path) -> Words:
    return ["report", out, "-o", out.parent / "page.html"]


RUN_FILES = {"status.json": 1, "metrics.jsonl": 1, "attempt.json": 2, "saves.jsonl": 4}
"""File of run/ -> what share of all damages it gets: 1, a half, a fourth."""
RUN_FILES |= {"evaluation.jsonl": 4, "summary.json": 4, "attempts.jsonl": 2}


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.prove)])
def test_files_of_a_run(count: int, folder: Path, copy: Path) -> None:
    found = []
    for name, share in RUN_FILES.items():
        found += try_damages(folder, f"run/{name}", look, count // share, copy)
    assert found == []


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.prove)])
def test_files_of_outer_steps(count: int, islands: Path, copy: Path) -> None:
    def commands(out: Path, rng: random.Random) -> list[Words]:
        more: Words = report_of(out) if rng.random() < 0.2 else ["stop", out, "--island", "0"]
        return [["status", out], ["status", out, "--json"], more]

    found = try_damages(islands, "island-0/run/outer.jsonl", commands, count, copy)
    found += try_damages(islands, "run/rounds.jsonl", commands, count // 2, copy)
    found += try_damages(islands, "island-0/run/metrics.jsonl", commands, count // 2, copy)
    assert found == []


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.prove)])
def test_plans(count: int, folder: Path, islands: Path, copy: Path) -> None:
    def commands(out: Path, rng: random.Random) -> list[Words]:
        every: list[Words] = [
            ["status", out],
            ["status", out, "--json"],
            ["stop", out],
            ["run", out],
            ["logs", out, "--rank", "1"],
            ["prepare", out],
            ["explain", out],
            ["explain", out, "--why-not", "pipeline=1", "--json"],
            ["diff", out, folder],
            ["diff", folder, out, "--json"],
        ]
        return [*rng.sample(every, 4), *([report_of(out)] if rng.random() < 0.2 else ())]

    found = try_damages(folder, "plan.json", commands, count, copy)
    found += try_damages(islands, "plan.json", commands, count // 4, copy)
    for name in ("recipe.resolved.json", "model_graph.json", "model/config.json"):
        found += try_damages(folder, name, commands, count // 4, copy)
    assert found == []


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.prove)])
def test_manifests(count: int, folder: Path, copy: Path) -> None:
    def commands(out: Path, rng: random.Random) -> list[Words]:
        (step,) = (out / "checkpoints").iterdir()
        from tests.unit.checkpoint.written_checkpoints import sum_up

        if all(path.is_file() or path.is_dir() for path in step.iterdir()):
            sum_up(step)  # as whoever wrote it would have it
        return [
            ["export", step, "-o", out / "hf"],
            ["generate", step, "--prompt", "x", "--tokens", "1"],
            ["run", out, "--resume", step],
            ["run", out],
            ["status", out],
        ]

    at = "checkpoints/step-00000004"
    found = try_damages(folder, f"{at}/manifest.json", commands, count, copy)
    found += try_damages(folder, f"{at}/plan.json", commands, count // 2, copy)
    assert found == []


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.prove)])
def test_calibration_files(count: int, tmp_path: Path) -> None:
    measured = measurements(
        layers=(layer(0, 4, 0.01), layer(1, 4, 0.02), layer(2, 4, 0.01)),
        engine=(engine(0, step=0.01),),
        runs=(ran({"data": 2, "zero_stage": 0}, 0.5, 0.4),),
        constants={"memory_efficiency": figure(0.5), "gemm_efficiency": figure(0.4)},
    )
    (tmp_path / "recipes").mkdir()
    recipe = recipe_file(tmp_path / "recipes", "measured.json")
    document = json.loads(recipe.read_text())
    layout = {"tensor": 1, "pipeline": 1, "data": 2, "zero_stage": 0, "micro_batch_size": 4}
    recipe.write_text(json.dumps({**document, "parallelism": layout}))
    (recipe.parent / "measured.json").write_text(json.dumps(asdict(measured)))

    def commands(out: Path, rng: random.Random) -> list[Words]:
        words: list[Words] = [["estimate"], ["estimate", "--json"], ["plan"], ["plan", "--json"]]
        return [[*each, out / recipe.name] for each in (["check"], *rng.sample(words, 2))]

    assert try_damages(recipe.parent, "measured.json", commands, count, tmp_path / "copy") == []


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    """Looking needs no write access; what needs it names the file."""
    out = tmp_path / "theirs"
    shutil.copytree(folder, out)
    for path in (out, *out.rglob("*")):
        path.chmod(path.stat().st_mode & 0o555)
    wanted = {"status": 0, "explain": 0, "doctor": 1, "run": 1}
    for name, code in wanted.items():
        done = shardwright(name, out, cwd=tmp_path, preexec_fn=binds)
        assert (done.returncode, "our fault" in done.stderr) == (code, False), done.stderr
        assert ("error[SW6323]" in done.stderr and str(out) in done.stderr) == (code == 1)


def test_lines_that_are_no_steps_are_left_out(folder: Path, copy: Path) -> None:
    shutil.copytree(folder, copy)
    path = copy / "run" / "metrics.jsonl"
    good = path.read_text().splitlines()
    bad = ['{"loss": 1.0}', '{"step": 21}', '{"step": 21, "loss": "none"}', '{"step": 1e400}']
    path.write_text("\n".join([*good, *bad]))
    code, out, _ = run_command(["status", copy])
    assert code == 0 and "step     20 of 60\nloss     3.0000\n" in out


def test_escapes_of_a_status_do_not_reach_the_terminal(folder: Path, copy: Path) -> None:
    shutil.copytree(folder, copy)
    escape = "\x1b]0;title\x07\x9b2J"
    record = {"status": f"run{escape}", "attempt": 1, "cause": escape, "stalled": escape}
    (copy / "run" / "status.json").write_text(json.dumps(record))
    code, out, _ = run_command(["status", copy])
    assert code == 0 and out.startswith("status   run") and not set("\x1b\x07\x9b") & set(out)
