"""`shardwright verify`: right layouts pass, planted faults do not, and what cannot be tried says
so."""

from __future__ import annotations

import json
import math
import os
import resource
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.layout.layout import Layout
from shardwright.models.tiny_config import VOCABULARY
from shardwright.verify import tiny_copy
from shardwright.verify.layout_verification import Comparison
from shardwright.verify.tiny_copy import ODD_VOCABULARY, tiny_config, tiny_strategy
from tests.parity.harness import must, shardwright
from tests.verify.cases import (
    ADAPTED,
    FAMILIES,
    FAULT_IN_TEST,
    FAULTS,
    FEATURES,
    IN_RANKS,
    OBJECTIVE_IN_TEST,
    OBJECTIVES,
    PACKED_AND_VALIDATED,
    SAMPLE,
    recipe,
)

ROOT = Path(__file__).parents[2]
Record = Callable[[str, str, dict[str, Any]], None]
CHECKS = [
    "losses",
    "gradient norms",
    "learning rates",
    "weights",
    "split",
    "resume",
    "resumed weights",
]
HELD_OUT = ["held-out losses", "resumed held-out losses"]
HELD_OUT_METRICS = ["held-out metrics", "resumed held-out metrics"]


def verified(document: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON object and standard error of the command."""
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = shardwright("verify", path, "--json", timeout=900)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout) if done.stdout else {}
    found["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, found, done.stderr


def passes(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    code, found, errors = verified(document, folder)
    assert (code, found.get("same")) == (0, True), f"{found}\n{errors}"
    wanted = CHECKS + (HELD_OUT if "validation" in document else [])
    objective = document["training"].get("objective", {"name": "next-token"})["name"]
    if objective != "next-token":
        wanted += ["metrics", *(HELD_OUT_METRICS if "validation" in document else [])]
        wanted += ["teacher"] if objective == "distill" else []
    if "validation" in document and "gpt2" in document["model"].get("source", ""):
        wanted = [*wanted, "held-out loss after dropout"]
    assert sorted(check["name"] for check in found["checks"]) == sorted(wanted)
    return found


def is_found(
    document: dict[str, Any], fault: str, folder: Path, patch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The fault changes a loss or a norm by far more than the limit."""
    planted = folder / "planted"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(
        IN_RANKS + textwrap.indent(fault.strip(), "    ") + "\n"
    )
    with patch.context() as context:
        context.setenv(
            "PYTHONPATH",
            os.pathsep.join(filter(None, (str(planted), os.environ.get("PYTHONPATH")))),
        )
        code, found, errors = verified(document, folder)
    assert (code, found.get("same")) == (1, False), f"{found}\n{errors}"
    assert "error[SW5401]" in errors and "Do not pay for this run" in errors
    failed = [check for check in found["checks"] if not check["passed"]]
    wrong = {
        check["name"]: math.inf if check["worst"] is None else check["worst"] for check in failed
    }  # null: infinite
    seen = ("losses", "gradient norms", "held-out losses", "held-out loss after dropout")
    assert any(wrong.get(name, 0) > 100 * 1e-5 for name in seen), wrong
    return found


@pytest.mark.launch
@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_passes(name: str, tmp_path: Path) -> None:
    """Its documents packed, and evaluated with others."""
    passes(recipe(*FAMILIES[name], PACKED_AND_VALIDATED), tmp_path)


@pytest.mark.launch
def test_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, parallelism, fault = FAULTS[FAULT_IN_TEST]
    is_found(recipe(source, parallelism), fault, tmp_path, monkeypatch)


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes(name: str, tmp_path: Path, proved: Record) -> None:
    proved("verify", name, _figures(FAMILIES[name][0], passes(recipe(*FAMILIES[name]), tmp_path)))


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_pass(name: str, tmp_path: Path, proved: Record) -> None:
    document = recipe(*ADAPTED[name]) | {"lora": {"rank": 16, "alpha": 32, "dropout": 0.1}}
    code, found, errors = verified(document, tmp_path)
    assert code == 0 and found["same"], (found, errors)
    proved("verify", f"lora: {name}", _figures(ADAPTED[name][0], found))


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proved: Record
) -> None:
    source, parallelism, fault = FAULTS[name]
    found = is_found(recipe(source, parallelism), fault, tmp_path, monkeypatch)
    proved("verify", f"fault: {name}", _figures(source, found))


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("name", FEATURES)
def test_what_the_recipe_asks_for_is_verified(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proved: Record
) -> None:
    """It passes as it is, and with a fault of its own it does not."""
    source, parallelism, more, fault = FEATURES[name]
    document = recipe(source, parallelism, more)
    proved("verify", f"{name}: {source}", _figures(source, passes(document, tmp_path)))
    found = is_found(document, fault, tmp_path, monkeypatch)
    proved("verify", f"fault in {name}", _figures(source, found))


def by_objective(name: str) -> dict[str, Any]:
    source, parallelism, own, more, _ = OBJECTIVES[name]
    return recipe(source, parallelism, {**more, "training": {"objective": {"name": name, **own}}})


@pytest.mark.launch
def test_an_objective_passes(tmp_path: Path) -> None:
    passes(by_objective(OBJECTIVE_IN_TEST), tmp_path)


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_verified(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proved: Record
) -> None:
    document, source = by_objective(name), OBJECTIVES[name][0]
    proved("verify", f"objective: {name}", _figures(source, passes(document, tmp_path)))
    found = is_found(document, OBJECTIVES[name][-1], tmp_path, monkeypatch)
    proved("verify", f"fault in {name}", _figures(source, found))


@pytest.mark.prove
@pytest.mark.launch
def test_another_model_is_the_reference(tmp_path: Path) -> None:
    """The copy's reference is another tiny model, which `run` scores: at the first step rewards
    are not 0."""
    document = by_objective("dpo")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text("{}")
    document["training"]["objective"]["reference"] = "./reference"
    passes(document, tmp_path)


@pytest.mark.prove
@pytest.mark.launch
def test_a_compiled_folder_is_verified_in_its_layout(tmp_path: Path) -> None:
    """Which another search may not choose: it has pipeline ranks, and the recipe lets them open."""
    must(shardwright("compile", ROOT / "recipes/tiny-dpo-cpu.yaml", "-o", tmp_path / "out"))
    resolved = tmp_path / "out" / "recipe.resolved.json"
    opened = json.loads(resolved.read_text())
    opened["parallelism"] |= {
        "tensor": "auto",
        "pipeline": "auto",
        "data": 2,
        "micro_batch_size": 1,
    }
    resolved.write_text(json.dumps(opened))
    done = must(shardwright("verify", tmp_path / "out", "--json", timeout=900))
    found = json.loads(done.stdout)
    assert found["same"] and "pipeline=2 data=1" in found["layout"]


def _figures(source: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": source,
        "verified": found["verified"],
        "same": found["same"],
        **{check["name"].replace(" ", "_"): check["worst"] for check in found["checks"]},
        "seconds": round(found["seconds"], 1),
        "cpu_seconds": round(found["cpu_seconds"], 1),
    }


def strategy(**values: Any) -> Layout:
    plain = {
        "tensor": 1,
        "pipeline": 1,
        "data": 1,
        "zero_stage": 1,
        "micro_batch_size": 4,
        "schedule": "1f1b",
    }
    plain |= {
        "gradient_accumulation_steps": 16,
        "activation_checkpointing": "none",
        "offload": "none",
    }
    return Layout(**{**plain, **values})


def test_the_tiny_layout_keeps_every_kind_of_parallelism() -> None:
    small = tiny_strategy(strategy(tensor=8, pipeline=16, data=128, zero_stage=1))
    assert (small.tensor, small.pipeline, small.data) == (2, 2, 2)
    assert (small.micro_batch_size, small.gradient_accumulation_steps) == (2, 2)
    assert tiny_strategy(strategy(zero_stage=3, data=64)).zero_stage == 3
    assert tiny_strategy(strategy(gradient_accumulation_steps=1)).gradient_accumulation_steps == 1
    assert (
        tiny_strategy(strategy(pipeline=8, schedule="dualpipev")).gradient_accumulation_steps == 4
    )


def test_the_tiny_model_keeps_what_tensor_ranks_do_apart_from_sizes() -> None:
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    even = tiny_config(config, strategy(tensor=8), 512)
    assert (even["vocab_size"], even["num_key_value_heads"]) == (VOCABULARY, 2)
    assert (
        tiny_config({**config, "vocab_size": 50257}, strategy(tensor=4), 512)["vocab_size"]
        == ODD_VOCABULARY
    )
    assert tiny_config({**config, "vocab_size": 50257}, strategy(), 512)["vocab_size"] == VOCABULARY
    assert (
        tiny_config({**config, "num_key_value_heads": 2}, strategy(tensor=8), 512)[
            "num_key_value_heads"
        ]
        == 1
    )


@pytest.mark.parametrize(("length", "inside"), [(4096, False), (4097, True)])
def test_the_tiny_model_is_on_the_recipes_side_of_a_rotary_switch(
    length: int, inside: bool
) -> None:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    }
    config: dict[str, Any] = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32}
    config |= {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    small: Any = tiny_config({**config, "rope_parameters": rope}, strategy(), length)
    assert small["rope_parameters"]["rope_type"] == "longrope"
    assert (small["original_max_position_embeddings"] < tiny_copy.LENGTH) == inside
    dynamic = {
        **config,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
    }
    small = tiny_config(dynamic, strategy(), length)
    assert (small["max_position_embeddings"] < tiny_copy.LENGTH) == inside


def test_dropout_is_that_of_the_model() -> None:
    config: dict[str, Any] = {
        "resid_pdrop": 0.1,
        "text_config": {"dropout": 0.2, "layerdrop": 0.3},
        "drop": True,
    }
    small: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "text_config": {"dropout": 0.0, "layerdrop": 0.0},
        "drop": True,
    }
    made = tiny_copy.with_dropout(small, config)
    assert made == {
        "resid_pdrop": 0.1,
        "text_config": {"dropout": 0.2, "layerdrop": 0.0},
        "drop": True,
    }


def test_a_number_that_is_none_does_not_pass() -> None:
    assert not Comparison(name="losses", what="", worst=float("nan"), limit=1e-5).passed
    assert Comparison(name="losses", what="", worst=1e-5, limit=1e-5).passed


def test_what_the_recipe_refuses_is_refused_here(tmp_path: Path) -> None:
    document = recipe("Qwen/Qwen3-8B", {"tensor": 2, "pipeline": 2})
    document["parallelism"]["zero_stage"] = 3
    code, _, errors = verified(document, tmp_path)
    assert code == 1 and "SW3108" in errors
