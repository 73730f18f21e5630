"""Pipelines, tensor parallelism, activation checkpointing, and the sections beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shardwright.lint.ds_config_precision_rules import precision
from shardwright.lint.ds_config_zero_rules import OFFLOADS, ZERO
from shardwright.lint.lint_rule import Edit, LintedDsConfig, RuleViolation, rule


@rule(
    "SW4601",
    help="Take stage 1, or remove the `pipeline` section where there is no PipelineModule.",
)
def pipeline_zero(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.has_pipeline and ds_config.stage in (2, 3):
        yield RuleViolation(
            (ZERO, "stage"), f"ZeRO stage {ds_config.stage} does not go with a pipeline"
        )


@rule(
    "SW4602",
    "warning",
    at="key",
    help="Give num_stages, partition_method and seed_layers to the PipelineModule.",
)
def pipeline_keys(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    idle = [key for key in ("stages", "partition", "seed_layers") if ds_config.has("pipeline", key)]
    if idle:
        yield RuleViolation(
            ("pipeline", idle[0]), f"nothing reads {', '.join(f'pipeline.{key}' for key in idle)}"
        )


@rule("SW4603", "warning", at="key", help='Add "use_reentrant": false.')
def reentrant(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    interval = ds_config.integer("pipeline", "activation_checkpoint_interval")
    if interval and ds_config.get("pipeline", "use_reentrant") is not False:
        yield RuleViolation(
            ("pipeline", "activation_checkpoint_interval"),
            (
                "re-entrant checkpointing, the default, gets no gradient past an embedding as "
                "first layer"
            ),
        )


@rule("SW4604", "warning")
def pipeline_overlap(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.has_pipeline and ds_config.is_on(ZERO, "overlap_comm") and ds_config.stage == 1:
        yield RuleViolation(
            (ZERO, "overlap_comm"), "overlap_comm has no effect under a pipeline", "Write false."
        )


@rule("SW4605", help="Remove the key.")
def pipeline_accumulation(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.has_pipeline and ds_config.get("managed_gradient_accumulation") is False:
        yield RuleViolation(
            ("managed_gradient_accumulation",),
            "managed_gradient_accumulation: false does not go with a pipeline",
        )


@rule("SW4606", "warning", at="key")
def contiguous_checkpoints(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    key = ("activation_checkpointing", "contiguous_memory_optimization")
    if ds_config.is_on(*key):
        missing = [
            other
            for other, given in (
                ("partition_activations", ds_config.is_on(key[0], "partition_activations")),
                ("number_checkpoints", ds_config.get(key[0], "number_checkpoints") is not None),
            )
            if not given
        ]
        if missing:
            yield RuleViolation(
                key,
                f"contiguous_memory_optimization needs {' and '.join(missing)}",
                "Add partition_activations: true and number_checkpoints: the number of layers; or "
                "pass them to deepspeed.checkpointing.configure.",
            )


@rule("SW4607", "warning", at="key")
def checkpointing_in_trainer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.audience == "trainer" and ds_config.section("activation_checkpointing"):
        yield RuleViolation(
            ("activation_checkpointing",),
            "activation_checkpointing has no effect on a Hugging Face model",
            "Give gradient_checkpointing=True to TrainingArguments, and remove the section.",
        )


@rule("SW4608", "warning", at="key", help='Add "autotp_size": the ranks of a tensor group.')
def tensor_parallel_off(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    section = ds_config.section("tensor_parallel")
    if section and (ds_config.integer("tensor_parallel", "autotp_size") or 0) == 0:
        yield RuleViolation(
            ("tensor_parallel",), "`tensor_parallel` does nothing without autotp_size"
        )


@rule("SW4609", "warning", at="key")
def pipeline_clipping(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    clipping = ds_config.number("gradient_clipping")
    clips = clipping is None or clipping > 0
    if ds_config.has_pipeline and ds_config.stage == 0 and precision(ds_config) == "fp32" and clips:
        given = (
            "gradient_clipping"
            if ds_config.has("gradient_clipping")
            else "DeepSpeed's default of 1.0"
        )
        yield RuleViolation(
            ("gradient_clipping",) if ds_config.has("gradient_clipping") else ("pipeline",),
            f"at ZeRO stage 0 in fp32 each stage of a pipeline clips by its own norm ({given})",
            (
                "Take zero_optimization.stage: 1, whose norm is that of the whole model; or "
                "gradient_clipping: 0."
            ),
        )


@rule(
    "SW4610",
    help="Remove `tensor_parallel`; give the module layers that are tensor-parallel by themselves.",
)
def pipeline_tensor(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    key = ("tensor_parallel", "autotp_size")
    if ds_config.has_pipeline and (ds_config.integer(*key) or 0) > 1:
        yield RuleViolation(key, "AutoTP does not work on a PipelineModule")


@rule("SW4611", "warning", help='Write "reduce_scatter": false, or take stage 1 or 2.')
def sequence_zero_3(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    ranks = ds_config.integer("sequence_parallel_size") or 1
    scatters = not ds_config.has(ZERO, "reduce_scatter") or ds_config.is_on(ZERO, "reduce_scatter")
    if ranks > 1 and ds_config.stage == 3 and scatters:
        path = (ZERO, "reduce_scatter")
        kind: Literal["set", "add"] = "set" if ds_config.has(*path) else "add"
        yield RuleViolation(
            ("sequence_parallel_size",),
            (
                f"at ZeRO stage 3 the gradients of {ranks} sequence-parallel ranks are 1/{ranks} "
                "of the right ones"
            ),
            fix=(Edit(kind=kind, path=path, value=False),),
        )


@rule("SW4701", "warning", at="key", help="Remove the section, or offload to device nvme.")
def aio_without_nvme(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    used = any(
        ds_config.offload(name) in ("nvme", "auto") for name in OFFLOADS
    ) or ds_config.section("checkpoint", "writer")
    if ds_config.section("aio") and not used and ds_config.get("datastates_ckpt") is None:
        yield RuleViolation(("aio",), "`aio` has no effect: nothing is offloaded to NVMe")


_SAMPLING = ("data_efficiency", "data_sampling")


@rule("SW4702", at="key", help="Add curriculum_metrics, an entry a metric.")
def curriculum(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    key = (*_SAMPLING, "curriculum_learning")
    if ds_config.is_on(*key, "enabled") and not ds_config.has(*key, "curriculum_metrics"):
        yield RuleViolation(
            key,
            "curriculum_learning is enabled without curriculum_metrics: DeepSpeed refuses the file",
        )


@rule("SW4703", at="key", help="Add max_tokens, the tokens of a micro-batch.")
def dynamic_batching(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    key = (*_SAMPLING, "dynamic_batching")
    if ds_config.is_on(*key, "enabled") and not ds_config.has(*key, "max_tokens"):
        yield RuleViolation(
            key, "dynamic_batching is enabled without max_tokens: DeepSpeed refuses the file"
        )


@rule("SW4704", "warning")
def disabled_parent(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    top = "data_efficiency"
    for name in ("data_sampling", "data_routing"):
        if ds_config.is_on(top, name, "enabled") and not ds_config.is_on(top, "enabled"):
            yield RuleViolation(
                (top, name, "enabled"),
                f"{top}.{name} is off, for {top} itself is not enabled",
                f'Add "enabled": true to {top}.',
            )


@rule("SW4008", help="Remove the comments and trailing commas.")
def hjson_for_trainer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.audience == "trainer" and not ds_config.is_plain_json:
        yield RuleViolation(
            (),
            (
                "the file has comments, a trailing comma or words without quotes; the Trainer "
                "reads plain JSON"
            ),
        )
