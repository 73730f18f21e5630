"""Pipelines, tensor parallelism, activation checkpointing, and the sections beside them."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.lint.rules.precision import precision
from shardwright.lint.rules.zero import OFFLOADS, ZERO
from shardwright.lint.subject import Found, LintedConfig


def pipeline_zero(subject: LintedConfig) -> Iterator[Found]:
    if subject.has_pipeline and subject.stage in (2, 3):
        yield Found(
            code="SW4601",
            key=(ZERO, "stage"),
            message=f"ZeRO stage {subject.stage} does not go with a pipeline",
            help="Take stage 1, or remove the `pipeline` section where there is no PipelineModule.",
        )


def pipeline_keys(subject: LintedConfig) -> Iterator[Found]:
    idle = [key for key in ("stages", "partition", "seed_layers") if subject.has("pipeline", key)]
    if idle:
        yield Found(
            code="SW4602",
            key=("pipeline", idle[0]),
            message=f"nothing reads {', '.join(f'pipeline.{key}' for key in idle)}",
            help="Give num_stages, partition_method and seed_layers to the PipelineModule.",
            severity="warning",
            at="key",
        )


def reentrant(subject: LintedConfig) -> Iterator[Found]:
    interval = subject.integer("pipeline", "activation_checkpoint_interval")
    if interval and subject.get("pipeline", "use_reentrant") is not False:
        yield Found(
            code="SW4603",
            key=("pipeline", "activation_checkpoint_interval"),
            message="re-entrant checkpointing, the default, gets no gradient past an embedding as first layer",
            help='Add "use_reentrant": false.',
            severity="warning",
            at="key",
        )


def pipeline_overlap(subject: LintedConfig) -> Iterator[Found]:
    if subject.has_pipeline and subject.is_on(ZERO, "overlap_comm") and subject.stage == 1:
        yield Found(
            code="SW4604",
            key=(ZERO, "overlap_comm"),
            message="overlap_comm has no effect under a pipeline",
            help="Write false.",
            severity="warning",
        )


def pipeline_accumulation(subject: LintedConfig) -> Iterator[Found]:
    if subject.has_pipeline and subject.get("managed_gradient_accumulation") is False:
        yield Found(
            code="SW4605",
            key=("managed_gradient_accumulation",),
            message="managed_gradient_accumulation: false does not go with a pipeline",
            help="Remove the key.",
        )


def contiguous_checkpoints(subject: LintedConfig) -> Iterator[Found]:
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
            yield Found(
                code="SW4606",
                key=key,
                message=f"contiguous_memory_optimization needs {' and '.join(missing)}",
                help="Add partition_activations: true and number_checkpoints: the number of layers; or pass them to "
                "deepspeed.checkpointing.configure.",
                severity="warning",
                at="key",
            )


def checkpointing_in_trainer(subject: LintedConfig) -> Iterator[Found]:
    if subject.audience == "trainer" and subject.section("activation_checkpointing"):
        yield Found(
            code="SW4607",
            key=("activation_checkpointing",),
            message="activation_checkpointing has no effect on a Hugging Face model",
            help="Give gradient_checkpointing=True to TrainingArguments, and remove the section.",
            severity="warning",
            at="key",
        )


def tensor_parallel_off(subject: LintedConfig) -> Iterator[Found]:
    section = subject.section("tensor_parallel")
    if section and (subject.integer("tensor_parallel", "autotp_size") or 0) == 0:
        yield Found(
            code="SW4608",
            key=("tensor_parallel",),
            message="`tensor_parallel` does nothing without autotp_size",
            help='Add "autotp_size": the ranks of a tensor group.',
            severity="warning",
            at="key",
        )


def pipeline_clipping(subject: LintedConfig) -> Iterator[Found]:
    clipping = subject.number("gradient_clipping")
    clips = clipping is None or clipping > 0
    if subject.has_pipeline and subject.stage == 0 and precision(subject) == "fp32" and clips:
        given = "gradient_clipping" if subject.has("gradient_clipping") else "DeepSpeed's default of 1.0"
        yield Found(
            code="SW4609",
            key=("gradient_clipping",) if subject.has("gradient_clipping") else ("pipeline",),
            message=f"at ZeRO stage 0 in fp32 each stage of a pipeline clips by its own norm ({given})",
            help="Take zero_optimization.stage: 1, whose norm is that of the whole model; or gradient_clipping: 0.",
            severity="warning",
            at="key",
        )


def pipeline_tensor(subject: LintedConfig) -> Iterator[Found]:
    key = ("tensor_parallel", "autotp_size")
    if subject.has_pipeline and (subject.integer(*key) or 0) > 1:
        yield Found(
            code="SW4610",
            key=key,
            message="AutoTP does not work on a PipelineModule",
            help="Remove `tensor_parallel`; give the module layers that are tensor-parallel by themselves.",
        )


def aio_without_nvme(subject: LintedConfig) -> Iterator[Found]:
    used = any(subject.offload(name) in ("nvme", "auto") for name in OFFLOADS) or subject.section(
        "checkpoint", "writer"
    )
    if subject.section("aio") and not used and subject.get("datastates_ckpt") is None:
        yield Found(
            code="SW4701",
            key=("aio",),
            message="`aio` has no effect: nothing is offloaded to NVMe",
            help="Remove the section, or offload to device nvme.",
            severity="warning",
            at="key",
        )


_SAMPLING = ("data_efficiency", "data_sampling")


def curriculum(subject: LintedConfig) -> Iterator[Found]:
    key = (*_SAMPLING, "curriculum_learning")
    if subject.is_on(*key, "enabled") and not subject.has(*key, "curriculum_metrics"):
        yield Found(
            code="SW4702",
            key=key,
            message="curriculum_learning is enabled without curriculum_metrics: DeepSpeed refuses the file",
            help="Add curriculum_metrics, an entry a metric.",
            at="key",
        )


def dynamic_batching(subject: LintedConfig) -> Iterator[Found]:
    key = (*_SAMPLING, "dynamic_batching")
    if subject.is_on(*key, "enabled") and not subject.has(*key, "max_tokens"):
        yield Found(
            code="SW4703",
            key=key,
            message="dynamic_batching is enabled without max_tokens: DeepSpeed refuses the file",
            help="Add max_tokens, the tokens of a micro-batch.",
            at="key",
        )


def disabled_parent(subject: LintedConfig) -> Iterator[Found]:
    top = "data_efficiency"
    for name in ("data_sampling", "data_routing"):
        if subject.is_on(top, name, "enabled") and not subject.is_on(top, "enabled"):
            yield Found(
                code="SW4704",
                key=(top, name, "enabled"),
                message=f"{top}.{name} is off, for {top} itself is not enabled",
                help=f'Add "enabled": true to {top}.',
                severity="warning",
            )


def hjson(subject: LintedConfig) -> Iterator[Found]:
    if subject.audience == "trainer" and not subject.is_json:
        yield Found(
            code="SW4008",
            key=(),
            message="the file has comments, a trailing comma or words without quotes; the Trainer reads plain JSON",
            help="Remove the comments and trailing commas.",
        )
