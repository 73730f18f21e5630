"""Check pipelines, tensor parallelism, activation checkpointing and related sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shardwright.engines.deepspeed.ds_config_schema import properties
from shardwright.layout.zero_settings import HPZ
from shardwright.lint.ds_config_training_rules import dtype, precision
from shardwright.lint.lint_rule import Edit, LintedDsConfig, RuleViolation, rule

# zero_optimization: what a stage takes, and what it leaves without effect.


ZERO = "zero_optimization"
Offload = Literal["offload_optimizer", "offload_param"]
OFFLOADS: tuple[Offload, Offload] = ("offload_optimizer", "offload_param")

_STAGE_3 = frozenset(
    {"sub_group_size", "memory_efficient_linear", "override_module_apply", "leaf_module"}
)
_ZERO_PLUS_PLUS_KEYS = (HPZ, "zero_quantized_weights", "zero_quantized_gradients")
_GATHER_ON_SAVE_KEYS = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
_BELOW_3 = ("round_robin_gradients", "parameter_alignment")


@rule("SW4401", "warning", at="key", help="Remove what is for stage 3 only, or take stage 3.")
def stage_3_keys(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    zero = ds_config.section(ZERO)
    known = properties(properties(ds_config.ds_config_schema.schema)[ZERO])
    # Accelerate gathers tensor ranks' shards by a key with the name of stage 3 (accelerator.py,
    # get_state_dict).
    gathered = _GATHER_ON_SAVE_KEYS if _tensor_ranks(ds_config) > 1 else ()
    unused = [
        key
        for key, value in zero.items()
        if key not in gathered
        and (key.startswith("stage3_") or key in _STAGE_3 or "same_as" in known.get(key, {}))
        and key in known
        and value is not False
        and value != "auto"
    ]
    if unused and ds_config.stage in (0, 1, 2):
        yield RuleViolation(
            (ZERO, unused[0]),
            f"without effect at ZeRO stage {ds_config.stage}: {', '.join(unused)}",
        )


@rule("SW4402", "warning", at="key", help="Take stage 3, or remove the section.")
def parameter_offload(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.offload("offload_param") in ("cpu", "nvme") and ds_config.stage in (0, 1, 2):
        yield RuleViolation(
            (ZERO, "offload_param"),
            (
                f"offload_param has no effect at ZeRO stage {ds_config.stage}: parameters stay "
                "on the GPU"
            ),
        )


@rule("SW4403", "warning", at="key", help="Take stage 1, 2 or 3.")
def offload_without_zero(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.offload("offload_optimizer") in ("cpu", "nvme") and ds_config.stage == 0:
        yield RuleViolation(
            (ZERO, "offload_optimizer"),
            "offload_optimizer has no effect at ZeRO stage 0, which has no ZeRO optimizer",
        )


@rule("SW4404", help='Add "nvme_path": a folder on the NVMe disk.')
def nvme_without_path(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for name in OFFLOADS:
        needed = ds_config.stage == 3 and ds_config.offload(name) == "nvme"
        if needed and ds_config.get(ZERO, name, "nvme_path") in (None, ""):
            yield RuleViolation(
                (ZERO, name, "device"), f"{ZERO}.{name}: device nvme has no nvme_path"
            )


@rule("SW4405", "warning", help="Take stage 3, or write device: cpu.")
def nvme_below_stage_3(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.offload("offload_optimizer") == "nvme" and ds_config.stage in (1, 2):
        yield RuleViolation(
            (ZERO, "offload_optimizer", "device"),
            f"at ZeRO stage {ds_config.stage} the optimizer states go to host memory, not to NVMe",
        )


@rule("SW4406", "warning", at="key", help="Write device: nvme, or remove the path.")
def path_without_nvme(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for name in OFFLOADS:
        path = ds_config.get(ZERO, name, "nvme_path")
        if path not in (None, "", "auto", "none") and ds_config.offload(name) in ("none", "cpu"):
            yield RuleViolation(
                (ZERO, name, "nvme_path"),
                f"{ZERO}.{name}: nvme_path has no effect with device {ds_config.offload(name)}",
            )


@rule("SW4407", help="Take stage 3, or remove the ratio.")
def partial_offload(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    ratio = ds_config.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and ds_config.stage in (0, 1, 2):
        yield RuleViolation(
            (ZERO, "offload_optimizer", "ratio"),
            f"an offload ratio of {ratio:g} needs ZeRO stage 3",
        )


@rule("SW4408", "warning", at="key", help="Take stage 3, or remove it.")
def zero_plus_plus(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    unused = [
        key
        for key in _ZERO_PLUS_PLUS_KEYS
        if ds_config.is_on(ZERO, key) and ds_config.integer(ZERO, key) != 1
    ]
    if unused and ds_config.stage in (0, 1, 2):
        yield RuleViolation(
            (ZERO, unused[0]),
            f"without effect at ZeRO stage {ds_config.stage}: ZeRO++'s {', '.join(unused)}",
        )


@rule("SW4409")
def gradient_norm_off(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    key = (ZERO, "compute_grad_norm")
    if ds_config.get(*key) is not False or ds_config.stage is None:
        return
    clipping = ds_config.get("gradient_clipping")
    if ds_config.stage not in (1, 2):
        why = f"is supported only at ZeRO stage 1 or 2, and the stage is {ds_config.stage}"
        help = "Remove compute_grad_norm."
    elif clipping is None or (ds_config.number("gradient_clipping") or 0) > 0:
        given = "is 1.0 by default" if clipping is None else f"is {clipping}"
        why = f"needs gradient_clipping: 0, but gradient_clipping {given}"
        help = 'Write "gradient_clipping": 0 at the top, or remove compute_grad_norm.'
    elif ds_config.offload("offload_optimizer") != "none":
        why = "is not supported with offload_optimizer"
        help = "Remove compute_grad_norm or offload_optimizer."
    elif (
        ds_config.stage == 1
        and precision(ds_config) == "bf16"
        and dtype(ds_config, "grad_accum_dtype") == "fp32"
    ):
        why = "is not supported at ZeRO stage 1 in bf16 with data_types.grad_accum_dtype: fp32"
        help = "Remove compute_grad_norm."
    else:
        return
    yield RuleViolation(key, f"compute_grad_norm: false {why}", help)


@rule("SW4410", help="Write mean, and scale the loss.")
def summed_gradients(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.text("gradient_allreduce_op") != "sum":
        return
    others = {
        "ZeRO stage 3": ds_config.stage == 3,
        "ZenFlow": ds_config.section(ZERO).get("zenflow") is not None,
        "DeepCompile": ds_config.is_on("compile", "deepcompile"),
    }
    for other, given in others.items():
        if given:
            yield RuleViolation(
                ("gradient_allreduce_op",),
                f"gradient_allreduce_op: sum is not supported with {other}",
            )
            return


@rule("SW4411")
def prescaled_gradients(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.stage not in (2, 3) or ds_config.section(ZERO).get("reduce_scatter") is False:
        return
    factor = ds_config.number("gradient_predivide_factor")
    wrong = {"prescale_gradients": ds_config.is_on("prescale_gradients")}
    wrong["gradient_predivide_factor"] = factor is not None and factor != 1
    for key, given in wrong.items():
        if given:
            yield RuleViolation(
                (key,),
                f"{key} is not supported with reduce_scatter at ZeRO stage {ds_config.stage}",
                f"Remove it, or write {ZERO}.reduce_scatter: false.",
            )


@rule("SW4412", at="key", help="Remove the key.")
def legacy_stage_1(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.is_on(ZERO, "legacy_stage1") and ds_config.stage != 0:
        yield RuleViolation(
            (ZERO, "legacy_stage1"),
            "legacy_stage1 is gone since DeepSpeed 0.5.9, which refuses to start with it",
            fix=(Edit(kind="remove", path=(ZERO, "legacy_stage1")),),
        )


@rule("SW4413", "warning", at="key")
def elastic_checkpoint(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.is_on(ZERO, "elastic_checkpoint") and ds_config.stage == 3:
        yield RuleViolation(
            (ZERO, "elastic_checkpoint"),
            "elastic_checkpoint has no effect at ZeRO stage 3",
            (
                "Convert with ds_to_universal and write checkpoint.load_universal: true to change "
                "the ranks."
            ),
        )


@rule("SW4414")
def odd_bucket(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    size = ds_config.integer(ZERO, "allgather_bucket_size")
    if size is not None and size % 2 and ds_config.stage in (1, 2):
        yield RuleViolation(
            (ZERO, "allgather_bucket_size"),
            (
                f"allgather_bucket_size {size} is odd, which DeepSpeed rejects at ZeRO stage "
                f"{ds_config.stage}"
            ),
            f"Write an even number, such as {size + 1}.",
            fix=(Edit(kind="set", path=(ZERO, "allgather_bucket_size"), value=size + 1),),
        )


@rule("SW4415", "warning")
def weights_not_gathered(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    given = next((name for name in _GATHER_ON_SAVE_KEYS if ds_config.has(ZERO, name)), None)
    cut = ds_config.stage == 3 or _tensor_ranks(ds_config) > 1
    if (
        ds_config.audience == "trainer"
        and cut
        and (given is None or ds_config.get(ZERO, given) is False)
    ):
        yield RuleViolation(
            (ZERO, given or "stage"),
            (
                f"without {_GATHER_ON_SAVE_KEYS[0]} the Trainer saves no usable model: each "
                "rank saves only its shard"
            ),
            f'Write "{_GATHER_ON_SAVE_KEYS[0]}": true'
            + (
                ", or convert each checkpoint with zero_to_fp32.py."
                if ds_config.stage == 3
                else "."
            ),
        )


@rule("SW4416", "warning", at="key", help="Remove it; it is for stages 1 and 2.")
def keys_without_effect_at_stage_3(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    unused = [key for key in _BELOW_3 if ds_config.is_on(ZERO, key)]
    if unused and ds_config.stage == 3:
        yield RuleViolation(
            (ZERO, unused[0]), f"without effect at ZeRO stage 3: {', '.join(unused)}"
        )


@rule(
    "SW4417", at="key", help='Take stage 1, 2 or 3 and add "offload_optimizer": {"device": "cpu"}.'
)
def zenflow(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if not isinstance(ds_config.get(ZERO, "zenflow"), dict) or ds_config.stage is None:
        return
    if ds_config.stage == 0 or ds_config.offload("offload_optimizer") != "cpu":
        yield RuleViolation(
            (ZERO, "zenflow"), "zenflow needs ZeRO and offload_optimizer with device cpu"
        )


@rule("SW4418", "warning", help="Take stage 3, or remove the key.")
def super_offload(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.is_on(ZERO, "offload_optimizer", "super_offload") and ds_config.stage in (0, 1, 2):
        yield RuleViolation(
            (ZERO, "offload_optimizer", "super_offload"),
            f"super_offload has no effect at ZeRO stage {ds_config.stage}",
        )


@rule("SW4419", "warning")
def boolean_zero(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    value = ds_config.get(ZERO)
    if isinstance(value, bool):
        yield RuleViolation(
            (ZERO,),
            (f"zero_optimization: {str(value).lower()} is an outdated form of stage {int(value)}"),
            f'Write {{"stage": {int(value)}}}.',
            fix=(Edit(kind="set", path=(ZERO,), value={"stage": int(value)}),),
        )


@rule(
    "SW4420",
    help='Write "overlap_comm": false, remove managed_gradient_accumulation, or use stage 2 or 3.',
)
def unmanaged_accumulation(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.get("managed_gradient_accumulation") is not False:
        return
    if ds_config.is_on(ZERO, "overlap_comm") and ds_config.stage in (0, 1):
        yield RuleViolation(
            ("managed_gradient_accumulation",),
            (
                "managed_gradient_accumulation: false is not supported with overlap_comm at ZeRO "
                f"stage {ds_config.stage}"
            ),
        )


@rule(
    "SW4421",
    at="key",
    help="Remove one of the two. `shardwright compile` makes groups of its own, which run both.",
)
def hpz_with_tensor_parallel(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Check hpZ with tensor parallelism: both groups are consecutive ranks."""
    size, tensor = ds_config.integer(ZERO, HPZ) or 1, _tensor_ranks(ds_config)
    if ds_config.stage == 3 and size > 1 and tensor > 1:
        yield RuleViolation(
            (ZERO, HPZ),
            (
                f"{HPZ} {size} with autotp_size {tensor}: weights are gathered from ranks that "
                "hold other shards"
            ),
        )


def _tensor_ranks(ds_config: LintedDsConfig) -> int:
    return ds_config.integer("tensor_parallel", "autotp_size") or 1


@rule(
    "SW4601",
    help="Take stage 1, or remove the `pipeline` section where there is no PipelineModule.",
)
def pipeline_zero(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.has_pipeline and ds_config.stage in (2, 3):
        yield RuleViolation(
            (ZERO, "stage"), f"ZeRO stage {ds_config.stage} is not supported with a pipeline"
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
            ("pipeline", idle[0]),
            f"DeepSpeed reads none of {', '.join(f'pipeline.{key}' for key in idle)}",
        )


@rule("SW4603", "warning", at="key", help='Add "use_reentrant": false.')
def reentrant(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    interval = ds_config.integer("pipeline", "activation_checkpoint_interval")
    if interval and ds_config.get("pipeline", "use_reentrant") is not False:
        yield RuleViolation(
            ("pipeline", "activation_checkpoint_interval"),
            (
                "re-entrant checkpointing, the default, gives no gradient to an embedding as first "
                "layer"
            ),
        )


@rule("SW4604", "warning")
def pipeline_overlap(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.has_pipeline and ds_config.is_on(ZERO, "overlap_comm") and ds_config.stage == 1:
        yield RuleViolation(
            (ZERO, "overlap_comm"), "overlap_comm has no effect under a pipeline", "Write false."
        )


@rule("SW4605", help="Remove managed_gradient_accumulation.")
def pipeline_accumulation(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.has_pipeline and ds_config.get("managed_gradient_accumulation") is False:
        yield RuleViolation(
            ("managed_gradient_accumulation",),
            "managed_gradient_accumulation: false is not supported with a pipeline",
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
            ("tensor_parallel",), "`tensor_parallel` has no effect without autotp_size"
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
                f"at ZeRO stage 3 with {ranks} sequence-parallel ranks gradients are {ranks} "
                "times too small"
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


@rule("SW4702", at="key", help="Add curriculum_metrics, with an entry per metric.")
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
def unread_enabled(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Compare the outer `enabled` keys, which DeepSpeed parses only, with those that it reads."""
    top = "data_efficiency"
    techniques = {
        "data_sampling": ("curriculum_learning", "dynamic_batching"),
        "data_routing": ("random_ltd",),
    }
    for name, inner in techniques.items():
        runs = [each for each in inner if ds_config.is_on(top, name, each, "enabled")]
        off = [
            ".".join(section)
            for section in ((top,), (top, name))
            if not ds_config.is_on(*section, "enabled")
        ]
        if runs and off:
            yield RuleViolation(
                (top, name, runs[0], "enabled"),
                f"{runs[0]} runs, although {' and '.join(off)} "
                f"{'is' if len(off) == 1 else 'are'} not enabled: DeepSpeed reads only "
                f"{runs[0]}.enabled",
                f'Add "enabled": true to {" and to ".join(off)}, or write "enabled": false in '
                f"{runs[0]}.",
            )
        elif ds_config.is_on(top, name, "enabled") and not runs:
            yield RuleViolation(
                (top, name, "enabled"),
                f"{top}.{name}.enabled has no effect: {' and '.join(inner)} "
                f"{'is' if len(inner) == 1 else 'are'} not enabled",
                f"Enable {' or '.join(inner)} in {top}.{name}, or remove {top}.{name}.",
            )


@rule("SW4008", help="Remove the comments and trailing commas.")
def hjson_for_a_json_reader(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.audience != "deepspeed" and not ds_config.is_plain_json:
        reader = {"trainer": "the Trainer", "lightning": "PyTorch Lightning"}[ds_config.audience]
        yield RuleViolation(
            (),
            f"the file has comments, a trailing comma or words without quotes; {reader} reads "
            "plain JSON",
        )
