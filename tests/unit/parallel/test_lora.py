"""LoRA's refusals, a merge, and adapters beside parameters that get their values later."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.checkpoint.checkpoint_compatibility import check_resumable
from shardwright.diagnostics import Refusal
from shardwright.engines.deepspeed.deepspeed_optimizer_shards import parameter_shards
from shardwright.launch.preflight_checks import check_preflight
from shardwright.layout.parameter_sharding import ModuleSharding, ParameterSharding
from shardwright.parallel.lora_adapters import (
    add_adapters,
    check_lora_adapters,
    hf_parameter_name,
    merge_adapter,
    peft_rewrites_targets,
    unique_parameters,
)
from shardwright.parallel.model_loading import conv1d_to_linear
from shardwright.parallel.weight_loader import LayerSeededWeights, WeightLoader, empty_model
from shardwright.plan.plan import Plan, PlanLora, plan_to_json, read_plan
from shardwright.train.training_session import rank_record
from tests.zoo.configs import tiny_config

CASE = Path(__file__).parents[2] / "cases" / "qwen2-tp2-zero3" / "expected"
LORA = PlanLora(rank=4, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj"))


def plan(lora: PlanLora | None) -> Plan:
    return dataclasses.replace(read_plan(CASE), lora=lora)


def codes(refused: pytest.ExceptionInfo[Refusal]) -> list[str]:
    return [d.code for d in refused.value.diagnostics]


def test_without_peft_a_run_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a)
    )
    with pytest.raises(Refusal) as refused:
        check_preflight(plan(LORA), tmp_path, None)
    (absent,) = [d for d in refused.value.diagnostics if d.code == "SW6251"]
    assert "pip install" in absent.help
    try:
        check_preflight(plan(None), tmp_path, None)
    except Refusal as other:
        assert all(d.code != "SW6251" for d in other.diagnostics)


@pytest.mark.parametrize(
    "here", [None, dataclasses.replace(LORA, alpha=16), dataclasses.replace(LORA, rank=8)]
)
def test_a_checkpoint_of_other_adapters(here: PlanLora | None, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_to_json(plan(LORA)))
    assert check_resumable(plan(LORA), tmp_path, tmp_path) == ()
    with pytest.raises(Refusal) as refused:
        check_resumable(plan(here), tmp_path, tmp_path)
    assert codes(refused) == ["SW6254"]


@pytest.mark.parametrize("turned", [False, True])
def test_a_merge(turned: bool) -> None:
    weight, a, b, x = torch.randn(6, 5), torch.randn(4, 5), torch.randn(6, 4), torch.randn(3, 5)
    wanted = x @ weight.t() + 2.0 * (x @ a.t()) @ b.t()
    whole = merge_adapter(weight.t() if turned else weight, a, b, LORA, is_transposed=turned)
    assert torch.allclose(x @ (whole if turned else whole.t()), wanted, atol=1e-5)


def with_parameters(base: Plan, shapes: dict[str, tuple[int, ...]]) -> Plan:
    """shapes: parameter name -> Hugging Face's shape, of a model that nothing cuts."""
    module = ModuleSharding(
        module="",
        style="replicated",
        parameters=tuple(
            ParameterSharding(name=n, shape=s, dimension=None, blocks=(), sizes=())
            for n, s in shapes.items()
        ),
    )
    return dataclasses.replace(
        base, tensor_parallel=dataclasses.replace(base.tensor_parallel, modules=(module,))
    )


STACKS = {"llama": "model.layers", "gpt2": "transformer.h"}


def drawn(model_type: str, lora: PlanLora | None) -> tuple[dict[str, torch.Tensor], nn.Module]:
    """Filled after the adapters were put in, from weights that are drawn only then; parameters by
    plain name."""
    model = empty_model(AutoConfig.for_model(**tiny_config(model_type)), "eager")
    weights = LayerSeededWeights(model, STACKS[model_type], 3)
    turned = conv1d_to_linear(model)
    filler = WeightLoader(model, weights, {}, turned, 0)
    base = plan(lora)
    cut = dataclasses.replace(base.model.cut, stack=STACKS[model_type])
    shapes = {n: tuple(p.shape)[:: -1 if n in turned else 1] for n, p in model.named_parameters()}
    add_adapters(
        model,
        with_parameters(
            dataclasses.replace(base, model=dataclasses.replace(base.model, cut=cut)), shapes
        ),
        turned,
    )
    filler.fill([""])
    return {hf_parameter_name(name): p for name, p in model.named_parameters()}, model


@pytest.mark.parametrize(
    ("model_type", "modules"),
    [("llama", ("q_proj", "down_proj")), ("gpt2", ("c_attn", "c_fc", "c_proj"))],
)
def test_adapters_beside_parameters_that_are_filled_later(
    model_type: str, modules: tuple[str, ...]
) -> None:
    lora = dataclasses.replace(LORA, target_modules=modules)
    without, plain = drawn(model_type, None)
    found, model = drawn(model_type, lora)
    assert without.keys() == {name for name in found if "lora_" not in name}
    assert all(torch.equal(found[name], p) for name, p in without.items())
    assert {name for name, p in found.items() if p.requires_grad} == {
        name for name in found if "lora_" in name
    }
    assert set(rank_record(parameter_shards(model), 0)["shapes"]) == set(found)  # type: ignore[arg-type]

    torch.manual_seed(plan(lora).training.seed)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(modules), task_type="CAUSAL_LM"
    )
    peft = dict(get_peft_model(plain, config).named_parameters())
    adapters = {name: p for name, p in found.items() if "lora_" in name}
    assert len(adapters) == sum("lora_" in name for name in peft)
    assert all(torch.equal(peft[f"base_model.model.{name}"], p) for name, p in adapters.items())


MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    "dots1": {"first_k_dense_replace": 1},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen2_moe": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": {},
    "qwen3_next": {},
    "mixtral": {},
}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_are_adapted_where_planned(model_type: str) -> None:
    """By a loop written by hand: each linear of a decoder layer has W x + alpha / r B A x, and
    nothing else."""
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**tiny_config(model_type), **MIXTURES[model_type]}),
        attn_implementation="eager",
    )
    model.eval()
    ids = torch.arange(3, 19)[None]
    linears = {
        n: m
        for n, m in model.model.layers.named_modules(prefix="model.layers")
        if type(m) is nn.Linear
    }
    lora = dataclasses.replace(LORA, target_modules=tuple({n.rpartition(".")[2] for n in linears}))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    planned = with_parameters(plan(lora), shapes)
    add_adapters(model, planned, frozenset())
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == {f"{n}.lora_{x}.default.weight" for n in linears for x in "AB"}
    assert len(unique_parameters(model.named_parameters())) == len(shapes) + len(found)
    with torch.no_grad():
        for p in found.values():
            p.copy_(torch.randn_like(p) * 0.05)
        adapted = model(input_ids=ids, use_cache=False).logits
        for name, module in linears.items():
            a, b = (found[f"{name}.lora_{x}.default.weight"] for x in "AB")
            module.weight += lora.alpha / lora.rank * b @ a
            b.zero_()
        merged_logits = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(adapted, merged_logits, atol=1e-4)


def test_other_adapters_than_planned_are_refused() -> None:
    planned: dict[str, tuple[int, ...]] = {
        "a.lora_A.default.weight": (4, 8),
        "b.lora_A.default.weight": (4, 8),
    }
    check_lora_adapters(planned, planned)
    others: list[dict[str, tuple[int, ...]]] = [
        {**planned, "c.lora_A.default.weight": (4, 8)},
        {"a.lora_A.default.weight": (4, 8)},
        {},
    ]
    for found in others:
        with pytest.raises(Refusal, match="planned") as refused:
            check_lora_adapters(found, planned)
        assert codes(refused) == ["SW6256"]
    with pytest.raises(Refusal, match="8x8, planned 4x8"):
        check_lora_adapters({**planned, "a.lora_A.default.weight": (8, 8)}, planned)


def test_two_parameters_of_one_name_are_refused() -> None:
    inner, outer = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    with pytest.raises(Refusal) as refused:
        unique_parameters([("a.base_layer.weight", inner), ("a.weight", outer)])
    assert codes(refused) == ["SW6257"]
    names = ("a.lora_A.default.weight", "a.base_layer.lora_A.default.weight")
    assert unique_parameters(zip(names, (inner, outer), strict=True)).keys() == set(names)


@pytest.mark.parametrize(
    ("model_type", "rewrites"), [("deepseek_v3", True), ("qwen3_moe", True), ("llama", False)]
)
def test_folders_that_peft_would_load_elsewhere(model_type: str, rewrites: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config(model_type)))
    every = dataclasses.replace(
        LORA, target_modules=("q_proj", "gate_proj", "up_proj", "down_proj")
    )
    assert peft_rewrites_targets(every, model) == rewrites
    assert (
        peft_rewrites_targets(dataclasses.replace(LORA, target_modules=("gate_proj",)), model)
        == rewrites
    )
    assert not peft_rewrites_targets(dataclasses.replace(LORA, target_modules=("q_proj",)), model)
