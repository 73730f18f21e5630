"""Pipelines, tensor parallelism, activation checkpointing, and the sections beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shardwright.lint.ds_config_precision_rules import precision
from shardwright.lint.ds_config_zero_rules import OFFLOADS, ZERO
from shardwright.lint.lint_rule import Edit, Fault, LintedConfig, rule


@rule(
    "SW4601",
    help="Take stage 1, or remove the `pipeline` section where there is no PipelineModule.",
)
def pipeline_zero(subject: LintedConfig) -> Iterator[Fault]:
    if subject.has_pipeline and subject.stage in (2, 3):
        yield Fault((ZERO, "stage"), f"ZeRO stage {subject.stage} does not go with a pipeline")


@rule(
    "SW4602",
    "warning",
    at="key",
    help="Give num_stages, partition_method and seed_layers to the PipelineModule.",
)
def pipeline_keys(subject: LintedConfig) -> Iterator[Fault]:
    idle = [key for key in ("stages", "partition", "seed_layers") if subject.has("pipeline", key)]
    if idle:
        yield Fault(
            ("pipeline", idle[0]), f"nothing reads {', '.join(f'pipeline.{key}' for key in idle)}"
        )


@rule("SW4603", "warning", at="key", help='Add "use_reentrant": false.')
def reentrant(subject: LintedConfig) -> Iterator[Fault]:
    interval = subject.integer("pipeline", "activation_checkpoint_interval")
    if interval and subject.get("pipeline", "use_reentrant") is not False:
        yield Fault(
            ("pipeline", "activation_checkpoint_interval"),
            (
                "re-entrant checkpointing, the default, gets no gradient past an embedding as "
                "first layer"
            ),
        )


@rule("SW4604", "warning")
def pipeline_overlap(subject: LintedConfig) -> Iterator[Fault]:
    if subject.has_pipeline and subject.is_on(ZERO, "overlap_comm") and subject.stage == 1:
        yield Fault(
            (ZERO, "overlap_comm"), "overlap_comm has no effect under a pipeline", "Write false."
        )


@rule("SW4605", help="Remove the key.")
def pipeline_accumulation(subject: LintedConfig) -> Iterator[Fault]:
    if subject.has_pipeline and subject.get("managed_gradient_accumulation") is False:
        yield Fault(
            ("managed_gradient_accumulation",),
            "managed_gradient_accumulation: false does not go with a pipeline",
        )


@rule("SW4606", "warning", at="key")
def contiguous_checkpoints(subject: LintedConfig) -> Iterator[Fault]:
    key = ("activation_checkpointing", "contiguous_memory_optimization")
    if subject.is_on(*key):
        missing = [
            other
            for other, given in (
                ("partition_activations", subject.is_on(key[0], "partition_activations")),
                ("number_checkpoints", subject.get(key[0], "number_checkpoints") is not None),
            )
            if not given
        ]
        if missing:
            yield Fault(
                key,
                f"contiguous_memory_optimization needs {' and '.join(missing)}",
                "Add partition_activations: true and number_checkpoints: the number of layers; or "
                "pass them to deepspeed.checkpointing.configure.",
            )


@rule("SW4607", "warning", at="key")
def checkpointing_in_trainer(subject: LintedConfig) -> Iterator[Fault]:
    if subject.audience == "trainer" and subject.section("activation_checkpointing"):
        yield Fault(
            ("activation_checkpointing",),
            "activation_checkpointing has no effect on a Hugging Face model",
            "Give gradient_checkpointing=True to TrainingArguments, and remove the section.",
        )


@rule("SW4608", "warning", at="key", help='Add "autotp_size": the ranks of a tensor group.')
def tensor_parallel_off(subject: LintedConfig) -> Iterator[Fault]:
    section = subject.section("tensor_parallel")
    if section and (subject.integer("tensor_parallel", "autotp_size") or 0) == 0:
        yield Fault(("tensor_parallel",), "`tensor_parallel` does nothing without autotp_size")


@rule("SW4609", "warning", at="key")
def pipeline_clipping(subject: LintedConfig) -> Iterator[Fault]:
    clipping = subject.number("gradient_clipping")
    clips = clipping is None or clipping > 0
    if subject.has_pipeline and subject.stage == 0 and precision(subject) == "fp32" and clips:
        given = (
            "gradient_clipping"
            if subject.has("gradient_clipping")
            else "DeepSpeed's default of 1.0"
        )
        yield Fault(
            ("gradient_clipping",) if subject.has("gradient_clipping") else ("pipeline",),
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
def pipeline_tensor(subject: LintedConfig) -> Iterator[Fault]:
    key = ("tensor_parallel", "autotp_size")
    if subject.has_pipeline and (subject.integer(*key) or 0) > 1:
        yield Fault(key, "AutoTP does not work on a PipelineModule")


@rule("SW4611", "warning", help='Write "reduce_scatter": false, or take stage 1 or 2.')
def sequence_zero_3(subject: LintedConfig) -> Iterator[Fault]:
    ranks = subject.integer("sequence_parallel_size") or 1
    scatters = not subject.has(ZERO, "reduce_scatter") or subject.is_on(ZERO, "reduce_scatter")
    if ranks > 1 and subject.stage == 3 and scatters:
        path = (ZERO, "reduce_scatter")
        kind: Literal["set", "add"] = "set" if subject.has(*path) else "add"
        yield Fault(
            ("sequence_parallel_size",),
            (
                f"at ZeRO stage 3 the gradients of {ranks} sequence-parallel ranks are 1/{ranks} "
                "of the right ones"
            ),
            fix=(Edit(kind=kind, path=path, value=False),),
        )


@rule("SW4701", "warning", at="key", help="Remove the section, or offload to device nvme.")
def aio_without_nvme(subject: LintedConfig) -> Iterator[Fault]:
    used = any(subject.offload(name) in ("nvme", "auto") for name in OFFLOADS) or subject.section(
        "checkpoint", "writer"
    )
    if subject.section("aio") and not used and subject.get("datastates_ckpt") is None:
        yield Fault(("aio",), "`aio` has no effect: nothing is offloaded to NVMe")


_SAMPLING = ("data_efficiency", "data_sampling")


@rule("SW4702", at="key", help="Add curriculum_metrics, an entry a metric.")
def curriculum(subject: LintedConfig) -> Iterator[Fault]:
    key = (*_SAMPLING, "curriculum_learning")
    if subject.is_on(*key, "enabled") and not subject.has(*key, "curriculum_metrics"):
        yield Fault(
            key,
            "curriculum_learning is enabled without curriculum_metrics: DeepSpeed refuses the file",
        )


@rule("SW4703", at="key", help="Add max_tokens, the tokens of a micro-batch.")
def dynamic_batching(subject: LintedConfig) -> Iterator[Fault]:
    key = (*_SAMPLING, "dynamic_batching")
    if subject.is_on(*key, "enabled") and not subject.has(*key, "max_tokens"):
        yield Fault(
            key, "dynamic_batching is enabled without max_tokens: DeepSpeed refuses the file"
        )


@rule("SW4704", "warning")
def disabled_parent(subject: LintedConfig) -> Iterator[Fault]:
    top = "data_efficiency"
    for name in ("data_sampling", "data_routing"):
        if subject.is_on(top, name, "enabled") and not subject.is_on(top, "enabled"):
            yield Fault(
                (top, name, "enabled"),
                f"{top}.{name} is off, for {top} itself is not enabled",
                f'Add "enabled": true to {top}.',
            )


@rule("SW4008", help="Remove the comments and trailing commas.")
def hjson(subject: LintedConfig) -> Iterator[Fault]:
    if subject.audience == "trainer" and not subject.is_json:
        yield Fault(
            (),
            (
                "the file has comments, a trailing comma or words without quotes; the Trainer "
                "reads plain JSON"
            ),
        )
