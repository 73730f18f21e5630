"""The AutoTP file, read by DeepSpeed's own parser."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Diagnostic
from shardwright.engines.deepspeed.deepspeed_capabilities import AUTOTP_FILE
from shardwright.engines.deepspeed.deepspeed_files import (
    autotp_config,
)
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe

TENSOR = {"tensor": 2, "pipeline": 1, "data": 2, "micro_batch_size": 2}


@pytest.fixture
def plan(write_recipe: Callable[..., Path]) -> Plan:
    return compile_recipe(load_recipe(write_recipe({"parallelism": TENSOR}))).plan


def restyled(plan: Plan, module: str, style: str, blocks: tuple[int, ...] | None = None) -> Plan:
    """The plan with this module's style in every layer."""
    modules = []
    for split in plan.tensor_parallel.modules:
        if split.module.endswith(module):
            parts = [
                dataclasses.replace(p, blocks=p.blocks if blocks is None else blocks)
                for p in split.parameters
            ]
            split = dataclasses.replace(split, style=style, parameters=tuple(parts))
        modules.append(split)
    return dataclasses.replace(
        plan, tensor_parallel=dataclasses.replace(plan.tensor_parallel, modules=tuple(modules))
    )


def parsed(plan: Plan) -> AutoTPConfig:
    config: Any = autotp_config(plan)
    assert isinstance(config, dict)
    found = TPTrainingConfig(
        **json.loads(json.dumps(config["tensor_parallel"]))
    ).get_partition_config_object()
    assert isinstance(found, AutoTPConfig) and found.strict_mode and not found.use_default_specs
    return found


def test_every_matrix_of_the_layers_has_one_spec(plan: Plan) -> None:
    config = parsed(plan)
    kinds = {
        "colwise": PartitionType.COLUMN,
        "rowwise": PartitionType.ROW,
        "replicated": PartitionType.SKIP,
    }
    for split in plan.tensor_parallel.modules:
        for p in split.parameters:
            matching = [s for s in config.layer_specs if s.matches(p.name)]
            assert (
                len(matching) == (1 if p.name.endswith(".weight") else 0)
                or split.style == "vocabulary_head"
            )
            if matching and split.style in kinds:
                assert matching[0].partition_type == kinds[split.style], p.name
    assert not any(
        s.matches("model.layers.0.self_attn.q_proj.weight.more") for s in config.layer_specs
    )
    assert not any(s.matches("xmodel.layers.0.self_attn.q_proj.weight") for s in config.layer_specs)


def test_blocks_of_a_fused_matrix(plan: Plan) -> None:
    name = "model.layers.3.mlp.gate_proj.weight"
    equal = parsed(restyled(plan, "gate_proj", "packed_colwise", (32, 32, 32))).find_matching_spec(
        name
    )
    assert equal is not None and equal.shape == (3, -1) and equal.get_num_sub_params() == 3
    uneven = parsed(restyled(plan, "gate_proj", "packed_colwise", (64, 16, 16))).find_matching_spec(
        name
    )
    assert uneven is not None and uneven.get_sub_param_sizes() == (64, 16, 16)


def test_a_gradient_that_is_summed(plan: Plan) -> None:
    config = parsed(restyled(plan, "input_layernorm", "replicated_with_grad_allreduce"))
    spec = config.find_matching_spec("model.layers.1.input_layernorm.weight")
    assert spec is not None and spec.grad_allreduce and spec.partition_type == PartitionType.SKIP


@pytest.mark.parametrize(
    "style", ["colwise_gather_output", "rowwise_split_input", "moe_tp_experts", "packed_rowwise"]
)
def test_other_styles_are_refused_by_name(style: str, plan: Plan) -> None:
    found = autotp_config(restyled(plan, "down_proj", style))
    assert isinstance(found, Diagnostic) and (found.code, found.severity) == ("SW4101", "warning")
    assert "model.layers.0.mlp.down_proj" in found.message and style in found.message


def test_a_type_that_was_not_proved(plan: Plan) -> None:
    other = dataclasses.replace(plan, model=dataclasses.replace(plan.model, model_type="newcomer"))
    found = autotp_config(other)
    assert isinstance(found, Diagnostic) and "newcomer" in found.message


def test_where_there_is_nothing_to_write(write_recipe: Callable[..., Path]) -> None:
    for layout in ({"tensor": 2, "pipeline": 2}, {"tensor": 1, "data": 4}):
        compiled = compile_recipe(load_recipe(write_recipe({"parallelism": layout})))
        assert AUTOTP_FILE not in compiled.files and compiled.warnings == ()
