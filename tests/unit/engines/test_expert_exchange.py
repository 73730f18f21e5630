"""How expert ranks exchange tokens under Megatron-Core: what is refused, lowered and priced."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe, estimate_recipe
from shardwright.cost.communication_bytes import step_traffic
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.megatron import expert_exchange, megatron_equivalence
from shardwright.engines.megatron.expert_exchange import (
    check_deepep,
    cuda_connections,
    exchange_settings,
)
from shardwright.engines.megatron.megatron_runtime import prepare_process
from shardwright.launch.preflight_checks import check_preflight
from shardwright.layout.layout_estimate import Estimate
from shardwright.plan.plan import Plan, plan_from_json
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_resolution import with_stages_assigned
from shardwright.search.layout_search import search
from shardwright.verify.tiny_copy import tiny_strategy
from tests.unit.engines.test_megatron import EXPERTS
from tests.unit.engines.test_transformer_engine import DEEPSEEK
from tests.unit.models.factory import graph_of, problem_of

MIXTURE = {**EXPERTS, "num_local_experts": 8, "num_hidden_layers": 4}
LAYOUT: dict[str, Any] = {"tensor": 1, "pipeline": 1, "data": 8, "expert": 2, "zero_stage": 1}
LAYOUT |= {"micro_batch_size": 1, "activation_checkpointing": "none"}
DEEPEP, OVERLAP = {"expert_dispatcher": "deepep"}, {"expert_overlap": True}
PIPED = {"pipeline": 2, "data": 4}
BASE: dict[str, Any] = {
    "target": "megatron",
    "model.config": MIXTURE,
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.gpus_per_node": 8,
    "training.precision": "bf16",
    "training.global_batch_size": 64,
}
INLINE = {"memory_gib": 80, "hbm_gbytes_per_second": 3000, "peak_tflops": {"bf16": 900}}


@pytest.fixture
def estimated(write_recipe: Callable[..., Path]) -> Callable[..., Estimate]:
    def of(layout: dict[str, Any], **changes: Any) -> Estimate:
        pins = {key: value for key, value in {**LAYOUT, **layout}.items() if value is not None}
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        recipe = load_recipe(write_recipe({**BASE, **keys, "parallelism": pins}))
        return estimate_recipe(recipe)[1]

    return of


def refused(estimate: Estimate) -> list[Diagnostic]:
    return [d for d in estimate.diagnostics if d.severity == "error"]


@pytest.mark.parametrize(
    ("layout", "changes", "code", "why"),
    [
        ({**DEEPEP, "expert": 1}, {}, "SW3163", "expert is 1"),
        ({**OVERLAP, "expert": 1}, {}, "SW3163", "expert is 1"),
        (DEEPEP, {"cluster__gpu": "a100-sxm4-80gb"}, "SW3170", "a100-sxm4-80gb"),
        (DEEPEP, {"cluster__gpu": "mi300x-192gb"}, "SW3170", "mi300x-192gb"),
        (DEEPEP, {"cluster__gpu": "l40s-48gb"}, "SW3170", "NVLink"),
        (DEEPEP, {"cluster__gpu": "h100-pcie-80gb"}, "SW3170", "NVLink"),
        (DEEPEP, {"cluster__gpu": "cpu"}, "SW3170", "cpu"),
        (DEEPEP, {"training__precision": "fp32"}, "SW3174", "fp32"),
        (
            {**DEEPEP, "expert": 3, "data": 3},
            {"cluster__gpus_per_node": 3, "training__global_batch_size": 66},
            "SW3174",
            "3 ranks",
        ),
        (
            {**DEEPEP, "expert": 8},
            {"cluster__gpus_per_node": 4, "cluster__nodes": 2},
            "SW3174",
            "nodes of 4 GPUs",
        ),
        (OVERLAP, {"training__precision": "fp32"}, "SW3175", "fp32"),
        ({**OVERLAP, "activation_checkpointing": "full"}, {}, "SW3175", "whole layers"),
        ({**OVERLAP, "activation_checkpointing": {"full": 1}}, {}, "SW3175", "whole layers"),
        ({**OVERLAP, "activation_checkpointing": ["moe"]}, {}, "SW3175", "moe is recomputed"),
        ({**OVERLAP, **PIPED}, {}, "SW3175", "without virtual stages"),
        ({**OVERLAP, "expert": 8}, {}, "SW3175", "one expert"),
        (
            OVERLAP,
            {
                "model__config": {
                    **{k: v for k, v in MIXTURE.items() if k != "num_local_experts"},
                    "model_type": "qwen3_moe",
                    "num_experts": 8,
                    "moe_intermediate_size": 32,
                    "mlp_only_layers": [3],
                    "decoder_sparse_step": 1,
                }
            },
            "SW3175",
            "last layer",
        ),
        (DEEPEP, {"target": "deepspeed"}, "SW3115", "expert_dispatcher deepep"),
        (OVERLAP, {"target": "deepspeed"}, "SW3115", "expert_overlap true"),
    ],
)
def test_what_is_refused(
    layout: dict[str, Any],
    changes: dict[str, Any],
    code: str,
    why: str,
    estimated: Callable[..., Estimate],
) -> None:
    (found,) = [d for d in refused(estimated(layout, **changes)) if d.code == code]
    assert why in found.message and found.help
    off = dict.fromkeys((*DEEPEP, *OVERLAP))
    assert code not in [d.code for d in refused(estimated({**layout, **off}, **changes))]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (DEEPEP, {}),
        (DEEPEP, {"cluster__gpu": INLINE}),
        (
            DEEPEP,
            {"cluster__gpu": "gb200-nvl-186gb", "cluster__gpus_per_node": 4, "cluster__nodes": 2},
        ),
        ({**DEEPEP, "expert": 8}, {"cluster__gpu": "h800-sxm-80gb"}),
        (OVERLAP, {"cluster__gpu": "mi300x-192gb"}),
        (OVERLAP, {"cluster__gpu": "cpu"}),
        ({**OVERLAP, "activation_checkpointing": ["layernorm", "moe_act"]}, {}),
        ({**OVERLAP, **PIPED, "virtual_stages": 2}, {}),
        ({**OVERLAP, **DEEPEP, "expert": 8}, {}),
    ],
)
def test_what_runs(
    layout: dict[str, Any], changes: dict[str, Any], estimated: Callable[..., Estimate]
) -> None:
    found = estimated(layout, **changes)
    assert not refused(found)
    assert found.strategy.expert_dispatcher == layout.get("expert_dispatcher", "alltoall")
    assert found.strategy.expert_overlap == layout.get("expert_overlap", False)


def test_auto_never_asks_for_either(write_recipe: Callable[..., Path]) -> None:
    recipe = load_recipe(write_recipe({**BASE, "parallelism": {"expert": "auto"}}))
    tried = [e.strategy for e in search(problem_of(recipe, graph_of(MIXTURE))).ranked]
    assert any(s.expert > 1 for s in tried)
    assert {(s.expert_dispatcher, s.expert_overlap) for s in tried} == {("alltoall", False)}


def test_a_search_keeps_the_pins(write_recipe: Callable[..., Path]) -> None:
    """Layouts that cannot have them are rejected with the reason."""
    pins = {**DEEPEP, **OVERLAP, "expert": "auto", "virtual_stages": "auto"}
    recipe = load_recipe(write_recipe({**BASE, "parallelism": pins}))
    found = search(problem_of(recipe, graph_of(MIXTURE)))
    assert {
        (s.expert_dispatcher, s.expert_overlap) for s in (e.strategy for e in found.ranked)
    } == {("deepep", True)}
    assert all(e.strategy.expert > 1 for e in found.ranked)
    assert {"SW3163", "SW3175"} <= {region.code for region in found.rejected}


def test_the_first_and_the_last_micro_batch_are_exposed(
    estimated: Callable[..., Estimate],
) -> None:
    def exchange(micro_batches: int, **layout: Any) -> float:
        ranks = 8 // layout.get("pipeline", 1)
        found = estimated(layout, training__global_batch_size=micro_batches * ranks)
        assert found.strategy.gradient_accumulation_steps == micro_batches
        return found.time.tensor_comm_seconds

    constants = 0.0
    for piped in ({}, {**PIPED, "virtual_stages": 2}):
        ranks = int(piped.get("pipeline", 1))
        for micro_batches in (ranks, 2 * ranks, 8 * ranks):
            plain = exchange(micro_batches, **piped)
            hidden = 1 - exchange(micro_batches, **piped, **OVERLAP) / plain
            share = 1 - ranks / micro_batches
            if not share:
                assert hidden == pytest.approx(0)
                continue
            constants = constants or hidden / share
            assert hidden / share == pytest.approx(constants, rel=0.05)
    assert 0.2 < constants < 0.6


def test_overlap_saves_one_more_layer(estimated: Callable[..., Estimate]) -> None:
    plain, overlapped = estimated({}), estimated(OVERLAP)
    assert overlapped.memory.peak_bytes > plain.memory.peak_bytes
    alone = {"training__global_batch_size": 8}
    assert estimated(OVERLAP, **alone).memory.peak_bytes == estimated({}, **alone).memory.peak_bytes


def test_deepep_sends_a_token_once_to_a_rank(write_recipe: Callable[..., Path]) -> None:
    """Two experts of a token are on one of 8 ranks one time in 8."""

    def moved(**layout: Any) -> float:
        pins = {**LAYOUT, "expert": 8, **layout}
        recipe = load_recipe(write_recipe({**BASE, "parallelism": pins}))
        problem, estimate = problem_of(recipe, graph_of(MIXTURE)), estimate_recipe(recipe)[1]
        return step_traffic(with_stages_assigned(problem, estimate.strategy), 0).expert_all_to_all

    assert moved(**DEEPEP) / moved() == pytest.approx(8 * (1 - (7 / 8) ** 2) / 2)


def test_a_routers_groups_limit_the_ranks_that_deepep_sends_to(
    write_recipe: Callable[..., Path],
) -> None:
    """Eight experts a token from half of the groups are on 4 of 8 ranks."""
    grouped = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 8}

    def sent(**groups: int) -> float:
        config = {**grouped, **groups}
        pins = {**LAYOUT, "expert": 8, **DEEPEP}
        recipe = load_recipe(write_recipe({**BASE, "model.config": config, "parallelism": pins}))
        problem, estimate = problem_of(recipe, graph_of(config)), estimate_recipe(recipe)[1]
        return step_traffic(with_stages_assigned(problem, estimate.strategy), 0).expert_all_to_all

    reached = 4 * (1 - (3 / 4) ** 8), 8 * (1 - (7 / 8) ** 8)
    assert sent() / sent(topk_group=4) == pytest.approx(reached[0] / reached[1])


@pytest.fixture
def planned(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Plan, dict[str, bytes]]]:
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())

    def of(layout: dict[str, Any], **changes: Any) -> tuple[Plan, dict[str, bytes]]:
        recipe = load_recipe(write_recipe({**BASE, **changes, "parallelism": {**LAYOUT, **layout}}))
        made = compile_recipe(recipe)
        return made.plan, dict(made.files)

    return of


def test_the_plan_carries_the_choice(planned: Callable[..., Any]) -> None:
    _, files = planned({**DEEPEP, **OVERLAP})
    read = plan_from_json(files["plan.json"].decode())
    assert (read.strategy.expert_dispatcher, read.strategy.expert_overlap) == ("deepep", True)
    assert exchange_settings(read.strategy) == {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_router_dtype": "fp32",
        "overlap_moe_expert_parallel_comm": True,
    }
    script = files["megatron_args.sh"].decode()
    words = shlex.split(script.partition("MEGATRON_ARGS=(")[2].rpartition(")")[0], comments=True)
    options = dict(itertools.pairwise(words))
    assert words.count("--moe-token-dispatcher-type") == 1
    assert options["--moe-token-dispatcher-type"] == "flex"
    assert options["--moe-flex-dispatcher-backend"] == "deepep"
    assert options["--moe-router-dtype"] == "fp32"
    assert "--overlap-moe-expert-parallel-comm" in words
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in script


def test_alltoall_is_lowered_as_before(planned: Callable[..., Any]) -> None:
    plan, files = planned({})
    assert exchange_settings(plan.strategy) == {}
    script = files["megatron_args.sh"].decode()
    assert "--moe-token-dispatcher-type alltoall" in script and "flex" not in script
    assert "overlap-moe" not in script and "CUDA_DEVICE_MAX_CONNECTIONS" not in script


def test_a_tiny_copy_exchanges_by_alltoall(planned: Callable[..., Any]) -> None:
    plan, _ = planned({**DEEPEP, **OVERLAP})
    small = tiny_strategy(plan.strategy)
    assert small.expert == 2 and "expert_" not in small.describe()


def test_streams_of_an_overlap_start_independently(
    planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    plan, _ = planned({"context": 2, "data": 4, **OVERLAP})
    found = cuda_connections(plan.strategy)
    assert found is not None and found.number == 32
    prepare_process(plan, user_training_loop=False)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    plain = dataclasses.replace(plan.strategy, expert_overlap=False)
    one = cuda_connections(plain)
    assert one is not None and one.number == 1


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_deepep_that_is_not_installed_stops_the_start(
    planned: Callable[..., Any], tmp_path: Path
) -> None:
    plan, _ = planned(DEEPEP)
    with pytest.raises(Refusal) as caught:
        check_preflight(plan, tmp_path, None)
    (found,) = [d for d in caught.value.diagnostics if d.code == "SW6016"]
    assert "deep_ep is not installed" in found.message and "alltoall" in str(found.help)
    plain, _ = planned({})
    try:
        check_preflight(plain, tmp_path, None)
    except Refusal as refusal:
        assert "SW6016" not in [d.code for d in refusal.diagnostics]


@pytest.mark.parametrize("absent", ["", "deep_ep cannot be imported"])
def test_a_rank_without_deepep_stops_all(
    absent: str, planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import distributed as dist

    plan, _ = planned(DEEPEP)
    asked: list[str] = []

    def gather(reasons: list[str], own: str) -> None:
        asked.append(own)
        reasons[:] = ["", own, *reasons[2:]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(expert_exchange, "_deepep_absent", lambda: absent)
    if not absent:
        check_deepep(plan)
        assert asked == [""]
        return
    with pytest.raises(Refusal) as caught:
        check_deepep(plan)
    (found,) = caught.value.diagnostics
    assert found.code == "SW6016" and "rank 1" in found.message and absent in found.message
    check_deepep(planned({})[0])
    assert len(asked) == 1  # alltoall asks no rank
