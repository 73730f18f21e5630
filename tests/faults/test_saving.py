"""Faults in saving, each provoked: what was published stays whole, and the run goes on as if
nothing had been."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_manifest import damage
from shardwright.checkpoint.checkpoint_storage import published_steps, step_name
from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.utils import run_lease
from tests.faults import saver
from tests.faults.disks import enlarge, small_disk
from tests.faults.phases import PHASES, plant

RECIPE = {
    "version": 1,
    "name": "faults",
    "model": {
        "config": {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32,  # noqa: E501
                   "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        "weights": "random",
    },
    "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
    "training": {"sequence_length": 16, "global_batch_size": 2, "steps": saver.STEPS, "precision": "fp32"},  # noqa: E501
    "data": {"kind": "synthetic"},
    "parallelism": {"tensor": 1, "pipeline": 1, "data": 1, "zero_stage": 0, "micro_batch_size": 2},
}  # fmt: skip
LAST = [saver.STEPS - saver.EVERY, saver.STEPS]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled folder, trained without any fault."""
    out = compiled(tmp_path_factory.mktemp("whole"))
    ended = saver.train(out)
    assert (ended.signal, ended.refused) == (0, ()), ended.said
    return out


def compiled(folder: Path, **checkpoint: object) -> Path:
    """Copies go to a folder beside it."""
    section = {
        "every_steps": saver.EVERY,
        "keep": saver.KEEP,
        "upload_to": f"file://{folder}/store",
    } | checkpoint
    (folder / "recipe.json").write_text(json.dumps(RECIPE | {"checkpoint": section}))
    assert cli.main(["compile", str(folder / "recipe.json"), "-o", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """Another, not trained."""
    return compiled(tmp_path)


def check_published(out: Path) -> None:
    """Every checkpoint, and every copy that counts as one, is whole."""
    for root in (out / "checkpoints", out.parent / "store"):
        for _, path in published_steps(root):
            if root.name == "checkpoints" or (path / "SHA256SUMS").exists():
                assert damage(path, contents=True) is None, path


def check_finished(out: Path, whole: Path) -> None:
    """Check that the run ended as the one without a fault did, and left nothing unfinished. A step
    that was published and not copied has no copy; the last one has."""
    assert saver.losses(out) == saver.losses(whole)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        step_name(step) for step in LAST
    ]
    copies = published_steps(out.parent / "store")
    assert copies[-1][0] == saver.STEPS and len(copies) == len(LAST)
    assert all((path / "SHA256SUMS").exists() for _, path in copies)
    check_published(out)


SAMPLE = ("writing the fragments", "after the rename", "during the upload", "during pruning")
"""Every day; in `make prove` all of them, there also of real ranks
(tests/launch/test_faults.py)."""


def killed(phase: str, out: Path, whole: Path) -> None:
    step = saver.STEPS - saver.EVERY
    assert saver.killed(saver.train(out, before=lambda plan: plant(phase, step)))
    check_published(out)
    assert max(step for step, _ in published_steps(out / "checkpoints")) >= step - saver.EVERY
    ended = saver.train(out)
    assert (ended.signal, ended.refused) == (0, ())
    assert "died without cleaning up" in ended.said
    check_finished(out, whole)


@pytest.mark.parametrize("phase", SAMPLE)
def test_killed(phase: str, out: Path, whole: Path) -> None:
    killed(phase, out, whole)


@pytest.mark.prove
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in SAMPLE])
def test_killed_in_the_other_phases(phase: str, out: Path, whole: Path) -> None:
    killed(phase, out, whole)


def at_step_6(out: Path) -> None:
    """Killed in its last save: the newest checkpoint is that of step 6."""
    assert saver.killed(
        saver.train(out, before=lambda plan: plant("before the rename", saver.STEPS))
    )
    assert [step for step, _ in published_steps(out / "checkpoints")] == [4, 6]


RANK = "rank-00000-000.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated shard": (
        lambda at: (at / RANK).write_bytes((at / RANK).read_bytes()[:-100]),
        f"{RANK} has ",
    ),
    "a missing rank's file": (lambda at: (at / RANK).unlink(), f"{RANK} is missing"),
    "a flipped bit": (lambda at: flip(at / RANK), f"{RANK} is damaged"),
    "a manifest of 200,000 [": (
        lambda at: (at / "manifest.json").write_text("[" * 200_000),
        "nested too deeply",
    ),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("upload", [False, True])
def test_damaged(upload: bool, tmp_path: Path, whole: Path) -> None:
    """The one before it is taken, and said so; with a copy elsewhere, the copy."""
    damaged("a flipped bit", upload, tmp_path, whole)


@pytest.mark.prove
@pytest.mark.parametrize("upload", [False, True])
@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "a flipped bit"])
def test_damaged_otherwise(how: str, upload: bool, tmp_path: Path, whole: Path) -> None:
    damaged(how, upload, tmp_path, whole)


def damaged(how: str, upload: bool, tmp_path: Path, whole: Path) -> None:
    spoil, why = DAMAGES[how]
    out = compiled(tmp_path, **{} if upload else {"upload_to": None})
    at_step_6(out)
    spoil(out / "checkpoints" / "step-00000006")
    ended = saver.train(out)
    assert (ended.signal, ended.refused) == (0, ())
    assert (
        "fetching step-00000006" if upload else "step-00000006 is skipped: "
    ) in ended.said and why in ended.said
    assert saver.losses(out) == saver.losses(whole)
    assert all(
        damage(path, contents=True) is None for _, path in published_steps(out / "checkpoints")
    )


def size_of(path: Path) -> int:
    """Return the bytes of the files on a disk with pages of 4 KiB."""
    return sum(-(-p.stat().st_size // 4096) * 4096 + 4096 for p in path.rglob("*"))


def test_a_full_disk(whole: Path, tmp_path: Path) -> None:
    """A disk that holds two checkpoints and half a third: the third is not saved, the others stay.
    With more room the run goes on."""
    out = compiled(tmp_path, upload_to=None)
    root, one = out / "checkpoints", size_of(whole / "checkpoints" / "step-00000008")

    def work() -> None:
        small_disk(root, one * 5 // 2)
        with pytest.raises(Refusal) as refused:
            saver.run(out)
        (diagnostic,) = refused.value.diagnostics
        print(f"error[{diagnostic.code}]: {diagnostic.message}")
        assert sorted(p.name for p in root.iterdir()) == ["step-00000002", "step-00000004"]
        assert all(damage(path, contents=True) is None for path in root.iterdir())
        enlarge(root, 4 * one)
        saver.run(out)
        assert [step for step, _ in published_steps(root)] == LAST
        assert all(damage(path, contents=True) is None for path in root.iterdir())

    ended = saver.forked(work)
    assert "error[SW6205]: rank 0 cannot write the checkpoint step-00000006" in ended.said
    assert "No space left on device" in ended.said
    assert saver.losses(out) == saver.losses(whole)


def test_an_upload_that_fails_midway(whole: Path, tmp_path: Path) -> None:
    """The store fills up in the third copy: nothing is pruned here or there, and a warning says
    which is not copied."""
    out = compiled(tmp_path)
    store, one = tmp_path / "store", size_of(whole / "checkpoints" / "step-00000008")

    def work() -> None:
        small_disk(store, one * 5 // 2)
        saver.run(out, after=lambda step: enlarge(store, 5 * one) if step == 6 else None)
        assert [step for step, _ in published_steps(store)] == [4, 8], (
            "what was left of the third went with the second"
        )
        assert all(damage(path, contents=True) is None for _, path in published_steps(store))

    ended = saver.forked(work)
    assert "warning[SW6208]" in ended.said and "step-00000006 is on this disk only" in ended.said
    assert saver.losses(out) == saver.losses(whole)
    assert [step for step, _ in published_steps(out / "checkpoints")] == LAST


@pytest.mark.parametrize("jump_seconds", [86400.0, -86400.0])
def test_a_clock_that_jumps(
    jump_seconds: float, out: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock and the file system's jump by a day at the third step. The run is then killed, and
    goes on."""
    shift, plain = [0.0], time.time

    def jump(step: int) -> None:
        if step == 3:
            shift[0] = jump_seconds
            times = (plain() + jump_seconds,) * 2
            for path in (*(out / "run").iterdir(), *(out / "checkpoints").glob("step-*/*")):
                os.utime(path, times)

    monkeypatch.setattr(time, "time", lambda: plain() + shift[0])
    assert saver.killed(
        saver.train(out, before=lambda plan: plant("before the rename", 6), after=jump)
    )
    monkeypatch.setattr(time, "time", plain)
    ended = saver.train(out)
    assert (ended.signal, ended.refused) == (0, ())
    check_finished(out, whole)


def test_a_lease_left_on_another_host(
    out: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched for a while: it is not touched any more."""
    for name in ("LEASE_EXPIRY_SECONDS", "EXPIRY_CONFIRMATION_SECONDS"):
        monkeypatch.setattr(run_lease, name, 0.5)
    gone = replace(run_lease.current_process_owner("ranks", out), boot="another", host="b", pid=7)
    (out / "run").mkdir()
    (out / "run" / "lease").write_text(json.dumps(asdict(gone)))
    ended = saver.train(out)
    assert (ended.signal, ended.refused) == (0, ())
    assert "the run on host b, process 7 died without cleaning up" in ended.said
    check_finished(out, whole)


def test_two_runs_at_once(out: Path, whole: Path) -> None:
    """The second is refused while the first trains, which does not notice."""
    seconds: list[saver.Ended] = []

    def second(step: int) -> None:
        if step == 3:
            seconds.append(saver.train(out))
            print(f"the second: {seconds[0].said}")

    ended = saver.train(out, after=second)
    assert "the second: error[SW6006]: another run of" in ended.said
    check_finished(out, whole)
