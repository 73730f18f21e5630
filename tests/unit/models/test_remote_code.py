"""model.trust_remote_code: a model's own code runs where the recipe names the model twice, and
nowhere else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.parallel.model_loading import load_config
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.models.own_model import FILES, write_own_model

Compile = Callable[[dict[str, Any]], CompileResult]


@pytest.fixture
def compiled(write_recipe: Callable[..., Path]) -> Compile:
    def compile_it(model: dict[str, Any]) -> CompileResult:
        layout = {"pipeline": 2, "data": 2, "micro_batch_size": 2}
        changes = {"model": {"weights": "random", **model}, "parallelism": layout}
        return compile_recipe(load_recipe(write_recipe(changes)))

    return compile_it


def refused(compiled: Compile, model: dict[str, Any]) -> Diagnostic:
    with pytest.raises(Refusal) as caught:
        compiled(model)
    (diagnostic,) = caught.value.diagnostics
    assert "\n" not in diagnostic.message and diagnostic.help
    return diagnostic


TRUSTED = {"source": "./own", "trust_remote_code": "./own"}


def test_the_compiled_folder_carries_the_code(compiled: Compile, tmp_path: Path) -> None:
    folder = write_own_model(tmp_path / "own")
    (folder / "unrelated.py").write_text("raise SystemExit")
    result = compiled(TRUSTED)
    plan = result.plan
    assert (plan.model.model_type, plan.model.architecture) == (
        "tiny_of_its_own",
        "TinyForCausalLM",
    )
    assert plan.model.remote_code is not None
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()}
    assert dict(plan.model.remote_code.files) == hashes
    assert {n: c for n, c in result.files.items() if n.endswith(".py") and "/" in n} == {
        f"model/{name}": text.encode() for name, text in FILES.items()
    }
    assert result.files == compiled(TRUSTED).files
    assert len([s for s in plan.stages for _ in s.layers]) == 6


def test_the_runtime_uses_the_copy_and_nothing_else(compiled: Compile, tmp_path: Path) -> None:
    write_own_model(tmp_path / "own")
    result = compiled(TRUSTED)
    out = tmp_path / "out"
    for name, content in result.files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    assert load_config(result.plan, out).scale == 1.7
    assert sorted(p.name for p in (out / "model").iterdir()) == sorted(
        ["config.json", *FILES]
    )  # no __pycache__
    (out / "model" / "layers_tiny.py").write_text("print('edited')")
    with pytest.raises(Refusal) as caught:
        load_config(result.plan, out)
    assert [d.code for d in caught.value.diagnostics] == ["SW6008"]


def test_other_code_is_another_model(compiled: Compile, tmp_path: Path) -> None:
    folder = write_own_model(tmp_path / "own")
    first = compiled(TRUSTED).plan.model
    (folder / "layers_tiny.py").write_text(FILES["layers_tiny.py"].replace("tanh", "sin"))
    second = compiled(TRUSTED).plan.model
    assert first.config_hash != second.config_hash and first.remote_code != second.remote_code


def test_without_trust_nothing_runs(compiled: Compile, tmp_path: Path) -> None:
    folder = write_own_model(tmp_path / "own")
    (folder / "configuration_tiny.py").write_text("raise AssertionError('it ran')")
    diagnostic = refused(compiled, {"source": "./own"})
    assert diagnostic.code == "SW2014" and "trust_remote_code:" in diagnostic.help
    assert refused(compiled, TRUSTED).code == "SW2018"


@pytest.mark.parametrize("trusted", ["org/name", "./other", "own"])
def test_trust_is_for_the_source_by_the_same_words(
    trusted: str, compiled: Compile, tmp_path: Path
) -> None:
    write_own_model(tmp_path / "own")
    diagnostic = refused(compiled, {"source": "./own", "trust_remote_code": trusted})
    assert (diagnostic.code, diagnostic.valid) == ("SW1212", ("./own",))


def test_trust_needs_a_source(compiled: Compile, small_recipe: dict[str, Any]) -> None:
    assert (
        refused(compiled, {**small_recipe["model"], "trust_remote_code": "org/name"}).code
        == "SW1212"
    )


@pytest.mark.parametrize("value", [True, False, 1])
def test_yes_is_not_a_name(value: object, compiled: Compile, tmp_path: Path) -> None:
    write_own_model(tmp_path / "own")
    diagnostic = refused(compiled, {"source": "./own", "trust_remote_code": value})
    assert diagnostic.code == "SW1102" and "trust_remote_code: org/name" in diagnostic.help


@pytest.mark.parametrize(
    ("auto_map", "code"),
    [
        ({}, "SW2014"),
        ("modeling_tiny.TinyForCausalLM", "SW2014"),
        ({"AutoConfig": "configuration_tiny.TinyConfig"}, "SW2014"),
        (
            {
                "AutoConfig": "configuration_tiny.TinyConfig",
                "AutoModelForCausalLM": "other/repo--m.Tiny",
            },
            "SW2014",
        ),
        (
            {
                "AutoConfig": "configuration_tiny.Absent",
                "AutoModelForCausalLM": "modeling_tiny.Tiny",
            },
            "SW2018",
        ),
        (
            {"AutoConfig": "absent.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.Tiny"},
            "SW2018",
        ),
    ],
)
def test_what_auto_map_may_say(
    auto_map: object, code: str, compiled: Compile, tmp_path: Path
) -> None:
    write_own_model(tmp_path / "own", auto_map=auto_map)
    assert refused(compiled, TRUSTED).code == code


def test_a_type_that_transformers_has_needs_no_code(
    compiled: Compile, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_own_model(tmp_path / "own")
    native = {
        **small_recipe["model"]["config"],
        "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"},
    }
    (folder / "config.json").write_text(json.dumps(native))
    result = compiled(TRUSTED)
    assert result.plan.model.model_type == "llama" and result.plan.model.remote_code is None
    assert not any(name.startswith("model/") and name.endswith(".py") for name in result.files)


def test_a_hub_id(compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "hub" / "models--org--own", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    folder = write_own_model(repository / "snapshots" / commit)
    trusted = {"source": "org/own", "trust_remote_code": "org/own"}
    assert refused(compiled, {"source": "org/own"}).help.count("trust_remote_code: org/own") == 1
    assert compiled(trusted).plan.model.remote_code is not None
    for name in FILES:
        (folder / name).unlink()
    diagnostic = refused(compiled, trusted)
    assert diagnostic.code == "SW2001" and "its code is not on this machine" in diagnostic.message
