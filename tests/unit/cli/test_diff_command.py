"""`diff`: what changed, what it does, and whether checkpoints resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from tests.unit.cli.shipped_models import write_llama

PINS: dict[str, Any] = {
    "tensor": 2,
    "pipeline": 2,
    "data": 4,
    "zero_stage": 1,
    "micro_batch_size": 1,
    "activation_checkpointing": "full",
    "schedule": "1f1b",
}
TRAINING = {"sequence_length": 2048, "global_batch_size": 256, "steps": 1000}
DATA = {"kind": "text", "path": "corpus/*.txt", "tokenizer": "byte"}


def between(capsys: pytest.CaptureFixture[str], a: str, b: str) -> Any:
    capsys.readouterr()
    assert main(["diff", a, b, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def keys(found: Any, section: str) -> dict[str, tuple[Any, Any]]:
    return {change["key"]: (change["a"], change["b"]) for change in found["changes"][section]}


def test_nothing_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path, parallelism=PINS)
    found = between(capsys, path, path)
    assert found["identical"] and found["resume"]["verdict"] == "bit for bit"
    assert all(effect["change"] in (0, None) for effect in found["effect"].values())
    assert main(["diff", path, path]) == 0
    assert "nothing differs" in capsys.readouterr().out


def test_effect_is_what_estimate_says_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    price = {"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb", "price_per_gpu_hour": 2.0}
    a = write_llama(tmp_path, parallelism=PINS, cluster=price)
    b = write_llama(
        tmp_path, "b.yaml", parallelism={**PINS, "activation_checkpointing": "none"}, cluster=price
    )
    found = between(capsys, a, b)
    assert main(["estimate", "--json", a, b]) in (0, 1)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for side, line in zip("ab", lines, strict=True):
        figures = {**line["memory"], **line["time"], **line["training"]}
        assert {name: effect[side] for name, effect in found["effect"].items()} == {
            name: figures[name] for name in found["effect"]
        }
    for effect in found["effect"].values():
        assert effect["change"] is None or effect["change"] == pytest.approx(
            effect["b"] / effect["a"] - 1
        )
    assert keys(found, "recipe") == {"parallelism.activation_checkpointing": ("full", "none")}
    assert keys(found, "strategy") == {"activation_checkpointing": ("full", "none")}
    assert found["effect"]["cost"]["change"] < 0 < found["effect"]["peak_bytes"]["change"]


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        (
            {"parallelism": {**PINS, "activation_checkpointing": "none"}},
            "same ranks",
            "activation_checkpointing",
        ),
        ({"parallelism": {**PINS, "micro_batch_size": 2}}, "same ranks", "micro_batch_size"),
        ({"parallelism": {**PINS, "tensor": 4, "data": 2}}, "converted", "tensor, data"),
        (
            {"parallelism": {**PINS, "pipeline": 1, "data": 8, "zero_stage": 3}},
            "converted",
            "pipeline",
        ),
        ({"training": {**TRAINING, "precision": "fp16"}}, "converted", "precision"),
        ({"training": {**TRAINING, "seed": 7}}, "same ranks", "training.seed"),
        ({"training": {**TRAINING, "optimizer": {"lr": 1e-5}}}, "same ranks", "training.optimizer"),
        ({"data": {**DATA, "shuffle": False}}, "same ranks", "data.shuffle"),
        ({"data": {**DATA, "tokenizer": "./other"}}, "no", "tokenizer"),
        ({"model": {"source": "Qwen/Qwen3-8B", "weights": "random"}}, "no", "model"),
        ({"checkpoint": {"every_steps": 5}}, "bit for bit", "the same"),
        ({"name": "other"}, "bit for bit", "the same"),
    ],
)
def test_whether_checkpoints_resume(
    change: dict[str, Any],
    verdict: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = {"parallelism": PINS, "training": TRAINING, "data": DATA}
    found = between(
        capsys,
        write_llama(tmp_path, **plain),
        write_llama(tmp_path, "b.yaml", **{**plain, **change}),
    )
    resume = found["resume"]
    assert resume["verdict"] == verdict
    assert says in " ".join([resume["how"], *resume["notes"]])


def test_a_second_copy_of_the_weights_changes_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = {**PINS, "tensor": 1, "pipeline": 1, "data": 16, "zero_stage": 3}
    plain = {"parallelism": pins, "training": TRAINING, "data": DATA}
    none = {"zero_optimization": {"zero_hpz_partition_size": 1}}
    found = between(
        capsys, write_llama(tmp_path, **plain), write_llama(tmp_path, "b.yaml", **plain, extra=none)
    )
    assert keys(found, "strategy") == {"hpz_partition_size": (8, 1)}
    assert found["effect"]["peak_bytes"]["change"] < 0 < found["effect"]["step_seconds"]["change"]
    assert found["resume"]["verdict"] == "bit for bit"


def test_folder_against_recipe(
    tmp_path: Path,
    write_recipe: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = str(write_recipe())
    folder = str(tmp_path / "built")
    assert main(["compile", recipe, "-o", folder]) == 0
    found = between(capsys, folder, recipe)
    assert found["identical"], found["changes"]
    assert (found["a"]["kind"], found["b"]["kind"]) == ("folder", "recipe")
    plan = json.loads(Path(folder, "plan.json").read_text())
    plan["versions"]["deepspeed"] = "0.19.0"
    Path(folder, "plan.json").write_text(json.dumps(plan))
    other = str(write_recipe({"parallelism.pipeline": 4, "parallelism.tensor": 1}, "other.json"))
    found = between(capsys, folder, other)
    assert keys(found, "versions")["deepspeed"][0] == "0.19.0"
    assert keys(found, "strategy") == {"tensor": (2, 1), "pipeline": (2, 4)}
    assert keys(found, "stages")["stage 3"][0] is None
    assert main(["diff", folder, other]) == 0
    out = capsys.readouterr().out
    assert "Stages" in out and "yes, converted" in out and "\x1b" not in out


def test_what_does_not_run_is_compared_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = write_llama(tmp_path, "b.yaml", parallelism={"pipeline": 2, "zero_stage": 3})
    assert main(["diff", write_llama(tmp_path, parallelism=PINS), b]) == 0
    assert "B does not run: SW3108" in capsys.readouterr().out


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path, parallelism=PINS)
    assert main(["diff", path, str(tmp_path / "none.yaml")]) == 1
    assert "SW1001" in capsys.readouterr().err
    assert main(["diff", path, str(tmp_path)]) == 1
    assert "SW6001" in capsys.readouterr().err
    for words in (["diff", path, str(tmp_path)], ["explain", str(tmp_path)]):
        assert main([*words, "--json"]) == 1
        assert [d["code"] for d in json.loads(capsys.readouterr().out)["diagnostics"]] == ["SW6001"]
