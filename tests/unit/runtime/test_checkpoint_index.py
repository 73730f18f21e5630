"""Which checkpoint a run continues from, and why not another one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import plan_to_json, read_plan
from shardwright.runtime.attempt import begin_attempt
from shardwright.runtime.checkpoint_index import choose_checkpoint, other_rows
from shardwright.runtime.checkpoint_manifest import CHECKSUMS, MANIFEST, read_manifest, write_manifest
from tests.unit.runtime.saved import write_checkpoint


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import SMALL_RECIPE

    folder = tmp_path_factory.mktemp("compiled")
    (folder / "recipe.json").write_text(json.dumps(SMALL_RECIPE))
    assert cli.main(["compile", str(folder / "recipe.json"), "-o", str(folder / "out")]) == 0
    return folder / "out"


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


RANK = "rank-00000-000.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a truncated shard": (lambda step: truncate(step / RANK), f"{RANK} has "),
    "one flipped bit": (lambda step: flip(step / RANK), f"{RANK} is damaged"),
    "a missing shard": (lambda step: (step / RANK).unlink(), f"{RANK} is missing"),
    "no manifest": (lambda step: (step / MANIFEST).unlink(), f"there is no {MANIFEST}"),
    "half a manifest": (lambda step: truncate(step / MANIFEST), ""),
    "no checksums": (lambda step: (step / CHECKSUMS).unlink(), f"there is no {CHECKSUMS}"),
    "a changed plan": (lambda step: flip(step / "plan.json"), "plan.json is damaged"),
    "an empty folder": (lambda step: (shutil.rmtree(step), step.mkdir())[0], f"there is no {MANIFEST}"),
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
    assert len(notes) == 1 and notes[0].startswith(f"warning[SW6206]: step-00000008 is skipped: {why}")


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_refused_by_name(kind: str, out: Path) -> None:
    spoil, why = DAMAGES[kind]
    spoil(out / "checkpoints" / "step-00000008")
    with pytest.raises(Refusal) as refused:
        chosen(out, str(out / "checkpoints" / "step-00000008"))
    assert refused.value.diagnostics[0].code == "SW6201"
    assert why in refused.value.diagnostics[0].message


def test_none_is_whole(out: Path) -> None:
    for step in (4, 8):
        truncate(out / "checkpoints" / f"step-{step:08d}" / RANK)
    with pytest.raises(Refusal, match="none of the 2 checkpoints"):
        chosen(out)


def rewrite(out: Path, plan: Plan) -> None:
    (out / "plan.json").write_text(plan_to_json(plan))


def test_another_model_is_refused(out: Path) -> None:
    plan = read_plan(out)
    rewrite(out, dataclasses.replace(plan, model=dataclasses.replace(plan.model, config_hash="f" * 64)))
    with pytest.raises(Refusal) as refused:
        chosen(out)
    assert refused.value.diagnostics[0].code == "SW6203"


def test_another_tokenizer_is_refused(out: Path) -> None:
    plan = read_plan(out)
    rewrite(out, dataclasses.replace(plan, data=dataclasses.replace(plan.data, tokenizer="tokenizer")))
    (out / "tokenizer").mkdir()
    (out / "tokenizer" / "tokenizer.json").write_text("{}")
    write_checkpoint(out, step=12)
    assert chosen(out)[0] == "step-00000012"
    (out / "tokenizer" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(Refusal, match=r"another tokenizer: tokenizer\.json differs") as refused:
        chosen(out)
    assert refused.value.diagnostics[0].code == "SW6204"


def test_other_samples_are_said(out: Path) -> None:
    plan = read_plan(out)
    rewrite(out, dataclasses.replace(plan, data=dataclasses.replace(plan.data, shuffle=not plan.data.shuffle)))
    _, notes = chosen(out)
    assert [note.split(":")[0] for note in notes] == ["warning[SW6207]"]


def test_other_weights_of_a_mixture_are_said(out: Path) -> None:
    plan = read_plan(out)

    def mixed(*weights: float) -> Plan:
        parts = tuple(dataclasses.replace(plan.data, weight=weight) for weight in weights)
        return dataclasses.replace(plan, data=dataclasses.replace(plan.data, kind="mixture", mixture=parts))

    rewrite(out, mixed(1.0, 3.0))
    write_checkpoint(out, step=12)
    assert chosen(out) == ("step-00000012", ())
    rewrite(out, mixed(1.0, 2.0))
    (note,) = chosen(out)[1]
    assert note.endswith("data.mixture.1.weight 3.0 -> 2.0")
    rewrite(out, mixed(1.0))
    (note,) = chosen(out)[1]
    assert note.endswith("data has 1 parts, not 2")


def test_data_that_grew_is_said(out: Path) -> None:
    step = out / "checkpoints" / "step-00000008"
    assert other_rows(step, (7, 5)) == (), "written before rows were counted"
    write_manifest(step, dataclasses.replace(read_manifest(step), rows=(1234, 5)))
    assert other_rows(step, (1234, 5)) == ()
    (warning,) = other_rows(step, (1300, 5))
    assert warning.startswith("warning[SW6207]: ") and "had 1,234 + 5 sequences and has 1,300 + 5" in warning


def test_later_checkpoints_are_set_aside(out: Path) -> None:
    """Going on from step 4 writes another step 8: neither is lost, and `auto` never takes the old one again."""
    plan, root = read_plan(out), out / "checkpoints"
    begin_attempt(plan, out, (root / "step-00000004").resolve(), fresh=False)
    assert sorted(p.name for p in root.iterdir()) == [".before-attempt-1", "step-00000004"]
    assert (root / ".before-attempt-1" / "step-00000008" / MANIFEST).is_file()
