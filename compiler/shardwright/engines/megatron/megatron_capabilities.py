"""Megatron-Core's row of the table."""

from __future__ import annotations

from shardwright.engines.engine_definition import Engine, EngineTraits
from shardwright.engines.megatron.megatron_file_names import ARGUMENTS_FILE
from shardwright.engines.megatron.megatron_model_weights import MODEL_MAPPINGS
from shardwright.engines.megatron.megatron_recipe_keys import check_recipe_keys
from shardwright.engines.megatron.megatron_rules import HF_MODULE_RULES, RULES
from shardwright.engines.megatron.transformer_engine_layers import transformer_engine_choice
from shardwright.models.model_graph import ModelGraph


def _unsupported_reason(graph: ModelGraph) -> str:
    if graph.is_vision_language:
        return "it runs no model that sees"
    if graph.model_type not in MODEL_MAPPINGS:
        return f"it has no {graph.model_type}"
    return "it runs no dropout" if graph.max_dropout > 0 else ""


MEGATRON = Engine(
    name="megatron",
    title="Megatron-LM",
    runtime="shardwright.engines.megatron.megatron_runtime",
    lowering="shardwright.engines.megatron.megatron_files",
    program="deepspeed",  # its launcher starts the ranks
    packages={"megatron-core": ">=0.16.1,<0.20,!=0.17.*,!=0.18.*", "deepspeed": ">=0.19.8,<0.20"},
    extra="megatron",
    artifacts=(ARGUMENTS_FILE,),
    traits=EngineTraits(
        selective_recomputes_projections=False,  # arXiv 2205.05198
        fuses_accumulation=True,
        tensor_parallel_launch_cost="hidden",
        bidirectional_p2p=True,
        saved_stage_outputs=0,
        bucketed_zero=False,
        bucketed_pipeline=False,
        traffic="megatron",
        zero_1_overlaps=True,
        zero3_gathers_flat_layers=False,
        chunked_loss=False,
        hpz=False,
        context_gathers_kv=True,
    ),
    rules=RULES,
    waived_rules=HF_MODULE_RULES,
    sbatch_option_errors=check_recipe_keys,
    axes=frozenset({"context", "expert", "expert_tensor", "virtual_stages", "sequence_parallel"}),
    types=frozenset(MODEL_MAPPINGS),
    pads_vocabulary=True,
    transformer_engine=transformer_engine_choice,
    unsupported_reason=_unsupported_reason,
)
