"""Check precision, batch sizes, optimizer and scheduler."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import cast

from shardwright.layout.formats import format_spelled
from shardwright.layout.zero_settings import HPZ
from shardwright.lint.lint_rule import Edit, LintedDsConfig, RuleViolation, json_snippet, rule
from shardwright.utils.json_values import JsonObject


def precision(ds_config: LintedDsConfig) -> str | None:
    """Return fp16, bf16 or fp32, or None where it is filled in later; bf16 precedes its old
    name."""
    bf16 = "bf16" if ds_config.get("bf16") is not None else "bfloat16"
    if "auto" in (ds_config.get("fp16", "enabled"), ds_config.get(bf16, "enabled")):
        return None
    if ds_config.is_on("fp16", "enabled"):
        return "fp16"
    return "bf16" if ds_config.is_on(bf16, "enabled") else "fp32"


def dtype(ds_config: LintedDsConfig, key: str) -> str:
    """Return the precision that a key of data_types names; "" where there is none."""
    name = ds_config.get("data_types", key)
    return "int8" if name in ("int8", "torch.int8") else format_spelled(name) or ""


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
            f"param_dtype {parameter_dtype} is not {model}, the precision that fp16 and bf16 set",
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
            f"Add {need}; or remove the key, which makes the master weights fp32.",
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
            f"without effect at the fixed loss_scale {scale:g}: {', '.join(ignored)}",
        )


@rule("SW4307")
def loss_scale_limits(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Check what fp16's own validators check, which no field declares."""
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
                f"fp16.{key} {value:g} is out of range",
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
                "gradients of the pipeline's micro-batches are summed in bf16, with a fraction of "
                "only 8 bits"
            ),
            'Take zero_optimization.stage: 1 and "data_types": {"grad_accum_dtype": "fp32"}.',
        )


@rule("SW4310", "warning", help="Write zero_optimization.stage: 1.")
def bf16_without_zero(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    is_drifting = ds_config.stage == 0 and precision(ds_config) == "bf16"
    is_said = ds_config.has("data_types", "grad_accum_dtype")
    if is_drifting and not is_said and not ds_config.has_pipeline:
        stage, enabled = ("zero_optimization", "stage"), ("bf16", "enabled")
        yield RuleViolation(
            stage if ds_config.has(*stage) else enabled,
            "bf16 at ZeRO stage 0 drifts from fp32, which stage 1 does not",
        )


@rule("SW4311", "warning", help="Remove one of the two sections.")
def autocast_in_another_precision(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Check engine.py:671 and runtime/zero/stage_1_and_2.py:611: a gradient scaler of torch over
    parameters that are bf16 already."""
    model, key = precision(ds_config), ("torch_autocast", "dtype")
    dtype = format_spelled(ds_config.get(*key))
    if not ds_config.is_on("torch_autocast", "enabled") or model not in ("fp16", "bf16"):
        return
    if dtype in ("fp16", "bf16", "fp32") and dtype != model:
        fails = ds_config.stage == 0 and (model, dtype) == ("bf16", "fp16")
        effect = (
            "at ZeRO stage 0 the first optimizer step fails"
            if fails
            else f"layers compute in {dtype} with weights that are rounded to {model}"
        )
        yield RuleViolation(
            key,
            f"torch_autocast in {dtype} beside `{model}`: {effect}",
            severity="error" if fails else "",
        )


# train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data ranks
# (runtime/config.py).


TRAIN_BATCH_SIZE_KEY, MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def data_ranks(ds_config: LintedDsConfig) -> int | None:
    """Return the data ranks that DeepSpeed divides the batch by: all ranks over the
    sequence-parallel ones.

    DeepSpeed does not divide by tensor_parallel.autotp_size. None with a pipeline, whose stages
    only the module knows.
    """
    world = ds_config.world_size
    sequence = ds_config.integer("sequence_parallel_size") or 1
    if world is None or ds_config.has_pipeline or world % sequence:
        return None
    return world // sequence


@rule("SW4201")
def no_batch_size(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if (
        ds_config.audience == "deepspeed"
        and ds_config.get(TRAIN_BATCH_SIZE_KEY) is None
        and ds_config.get(MICRO_BATCH_SIZE_KEY) is None
    ):
        yield RuleViolation(
            (),
            (
                f"neither `{TRAIN_BATCH_SIZE_KEY}` nor `{MICRO_BATCH_SIZE_KEY}` is given: "
                "DeepSpeed "
                "refuses the file"
            ),
            f"Give one of them, such as {MICRO_BATCH_SIZE_KEY}: 1."
            + (
                ""
                if ds_config.is_audience_given
                else " PyTorch Lightning fills it in: `lint --for lightning`."
            ),
        )


@rule("SW4206", at="key", help="Remove it; give accumulate_grad_batches to Lightning's Trainer.")
def accumulation_for_lightning(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.audience == "lightning" and ds_config.has(ACCUMULATION_STEPS_KEY):
        yield RuleViolation(
            (ACCUMULATION_STEPS_KEY,),
            f"PyTorch Lightning refuses a file with `{ACCUMULATION_STEPS_KEY}`",
        )


@rule("SW4202")
def batch_size_mismatch(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    train, micro, steps = (
        ds_config.integer(key)
        for key in (TRAIN_BATCH_SIZE_KEY, MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
    )
    ranks = data_ranks(ds_config)
    if not train or not micro or not steps:
        return
    if ranks is not None and train != micro * steps * ranks:
        yield RuleViolation(
            (TRAIN_BATCH_SIZE_KEY,),
            (
                f"{TRAIN_BATCH_SIZE_KEY} {train} is not {micro} x {steps} x {ranks} data ranks = "
                f"{micro * steps * ranks}"
            ),
            (
                f"Leave {ACCUMULATION_STEPS_KEY} out, and DeepSpeed works it out; or write "
                f"{micro * steps * ranks}."
            ),
        )
    elif ranks is None and train % (micro * steps):
        yield RuleViolation(
            (TRAIN_BATCH_SIZE_KEY,),
            (
                f"{TRAIN_BATCH_SIZE_KEY} {train} is not a multiple of {micro} x {steps}, for "
                "any number of ranks"
            ),
            f"Leave {ACCUMULATION_STEPS_KEY} out, and DeepSpeed works it out.",
        )


@rule("SW4203")
def batch_size_not_divisible(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    train = ds_config.integer(TRAIN_BATCH_SIZE_KEY)
    given = {
        key: value
        for key in (MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
        if (value := ds_config.integer(key))
    }
    filled = any(
        ds_config.get(key) == "auto" for key in (MICRO_BATCH_SIZE_KEY, ACCUMULATION_STEPS_KEY)
    )
    if not train or len(given) == 2 or filled:
        return
    ranks = data_ranks(ds_config)
    per_rank = next(iter(given.values()), 1)
    if train % (per_rank * (ranks or 1)) == 0:
        return
    parts = [f"{value} of {key}" for key, value in given.items()] + (
        [f"{ranks} data ranks"] if ranks else []
    )
    yield RuleViolation(
        (TRAIN_BATCH_SIZE_KEY,),
        f"{TRAIN_BATCH_SIZE_KEY} {train} is not divisible by {' x '.join(parts)}",
        (
            f"Take a multiple of {per_rank * (ranks or 1)}; DeepSpeed rounds down and then refuses "
            "the file."
        ),
    )


@rule("SW4204")
def group_size_not_divisor(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    world = ds_config.world_size
    for key in (
        ("tensor_parallel", "autotp_size"),
        ("sequence_parallel_size",),
        ("zero_optimization", HPZ),
    ):
        size = ds_config.integer(*key)
        if world is not None and size is not None and size > 1 and world % size:
            if key[-1] == HPZ and (ds_config.stage != 3 or size > world):
                continue  # a larger group is cut down to the world
            yield RuleViolation(
                key,
                f"{'.'.join(key)}: {size} does not divide the {world} ranks",
                f"Take a divisor of {world}.",
            )


@rule("SW4205")
def mesh_size_mismatch(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    data, sequence = (
        ds_config.integer("data_parallel_size"),
        ds_config.integer("sequence_parallel_size"),
    )
    if (
        ds_config.world_size is not None
        and data
        and sequence
        and data * sequence != ds_config.world_size
    ):
        yield RuleViolation(
            ("data_parallel_size",),
            (
                f"data_parallel_size {data} x sequence_parallel_size {sequence} is not "
                f"{ds_config.world_size} ranks"
            ),
            f"Their product must be the number of ranks, {ds_config.world_size}.",
        )


@rule("SW4207", "warning", at="key")
def accumulation_not_filled(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Check accelerate/utils/dataclasses.py:1274: Accelerate writes 1 where the key is missing, and
    --gradient_accumulation_steps of the Trainer goes into train_batch_size alone."""
    if (
        ds_config.audience != "trainer"
        or ds_config.get(TRAIN_BATCH_SIZE_KEY) is None
        or ds_config.has(ACCUMULATION_STEPS_KEY)
    ):
        return
    train, micro = ds_config.integer(TRAIN_BATCH_SIZE_KEY), ds_config.integer(MICRO_BATCH_SIZE_KEY)
    ranks = data_ranks(ds_config)
    if train and micro and ranks and train == micro * ranks:
        return
    yield RuleViolation(
        (TRAIN_BATCH_SIZE_KEY,),
        f"without {ACCUMULATION_STEPS_KEY} Accelerate accumulates over 1 micro-batch, whatever "
        "--gradient_accumulation_steps says, and DeepSpeed refuses the other batch",
        f'Add "{ACCUMULATION_STEPS_KEY}": "auto".',
        (Edit(kind="add", path=(ACCUMULATION_STEPS_KEY,), value="auto"),),
    )


# Optimizer and scheduler: sections that DeepSpeed passes to constructors unchanged.


MIN_NOTICEABLE_WEIGHT_DECAY = 1e-3
"""Below it neither form of weight decay moves the weights noticeably; DeepSpeed's own examples have
3e-7."""

_REMOVED = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})


def optimizer(ds_config: LintedDsConfig) -> JsonObject | None:
    """Return the optimizer's entry in the snapshot; None where there is none of this name.
    DeepSpeed's own names match in upper and lower case."""
    name = ds_config.get("optimizer", "type")
    if not isinstance(name, str):
        return None
    table = ds_config.ds_config_schema.optimizers
    return table.get(name.lower()) or table.get(name)


def scheduler(ds_config: LintedDsConfig) -> JsonObject | None:
    name = ds_config.get("scheduler", "type")
    return ds_config.ds_config_schema.schedulers.get(name) if isinstance(name, str) else None


@rule("SW4501")
def unknown_optimizer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    name = ds_config.get("optimizer", "type")
    if isinstance(name, str) and optimizer(ds_config) is None and name.lower() not in _REMOVED:
        known = [
            "Adam",
            "AdamW",
            "Lamb",
            "Lion",
            "Muon",
            "Adagrad",
            *(known for known in ds_config.ds_config_schema.optimizers if known[0].isupper()),
        ]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        short = name.removeprefix("DeepSpeed").removeprefix("Fused").removeprefix("CPU")
        if short in known:
            help = f"Write `{short}`: DeepSpeed takes the fused or CPU form of it by itself."
        else:
            help = (
                f"Did you mean `{close[0]}`?"
                if close
                else "Write AdamW, or the name of a class of torch.optim."
            )
        yield RuleViolation(
            ("optimizer", "type"),
            f"{json_snippet(name)} is not an optimizer of DeepSpeed or torch.optim",
            help,
        )


@rule(
    "SW4502",
    help=(
        "Write AdamW or Lamb without the 1-bit parameters; ZeRO++ lowers communication at stage 3."
    ),
)
def removed_optimizer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.text("optimizer", "type") in _REMOVED:
        yield RuleViolation(
            ("optimizer", "type"),
            (
                f"{json_snippet(ds_config.get('optimizer', 'type'))} was removed from DeepSpeed "
                f"{ds_config.ds_config_schema.version}"
            ),
        )


@rule("SW4503", at="key")
def max_grad_norm(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    path = ("optimizer", "params", "max_grad_norm")
    if ds_config.has(*path):
        value = ds_config.get(*path)
        fix = [Edit(kind="remove", path=path)]
        if not ds_config.has("gradient_clipping") and ds_config.number(*path) is not None:
            fix.append(Edit(kind="add", path=("gradient_clipping",), value=value))
        yield RuleViolation(
            path,
            "max_grad_norm is no optimizer parameter: DeepSpeed refuses it",
            f'Write "gradient_clipping": {json_snippet(value)} at the top.',
            fix=tuple(fix),
        )


def optimizer_form(ds_config: LintedDsConfig) -> JsonObject | None:
    """Return the class that DeepSpeed builds for the optimizer, as the snapshot describes it
    (engine.py, get_optimizer_configuration and _configure_basic_optimizer); None where it depends
    on an "auto" or on nothing."""
    entry = optimizer(ds_config)
    forms = cast("Mapping[str, JsonObject]", (entry or {}).get("forms", {}))
    if "torch" in forms and ds_config.is_on("optimizer", "params", "torch_adam"):
        return forms["torch"]
    device = ds_config.offload("offload_optimizer")
    if "cpu" not in forms or device == "none":
        return forms.get("gpu")
    return None if device == "auto" else forms["cpu"]


@rule("SW4504", at="key")
def unknown_parameter(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    entry, form = optimizer(ds_config), optimizer_form(ds_config)
    if entry is None or entry["params"] is None:
        return
    names = cast("list[str]", entry["params"])
    yield from _unknown(ds_config, "optimizer", names)
    if form is None:
        return
    forms = cast("Mapping[str, JsonObject]", entry["forms"])
    accepted, refused = (cast("list[str]", form[key]) for key in ("params", "refuses"))
    for key in ds_config.section("optimizer", "params"):
        path = ("optimizer", "params", key)
        if key in refused and ds_config.is_on(*path):
            message = f"{form['class']}, which DeepSpeed builds here, refuses {key}"
        elif key in names and key not in accepted:
            message = f"{form['class']}, which DeepSpeed builds here, takes no {json_snippet(key)}"
        else:
            continue
        by_torch = key in cast("list[str]", forms.get("torch", {}).get("params", []))
        more = ' or add "torch_adam": true for torch.optim.AdamW.' if by_torch else ""
        yield RuleViolation(path, message, f"Remove it{',' + more if more else '.'}")


@rule("SW4510", at="key")
def unknown_schedule_parameter(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    entry = scheduler(ds_config)
    if entry is not None:
        yield from _unknown(ds_config, "scheduler", cast("list[str]", entry["params"]))


@rule("SW4505", at="key", help='Add "type": "AdamW".')
def no_optimizer_type(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.section("optimizer") and ds_config.get("optimizer", "type") is None:
        yield RuleViolation(
            ("optimizer",),
            "`optimizer` has no `type`: DeepSpeed ignores the section and makes no optimizer",
        )


@rule(
    "SW4506",
    "warning",
    help='Write AdamW to say so, or add "adam_w_mode": false for L2 regularization.',
)
def adam_is_adamw(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    decay = ds_config.get("optimizer", "params", "weight_decay")
    decays = (
        decay == "auto"
        or (ds_config.number("optimizer", "params", "weight_decay") or 0)
        >= MIN_NOTICEABLE_WEIGHT_DECAY
    )
    if (
        ds_config.text("optimizer", "type") == "adam"
        and decays
        and not ds_config.has("optimizer", "params", "adam_w_mode")
    ):
        yield RuleViolation(
            ("optimizer", "type"),
            "DeepSpeed's Adam is AdamW: its weight decay is decoupled",
            fix=(Edit(kind="set", path=("optimizer", "type"), value="AdamW"),),
        )


@rule("SW4507", help="Write loss_scale: 0.")
def lamb_scale(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.text("optimizer", "type") == "lamb" and ds_config.number("fp16", "loss_scale"):
        yield RuleViolation(
            ("fp16", "loss_scale"),
            "Lamb needs dynamic loss scaling: DeepSpeed refuses a fixed loss_scale",
        )


@rule("SW4508")
def unknown_scheduler(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    name = ds_config.get("scheduler", "type")
    if isinstance(name, str) and scheduler(ds_config) is None:
        known = ds_config.ds_config_schema.schedulers
        near = {n.lower(): n for n in known}
        close = [near[n] for n in difflib.get_close_matches(name.lower(), near, n=1, cutoff=0.5)]
        exact = close and close[0].lower() == name.lower()
        own = ", ".join(n for n, entry in known.items() if entry["own"])
        yield RuleViolation(
            ("scheduler", "type"),
            f"{json_snippet(name)} is not a scheduler of DeepSpeed or torch",
            f"Did you mean `{close[0]}`?" if close else f"DeepSpeed's are {own}.",
            fix=(Edit(kind="set", path=("scheduler", "type"), value=close[0]),) if exact else (),
        )


@rule("SW4509", at="key", help='Add "params": {}, with what the scheduler needs.')
def no_scheduler_params(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if (
        isinstance(ds_config.get("scheduler", "type"), str)
        and ds_config.get("scheduler", "params") is None
    ):
        yield RuleViolation(("scheduler",), "`scheduler` has no `params`: DeepSpeed fails on it")


@rule("SW4511", at="key")
def missing_schedule_parameter(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    entry = scheduler(ds_config)
    if entry is None or ds_config.get("scheduler", "params") is None:
        return
    missing = [
        n
        for n in cast("list[str]", entry["required"])
        if not ds_config.has("scheduler", "params", n)
    ]
    if missing:
        yield RuleViolation(
            ("scheduler", "params"),
            f"{ds_config.get('scheduler', 'type')} needs {', '.join(missing)}",
            f"Add {', '.join(missing)} to scheduler.params.",
        )


@rule("SW4512")
def warmup_steps(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Check for a whole float, which DeepSpeed's Hjson reads as an integer and the Trainer does
    not."""
    path = ("scheduler", "params", "warmup_num_steps")
    value, entry = ds_config.get(*path), scheduler(ds_config)
    if (
        entry is None
        or not entry["own"]
        or isinstance(value, bool)
        or not isinstance(value, int | float)
    ):
        return
    whole = ds_config.integer(*path)
    if whole is None or whole < 1 or (isinstance(value, float) and ds_config.audience == "trainer"):
        yield RuleViolation(
            path,
            (
                f"warmup_num_steps {json_snippet(value)} is not an integer above 0: DeepSpeed "
                "refuses it"
            ),
            f"Write {whole or 1}; for no warm-up, remove the scheduler.",
            fix=(Edit(kind="set", path=path, value=whole),) if whole and whole >= 1 else (),
        )


@rule("SW4513", "warning", help="Give fewer warmup_num_steps.")
def warmup_too_long(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    total = ds_config.integer("scheduler", "params", "total_num_steps")
    given = ds_config.integer("scheduler", "params", "warmup_num_steps")
    unset = not ds_config.has("scheduler", "params", "warmup_num_steps")
    warmup = 1000 if unset else given
    if (
        total is not None
        and warmup is not None
        and total < warmup
        and scheduler(ds_config) is not None
    ):
        by_default = " (its default)" if unset else ""
        yield RuleViolation(
            ("scheduler", "params", "total_num_steps"),
            f"total_num_steps {total} ends before the warm-up of {warmup} steps{by_default} does",
        )


@rule("SW4514", "warning", help="Write log or linear.")
def warmup_type(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    path = ("scheduler", "params", "warmup_type")
    entry, value = scheduler(ds_config), ds_config.get(*path)
    if (
        entry is not None
        and entry["own"]
        and isinstance(value, str)
        and value not in ("log", "linear", "auto")
    ):
        yield RuleViolation(
            path,
            f"warmup_type {json_snippet(value)} is unknown: DeepSpeed takes log instead",
        )


@rule("SW4515")
def torch_scheduler(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    entry = scheduler(ds_config)
    wrapped = (ds_config.stage or 0) > 0 or precision(ds_config) in ("fp16", "bf16")
    if entry is not None and not entry["own"] and wrapped:
        yield RuleViolation(
            ("scheduler", "type"),
            (
                f"torch's {ds_config.get('scheduler', 'type')} refuses the optimizer that "
                "ZeRO, fp16 "
                "or bf16 wraps"
            ),
            (
                "Pass a function as lr_scheduler to deepspeed.initialize, or take WarmupCosineLR "
                "or WarmupDecayLR."
            ),
        )


@rule("SW4516", "warning", at="key", help='Add "type": "WarmupLR".')
def no_scheduler_type(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    if ds_config.section("scheduler") and ds_config.get("scheduler", "type") is None:
        yield RuleViolation(
            ("scheduler",),
            (
                "`scheduler` has no `type`: DeepSpeed ignores the section and the learning rate "
                "stays constant"
            ),
        )


@rule("SW4517", help="Write zero_optimization.reduce_scatter: false.")
def muon_reduce_scatter(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    scatters = ds_config.section("zero_optimization").get("reduce_scatter") is not False
    if ds_config.text("optimizer", "type") == "muon" and ds_config.stage == 3 and scatters:
        yield RuleViolation(
            ("optimizer", "type"),
            "at ZeRO stage 3 Muon is not supported with reduce_scatter, which is on by default",
        )


@rule("SW4518", help='Add "zero_allow_untested_optimizer": true at the top, or take AdamW.')
def untested_optimizer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    entry = optimizer(ds_config)
    allowed = ds_config.is_on("zero_allow_untested_optimizer")
    if entry is not None and not entry["zero"] and (ds_config.stage or 0) > 0 and not allowed:
        yield RuleViolation(
            ("optimizer", "type"),
            f"{ds_config.get('optimizer', 'type')} under ZeRO needs zero_allow_untested_optimizer",
        )


@rule("SW4519", help="Write [0.9, 0.95].")
def betas(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    value = ds_config.get("optimizer", "params", "betas")
    if isinstance(value, list):
        right = len(value) == 2 and all(
            isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in value
        )
        if not right:
            yield RuleViolation(
                ("optimizer", "params", "betas"),
                f"betas {json_snippet(value)} are not two numbers in [0, 1)",
            )


WARMUP_DECAY_MAX_LR = 1e-3
"""WarmupDecayLR's own default of warmup_max_lr (lr_schedules.py:818)."""


@rule("SW4520", "warning", at="key")
def warmup_decay_rate(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    """Check lr_schedules.py:818: WarmupLR takes the optimizer's rate, WarmupDecayLR does not."""
    params, rate = ("scheduler", "params"), ("optimizer", "params", "lr")
    if (
        ds_config.get("scheduler", "type") != "WarmupDecayLR"
        or ds_config.get(*params) is None
        or ds_config.has(*params, "warmup_max_lr")
        or ds_config.number(*rate) == WARMUP_DECAY_MAX_LR
    ):
        return
    number = ds_config.number(*rate)
    unused = "the optimizer's lr" if number is None else f"optimizer.params.lr {number:g}"
    yield RuleViolation(
        params,
        f"WarmupDecayLR without warmup_max_lr warms up to {WARMUP_DECAY_MAX_LR:g} and ignores "
        f"{unused}",
        'Add "warmup_max_lr": "auto" to scheduler.params: the Trainer fills in its learning rate.'
        if ds_config.audience == "trainer"
        else f'Add "warmup_max_lr": {number or 2e-5:g} to scheduler.params, or the highest rate '
        "that you want.",
    )


def _unknown(ds_config: LintedDsConfig, section: str, names: list[str]) -> Iterator[RuleViolation]:
    params = ds_config.section(section, "params")
    for key in params:
        if key not in names and key != "max_grad_norm":
            close = [
                n for n in difflib.get_close_matches(key, names, n=1, cutoff=0.8) if n not in params
            ]
            path = (section, "params", key)
            yield RuleViolation(
                path,
                (
                    f"{ds_config.get(section, 'type')} takes no {json_snippet(key)}: DeepSpeed "
                    "fails on it"
                ),
                f"Did you mean `{close[0]}`?" if close else f"It takes {', '.join(names)}.",
                fix=(Edit(kind="rename", path=path, name=close[0]),) if close else (),
            )
