"""`run --supervise` on one machine, under the real launcher: ranks that are killed, that raise or
that hang; losses that are not finite; preemption; restarts without progress; a supervisor that is
killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.utils.numeric_difference import max_series_diff
from shardwright.verify.reference_run import cosine
from tests.launch.supervised import (
    EVERY,
    POISON,
    STEPS,
    check_same_losses,
    compile_with_faults,
    restart_seconds,
    status,
    write_supervised_recipe,
)
from tests.launch.wait_until import wait_until
from tests.parity.harness import (
    BETAS,
    DECAY,
    EPS,
    LOSS_ABSOLUTE,
    LR,
    SEED,
    WARMUP,
    Case,
    metrics,
    must,
    shardwright,
)
from tests.parity.models import MODELS
from tests.parity.reference import initial_model, token_rows

pytestmark = pytest.mark.launch

CASE = Case(model="llama", data=2)
ON_A_SMALL_DISK = Path(__file__).resolve().parents[1] / "faults" / "on_a_small_disk.py"
PAGE = 4096


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    out = compile_with_faults(write_supervised_recipe(CASE, folder), folder / "out")
    must(shardwright("run", out))
    return out


def test_a_killed_rank_and_one_that_raises(tmp_path: Path, whole: Path) -> None:
    path = write_supervised_recipe(CASE, tmp_path)
    faults = ((4, (1,), 1, "kill"), (6, (2,), 0, "raise"))
    out = compile_with_faults(path, tmp_path / "out", *faults)
    done = must(shardwright("run", out, "--supervise"))
    assert "rank 1 on host" in done.stdout and "failed (RuntimeError) after step 5" in done.stdout
    # The supervisor knows that the ranks have ended: no lease of theirs is waited for.
    assert "died without cleaning up" not in done.stderr
    check_same_losses(out, whole)
    attempts = status(out)["attempts"]
    assert [(a["number"], a["cause"], a["rank"]) for a in attempts] == [
        (1, "rank", 1),
        (2, "rank", 0),
        (3, None, None),
    ]
    # No step is lost beyond the last save.
    assert [(a["started_step"], a["ended_step"]) for a in attempts] == [(0, 3), (2, 5), (4, STEPS)]
    assert [a["seconds_lost"] is not None and a["seconds_lost"] > 0 for a in attempts] == [
        True,
        True,
        False,
    ]
    assert all((a["nodes"], a["layout"]) == (1, attempts[0]["layout"]) for a in attempts)
    assert status(out)["status"] == "done"
    # It is done: a further start trains nothing.
    assert "already trained" in must(shardwright("run", out, "--supervise")).stdout


@pytest.mark.prove
def test_a_hang_and_a_preemption(tmp_path: Path, whole: Path) -> None:
    faults = ((4, (1,), 1, "hang"), (6, (2,), 1, "preempt"))
    out = compile_with_faults(write_supervised_recipe(CASE, tmp_path), tmp_path / "out", *faults)
    done = subprocess.run(  # cold: the ranks read the variable when they start
        [sys.executable, "-m", "shardwright", "run", str(out), "--supervise"],
        env={**os.environ, "SHARDWRIGHT_STALL_SECONDS": "20"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "error[SW6303]: no step for 20 s: rank 1 on" in done.stderr, done.stderr
    check_same_losses(out, whole)
    first, second, _ = status(out)["attempts"]
    assert (first["cause"], first["rank"], first["ended_step"]) == ("hang", 1, 3)
    # The notice is answered by a checkpoint after the step: nothing is trained twice.
    assert (second["cause"], second["started_step"], second["ended_step"]) == ("preemption", 2, 6)
    assert status(out)["attempts"][2]["started_step"] == 6
    lines = (out / "run" / "attempts.jsonl").read_text()
    assert "waits in no collective" in lines


@pytest.mark.prove
def test_a_loss_that_is_not_finite_once_and_twice(tmp_path: Path, whole: Path) -> None:
    """Once it is restarted; at the same step again it ends the run, and the batch is named."""
    path = write_supervised_recipe(CASE, tmp_path, stop_after_nonfinite=1)
    out = compile_with_faults(path, tmp_path / "once", (5, (1,), 0, "nan"))
    must(shardwright("run", out, "--supervise"))
    check_same_losses(out, whole)
    assert [a["cause"] for a in status(out)["attempts"]] == ["nonfinite", None]

    out = compile_with_faults(path, tmp_path / "twice", (5, (), 0, "nan"))
    done = shardwright("run", out, "--supervise")
    assert done.returncode == 3
    assert "error[SW6324]" in done.stderr and "by the same cause after step 5" in done.stderr
    rows = f"step 5 trains rows {4 * CASE.batch}-{5 * CASE.batch - 1} of {tmp_path}/tokens.npy"
    assert rows in done.stderr, done.stderr
    assert [a["cause"] for a in status(out)["attempts"]] == ["nonfinite", "nonfinite"]


POISONED_STEP, POISONED_TOKEN = 5, 256


@pytest.mark.prove
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        *(
            pytest.param(layout, marks=pytest.mark.prove)
            for layout in (
                Case(model="llama", pipeline=2),
                Case(model="llama", tensor=2),
                Case(model="llama", data=2, zero_stage=3),
            )
        ),
    ],
    ids=["data", "pipeline", "tensor", "zero-3"],
)
def test_a_poisoned_batch_is_skipped(tmp_path: Path, case: Case) -> None:
    """Whoever trains one row of step 5 has NaN from then on. All other steps are those of a plain
    loop that makes no update at step 5."""
    path = write_supervised_recipe(
        case, tmp_path, {"skip_batches": 1}, stop_after_nonfinite=2, steps=STEPS
    )
    tokens = np.load(tmp_path / "tokens.npy")
    tokens[tokens == POISONED_TOKEN] = 0
    tokens[(POISONED_STEP - 1) * case.batch + 1, 7] = POISONED_TOKEN
    np.save(tmp_path / "tokens.npy", tokens)
    out = compile_with_faults(path, tmp_path / "out")
    script = out / "train.py"
    script.write_text(POISON.format(token=POISONED_TOKEN) + script.read_text())
    done = must(shardwright("run", out, "--supervise"))
    first, last = (POISONED_STEP - 1) * case.batch, POISONED_STEP * case.batch - 1
    rows = f"step {POISONED_STEP} trains rows {first}-{last} of {tmp_path}/tokens.npy"
    assert f"the batch of step {POISONED_STEP} is skipped from now on: {rows}" in done.stdout
    found = status(out)
    assert found["skipped_batches"] == [{"step": POISONED_STEP, "rows": rows}]
    assert [a["cause"] for a in found["attempts"]] == ["nonfinite", "nonfinite", None]
    assert found["attempts"][2]["started_step"] == POISONED_STEP - 1
    lines = {m["step"]: m for m in metrics(out)}
    assert lines.pop(POISONED_STEP)["skipped"] is True
    expected = plain_losses(case, tokens, without=POISONED_STEP)
    assert list(lines) == list(expected)
    off = max_series_diff([m["loss"] for m in lines.values()], list(expected.values()))
    assert off <= LOSS_ABSOLUTE, off
    rates = {m["step"]: m["learning_rate"] for m in lines.values()}
    assert rates[POISONED_STEP + 1] == cosine(LR, POISONED_STEP + 1, WARMUP, STEPS)


def plain_losses(case: Case, tokens: np.ndarray, without: int) -> dict[int, float]:
    """Train in one process, in plain PyTorch, with no update at one step."""
    model = initial_model(MODELS[case.model], SEED)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses = {}
    for step in range(1, STEPS + 1):
        if step == without:
            continue
        (rows,) = token_rows(tokens, step, case.batch)
        loss = model(**rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        for group in optimizer.param_groups:
            group["lr"] = LR * step / WARMUP if step <= WARMUP else cosine(LR, step, WARMUP, STEPS)
        optimizer.step()
        losses[step] = float(loss.detach())
    return losses


@pytest.mark.prove
def test_restarts_end(tmp_path: Path) -> None:
    """Before a first checkpoint, at other steps: `retries` end them; and `on` names the causes."""
    one = Case(model="llama")
    path = write_supervised_recipe(one, tmp_path, {"retries": 1})
    faults = ((2, (1,), 0, "raise"), (1, (2,), 0, "raise"))
    out = compile_with_faults(path, tmp_path / "out", *faults)
    done = shardwright("run", out, "--supervise")
    assert done.returncode == 3 and "1 restart in a row made no newer checkpoint" in done.stderr
    assert [a["ended_step"] for a in status(out)["attempts"]] == [1, 0]

    path = write_supervised_recipe(one, tmp_path, {"on": ["host"]})
    out = compile_with_faults(path, tmp_path / "on", (2, (), 0, "raise"))
    done = shardwright("run", out, "--supervise")
    assert done.returncode == 3 and "launch.recovery.on does not name `rank`" in done.stderr
    assert len(status(out)["attempts"]) == 1


@pytest.mark.prove
def test_a_full_disk_is_not_restarted(tmp_path: Path) -> None:
    """It ends the run at once; once there is room, the same command goes on."""
    case = Case(model="llama", pretrained=True)  # random weights would pass through run/
    path = write_supervised_recipe(case, tmp_path, steps=200)
    out = compile_with_faults(path, tmp_path / "out")
    must(shardwright("compile", path, "-o", out, "--set", "checkpoint.every_steps=200"))
    small, large = str(16 * PAGE), str(2**24)
    command = [sys.executable, "-m", "shardwright", "run", str(out), "--supervise"]
    done = subprocess.run(
        [sys.executable, ON_A_SMALL_DISK, out / "run", small, large, *command],
        capture_output=True,
        text=True,
        timeout=500,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("no mounts of its own")
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["first"], found["second"]) == (3, 0), done.stderr[-3000:]
    assert done.stderr.count("error[SW6323]") == 1, done.stderr
    assert "error[SW6324]" in done.stderr and "would fill the disk again" in done.stderr


CHAOS_FAULTS, CHAOS_SEED = 30, 5


@pytest.mark.prove
def test_thirty_random_faults_in_one_run(tmp_path: Path, proved: Any) -> None:
    """Each attempt ends at a random step: a rank is killed, raises, or is told to stop."""
    choice, faults, expected = random.Random(CHAOS_SEED), [], []
    start = before = 0
    for attempt in range(1, CHAOS_FAULTS + 1):
        # Never twice in a row at one step, which ends a run.
        at = choice.choice([s for s in range(start + 1, start + 5) if s - 1 != before])
        act = choice.choice(("kill", "raise", "preempt"))
        faults.append((at, (attempt,), choice.randrange(CASE.world), act))
        ended = at if act == "preempt" else at - 1
        expected.append((attempt, "preemption" if act == "preempt" else "rank", start, ended))
        start = ended if act == "preempt" else max(start, ended // EVERY * EVERY)
        before = ended
    steps = start + EVERY
    path = write_supervised_recipe(CASE, tmp_path, {"retries": CHAOS_FAULTS}, steps=steps)
    whole = compile_with_faults(path, tmp_path / "whole")
    must(shardwright("run", whole))
    out = compile_with_faults(path, tmp_path / "out", *faults)
    must(shardwright("run", out, "--supervise", timeout=3000))
    off = check_same_losses(out, whole)
    *ended_early, last = status(out)["attempts"]
    found = [(a["number"], a["cause"], a["started_step"], a["ended_step"]) for a in ended_early]
    assert found == expected
    assert (last["cause"], last["ended_step"]) == (None, steps)
    # From the last step that counts to the next one: repeated steps, noticing, and starting again.
    lost = max(a["seconds_lost"] for a in ended_early)
    restarts = list(restart_seconds(out))
    for restart in restarts:
        restart.check()
    largest = {
        part: max(restart.figures()[part] for restart in restarts) for part in restarts[0].figures()
    }
    figures = {"faults": CHAOS_FAULTS, "loss_difference": off, "seconds_lost": round(lost, 1)}
    proved("recovery", "random faults in one run, at most", {**figures, **largest})
    print({**figures, **largest})


@pytest.mark.prove
def test_two_supervisors_and_one_that_is_killed(tmp_path: Path) -> None:
    path = write_supervised_recipe(CASE, tmp_path, steps=60)
    faults = tuple((step, (), 0, "slow") for step in range(1, 61))
    out = compile_with_faults(path, tmp_path / "out", *faults)
    command = [sys.executable, "-m", "shardwright", "run", str(out), "--supervise"]

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def saved() -> int:
        steps = published_steps(out / "checkpoints")
        return steps[-1][0] if steps else 0

    first = begin()
    wait_until(lambda: saved() >= EVERY, "no checkpoint", 120)
    for arguments in (["run", out, "--supervise"], ["run", out], ["compile", path, "-o", out]):
        refused = shardwright(*arguments)
        assert refused.returncode == 1, refused.stderr
        assert "SW6006" in refused.stderr or "SW5106" in refused.stderr
    assert "a supervisor of" in shardwright("run", out).stderr
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = saved()
    second = begin()
    wait_until(lambda: saved() > before + EVERY, "no further checkpoint", 180)
    # A stop ends the supervisor too.
    must(shardwright("stop", out))
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert "died without cleaning up; its lock is taken over" in errors
    assert not (out / "run" / "supervisor.lease").exists()
    lines = metrics(out)
    assert [m["step"] for m in lines] == list(range(1, len(lines) + 1))
    attempts = status(out)["attempts"]
    assert [a["cause"] for a in attempts] == ["rank", "stopped"]
    assert attempts[1]["started_step"] >= before


@pytest.mark.prove
def test_a_detached_supervisor_outlives_its_terminal(tmp_path: Path) -> None:
    path = write_supervised_recipe(CASE, tmp_path)
    out = compile_with_faults(path, tmp_path / "out", (4, (1,), 1, "kill"))
    terminal = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out), "--supervise", "--detach"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert terminal.wait(timeout=120) == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(terminal.pid, signal.SIGHUP)
    following = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "logs", str(out), "-f"],
        stdout=subprocess.PIPE,
        text=True,
    )

    def is_done() -> bool:
        return (out / "run" / "status.json").exists() and status(out)["status"] == "done"

    wait_until(is_done, "not done", 180)
    wait_until(lambda: not (out / "run" / "supervisor.lease").exists(), "lease", 30)
    document = json.loads(must(shardwright("status", out, "--json")).stdout)
    assert document["status"] == "done" and len(document["attempts"]) == 2
    # `logs -f` goes on from one attempt's file to the next one's.
    shown, _ = following.communicate(timeout=60)
    steps = [line for line in shown.splitlines() if '"attempt": ' in line]
    assert '"attempt": 1' in steps[0] and '"attempt": 2' in steps[-1]
    assert f'"step": {STEPS},' in steps[-1]
