"""Faults in saving, done to runs of two real ranks: what they leave, what the next `run` does, and
that the losses are those of a run without a fault. The same in a forked process, for every day:
tests/faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwright.checkpoint.checkpoint_manifest import damage
from shardwright.checkpoint.checkpoint_storage import published_steps, step_name
from shardwright.utils.child_processes import free_port
from tests.faults.phases import PHASES
from tests.faults.test_saving import DAMAGES, size_of
from tests.launch.test_launch_script import start
from tests.launch.wait_until import wait_until
from tests.parity.harness import STEPS, Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = pytest.mark.launch

Proved = Callable[[str, str, dict[str, Any]], None]
CASE = Case(model="llama", data=2)
EVERY, KEEP = 2, 2
LAST = [STEPS - EVERY, STEPS]
ROOT = Path(__file__).resolve().parents[2]
PLANT = """
import os, sys
sys.path.insert(0, {root!r})
if os.environ["RANK"] == "{rank}":
    from tests.faults.phases import plant
    plant({phase!r}, {step})
"""
ON_A_SMALL_DISK = [sys.executable, str(ROOT / "tests" / "faults" / "on_a_small_disk.py")]
ANOTHER_PROCESS_TABLE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
"""As on another host: what goes on in this one's processes cannot be seen."""


def compiled(folder: Path, upload: bool = True, **training: Any) -> Path:
    write_inputs(CASE, folder)
    document = recipe(CASE, folder)
    document["training"] |= training
    document["checkpoint"] = {"every_steps": EVERY, "keep": KEEP}
    if upload:
        document["checkpoint"]["upload_to"] = f"file://{folder}/store"
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    return folder / "out"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = compiled(tmp_path_factory.mktemp("whole"))
    must(shardwright("run", out))
    return out


@pytest.fixture(scope="module")
def at_step_6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed in its last save: the newest checkpoint is that of step 6."""
    out = compiled(tmp_path_factory.mktemp("cut-off"))
    killed(out, "before the rename", STEPS, 0)
    return out


def killed(out: Path, phase: str, step: int, rank: int) -> str:
    """What the user read."""
    script = out / "train.py"
    plain = script.read_text()
    script.write_text(PLANT.format(root=str(ROOT), rank=rank, phase=phase, step=step) + plain)
    done = shardwright("run", out)
    script.write_text(plain)
    assert done.returncode == 3, done.stderr
    return said(done)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Errors, warnings and notes, without this machine's paths."""
    lines = re.findall(
        r"^(?:error\[|warning\[|fetching |waiting |the run on ).*", done.stdout + done.stderr, re.M
    )
    text = "; ".join(
        re.sub(r"process \d+|\d+ s for a heartbeat", "...", re.sub(r"(file://)?/\S*/", "", x))
        for x in lines
    )
    assert "Traceback" not in done.stderr
    return re.sub(r"host [\w.-]+", "host ...", text)


def remaining(out: Path) -> dict[str, list[str]]:
    """Everything under the two roots; each checkpoint of it is whole."""
    roots = {"checkpoints": out / "checkpoints", "copies": out.parent / "store"}
    for root in roots.values():
        for _, path in published_steps(root):
            if root.name == "checkpoints" or (path / "SHA256SUMS").exists():
                assert damage(path, contents=True) is None, path
    return {
        name: sorted(p.name for p in root.iterdir())
        for name, root in roots.items()
        if root.exists()
    }


def numbers(out: Path) -> list[tuple[float, ...]]:
    return [
        tuple(m[key] for key in ("step", "loss", "grad_norm", "learning_rate"))
        for m in metrics(out)
    ]


def goes_on(out: Path, whole: Path) -> str:
    """To the end, with the same numbers, and nothing unfinished left. What the user read."""
    done = must(shardwright("run", out))
    assert numbers(out) == numbers(whole)
    left = remaining(out)
    assert [name for name in left["checkpoints"] if not name.startswith(".before")] == [
        step_name(s) for s in LAST
    ]
    if "copies" in left:
        assert left["copies"][-1] == step_name(STEPS) and len(left["copies"]) == 1 + KEEP
    return said(done)


@pytest.mark.prove
@pytest.mark.parametrize("phase", PHASES)
def test_kill_9(phase: str, tmp_path: Path, whole: Path, proved: Proved) -> None:
    out, step = compiled(tmp_path), STEPS - EVERY
    rank = (
        1 if phase == "writing the fragments" else 0
    )  # what follows the publication is planted where that is called
    first = killed(out, phase, step, rank)
    left = remaining(out)
    proved(
        "faults",
        f"kill -9 of rank {rank} {phase}",
        {
            "step": step,
            "remained": left,
            "said": first,
            "then": goes_on(out, whole),
            "same_losses": True,
        },
    )


@pytest.mark.prove
@pytest.mark.parametrize("damaged", DAMAGES)
@pytest.mark.parametrize("copied", [False, True])
def test_damaged(
    damaged: str, copied: bool, tmp_path: Path, at_step_6: Path, whole: Path, proved: Proved
) -> None:
    shutil.copytree(at_step_6.parent, tmp_path, dirs_exist_ok=True)
    out = tmp_path / "out"
    if copied:
        must(
            shardwright(
                "compile",
                tmp_path / "recipe.yaml",
                "-o",
                out,
                "--set",
                f"checkpoint.upload_to=file://{tmp_path}/store",
            )
        )
    else:
        shutil.rmtree(tmp_path / "store")
        must(
            shardwright(
                "compile", tmp_path / "recipe.yaml", "-o", out, "--set", "checkpoint.upload_to=null"
            )
        )
    spoil, why = DAMAGES[damaged]
    spoil(out / "checkpoints" / "step-00000006")
    then = goes_on(out, whole)
    assert why in then and ("fetching" in then) is copied and ("SW6206" in then) is not copied
    case = f"{damaged}, {'with' if copied else 'without'} a copy"
    proved("faults", case, {"then": then, "same_losses": True})


@pytest.mark.prove
@pytest.mark.parametrize("full", ["checkpoints", "store"])
def test_a_full_disk(full: str, tmp_path: Path, whole: Path, proved: Proved) -> None:
    """It holds two checkpoints and half a third."""
    out = compiled(tmp_path, upload=full == "store")
    at = out / "checkpoints" if full == "checkpoints" else tmp_path / "store"
    one = size_of(whole / "checkpoints" / step_name(STEPS))
    command = [
        *ON_A_SMALL_DISK,
        str(at),
        str(one * 5 // 2),
        str(one * 5),
        sys.executable,
        "-m",
        "shardwright",
        "run",
    ]
    done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["second"] == 0 and numbers(out) == numbers(whole)
    told = said(done)
    if full == "checkpoints":
        assert found["first"] == 3 and "error[SW6205]" in told and "No space left on device" in told
        assert found["between"] == ["step-00000002", "step-00000004"]
    else:
        assert (
            found["first"] == 3
            and "warning[SW6208]" in told
            and "step-00000006 is on this disk only" in told
        )
    names = (
        "the disk of the checkpoints"
        if full == "checkpoints"
        else "the disk of the copies: an upload fails midway"
    )
    proved(
        "faults",
        f"a full disk, {names}",
        {"remained": found["between"], "said": told, "same_losses": True},
    )


def steps(out: Path) -> int:
    path = out / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def long_run(tmp_path: Path, **training: Any) -> tuple[Path, subprocess.Popen[str]]:
    """Alive, in its steps."""
    out = compiled(tmp_path, upload=False, steps=4000, **training)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: steps(out) > 2, "no steps", 120)
    return out, process


def stopped(out: Path, process: subprocess.Popen[str]) -> None:
    """By its user: it was not disturbed."""
    must(shardwright("stop", out))
    assert process.wait(60) == 0
    assert [m["step"] for m in metrics(out)] == list(range(1, steps(out) + 1))
    assert {m["attempt"] for m in metrics(out)} == {1}
    assert json.loads((out / "run" / "status.json").read_text())["status"] == "preempted"


@pytest.mark.prove
def test_two_runs(tmp_path: Path, proved: Proved) -> None:
    """A second launch by launch.sh and by `run`, a compile, one from where the run's processes
    cannot be seen, with the lease's clock a day off, and a run of another folder into the same
    checkpoints."""
    out, process = long_run(tmp_path)
    other = tmp_path / "other"
    shared = f"checkpoint.directory={out}/checkpoints"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", other, "--set", shared))
    by_hand = start(out, tmp_path, free_port())
    output, _ = by_hand.communicate(timeout=120)
    assert by_hand.returncode != 0 and "another run of" in output, output[-3000:]
    table = {
        "launch.sh by hand": "error[SW6006]: another run of the folder is alive: host, process"
    }
    for name, arguments in {
        "run": ("run", out, "--resume", "never"),
        "compile": ("compile", tmp_path / "recipe.yaml", "-o", out),
        "run of another folder with the same checkpoint.directory": (
            "run",
            other,
            "--resume",
            "never",
        ),
    }.items():
        done = shardwright(*arguments)
        assert done.returncode == 1, (name, done.stdout, done.stderr)
        table[name] = said(done)
    assert (
        "writes its checkpoints to"
        in table["run of another folder with the same checkpoint.directory"]
    )
    for days in (1, -1):
        at = time.time() + days * 86400
        os.utime(out / "run" / "lease", (at, at))
        command = [*ANOTHER_PROCESS_TABLE, sys.executable, "-m", "shardwright", "compile"]
        done = subprocess.run(
            [*command, str(tmp_path / "recipe.yaml"), "-o", str(out)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "SW5106" in done.stderr, done.stderr
        table[
            f"from another host, the clock of its lease {'ahead' if days > 0 else 'back'} a day"
        ] = said(done)
    stopped(out, process)
    proved(
        "faults",
        "two runs at once",
        {"said": table, "the first": "not disturbed, preempted by its user"},
    )


@pytest.mark.prove
def test_a_stale_lock(tmp_path: Path, whole: Path, proved: Proved) -> None:
    """`run`, its launcher and all ranks are killed at once, as when the machine goes down."""
    out, process = long_run(tmp_path)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in tree:
        each.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "run" / "lease").exists()
    must(
        shardwright(
            "compile", tmp_path / "recipe.yaml", "-o", out, "--set", f"training.steps={STEPS}"
        )
    )
    reached = steps(out)
    again = shardwright("run", out)
    assert again.returncode == 0 and "died without cleaning up" in again.stderr, again.stderr
    assert json.loads((out / "run" / "attempt.json").read_text())["attempt"] == 2
    figures = {"steps_before": reached, "then": said(again)}
    proved("faults", "a stale lock: every process killed at once", figures)
