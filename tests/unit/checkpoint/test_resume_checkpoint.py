"""Which checkpoint a run continues from, and why not another one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_manifest import CHECKSUMS, MANIFEST
from shardwright.checkpoint.checkpoint_storage import (
    parse_step,
    prune_moved_aside,
    publish,
    published_steps,
    superseded_checkpoints,
)
from shardwright.checkpoint.resume_checkpoint import choose_checkpoint
from shardwright.checkpoint.run_history import ParentRun, new_run_history
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan, plan_to_json, read_plan
from shardwright.train.run_attempt import Attempt, begin_attempt
from tests.unit.checkpoint.written_checkpoints import write_checkpoint


@pytest.fixture
def out(compiled: Path, tmp_path: Path) -> Path:
    shutil.copytree(compiled, tmp_path / "out")
    for step in (4, 8):
        write_checkpoint(tmp_path / "out", step=step)
    return tmp_path / "out"


def chosen(out: Path, resume: str = "auto") -> tuple[str, tuple[str, ...]]:
    found = choose_checkpoint(read_plan(out), out, resume)
    assert found is not None
    return found.path.name, found.notes


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


RANK = "rank-00000-000.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated shard": (lambda step: truncate(step / RANK), f"{RANK} has "),
    "one flipped bit": (lambda step: flip(step / RANK), f"{RANK} is damaged"),
    "a missing shard": (lambda step: (step / RANK).unlink(), f"{RANK} is missing"),
    "no manifest": (lambda step: (step / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "half a manifest": (lambda step: truncate(step / MANIFEST), ""),
    "no checksums": (lambda step: (step / CHECKSUMS).unlink(), f"{CHECKSUMS} is missing"),
    "a changed plan": (lambda step: flip(step / "plan.json"), "plan.json is damaged"),
    "an empty folder": (empty, f"{MANIFEST} is missing"),
}


def test_the_newest_one(out: Path) -> None:
    assert chosen(out) == ("step-00000008", ())
    (out / "checkpoints" / ".step-00000012.partial").mkdir()
    assert chosen(out)[0] == "step-00000008"
    assert choose_checkpoint(read_plan(out), out, "never") is None


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_skipped_and_said_so(kind: str, out: Path) -> None:
    spoil, why = DAMAGES[kind]
    spoil(out / "checkpoints" / "step-00000008")
    name, notes = chosen(out)
    assert name == "step-00000004"
    assert len(notes) == 1 and notes[0].startswith(
        f"warning[SW6206]: step-00000008 is skipped: {why}"
    )


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_refused_by_name(kind: str, out: Path) -> None:
    spoil, why = DAMAGES[kind]
    spoil(out / "checkpoints" / "step-00000008")
    with pytest.raises(Refusal) as refused:
        chosen(out, str(out / "checkpoints" / "step-00000008"))
    assert refused.value.diagnostics[0].code == "SW6201"
    assert why in refused.value.diagnostics[0].message


def test_the_newest_with_a_finite_loss(out: Path) -> None:
    """`auto` prefers it and says so; a step that is asked for by name is taken, with a word."""
    write_checkpoint(out, step=12, finite=False)
    newest = write_checkpoint(out, step=16, finite=False)
    name, notes = chosen(out)
    assert name == "step-00000008"
    assert [note.partition(" was written")[0] for note in notes] == [
        "warning[SW6212]: step-00000016",
        "warning[SW6212]: step-00000012",
    ]
    assert all("it is skipped" in note for note in notes)
    name, notes = chosen(out, str(newest))
    assert name == "step-00000016" and notes[0].startswith(
        "warning[SW6212]: step-00000016 was written after a loss"
    )
    for step in (4, 8):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    name, notes = chosen(out)  # none is better
    assert name == "step-00000016" and len(notes) == 1 and "skipped" not in notes[0]


@pytest.mark.parametrize(
    ("finite", "keep", "gone"),
    [
        ("ffff", 2, [0, 1]),
        ("fffn", 2, [0, 1]),
        ("ffnn", 2, [0]),  # the newest with a finite loss stays, beside the two
        ("ffnn", 1, [0, 2]),
        ("fnnn", 1, [1, 2]),
        ("nnnn", 2, [0, 1]),
        ("f", 3, []),
        ("nf", 1, [0]),
    ],
)
def test_keep_never_takes_the_newest_with_a_finite_loss(
    finite: str, keep: int, gone: list[int]
) -> None:
    names = [f"step-{n:08d}" for n in range(len(finite))]
    assert superseded_checkpoints(names, keep, lambda name: finite[names.index(name)] == "f") == [
        names[n] for n in gone
    ]


def test_none_is_whole(out: Path) -> None:
    for step in (4, 8):
        truncate(out / "checkpoints" / f"step-{step:08d}" / RANK)
    with pytest.raises(Refusal, match="none of the 2 checkpoints"):
        chosen(out)


def rewrite(out: Path, plan: Plan) -> None:
    (out / "plan.json").write_text(plan_to_json(plan))


def test_another_model_is_refused(out: Path) -> None:
    plan = read_plan(out)
    rewrite(
        out, dataclasses.replace(plan, model=dataclasses.replace(plan.model, config_hash="f" * 64))
    )
    with pytest.raises(Refusal) as refused:
        chosen(out)
    assert refused.value.diagnostics[0].code == "SW6203"


def test_another_tokenizer_is_refused(out: Path) -> None:
    plan = read_plan(out)
    rewrite(
        out, dataclasses.replace(plan, data=dataclasses.replace(plan.data, tokenizer="tokenizer"))
    )
    (out / "tokenizer").mkdir()
    (out / "tokenizer" / "tokenizer.json").write_text("{}")
    write_checkpoint(out, step=12)
    assert chosen(out)[0] == "step-00000012"
    (out / "tokenizer" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(Refusal, match=r"a different tokenizer: tokenizer\.json differs") as refused:
        chosen(out)
    assert refused.value.diagnostics[0].code == "SW6204"


def test_other_samples_are_said(out: Path) -> None:
    plan = read_plan(out)
    rewrite(
        out,
        dataclasses.replace(
            plan, data=dataclasses.replace(plan.data, shuffle=not plan.data.shuffle)
        ),
    )
    _, notes = chosen(out)
    assert [note.split(":")[0] for note in notes] == ["warning[SW6207]"]


def test_other_weights_of_a_mixture_are_said(out: Path) -> None:
    plan = read_plan(out)

    def mixed(*weights: float) -> Plan:
        parts = tuple(dataclasses.replace(plan.data, weight=weight) for weight in weights)
        return dataclasses.replace(
            plan, data=dataclasses.replace(plan.data, kind="mixture", mixture=parts)
        )

    rewrite(out, mixed(1.0, 3.0))
    write_checkpoint(out, step=12)
    assert chosen(out) == ("step-00000012", ())
    rewrite(out, mixed(1.0, 2.0))
    (note,) = chosen(out)[1]
    assert note.endswith("data.mixture.1.weight 3.0 -> 2.0")
    rewrite(out, mixed(1.0))
    (note,) = chosen(out)[1]
    assert note.endswith("data has 1 parts, not 2")


def begun(out: Path, resume: str = "auto") -> Attempt:
    """As `run` begins an attempt."""
    plan = read_plan(out)
    return begin_attempt(plan, out, choose_checkpoint(plan, out, resume), fresh=resume == "never")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_later_checkpoints_are_set_aside(out: Path) -> None:
    """Going on from step 4 writes another step 8: neither is lost, and `auto` never takes the old
    one again."""
    root = out / "checkpoints"
    begun(out, str(root / "step-00000004"))
    assert names(root) == [".before-attempt-1", "step-00000004"]
    assert (root / ".before-attempt-1" / "step-00000008" / MANIFEST).is_file()


def test_a_checkpoint_from_elsewhere_keeps_what_is_there_out_of_its_way(
    out: Path, tmp_path: Path
) -> None:
    """Step 6 of another folder, where this one has a step 8: the run would meet it."""
    (tmp_path / "other").mkdir()
    shutil.copyfile(out / "plan.json", tmp_path / "other" / "plan.json")
    theirs = write_checkpoint(tmp_path / "other", step=6, line=new_run_history())
    attempt = begun(out, str(theirs))
    assert (attempt.step, attempt.resume) == (6, str(theirs.resolve()))
    assert names(out / "checkpoints") == [".before-attempt-1", "step-00000004"]
    # It ended before its first checkpoint: the next one goes on from the same place, as the same
    # run.
    again = begun(out)
    assert (again.number, again.step, again.resume, again.line) == (
        2,
        6,
        str(theirs.resolve()),
        attempt.line,
    )
    shutil.rmtree(theirs)
    with pytest.raises(Refusal) as refused:
        begun(out)
    assert refused.value.diagnostics[0].code == "SW6201", (
        "and not from step 4, which is of another run"
    )


def test_a_deleted_run_folder_does_not_make_two_of_one_name(out: Path) -> None:
    root = out / "checkpoints"
    begun(out, "never")
    shutil.rmtree(out / "run")
    for step in (4, 8):
        write_checkpoint(out, step=step)
    begun(out, "never")
    assert [names(root / f".before-attempt-{n}") for n in (1, 2)] == [
        ["step-00000004", "step-00000008"]
    ] * 2


def test_the_id_of_a_run(out: Path) -> None:
    """Kept by every attempt that goes on by itself, another where it starts again or from a named
    checkpoint."""
    root = out / "checkpoints"
    first = begun(out)  # from a checkpoint without an id
    assert first.line.before == (ParentRun(run="", step=8),)
    write_checkpoint(out, step=12, line=first.line)
    assert begun(out).line == first.line
    named = begun(out, str(root / "step-00000012")).line
    assert named.run != first.line.run and named.before == (
        *first.line.before,
        ParentRun(run=first.line.run, step=12),
    )
    assert begun(out).line == named, "ended before its first checkpoint"
    fresh = begun(out, "never").line
    assert fresh.before == () and fresh.run not in (first.line.run, named.run)
    assert begun(out).line == fresh, "and that too"


def test_a_checkpoint_put_there_by_hand_is_taken_and_said(out: Path) -> None:
    begun(out, "never")
    theirs = new_run_history()
    write_checkpoint(out, step=20, line=theirs)
    found = choose_checkpoint(read_plan(out), out, "auto")
    assert (
        found is not None
        and found.step == 20
        and found.line.before == (ParentRun(run=theirs.run, step=20),)
    )
    assert [note.split(":")[0] for note in found.notes] == [
        "warning[SW6206]"
    ] and "another run" in found.notes[0]


def test_steps_of_nine_digits(out: Path) -> None:
    root = out / "checkpoints"
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        assert parse_step(write_checkpoint(out, step=step).name) == step
    assert [step for step, _ in published_steps(root)] == [
        4,
        8,
        99_999_999,
        100_000_000,
        1_000_000_000,
    ]
    assert chosen(out)[0] == "step-1000000000"
    for name in ("step-0100000000", "step-1000", "step-00000001x", ".step-00000001.partial"):
        assert parse_step(name) is None


def test_what_was_moved_aside_goes_in_the_end(out: Path) -> None:
    """The newest of it stays; older goes once the run has come past it."""
    root = out / "checkpoints"
    for _ in range(3):
        write_checkpoint(out, step=16)
        begun(out, "never")
    prune_moved_aside(root, 15)
    assert names(root) == [f".before-attempt-{n}" for n in (1, 2, 3)]
    prune_moved_aside(root, 16)
    assert names(root) == [".before-attempt-3"]


def test_what_has_the_name_already_is_moved_aside(out: Path) -> None:
    root = out / "checkpoints"
    (root / ".step-00000008.partial").mkdir()
    publish(root / ".step-00000008.partial", root, 8)
    assert names(root) == [".before-attempt-0", "step-00000004", "step-00000008"]
    assert (
        names(root / "step-00000008") == []
        and (root / ".before-attempt-0" / "step-00000008" / MANIFEST).is_file()
    )
