"""Write ds_config.json, and check the recipe's `extra`.

It has no tensor parallelism: the runtime's layers are sharded already.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from shardwright.diagnostics import Diagnostic, KeyPath
from shardwright.engines.deepspeed.ds_config_schema import (
    SchemaMismatch,
    ds_config_schema,
    limits_text,
    schema_mismatches,
)
from shardwright.layout.device_kinds import DeviceKind
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Layout
from shardwright.layout.zero_settings import (
    BUCKET_NUMEL,
    HPZ,
    LIVE_NUMEL,
    PREFETCH_NUMEL,
    disables_hpz,
)
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonObject, JsonValue

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

# The recipe's `extra`: more of DeepSpeed's keys, merged into ds_config.json where the plan decides
# nothing.

EXTRA_KEYS_ALLOWED: tuple[str, ...] = (
    # logging and profiling
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "steps_per_print",
    "timers",
    "comms_logger",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "csv_monitor",
    # communication and buffers
    "aio",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.allgather_partitions",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    "zero_optimization.stage3_allgather_sequential",
    "zero_optimization.leaf_module",
    "zero_optimization.log_trace_cache_warnings",
    "zero_optimization.enable_sanity_checks",
    # fp16's loss scale
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
)
"""Lists keys and sections that change neither training nor the plan's layout and memory.

They change memory by their own buffers at most. `make prove` trains with each, saves and resumes on
another layout (tests/launch/test_extra_ds_config_keys.py).
"""

EXTRA_KEYS_REFUSED: dict[str, str] = {
    "zero_optimization.round_robin_gradients": "DeepSpeed then reports a wrong order of the fp32 "
    "master weights, so checkpoints and exports would hold weights under wrong names",
    "zero_optimization.stage3_module_granularity_threshold": "a module that DeepSpeed then gathers "
    "at once keeps gradients that ZeRO-3's optimizer does not expect, and the first step fails on "
    "a CPU (GPUs are untested)",
    "comet": "comet is not tested with checkpoints; `tracking` and the other monitors are",
}
"""Maps keys that DeepSpeed documents as neutral to the reason why `extra` may not hold them."""

KEYS_SET_BY_RECIPE: dict[str, str] = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "parallelism.micro_batch_size",
    "gradient_accumulation_steps": "parallelism.micro_batch_size",
    "gradient_clipping": "training.gradient_clipping",
    "optimizer": "training.optimizer",
    "scheduler": "training.scheduler",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "data_types": "training.gradient_accumulation_dtype",
    "zero_optimization.offload_optimizer": "parallelism.offload",
    "zero_optimization.offload_param": "parallelism.offload",
    "zero_optimization": "parallelism.zero_stage",
    "pipeline": "parallelism.pipeline",
    "tensor_parallel": "parallelism.tensor",
    "sequence_parallel_size": "parallelism.context",
    "activation_checkpointing": "parallelism.activation_checkpointing",
    "checkpoint": "checkpoint",
}
"""Maps a key or section of ds_config.json to the recipe's key that decides it."""


def extra_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return SW1214 to SW1217 for keys of `extra`, each key once.

    A key is unknown to DeepSpeed, has a value of another type, or is decided by the recipe.
    """
    found = {
        misfit.path: _misfit(misfit)
        for misfit in schema_mismatches(recipe.extra, ds_config_schema())
    }
    told = set(found)
    for path in _leaves(recipe.extra, ()):
        if not any(path[:length] in told for length in range(1, len(path) + 1)):
            refusal = _refusal(path, recipe)
            if refusal is not None:
                found[refusal.key[1:] if refusal.key else ()] = refusal
    return tuple(found.values())


def merge_ds_config(base: JsonObject, extra: JsonObject) -> JsonObject:
    """Merge `extra` over `base`, section by section."""
    result: dict[str, JsonValue] = dict(base)
    for key, value in extra.items():
        below = result.get(key)
        result[key] = (
            merge_ds_config(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    return result


def _leaves(section: JsonObject, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _refusal(path: tuple[str, ...], recipe: Recipe) -> Diagnostic | None:
    if path == ("zero_optimization", HPZ):
        if disables_hpz(recipe.extra):
            return None
        message = (
            f"extra.zero_optimization.{HPZ}: the layout decides over how many ranks the second "
            "copy of the weights is sharded"
        )
        return _error(
            "SW1214",
            path,
            message,
            "Remove the key, or write 1 for a run without a second copy.",
            ("1",),
        )
    prefixes = [".".join(path[:length]) for length in range(len(path), 0, -1)]
    refused = next((prefix for prefix in prefixes if prefix in EXTRA_KEYS_REFUSED), None)
    if refused is not None:
        message = (
            f"extra.{refused}: compile does not pass this key to DeepSpeed: "
            f"{EXTRA_KEYS_REFUSED[refused]}"
        )
        return _error("SW1215", path, message, "Remove the key.")
    allowed = next((prefix for prefix in prefixes if prefix in EXTRA_KEYS_ALLOWED), None)
    if allowed is not None:
        if path[0] == "fp16" and not FORMATS[recipe.training.precision].scales_loss:
            message = (
                f"extra.{'.'.join(path)} scales the loss in fp16, but training.precision is "
                f"{recipe.training.precision}"
            )
            return _error("SW1214", path, message, "Remove the key.")
        return None
    decided = next((prefix for prefix in prefixes if prefix in KEYS_SET_BY_RECIPE), None)
    if decided is None:
        return _error(
            "SW1215",
            path[:1],
            (
                f"extra.{path[0]}: compile does not pass this section to DeepSpeed: the section "
                "changes training in ways that the plan does not account for"
            ),
            "Remove the section. `extra` takes monitoring, profiling, and sizes of buffers.",
        )
    return _error(
        "SW1214",
        path,
        (
            f"extra.{'.'.join(path)}: this key of ds_config.json follows from the recipe's "
            f"{KEYS_SET_BY_RECIPE[decided]}"
        ),
        f"Remove the key, and set {KEYS_SET_BY_RECIPE[decided]} instead.",
        (KEYS_SET_BY_RECIPE[decided],),
    )


_TYPES = {
    "array": "a list",
    "object": "a section",
    "boolean": "true or false",
    "integer": "an integer",
}


def _misfit(misfit: SchemaMismatch) -> Diagnostic:
    """Return SW1216 for a key that DeepSpeed lacks, SW1217 for a value that it does not accept."""
    name = ".".join(map(str, ("extra", *misfit.path)))
    if misfit.kind == "unknown":
        known = sorted(cast("Mapping[str, JsonValue]", misfit.schema.get("properties", {})))
        near = tuple(difflib.get_close_matches(str(misfit.path[-1]), known, n=1, cutoff=0.7))
        help = (
            f"Did you mean `{near[0]}`?"
            if near
            else "The keys are DeepSpeed's, as in its own configuration files."
        )
        return _error(
            "SW1216",
            misfit.path,
            f"{name}: DeepSpeed {ds_config_schema().version} has no such key",
            help,
            near,
        )
    types = cast("list[str]", misfit.schema.get("type", []))
    wanted = " or ".join(_TYPES.get(kind, f"a {kind}") for kind in types if kind != "null")
    if misfit.kind == "choice":
        choices = tuple(map(str, cast("list[JsonValue]", misfit.schema["enum"])))
        return _error(
            "SW1217",
            misfit.path,
            f"{name}: {misfit.value!r} is not a valid value",
            "Write one of the valid values.",
            choices,
        )
    if misfit.kind == "range":
        return _error(
            "SW1217",
            misfit.path,
            f"{name}: {misfit.value} is out of range",
            f"Give a number {limits_text(misfit.schema)}.",
        )
    help = f"Write {wanted or 'a value'}."
    if misfit.kind == "auto":
        help += " Only the HF Trainer fills in auto."
    return _error(
        "SW1217",
        misfit.path,
        f"{name}: DeepSpeed takes {wanted or 'a value'}, not {misfit.value!r}",
        help,
    )


def _error(
    code: str, path: KeyPath, message: str, help: str, valid: tuple[str, ...] = ()
) -> Diagnostic:
    return Diagnostic(code=code, message=message, help=help, key=("extra", *path), valid=valid)


# The zero_optimization section of ds_config.json, decided with the plan.


def zero_section(strategy: Layout, *, numel: int, device: DeviceKind) -> JsonObject:
    """Return zero_optimization, with DeepSpeed's own defaults written out where a run depends on
    them.

    numel: parameters on the rank that has the most. A gradient bucket is allocated whole and is not
    larger; the cost model counts it so.
    """
    # Pipelines ignore overlap_comm with a warning (DeepSpeed pipe/engine.py).
    overlap = strategy.zero_stage >= 2 and device.has_streams
    if strategy.zero_stage == 0:
        return {"stage": 0}
    section: dict[str, JsonValue] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": overlap,
        "reduce_scatter": True,
        "reduce_bucket_size": max(1, min(BUCKET_NUMEL, numel)),
    }
    if strategy.zero_stage < 3:
        section["allgather_bucket_size"] = BUCKET_NUMEL
    if strategy.zero_stage == 3:
        # 0: no parameter stays gathered, so that the plan's bytes per rank are resident.
        section["stage3_param_persistence_threshold"] = 0
        section["stage3_gather_16bit_weights_on_model_save"] = False
        section["stage3_prefetch_bucket_size"] = PREFETCH_NUMEL
        section["stage3_max_live_parameters"] = LIVE_NUMEL
        section["stage3_max_reuse_distance"] = LIVE_NUMEL
    if strategy.hpz_partition_size > 1:
        section[HPZ] = strategy.hpz_partition_size
    if strategy.offload != "none":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": device.has_pinned_memory}
    if strategy.offload == "parameters":
        section["offload_param"] = {"device": "cpu", "pin_memory": device.has_pinned_memory}
    return section


STEPS_PER_PRINT_NEVER = 1_000_000_000


OPTIMIZER_NAMES: Mapping[str, str] = {
    "adamw": "AdamW",
    "muon": "MuonAdamW",
    "adamw_8bit": "ShardedAdamW8bit",
    "lion": "Lion",
    "adafactor": "ShardedAdafactor",
}
"""Maps a recipe's optimizer to DeepSpeed's `optimizer.type`, or to this project's class."""
OWN_OPTIMIZERS = frozenset(OPTIMIZER_NAMES) - {"adamw"}
"""Lists the optimizers that the ranks build (own_optimizers.py): DeepSpeed gets no `optimizer`."""


def ds_config(plan: Plan) -> JsonObject:
    """Return ds_config.json.

    It has no `scheduler`: the runtime sets each update's learning rate in closed form (DeepSpeed's
    WarmupLR warms up on a log curve). It has no `tensor_parallel`: that would shard the layers a
    second time.
    """
    strategy, training = plan.strategy, plan.training
    precision: dict[str, JsonValue] = {}
    if FORMATS[training.precision].is_half:
        precision[training.precision] = {"enabled": True}
        if training.precision == "bf16" or training.gradient_accumulation_dtype != "fp16":
            precision["data_types"] = {"grad_accum_dtype": training.gradient_accumulation_dtype}
    config: dict[str, JsonValue] = {
        # To DeepSpeed context ranks are data ranks, each with its own sequences.
        "train_batch_size": training.global_batch_size * strategy.context,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "gradient_clipping": training.gradient_clipping,  # left out, DeepSpeed clips at 1.0
        **_optimizer_section(plan),
        "zero_optimization": plan.zero,
        **precision,
        "steps_per_print": STEPS_PER_PRINT_NEVER,  # run/metrics.jsonl has every step
        "wall_clock_breakdown": False,
    }
    if strategy.pipeline > 1:
        # Recomputation is torch's non-reentrant checkpoint around each layer, so the engine's own
        # stays off (interval 0); its re-entrant one fails on the embedding stage.
        pipeline: dict[str, JsonValue] = {
            "activation_checkpoint_interval": 0,
            "use_reentrant": False,
        }
        if strategy.schedule == "dualpipev":
            # DualPipeV sends whole tensors between stages; the default (on) is an assertion under
            # tensor parallelism.
            pipeline |= {"pipe_partitioned": False, "grad_partitioned": False}
        config["pipeline"] = pipeline
    return merge_ds_config(config, plan.extra)


def _optimizer_section(plan: Plan) -> JsonObject:
    optimizer = plan.optimizer
    if optimizer.name in OWN_OPTIMIZERS:
        return {"zero_allow_untested_optimizer": True}
    return {
        "optimizer": {
            "type": OPTIMIZER_NAMES[optimizer.name],
            "params": {
                "lr": optimizer.lr,
                "betas": list(optimizer.betas),
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
                # Else DeepSpeed compiles FusedAdam on each node. States in host memory want its
                # vectorised CPUAdam.
                "torch_adam": plan.strategy.offload == "none" or plan.gpu == "cpu",
            },
        }
    }


def ds_config_for_user_scripts(plan: Plan) -> JsonObject:
    """Return ds_config without hpZ, whose groups DeepSpeed alone builds wrong (decision 019)."""
    return ds_config(
        replace(plan, zero={key: value for key, value in plan.zero.items() if key != HPZ})
    )


def validated_ds_config(config: JsonObject) -> JsonObject:
    """Return `config`. Raise ValueError where DeepSpeed would refuse it or ignore a key.

    It is checked against DeepSpeed's models and, for sections that those leave loose, our own
    strict schema.
    """
    wrong = [
        f"{misfit.kind} {'.'.join(map(str, misfit.path))}"
        for misfit in schema_mismatches(config, ds_config_schema())
    ]
    if wrong:
        raise ValueError(f"ds_config: {', '.join(wrong)}")
    return config
