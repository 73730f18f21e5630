"""Recipes for unit tests of stages 2 to 5, built without YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Source
from shardwright.layout.gpu_cluster import Cluster, resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Objective
from shardwright.recipe.recipe_types import (
    AssumeSection,
    CheckpointSection,
    ClusterSection,
    LaunchSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    Recipe,
    SchedulerSection,
    TrackingSection,
    TrainingSection,
)
from shardwright.utils.json_values import JsonValue

SMALL_LLAMA: dict[str, JsonValue] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 128,
}
SMALL_GPT2: dict[str, JsonValue] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "vocab_size": 259,
    "n_positions": 128,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "summary_first_dropout": 0.0,
}
LLAMA_8B: dict[str, JsonValue] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_70B: dict[str, JsonValue] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_405B: dict[str, JsonValue] = {
    **LLAMA_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}


def write_weights(folder: Path, config: Mapping[str, JsonValue]) -> None:
    """Write config.json and model.safetensors of this configuration, drawn."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
    )  # here: other tests import this module without torch

    document = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(str(config["model_type"]), **document)
    )
    model.save_pretrained(folder)


def problem_of(recipe: Recipe, graph: ModelGraph, cluster: Cluster | None = None) -> Problem:
    """cluster: the recipe's own where none is given."""
    return Problem(recipe=recipe, graph=graph, cluster=cluster or resolve_cluster(recipe.cluster))


def model_section(config: Mapping[str, JsonValue] | None = None, **changes: Any) -> ModelSection:
    plain = ModelSection(
        source=None, config=config, revision="main", weights="random", attention="auto", loss="auto"
    )
    return dataclasses.replace(plain, **changes)


@cache
def _graph(items: tuple[tuple[str, JsonValue], ...]) -> ModelGraph:
    return build_model_graph(model_section(dict(items)))


def graph_of(config: Mapping[str, JsonValue]) -> ModelGraph:
    return _graph(tuple(config.items()))


def recipe_of(
    config: Mapping[str, JsonValue] | None = None,
    *,
    cluster: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    parallelism: Mapping[str, Any] | None = None,
    assume: Mapping[str, Any] | None = None,
    objective: Objective = "throughput",
    target: str = "deepspeed",
) -> Recipe:
    """Eight H100 on one node and a batch of 16 unless told otherwise; every layout key auto."""
    return Recipe(
        version=1,
        name="test",
        target=target,
        model=model_section(config or SMALL_LLAMA),
        cluster=dataclasses.replace(
            ClusterSection(
                nodes=1,
                gpus_per_node=8,
                gpu="h100-sxm-80gb",
                intra_node_gbytes_per_second=None,
                inter_node_gbits_per_second=None,
                host_memory_gib=None,
                shared_filesystem=True,
                price_per_gpu_hour=None,
            ),
            **(cluster or {}),
        ),
        training=dataclasses.replace(
            TrainingSection(
                sequence_length=128,
                global_batch_size=16,
                steps=10,
                tokens=None,
                epochs=None,
                precision="bf16",
                gradient_accumulation_dtype=None,
                optimizer=OptimizerSection(
                    name="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
                ),
                scheduler=SchedulerSection(
                    name="constant",
                    warmup_steps=0,
                    warmup_ratio=None,
                    min_lr=0.0,
                    min_lr_ratio=None,
                    decay_steps=None,
                ),
                gradient_clipping=1.0,
                seed=1,
                days_at_most=None,
            ),
            **(training or {}),
        ),
        data=None,
        validation=None,
        parallelism=dataclasses.replace(
            ParallelismSection(
                tensor=None,
                pipeline=None,
                data=None,
                zero_stage=None,
                micro_batch_size=None,
                activation_checkpointing=None,
                schedule=None,
                offload="none",
                memory_headroom=None,
                expert=None,
                context=None,
                virtual_stages=1,
                sequence_parallel=False,
            ),
            **(parallelism or {}),
        ),
        objective=objective,
        assume=dataclasses.replace(
            AssumeSection(kernels="auto", mfu=None, ignore_memory=False),
            **(assume or {}),
        ),
        launch=LaunchSection(
            launcher="auto",
            hostfile=None,
            master_addr=None,
            master_port=None,
            env=(),
            env_from=(),
            setup_script=None,
            slurm=None,
            kubernetes=None,
        ),
        checkpoint=CheckpointSection(directory="checkpoints", every_steps=None, keep=None),
        tracking=TrackingSection(tensorboard=False, wandb=None),
        extra={},
        directory="/",
        document={},
        source=Source(file="recipe.yaml"),
    )
