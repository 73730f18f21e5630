"""Megatron-Core's row of the table."""

from __future__ import annotations

from shardwright.engines.engine_definition import Engine, Traits
from shardwright.engines.megatron.megatron_file_names import ARGUMENTS_FILE
from shardwright.engines.megatron.megatron_model_weights import FAMILIES
from shardwright.engines.megatron.megatron_recipe_keys import check_keys
from shardwright.engines.megatron.megatron_rules import OWN_MODULES, RULES
from shardwright.engines.megatron.transformer_engine_layers import choice
from shardwright.models.model_graph import ModelGraph


def _lacks(graph: ModelGraph) -> str:
    if graph.sees:
        return "it runs no model that sees"
    if graph.model_type not in FAMILIES:
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
    traits=Traits(
        selective_repeats_projections=False,  # arXiv 2205.05198
        fuses_accumulation=True,
        tensor_host="hidden",
        duplex_sends=True,
        kept_outputs=0,
        bucketed_zero=False,
        bucketed_pipeline=False,
        traffic="megatron",
        zero_1_overlaps=True,
        gathers_layers=False,
        chunked_loss=False,
        hpz=False,
        gathers_keys=True,
    ),
    rules=RULES,
    lifts=OWN_MODULES,
    check_extra=check_keys,
    axes=frozenset({"context", "expert", "expert_tensor", "virtual_stages", "sequence_parallel"}),
    types=frozenset(FAMILIES),
    pads_vocabulary=True,
    transformer_engine=choice,
    lacks=_lacks,
)
