"""Check a ds_config against a named model (`--model`): AutoEP's expert ranks, DeepSpeed's sequence
parallelism (Ulysses), and the memory that each GPU needs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path

from shardwright.cost.peak_memory import estimate_memory
from shardwright.diagnostics import Refusal, Severity
from shardwright.engines.deepspeed.ds_config_schema import schema_mismatches
from shardwright.layout.gpu_cluster import catalogue, resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Memory
from shardwright.layout.planning_problem import Problem
from shardwright.layout.zero_settings import HPZ
from shardwright.lint.ds_config_training_rules import (
    ACCUMULATION_STEPS_KEY,
    MICRO_BATCH_SIZE_KEY,
    TRAIN_BATCH_SIZE_KEY,
    dtype,
    precision,
)
from shardwright.lint.lint_rule import LintedDsConfig, LintFinding
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_sources import match_catalog_id, read_config
from shardwright.recipe.literal_types import Checkpointing, Offload
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import ModelSection
from shardwright.search.layout_resolution import with_stages_assigned
from shardwright.utils.json_values import JsonObject, JsonValue

SEQUENCE = "sequence_parallel_size"
AUTOEP = "expert_parallel"


def lint_for_model(
    ds_config: LintedDsConfig, model: str, sequence_length: int | None
) -> tuple[LintFinding, ...]:
    """Return SW4612 to SW4614.

    sequence_length: tokens of a sequence; None where it was not given

    Raises Refusal with SW20xx where the model's configuration is not available.
    """
    ranks = ds_config.integer(SEQUENCE) or 1
    wants_experts = ds_config.is_on(AUTOEP, "enabled")
    if ranks == 1 and not wants_experts:
        return ()
    section = ModelSection(
        source=os.path.abspath(model) if os.path.isdir(model) else match_catalog_id(model) or model,
        config=None,
        revision="main",
        weights="random",
        attention="auto",
        loss="auto",
    )
    config, _ = read_config(section)
    found: list[LintFinding] = []
    if wants_experts:
        found += _experts(ds_config, str(config.get("model_type", "")))
    if ranks > 1:
        with suppress(Refusal):  # a type that is not planned here has a configuration all the same
            config = build_model_graph(section).config
        found += [*_window(config, ranks, sequence_length), *_heads(config, ranks)]
    return tuple(found)


def detected() -> Mapping[str, str]:
    """Map a model type to what AutoEP does with its experts: found | missed | refused.

    tools/generate/autoep_support.py measured it for every type of transformers that has experts and
    runs.
    """
    text = resources.files("shardwright.lint").joinpath("autoep.json").read_text("utf-8")
    table: dict[str, str] = json.loads(text)
    return table


def _experts(ds_config: LintedDsConfig, kind: str) -> Iterator[LintFinding]:
    # With either of these DeepSpeed raises where it finds nothing (auto_ep.py,
    # _requires_selected_preset_detection).
    if (
        ds_config.get(AUTOEP, "preset_model") is not None
        or ds_config.get(AUTOEP, "moe_layer_pattern") is not None
    ):
        return
    known = detected()
    outcome = known.get(kind, "missed")
    if outcome == "found":
        return
    severity: Severity = "warning"
    if outcome == "refused":
        severity, message = "error", f"AutoEP refuses a model of type {kind}"
    elif kind in known:
        message = f"AutoEP does not find the experts of {kind}: it trains without expert ranks"
    else:
        message = f"AutoEP finds no experts in {kind or 'this model'}: `{AUTOEP}` has no effect"
    yield LintFinding(
        code="SW4612",
        key=(AUTOEP, "enabled"),
        message=message,
        help=f"Its presets are for {', '.join(sorted(t for t in known if known[t] == 'found'))}. "
        "Give preset_model or "
        "moe_layer_pattern, with which DeepSpeed raises where it finds nothing; or `shardwright "
        "import` the file and "
        "set parallelism.expert.",
        severity=severity,
        at="key",
    )


def _window(config: JsonObject, ranks: int, sequence_length: int | None) -> Iterator[LintFinding]:
    width = window(config)
    if width is None or (sequence_length is not None and sequence_length <= width):
        return
    yield LintFinding(
        code="SW4613",
        key=(SEQUENCE,),
        message=(
            f"with {ranks} sequence ranks, sdpa and flex_attention ignore {_kind(config)}'s window "
            f"of {width} tokens"
        ),
        help='Load the model with attn_implementation="flash_attention_2", which keeps the window; '
        "or `shardwright import` the file and set parallelism.context.",
        severity="warning",
    )


def window(config: JsonObject) -> int | None:
    """Return how many tokens a layer with a sliding window or chunks attends to; None where all
    do."""
    text = _text(config)
    kinds = text.get("layer_types")
    for key, kind in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        width = text.get(key)
        used = (
            kind in kinds
            if isinstance(kinds, list)
            else text.get("use_sliding_window") is not False
        )
        if isinstance(width, int) and not isinstance(width, bool) and used:
            return width
    return None


def _heads(config: JsonObject, ranks: int) -> Iterator[LintFinding]:
    text = _text(config)
    heads, shared = _whole(text.get("num_attention_heads")), _whole(text.get("num_key_value_heads"))
    message = ""
    if heads and heads % ranks:
        message = f"{heads} attention heads are not divisible by {ranks} sequence ranks"
    elif shared and shared % ranks and ranks % shared:
        message = (
            f"{shared} key and value heads are neither a multiple nor a divisor of {ranks} "
            "sequence ranks"
        )
    if message:
        yield LintFinding(
            code="SW4614",
            key=(SEQUENCE,),
            message=f"{_kind(config)}: {message}",
            help="Take a number of sequence ranks that divides the heads; or `shardwright import` "
            "the file and set "
            "parallelism.context, which repeats key and value heads.",
        )


def _text(config: JsonObject) -> JsonObject:
    """Return the text part of a configuration, as get_text_config does."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _whole(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _kind(config: JsonObject) -> str:
    return str(config.get("model_type") or "the model")


# What a named model needs of each GPU under a ds_config, by the cost model.
#
# A ds_config does not say whether activations are recomputed, nor how long a sample is: both
# answers
# are given for the first, and the second is an argument. Tensor parallelism counts where AutoTP is
# told to; a pipeline's degree is not in the file, so there is no answer with one.


ASSUMED_SEQUENCE = 4096
GIB = 2**30
CHECKPOINTING_CHOICES: tuple[Checkpointing, ...] = ("full", "none")


def memory(
    ds_config: LintedDsConfig, model: str, gpu: str | None, sequence_length: int | None
) -> tuple[tuple[LintFinding, ...], tuple[str, ...]]:
    """Return (SW4801 where the model does not fit, lines to print).

    Raises Refusal with SW2xxx for the model, or SW3001 for the GPU.
    """
    why = _unknown(ds_config)
    if why:
        return (), (f"memory   not predicted: {why}",)
    strategy = _strategy(ds_config)
    length = sequence_length or ASSUMED_SEQUENCE
    first = gpu or next(iter(catalogue()["gpus"]))
    world = strategy.world_size
    per_node = 8 if world % 8 == 0 else world if world <= 1024 else 1
    source = os.path.abspath(model) if os.path.isdir(model) else match_catalog_id(model) or model
    kind = precision(ds_config) or "bf16"
    document = {
        "version": 1,
        "name": "lint",
        "model": {"source": source, "weights": "random"},
        "cluster": {"nodes": world // per_node, "gpus_per_node": per_node, "gpu": first},
        "training": {
            "sequence_length": length,
            "global_batch_size": strategy.micro_batch_size
            * strategy.gradient_accumulation_steps
            * strategy.data,
            "steps": 1,
            "precision": kind,
            # Without the key gradients have the parameters' precision (engine.py, get_data_types).
            "gradient_accumulation_dtype": dtype(ds_config, "grad_accum_dtype") or kind,
        },
    }
    recipe = load_recipe(Path("-"), (), stdin_text=json.dumps(document))
    graph = build_model_graph(recipe.model)
    names = [gpu] if gpu else [name for name in catalogue()["gpus"] if name != "cpu"]
    predicted: dict[Checkpointing, dict[str, Memory]] = {}
    for recompute in CHECKPOINTING_CHOICES:
        chosen = dataclasses.replace(strategy, activation_checkpointing=recompute)
        predicted[recompute] = {}
        for name in names:
            cluster = resolve_cluster(dataclasses.replace(recipe.cluster, gpu=name))
            problem = Problem(recipe=recipe, graph=graph, cluster=cluster)
            predicted[recompute][name] = estimate_memory(with_stages_assigned(problem, chosen))
    stage = predicted["full"][names[-1]].stages[0]
    states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_bytes
    lines = [
        f"memory   {match_catalog_id(model) or model}, {graph.total_parameters / 1e9:.2f} B "
        f"parameters, {strategy.world_size} ranks, ZeRO stage {strategy.zero_stage}, micro-batch "
        f"{strategy.micro_batch_size} x {length} tokens",
        f"         {states / GIB:.1f} GiB of model states a GPU: parameters "
        f"{stage.parameters_bytes / GIB:.1f}, gradients {stage.gradients_bytes / GIB:.1f}, "
        f"optimizer {stage.optimizer_bytes / GIB:.1f}",
    ]
    for recompute, words in zip(CHECKPOINTING_CHOICES, ("with", "without"), strict=True):
        fits = [name for name, found in predicted[recompute].items() if found.fits]
        lines.append(
            f"         {words} activation checkpointing it fits on "
            f"{', '.join(fits) or 'none of them'}"
        )
    if any(found.fits for found in predicted["full"].values()):
        return (), tuple(lines)
    peak = min(found.peak_bytes for found in predicted["full"].values())
    where = (
        f"{gpu} ({predicted['full'][names[0]].capacity_bytes / GIB:.0f} GiB)"
        if gpu
        else "any GPU of the catalogue"
    )
    if strategy.zero_stage < 3:
        help = (
            "Take a higher ZeRO stage, more ranks, a smaller micro-batch, or offload_optimizer "
            "to the CPU."
        )
    elif strategy.offload == "none":
        help = "Take more ranks, a smaller micro-batch, or offload_optimizer to the CPU."
    else:
        help = "Take more ranks, a smaller micro-batch or shorter sequences."
    risk = LintFinding(
        code="SW4801",
        key=("zero_optimization", "stage") if ds_config.has("zero_optimization", "stage") else (),
        message=(
            f"about {peak / GIB:.0f} GiB a GPU, {states / GIB:.0f} of them model states, do "
            f"not fit on {where}"
        ),
        help=help,
        severity="warning",
    )
    return (risk,), tuple(lines)


def _unknown(ds_config: LintedDsConfig) -> str:
    """Return what the file leaves open; "" where it is complete."""
    if ds_config.has_pipeline:
        return "the pipeline's degree is not in the file"
    if any(
        misfit.kind in ("type", "text", "range")
        for misfit in schema_mismatches(ds_config.config, ds_config.ds_config_schema)
    ):
        return "the file has errors"
    if ds_config.stage is None:
        return "the ZeRO stage is filled in later"
    world = _world(ds_config)
    if world is None:
        return "give --world-size N"
    tensor = max(1, ds_config.integer("tensor_parallel", "autotp_size") or 1)
    return "" if world % tensor == 0 else f"autotp_size {tensor} does not divide {world} ranks"


def _world(ds_config: LintedDsConfig) -> int | None:
    train, micro, steps = (
        ds_config.integer(key)
        for key in (TRAIN_BATCH_SIZE_KEY, MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
    )
    if ds_config.world_size is not None:
        return ds_config.world_size
    if train and micro and steps and train % (micro * steps) == 0:
        return train // (micro * steps)
    return None


def _strategy(ds_config: LintedDsConfig) -> Layout:
    """Return the layout; a value filled in later counts as micro-batch 1 without accumulation."""
    world = _world(ds_config) or 1
    tensor = max(1, ds_config.integer("tensor_parallel", "autotp_size") or 1)
    train, micro, steps = (
        ds_config.integer(key)
        for key in (TRAIN_BATCH_SIZE_KEY, MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
    )
    if not micro:
        micro = max(1, train // world // (steps or 1)) if train else 1
    if not steps:
        steps = max(1, train // (micro * world)) if train else 1
    offload: Offload = "none"
    hpz_partition_size = 1
    if ds_config.offload("offload_optimizer") in ("cpu", "nvme") and ds_config.stage:
        offload = "optimizer"
    if ds_config.offload("offload_param") in ("cpu", "nvme") and ds_config.stage == 3:
        offload = "parameters"
    if ds_config.stage == 3:
        hpz_partition_size = min(world, max(1, ds_config.integer("zero_optimization", HPZ) or 1))
    return Layout(
        tensor=tensor,
        pipeline=1,
        data=world // tensor,
        zero_stage=ds_config.stage or 0,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        activation_checkpointing="none",
        schedule="1f1b",
        offload=offload,
        hpz_partition_size=hpz_partition_size,
    )
