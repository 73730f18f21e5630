"""Define DeepSpeed's row of the engine table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.deepspeed.ds_config import OPTIMIZER_NAMES, extra_errors
from shardwright.engines.engine_definition import Engine, EngineTraits
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate, Rule, rule
from shardwright.recipe.objectives import OBJECTIVES
from shardwright.utils.private_names import Purpose

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

# DeepSpeed's files in the compiled folder.
DS_CONFIG = "ds_config.json"
AUTOTP_FILE = "ds_config.autotp.json"
ACCELERATE = "accelerate"

# What DeepSpeed, or this version's use of it, does not run. Lines are of DeepSpeed 0.19.8.

_TIMERS = "DeepSpeed's pipeline engine starts the timers of the backward pass twice, and fails"
EXTRA_KEYS_REFUSED_IN_PIPELINE = {"wall_clock_breakdown": _TIMERS, "flops_profiler": _TIMERS}
"""Maps keys of `extra` to the reason why a pipeline does not run with them."""


def pipeline_zero_0(x: Candidate) -> Diagnostic | None:
    """In a pipeline without ZeRO, DeepSpeed clips fp32 gradients by a wrong norm, as measured, and
    cannot accumulate bf16 gradients in fp32. ZeRO stage 1 clips and accumulates correctly, and
    costs nothing with data: 1."""
    if x.strategy.pipeline == 1 or x.strategy.zero_stage != 0:
        return None
    return found(
        "SW3107",
        "parallelism.zero_stage",
        f"zero_stage 0 with pipeline {x.strategy.pipeline} computes a wrong gradient norm",
        "Use zero_stage: 1, which clips gradients correctly and costs nothing with data: 1.",
        (1,),
    )


def pipeline_zero_23(x: Candidate) -> Diagnostic | None:
    """DeepSpeed's pipeline engine asserts that the ZeRO stage is 0 or 1 (pipe/engine.py:76)."""
    if x.strategy.pipeline == 1 or x.strategy.zero_stage < 2:
        return None
    return found(
        "SW3108",
        "parallelism.zero_stage",
        f"zero_stage {x.strategy.zero_stage} does not work with pipeline {x.strategy.pipeline}: "
        "DeepSpeed's pipeline engine asserts stage 0 or 1",
        "Use zero_stage: 1 with the pipeline, or pipeline: 1 with this stage.",
        (1,),
    )


def dualpipev_micro_batches(x: Candidate) -> Diagnostic | None:
    """DualPipeV's schedule needs at least two micro-batches for each pipeline rank
    (pipe/schedule.py:353)."""
    s = x.strategy
    if (
        s.schedule != "dualpipev"
        or s.pipeline == 1
        or s.gradient_accumulation_steps >= 2 * s.pipeline
    ):
        return None
    return found(
        "SW3109",
        "parallelism.schedule",
        f"dualpipev over pipeline {s.pipeline} needs {2 * s.pipeline} micro-batches a step, "
        f"not {s.gradient_accumulation_steps}",
        "Raise training.global_batch_size, lower micro_batch_size or data, or use schedule: 1f1b.",
    )


def offload_without_effect(x: Candidate) -> Diagnostic | None:
    """DeepSpeed offloads optimizer states from ZeRO stage 1 on, and parameters at stage 3. At a
    lower stage it accepts the setting without a warning and offloads nothing, as measured."""
    # Offloaded optimizer states in a pipeline (DeepSpeed#3866) are correct in the tested versions:
    # tests/parity compares them.
    s = x.strategy
    needed = {"none": 0, "optimizer": 1, "parameters": 3}[s.offload]
    if s.zero_stage >= needed:
        return None
    return found(
        "SW3111",
        "parallelism.zero_stage",
        f"offload {s.offload} has no effect with zero_stage {s.zero_stage}: DeepSpeed would "
        "offload nothing",
        f"Use zero_stage: {needed}{' or more' if needed < 3 else ''}, or offload: none.",
        tuple(range(needed, 4)),
    )


def zero_0_half_precision(x: Candidate) -> Diagnostic | None:
    """Without ZeRO, DeepSpeed cannot accumulate bf16 gradients in fp32 (engine.py,
    _do_optimizer_sanity_check), and its half-precision optimizer (fp16/unfused_optimizer.py) is
    inaccurate. After eight steps of a tiny GPT-2 in bf16 the gradient norm was 7 % off that of a
    single-process run. ZeRO stage 1 has neither fault, and costs nothing with data: 1."""
    s, precision = x.strategy, x.recipe.training.precision
    if s.zero_stage != 0 or s.pipeline > 1 or not FORMATS[precision].is_half:
        return None
    return found(
        "SW3114",
        "parallelism.zero_stage",
        f"zero_stage 0 in {precision} is inaccurate: without ZeRO, DeepSpeed accumulates and "
        "updates in half precision",
        "Use zero_stage: 1, which accumulates in fp32 and costs nothing with data: 1.",
        (1,),
    )


def timers_in_a_pipeline(x: Candidate) -> Diagnostic | None:
    """Some keys of `extra` start timers. With them DeepSpeed's pipeline engine fails in the first
    backward pass, as measured: runtime/pipe/engine.py, _exec_backward_pass, and the hook of
    runtime/engine.py start the same timer."""
    if x.strategy.pipeline == 1:
        return None
    for key, why in EXTRA_KEYS_REFUSED_IN_PIPELINE.items():
        value = x.recipe.extra.get(key)
        if value.get("enabled") if isinstance(value, Mapping) else value:
            return found(
                "SW3133",
                f"extra.{key}",
                f"extra.{key} does not run with pipeline {x.strategy.pipeline}: {why}",
                f"Remove extra.{key}, or write `pipeline: 1`. run/metrics.jsonl has every step's "
                "seconds.",
            )
    return None


def experts_without_zero(x: Candidate) -> Diagnostic | None:
    """At ZeRO stage 0 DeepSpeed leaves the experts of other ranks out of a rank's gradient norm
    (runtime/engine.py). Measured: the norm that gradients are clipped by is 2e-3 off."""
    if x.strategy.expert == 1 or x.strategy.zero_stage > 0:
        return None
    return found(
        "SW3150",
        "parallelism.zero_stage",
        (
            f"zero_stage 0 with expert {x.strategy.expert} computes a wrong gradient norm: each "
            "rank leaves out other ranks' experts"
        ),
        "Use zero_stage: 1, 2 or 3.",
        (1, 2, 3),
    )


RULES: dict[str, Rule] = {
    "SW3107": rule(pipeline_zero_0, "pipeline", "zero_stage"),
    "SW3108": rule(pipeline_zero_23, "pipeline", "zero_stage"),
    "SW3109": rule(dualpipev_micro_batches, "pipeline", "schedule", "gradient_accumulation_steps"),
    "SW3111": rule(offload_without_effect, "zero_stage", "offload"),
    "SW3114": rule(zero_0_half_precision, "pipeline", "zero_stage"),
    "SW3133": rule(timers_in_a_pipeline, "pipeline"),
    "SW3150": rule(experts_without_zero, "expert", "zero_stage"),
}


def _private_names(plan: Plan) -> tuple[Purpose, ...]:
    needed: list[Purpose] = ["every run under DeepSpeed"]
    if plan.strategy.pipeline > 1:
        needed.append("a pipeline under DeepSpeed")
    if plan.low_precision is not None:
        needed.append("low precision")
    return tuple(needed)


DEEPSPEED = Engine(
    name="deepspeed",
    title="DeepSpeed",
    runtime="shardwright.engines.deepspeed.deepspeed_runtime",
    lowering="shardwright.engines.deepspeed.deepspeed_files",
    program="deepspeed",
    packages={"deepspeed": ">=0.19.8,<0.20"},
    private_names=_private_names,
    artifacts=(DS_CONFIG, AUTOTP_FILE, f"{ACCELERATE}/"),
    inputs=(DS_CONFIG,),
    traits=EngineTraits(
        selective_recomputes_projections=True,
        fuses_accumulation=False,
        tensor_parallel_launch_cost="floor",
        bidirectional_p2p=False,
        # pipe/engine.py, _exec_backward_pass; pipe/schedule.py, TrainSchedule.num_pipe_buffers
        saved_stage_outputs=2,
        bucketed_zero=False,
        bucketed_pipeline=True,
        traffic="deepspeed",
        # overlap_comm is written from stage 2 on (engines/deepspeed/ds_config.py)
        zero_1_overlaps=False,
        zero3_gathers_flat_layers=False,
        chunked_loss=True,
        hpz=True,
    ),
    precisions=("bf16", "fp16", "fp32"),
    optimizers=OPTIMIZER_NAMES,
    # torchao's names (Float8LinearConfig.from_recipe_name).
    low_precision={"fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise"},
    refusal_reasons={
        "training.low_precision": "torchao's linears of this format are prototypes for single GPUs"
    },
    rules=RULES,
    key_errors=extra_errors,
    axes=frozenset({"context", "expert"}),
    compiles_layers=True,
    tasks=frozenset({"causal-lm", "image-text-to-text", "contrastive", "sequence-classification"}),
    objectives=tuple(OBJECTIVES),
    scores_tokens=True,
    islands=True,
    measures_noise_scale=True,
)
