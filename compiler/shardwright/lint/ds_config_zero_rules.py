"""zero_optimization: what a stage takes, and what it leaves without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from shardwright.engines.deepspeed.ds_config_validation import properties
from shardwright.layout.zero_hpz_key import HPZ
from shardwright.lint.ds_config_precision_rules import dtype, precision
from shardwright.lint.lint_rule import Edit, Fault, LintedConfig, rule
from shardwright.utils.json_types import JsonObject

ZERO = "zero_optimization"
Offload = Literal["offload_optimizer", "offload_param"]
OFFLOADS: tuple[Offload, Offload] = ("offload_optimizer", "offload_param")

_STAGE_3 = frozenset(
    {"sub_group_size", "memory_efficient_linear", "override_module_apply", "leaf_module"}
)
_PLUS = (HPZ, "zero_quantized_weights", "zero_quantized_gradients")
_GATHER = (
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
_BELOW_3 = ("round_robin_gradients", "parameter_alignment")


@rule("SW4401", "warning", at="key", help="Remove what is for stage 3 only, or take stage 3.")
def stage_3_keys(subject: LintedConfig) -> Iterator[Fault]:
    zero = subject.section(ZERO)
    known = properties(_zero_schema(subject))
    # Accelerate gathers tensor ranks' shards by a key with the name of stage 3 (accelerator.py,
    # get_state_dict).
    gathered = _GATHER if _tensor_ranks(subject) > 1 else ()
    idle = [
        key
        for key, value in zero.items()
        if key not in gathered
        and (key.startswith("stage3_") or key in _STAGE_3 or "same_as" in known.get(key, {}))
        and key in known
        and value is not False
        and value != "auto"
    ]
    if idle and subject.stage in (0, 1, 2):
        yield Fault(
            (ZERO, idle[0]),
            f"at ZeRO stage {subject.stage} there is no effect of {', '.join(idle)}",
        )


@rule("SW4402", "warning", at="key", help="Take stage 3, or remove the section.")
def parameter_offload(subject: LintedConfig) -> Iterator[Fault]:
    if subject.offload("offload_param") in ("cpu", "nvme") and subject.stage in (0, 1, 2):
        yield Fault(
            (ZERO, "offload_param"),
            f"offload_param does nothing at ZeRO stage {subject.stage}: parameters stay on the GPU",
        )


@rule("SW4403", "warning", at="key", help="Take stage 1, 2 or 3.")
def offload_without_zero(subject: LintedConfig) -> Iterator[Fault]:
    if subject.offload("offload_optimizer") in ("cpu", "nvme") and subject.stage == 0:
        yield Fault(
            (ZERO, "offload_optimizer"),
            "offload_optimizer does nothing at ZeRO stage 0: there is no ZeRO optimizer",
        )


@rule("SW4404", help='Add "nvme_path": a folder on the NVMe disk.')
def nvme_without_path(subject: LintedConfig) -> Iterator[Fault]:
    for name in OFFLOADS:
        needed = subject.stage == 3 and subject.offload(name) == "nvme"
        if needed and subject.get(ZERO, name, "nvme_path") in (None, ""):
            yield Fault((ZERO, name, "device"), f"{ZERO}.{name}: device nvme has no nvme_path")


@rule("SW4405", "warning", help="Take stage 3, or write device: cpu.")
def nvme_below_stage_3(subject: LintedConfig) -> Iterator[Fault]:
    if subject.offload("offload_optimizer") == "nvme" and subject.stage in (1, 2):
        yield Fault(
            (ZERO, "offload_optimizer", "device"),
            f"at ZeRO stage {subject.stage} the optimizer states go to host memory, not to NVMe",
        )


@rule("SW4406", "warning", at="key", help="Write device: nvme, or remove the path.")
def path_without_nvme(subject: LintedConfig) -> Iterator[Fault]:
    for name in OFFLOADS:
        path = subject.get(ZERO, name, "nvme_path")
        if path not in (None, "", "auto", "none") and subject.offload(name) in ("none", "cpu"):
            yield Fault(
                (ZERO, name, "nvme_path"),
                f"{ZERO}.{name}: nvme_path has no effect with device {subject.offload(name)}",
            )


@rule("SW4407", help="Take stage 3, or remove the ratio.")
def partial_offload(subject: LintedConfig) -> Iterator[Fault]:
    ratio = subject.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and subject.stage in (0, 1, 2):
        yield Fault(
            (ZERO, "offload_optimizer", "ratio"),
            f"an offload ratio of {ratio:g} needs ZeRO stage 3",
        )


@rule("SW4408", "warning", at="key", help="Take stage 3, or remove it.")
def zero_plus_plus(subject: LintedConfig) -> Iterator[Fault]:
    idle = [key for key in _PLUS if subject.is_on(ZERO, key) and subject.integer(ZERO, key) != 1]
    if idle and subject.stage in (0, 1, 2):
        yield Fault(
            (ZERO, idle[0]),
            (
                f"ZeRO++ is for stage 3; at stage {subject.stage} there is no effect of "
                f"{', '.join(idle)}"
            ),
        )


@rule("SW4409")
def gradient_norm_off(subject: LintedConfig) -> Iterator[Fault]:
    key = (ZERO, "compute_grad_norm")
    if subject.get(*key) is not False or subject.stage is None:
        return
    clipping = subject.get("gradient_clipping")
    if subject.stage not in (1, 2):
        why = "is for ZeRO stages 1 and 2"
    elif clipping is None or (subject.number("gradient_clipping") or 0) > 0:
        given = (
            "clips at 1.0 unless told otherwise"
            if clipping is None
            else f"is told to clip at {clipping}"
        )
        why = f"needs gradient_clipping: 0; DeepSpeed {given}"
    elif subject.offload("offload_optimizer") != "none":
        why = "does not go with offload_optimizer"
    elif (
        subject.stage == 1
        and precision(subject) == "bf16"
        and dtype(subject, "grad_accum_dtype") == "fp32"
    ):
        why = "does not go with bf16 summed in fp32 at ZeRO stage 1"
    else:
        return
    yield Fault(key, f"compute_grad_norm: false {why}", "Remove the key, or change the other.")


@rule("SW4410", help="Write mean, and scale the loss.")
def summed_gradients(subject: LintedConfig) -> Iterator[Fault]:
    if subject.text("gradient_allreduce_op") != "sum":
        return
    others = {
        "ZeRO stage 3": subject.stage == 3,
        "ZenFlow": subject.section(ZERO).get("zenflow") is not None,
        "DeepCompile": subject.is_on("compile", "deepcompile"),
    }
    for other, given in others.items():
        if given:
            yield Fault(
                ("gradient_allreduce_op",), f"gradient_allreduce_op: sum does not go with {other}"
            )
            return


@rule("SW4411")
def scaled_before(subject: LintedConfig) -> Iterator[Fault]:
    if subject.stage not in (2, 3) or subject.section(ZERO).get("reduce_scatter") is False:
        return
    factor = subject.number("gradient_predivide_factor")
    wrong = {"prescale_gradients": subject.is_on("prescale_gradients")}
    wrong["gradient_predivide_factor"] = factor is not None and factor != 1
    for key, given in wrong.items():
        if given:
            yield Fault(
                (key,),
                f"{key} does not go with reduce_scatter at ZeRO stage {subject.stage}",
                f"Remove it, or write {ZERO}.reduce_scatter: false.",
            )


@rule("SW4412", at="key", help="Remove the key.")
def legacy_stage_1(subject: LintedConfig) -> Iterator[Fault]:
    if subject.is_on(ZERO, "legacy_stage1") and subject.stage != 0:
        yield Fault(
            (ZERO, "legacy_stage1"),
            "legacy_stage1 is gone since DeepSpeed 0.5.9, which refuses to start with it",
            fix=(Edit(kind="remove", path=(ZERO, "legacy_stage1")),),
        )


@rule("SW4413", "warning", at="key")
def elastic_checkpoint(subject: LintedConfig) -> Iterator[Fault]:
    if subject.is_on(ZERO, "elastic_checkpoint") and subject.stage == 3:
        yield Fault(
            (ZERO, "elastic_checkpoint"),
            "elastic_checkpoint has no effect at ZeRO stage 3",
            (
                "Convert with ds_to_universal and write checkpoint.load_universal: true to change "
                "the ranks."
            ),
        )


@rule("SW4414")
def odd_bucket(subject: LintedConfig) -> Iterator[Fault]:
    size = subject.integer(ZERO, "allgather_bucket_size")
    if size is not None and size % 2 and subject.stage in (1, 2):
        yield Fault(
            (ZERO, "allgather_bucket_size"),
            (
                f"allgather_bucket_size {size} is odd: DeepSpeed refuses it at ZeRO stage "
                f"{subject.stage}"
            ),
            f"Write {size + 1}.",
            fix=(Edit(kind="set", path=(ZERO, "allgather_bucket_size"), value=size + 1),),
        )


@rule("SW4415", "warning")
def weights_not_gathered(subject: LintedConfig) -> Iterator[Fault]:
    given = next((name for name in _GATHER if subject.has(ZERO, name)), None)
    cut = subject.stage == 3 or _tensor_ranks(subject) > 1
    if (
        subject.audience == "trainer"
        and cut
        and (given is None or subject.get(ZERO, given) is False)
    ):
        yield Fault(
            (ZERO, given or "stage"),
            (
                f"without {_GATHER[0]} the Trainer saves no usable model: the weights stay cut "
                "over the ranks"
            ),
            f'Write "{_GATHER[0]}": true'
            + (", or convert each checkpoint with zero_to_fp32.py." if subject.stage == 3 else "."),
        )


@rule("SW4416", "warning", at="key", help="Remove it; it is for stages 1 and 2.")
def no_stage_3_form(subject: LintedConfig) -> Iterator[Fault]:
    idle = [key for key in _BELOW_3 if subject.is_on(ZERO, key)]
    if idle and subject.stage == 3:
        yield Fault((ZERO, idle[0]), f"at ZeRO stage 3 there is no effect of {', '.join(idle)}")


@rule(
    "SW4417", at="key", help='Take stage 1, 2 or 3 and add "offload_optimizer": {"device": "cpu"}.'
)
def zenflow(subject: LintedConfig) -> Iterator[Fault]:
    if not isinstance(subject.get(ZERO, "zenflow"), dict) or subject.stage is None:
        return
    if subject.stage == 0 or subject.offload("offload_optimizer") != "cpu":
        yield Fault((ZERO, "zenflow"), "zenflow needs ZeRO and offload_optimizer with device cpu")


@rule("SW4418", "warning", help="Take stage 3, or remove the key.")
def super_offload(subject: LintedConfig) -> Iterator[Fault]:
    if subject.is_on(ZERO, "offload_optimizer", "super_offload") and subject.stage in (0, 1, 2):
        yield Fault(
            (ZERO, "offload_optimizer", "super_offload"),
            f"super_offload has no effect at ZeRO stage {subject.stage}",
        )


@rule("SW4419", "warning")
def boolean_zero(subject: LintedConfig) -> Iterator[Fault]:
    value = subject.get(ZERO)
    if isinstance(value, bool):
        yield Fault(
            (ZERO,),
            (
                f"zero_optimization: {str(value).lower()} is the form of 2020, and means stage "
                f"{int(value)}"
            ),
            f'Write {{"stage": {int(value)}}}.',
            fix=(Edit(kind="set", path=(ZERO,), value={"stage": int(value)}),),
        )


@rule("SW4420", help="Write overlap_comm: false, or take stage 2.")
def unmanaged_accumulation(subject: LintedConfig) -> Iterator[Fault]:
    if subject.get("managed_gradient_accumulation") is not False:
        return
    overlaps = subject.is_on(ZERO, "overlap_comm") or (
        subject.stage == 3 and subject.get(ZERO, "overlap_comm") is None
    )
    if overlaps and subject.stage in (0, 1, 3):
        yield Fault(
            ("managed_gradient_accumulation",),
            (
                "managed_gradient_accumulation: false does not go with overlap_comm at ZeRO stage "
                f"{subject.stage}"
            ),
        )


@rule(
    "SW4421",
    at="key",
    help="Remove one of the two. `shardwright compile` makes groups of its own, which run both.",
)
def second_copy_of_shards(subject: LintedConfig) -> Iterator[Fault]:
    """The groups are consecutive ranks, as tensor-parallel ones are."""
    size, tensor = subject.integer(ZERO, HPZ) or 1, _tensor_ranks(subject)
    if subject.stage == 3 and size > 1 and tensor > 1:
        yield Fault(
            (ZERO, HPZ),
            (
                f"{HPZ} {size} with autotp_size {tensor}: weights are gathered from ranks that "
                "hold other shards"
            ),
        )


def _tensor_ranks(subject: LintedConfig) -> int:
    return subject.integer("tensor_parallel", "autotp_size") or 1


def _zero_schema(subject: LintedConfig) -> JsonObject:
    return properties(subject.snapshot.schema)[ZERO]
