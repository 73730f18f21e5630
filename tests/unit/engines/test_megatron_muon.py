"""Muon under `target: megatron`: megatron_args.sh's options, the layouts that run, their price, and
hosts without Megatron-Core's Muon."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines.megatron import megatron_equivalence, megatron_muon
from shardwright.engines.megatron.megatron_muon import check_muon, muon_settings
from shardwright.launch.host_checks import optional_packages
from shardwright.launch.host_probe import PACKAGES
from shardwright.layout.muon_matrices import muon_parameters, newton_schulz_flops
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_resolution import estimate_layout
from tests.unit.cost.test_estimate import change
from tests.unit.engines.test_transformer_engine import ON_GPUS
from tests.unit.models.factory import LLAMA_8B, SMALL_LLAMA, graph_of, problem_of
from tests.unit.search.test_muon_rules import with_muon

OPTIMIZER = {"name": "muon", "lr": 1e-3, "adamw_lr": 1e-3, "momentum": 0.9, "ns_steps": 4}
MUON: dict[str, Any] = {
    **ON_GPUS,
    "training.optimizer": OPTIMIZER,
    "parallelism.zero_stage": 0,
}


def compiled(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> CompileResult:
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    return compile_recipe(load_recipe(write_recipe({**MUON, **changes})))


def test_options_of_pretrain_gpt(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled(write_recipe, monkeypatch)
    lines = made.files["megatron_args.sh"].decode().splitlines()
    words = [tuple(shlex.split(line)) for line in lines if "muon" in line]
    assert words == [
        ("--optimizer", "muon"),
        ("--muon-momentum", "0.9"),
        ("--muon-nesterov",),
        ("--muon-num-ns-steps", "4"),
        ("--muon-coefficient-type", "simple"),
        ("--muon-scale-mode", "shape_scaling"),
        ("--muon-tp-mode", "duplicated"),
    ]
    settings = muon_settings(made.plan)
    assert settings["muon_num_ns_steps"] == 4 and settings["muon_fp32_matmul_prec"] == "medium"
    single = dataclasses.replace(made.plan.training, precision="fp32")
    in_fp32 = dataclasses.replace(made.plan, training=single)
    assert muon_settings(in_fp32)["muon_fp32_matmul_prec"] == "highest"


def test_the_script_has_one_learning_rate(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**OPTIMIZER, "adamw_lr": 3e-4}
    made = compiled(write_recipe, monkeypatch, **{"training.optimizer": own})
    assert "megatron_args.sh" not in made.files
    [found] = [d for d in made.warnings if d.code == "SW2055"]
    assert "training.optimizer.adamw_lr 0.0003, which differs from lr 0.001" in found.message


def test_states_are_not_sharded(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refusal) as caught:
        compiled(write_recipe, monkeypatch, **{"parallelism.zero_stage": 1})
    [found] = caught.value.diagnostics
    assert found.code == "SW3237" and "zero_stage 1" in found.message


def test_transposed_experts_are_refused(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    config = {**SMALL_LLAMA, "model_type": "gpt_oss", "head_dim": 8, **experts}
    with pytest.raises(Refusal) as caught:
        compiled(write_recipe, monkeypatch, **{"model.config": config})
    assert [d.code for d in caught.value.diagnostics] == ["SW3238"]


def test_hosts_without_megatrons_muon(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compiled(write_recipe, monkeypatch).plan
    monkeypatch.setattr(megatron_muon, "missing_muon", lambda: "")
    check_muon(plan)
    absent = "emerging-optimizers is not installed"
    monkeypatch.setattr(megatron_muon, "missing_muon", lambda: absent)
    with pytest.raises(Refusal) as caught:
        check_muon(plan)
    [found] = caught.value.diagnostics
    assert found.code == "SW6018" and absent in found.message
    check_muon(dataclasses.replace(plan, muon={}))


def test_a_megatron_core_without_the_recipes_muon_is_told() -> None:
    version = pytest.importorskip("importlib.metadata").version
    pytest.importorskip("megatron.core")
    if version("megatron-core").startswith("0.16"):
        assert "has other coefficients than the recipe" in megatron_muon.missing_muon()
    else:
        assert "megatron-core" not in megatron_muon.missing_muon()


def test_doctor_asks_each_host_for_the_packages_of_some_plans(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = optional_packages(compiled(write_recipe, monkeypatch).plan)
    assert needed["emerging_optimizers"] and not needed["torchao"]
    assert set(needed) <= set(PACKAGES)


def test_ranks_repeat_the_iterations() -> None:
    graph = graph_of(LLAMA_8B)
    flops = sum(newton_schulz_flops(graph, p, 5) for p in muon_parameters(graph, ()))
    recipe = dataclasses.replace(with_muon(LLAMA_8B), target="megatron")
    seconds = {}
    for tensor in (1, 4):
        layout = change(
            tensor=tensor,
            pipeline=1,
            data=8 // tensor,
            zero_stage=0,
            gradient_accumulation_steps=2 * tensor,
        )
        time = estimate_layout(problem_of(recipe, graph), layout).time
        seconds[tensor] = time.optimizer_seconds
    assert all(each > flops / 989e12 for each in seconds.values())
