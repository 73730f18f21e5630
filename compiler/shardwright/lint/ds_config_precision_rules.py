"""fp16, bf16, data_types: what trains in which precision."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.lint.lint_rule import Edit, LintedDsConfig, RuleViolation, rule

_NAMES: dict[str, frozenset[str]] = {
    "fp16": frozenset({"torch.float16", "fp16", "float16", "half"}),
    "fp32": frozenset({"torch.float32", "fp32", "float32", "float"}),
    "bf16": frozenset({"torch.bfloat16", "bf16", "bfloat16"}),
    "int8": frozenset({"torch.int8", "int8"}),
}


def precision(ds_config: LintedDsConfig) -> str | None:
    """fp16, bf16 or fp32; None where it is filled in later. bf16 counts before its old name."""
    bf16 = "bf16" if ds_config.get("bf16") is not None else "bfloat16"
    if "auto" in (ds_config.get("fp16", "enabled"), ds_config.get(bf16, "enabled")):
        return None
    if ds_config.is_on("fp16", "enabled"):
        return "fp16"
    return "bf16" if ds_config.is_on(bf16, "enabled") else "fp32"


def dtype(ds_config: LintedDsConfig, key: str) -> str:
    """The precision that a key of data_types names; "" where it is not given or is none."""
    name = ds_config.get("data_types", key)
    return next(
        (dtype for dtype, names in _NAMES.items() if isinstance(name, str) and name in names), ""
    )


@rule("SW4301", help="Disable one; bf16 where the GPU has it.")
def fp16_and_bf16_enabled(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    name = "bf16" if ds_config.get("bf16") is not None else "bfloat16"
    if ds_config.is_on("fp16", "enabled") and ds_config.is_on(name, "enabled"):
        yield RuleViolation(
            ("fp16", "enabled"), f"`fp16` and `{name}` are both enabled: DeepSpeed refuses the file"
        )


@rule("SW4302")
def accumulation_without_zero(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    model, accumulation = precision(ds_config), dtype(ds_config, "grad_accum_dtype")
    if ds_config.stage == 0 and model is not None and accumulation not in ("", model):
        yield RuleViolation(
            ("data_types", "grad_accum_dtype"),
            f"gradients of {model} parameters cannot be summed in {accumulation} at ZeRO stage 0",
            f"Write {model}, or take zero_optimization.stage: 1.",
        )


@rule("SW4303", help="Remove the key, or enable the section of this precision.")
def parameter_type(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    model, parameter_dtype = precision(ds_config), dtype(ds_config, "param_dtype")
    if model is not None and parameter_dtype not in ("", model):
        yield RuleViolation(
            ("data_types", "param_dtype"),
            f"param_dtype {parameter_dtype} is not the {model} that fp16 and bf16 say",
        )


@rule("SW4304")
def low_precision_master(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for name in ("fp16", "bf16"):
        key = (name, f"{name}_master_weights_and_grads")
        if not ds_config.is_on(*key) or ds_config.stage is None:
            continue
        offloaded = ds_config.offload("offload_optimizer") != "none"
        if ds_config.stage == 0:
            need = "ZeRO stage 1, 2 or 3"
        elif not offloaded and not (
            name == "bf16" and ds_config.is_on("bf16", "bf16_optimizer_states")
        ):
            need = "offload_optimizer" + (" or bf16_optimizer_states" if name == "bf16" else "")
        else:
            continue
        yield RuleViolation(
            key,
            f"{key[1]} needs {need}",
            f"Add {need}, or remove the key: master weights are fp32 then.",
        )


@rule("SW4305", help='Add "bf16_master_weights_and_grads": true, or remove the key.')
def low_precision_states(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.is_on("bf16", "bf16_optimizer_states") and not ds_config.is_on(
        "bf16", "bf16_master_weights_and_grads"
    ):
        yield RuleViolation(
            ("bf16", "bf16_optimizer_states"),
            "bf16_optimizer_states needs bf16_master_weights_and_grads",
        )


_DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)


@rule(
    "SW4306", "warning", help="Write loss_scale: 0 for dynamic scaling, or remove the other keys."
)
def static_loss_scale_ignores_keys(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    scale = ds_config.number("fp16", "loss_scale")
    ignored = [key for key in _DYNAMIC if ds_config.has("fp16", key)]
    if scale and ignored and ds_config.get("fp16", "enabled") is not False:
        yield RuleViolation(
            ("fp16", "loss_scale"),
            f"a fixed loss_scale of {scale:g} leaves {', '.join(ignored)} without effect",
        )


@rule("SW4307")
def loss_scale_limits(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """fp16's own validators, which no field declares."""
    dynamic = ds_config.is_on("fp16", "enabled") and not ds_config.number("fp16", "loss_scale")
    limits = [
        ("loss_scale", 0.0, True),
        ("loss_scale_window", 1.0, dynamic),
        ("min_loss_scale", 1.0, dynamic),
    ]
    for key, least, applies in limits:
        value = ds_config.number("fp16", key)
        if applies and value is not None and value < least:
            yield RuleViolation(
                ("fp16", key),
                f"fp16.{key}: {value:g} is refused",
                f"Give at least {least:g}"
                + (", 0 for dynamic scaling." if key == "loss_scale" else "."),
            )


@rule("SW4308", "warning", at="key", help="Remove it.")
def old_and_new_bf16(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.get("bf16") is not None and ds_config.has("bfloat16"):
        yield RuleViolation(
            ("bfloat16",),
            "`bfloat16` is ignored: `bf16` is given too",
            fix=(Edit(kind="remove", path=("bfloat16",)),),
        )


@rule("SW4309", "warning", at="key")
def pipeline_accumulation(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    steps = ds_config.integer("gradient_accumulation_steps")
    if (
        not ds_config.has_pipeline
        or precision(ds_config) != "bf16"
        or steps == 1
        or ds_config.stage not in (0, 1)
    ):
        return
    if dtype(ds_config, "grad_accum_dtype") in ("", "bf16"):
        yield RuleViolation(
            ("bf16",),
            (
                "gradients of the pipeline's micro-batches are summed in bf16, 8 bits of which are "
                "the fraction"
            ),
            'Take zero_optimization.stage: 1 and "data_types": {"grad_accum_dtype": "fp32"}.',
        )
