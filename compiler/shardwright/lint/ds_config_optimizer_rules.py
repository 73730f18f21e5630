"""optimizer and scheduler: sections that DeepSpeed hands to constructors as they are."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import cast

from shardwright.lint.ds_config_precision_rules import precision
from shardwright.lint.lint_rule import Edit, Fault, LintedConfig, rule, say
from shardwright.utils.json_types import JsonObject

LEAST_DECAY = 1e-3
"""Below it neither form of weight decay moves the weights noticeably; DeepSpeed's own examples have
3e-7."""

_REMOVED = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})


def optimizer(subject: LintedConfig) -> JsonObject | None:
    """Its entry in the snapshot; None where there is none of this name. DeepSpeed's own are matched
    in any case."""
    name = subject.get("optimizer", "type")
    if not isinstance(name, str):
        return None
    table = subject.snapshot.optimizers
    return table.get(name.lower()) or table.get(name)


def scheduler(subject: LintedConfig) -> JsonObject | None:
    name = subject.get("scheduler", "type")
    return subject.snapshot.schedulers.get(name) if isinstance(name, str) else None


@rule("SW4501")
def unknown_optimizer(subject: LintedConfig) -> Iterator[Fault]:
    name = subject.get("optimizer", "type")
    if isinstance(name, str) and optimizer(subject) is None and name.lower() not in _REMOVED:
        known = [
            "Adam",
            "AdamW",
            "Lamb",
            "Lion",
            "Muon",
            "Adagrad",
            *_capital(subject.snapshot.optimizers),
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
        yield Fault(
            ("optimizer", "type"), f"{say(name)} is no optimizer of DeepSpeed or torch.optim", help
        )


@rule(
    "SW4502",
    help=(
        "Write AdamW or Lamb without the 1-bit parameters; ZeRO++ lowers communication at stage 3."
    ),
)
def removed_optimizer(subject: LintedConfig) -> Iterator[Fault]:
    if subject.text("optimizer", "type") in _REMOVED:
        yield Fault(
            ("optimizer", "type"),
            (
                f"{say(subject.get('optimizer', 'type'))} is gone from DeepSpeed "
                f"{subject.snapshot.version}"
            ),
        )


@rule("SW4503", at="key")
def max_grad_norm(subject: LintedConfig) -> Iterator[Fault]:
    path = ("optimizer", "params", "max_grad_norm")
    if subject.has(*path):
        value = subject.get(*path)
        fix = [Edit(kind="remove", path=path)]
        if not subject.has("gradient_clipping") and subject.number(*path) is not None:
            fix.append(Edit(kind="add", path=("gradient_clipping",), value=value))
        yield Fault(
            path,
            "max_grad_norm is no optimizer parameter: DeepSpeed refuses it",
            f'Write "gradient_clipping": {say(value)} at the top.',
            fix=tuple(fix),
        )


@rule("SW4504", at="key")
def unknown_parameter(subject: LintedConfig) -> Iterator[Fault]:
    entry = optimizer(subject)
    if entry is not None and entry["params"] is not None:
        yield from _unknown(subject, "optimizer", cast("list[str]", entry["params"]))


@rule("SW4510", at="key")
def unknown_schedule_parameter(subject: LintedConfig) -> Iterator[Fault]:
    entry = scheduler(subject)
    if entry is not None:
        yield from _unknown(subject, "scheduler", cast("list[str]", entry["params"]))


@rule("SW4505", at="key", help='Add "type": "AdamW".')
def no_optimizer_type(subject: LintedConfig) -> Iterator[Fault]:
    if subject.section("optimizer") and subject.get("optimizer", "type") is None:
        yield Fault(
            ("optimizer",),
            "`optimizer` has no `type`: DeepSpeed ignores the section and makes no optimizer",
        )


@rule(
    "SW4506",
    "warning",
    help='Write AdamW to say so, or add "adam_w_mode": false for L2 regularization.',
)
def adam_is_adamw(subject: LintedConfig) -> Iterator[Fault]:
    decay = subject.get("optimizer", "params", "weight_decay")
    decays = (
        decay == "auto"
        or (subject.number("optimizer", "params", "weight_decay") or 0) >= LEAST_DECAY
    )
    if (
        subject.text("optimizer", "type") == "adam"
        and decays
        and not subject.has("optimizer", "params", "adam_w_mode")
    ):
        yield Fault(
            ("optimizer", "type"),
            "DeepSpeed's Adam is AdamW: the weight decay is decoupled",
            fix=(Edit(kind="set", path=("optimizer", "type"), value="AdamW"),),
        )


@rule("SW4507", help="Write loss_scale: 0.")
def lamb_scale(subject: LintedConfig) -> Iterator[Fault]:
    if subject.text("optimizer", "type") == "lamb" and subject.number("fp16", "loss_scale"):
        yield Fault(
            ("fp16", "loss_scale"),
            "Lamb needs dynamic loss scaling: DeepSpeed refuses a fixed loss_scale",
        )


@rule("SW4508")
def unknown_scheduler(subject: LintedConfig) -> Iterator[Fault]:
    name = subject.get("scheduler", "type")
    if isinstance(name, str) and scheduler(subject) is None:
        known = subject.snapshot.schedulers
        near = {n.lower(): n for n in known}
        close = [near[n] for n in difflib.get_close_matches(name.lower(), near, n=1, cutoff=0.5)]
        exact = close and close[0].lower() == name.lower()
        own = ", ".join(n for n, entry in known.items() if entry["own"])
        yield Fault(
            ("scheduler", "type"),
            f"{say(name)} is no scheduler of DeepSpeed or torch",
            f"Did you mean `{close[0]}`?" if close else f"DeepSpeed's are {own}.",
            fix=(Edit(kind="set", path=("scheduler", "type"), value=close[0]),) if exact else (),
        )


@rule("SW4509", at="key", help='Add "params": {}, with what the scheduler needs.')
def no_scheduler_params(subject: LintedConfig) -> Iterator[Fault]:
    if (
        isinstance(subject.get("scheduler", "type"), str)
        and subject.get("scheduler", "params") is None
    ):
        yield Fault(("scheduler",), "`scheduler` has no `params`: DeepSpeed fails on it")


@rule("SW4511", at="key")
def missing_schedule_parameter(subject: LintedConfig) -> Iterator[Fault]:
    entry = scheduler(subject)
    if entry is None or subject.get("scheduler", "params") is None:
        return
    missing = [
        n for n in cast("list[str]", entry["required"]) if not subject.has("scheduler", "params", n)
    ]
    if missing:
        yield Fault(
            ("scheduler", "params"),
            f"{subject.get('scheduler', 'type')} needs {', '.join(missing)}",
            f"Add {', '.join(missing)} to scheduler.params.",
        )


@rule("SW4512")
def warmup_steps(subject: LintedConfig) -> Iterator[Fault]:
    """A whole float is an integer to Hjson, by which DeepSpeed reads the file; not to the
    Trainer."""
    path = ("scheduler", "params", "warmup_num_steps")
    value, entry = subject.get(*path), scheduler(subject)
    if (
        entry is None
        or not entry["own"]
        or isinstance(value, bool)
        or not isinstance(value, int | float)
    ):
        return
    whole = subject.integer(*path)
    if whole is None or whole < 1 or (isinstance(value, float) and subject.audience == "trainer"):
        yield Fault(
            path,
            f"warmup_num_steps {say(value)} is no integer of at least 1: DeepSpeed refuses it",
            f"Write {whole or 1}; to warm up not at all, remove the scheduler.",
            fix=(Edit(kind="set", path=path, value=whole),) if whole and whole >= 1 else (),
        )


@rule("SW4513", "warning", help="Give fewer warmup_num_steps.")
def warmup_too_long(subject: LintedConfig) -> Iterator[Fault]:
    total = subject.integer("scheduler", "params", "total_num_steps")
    given = subject.integer("scheduler", "params", "warmup_num_steps")
    unset = not subject.has("scheduler", "params", "warmup_num_steps")
    warmup = 1000 if unset else given
    if (
        total is not None
        and warmup is not None
        and total < warmup
        and scheduler(subject) is not None
    ):
        by_default = " (its default)" if unset else ""
        yield Fault(
            ("scheduler", "params", "total_num_steps"),
            f"total_num_steps {total} ends before the warm-up of {warmup} steps{by_default} does",
        )


@rule("SW4514", "warning", help="Write log or linear.")
def warmup_type(subject: LintedConfig) -> Iterator[Fault]:
    path = ("scheduler", "params", "warmup_type")
    entry, value = scheduler(subject), subject.get(*path)
    if (
        entry is not None
        and entry["own"]
        and isinstance(value, str)
        and value not in ("log", "linear", "auto")
    ):
        yield Fault(
            path, f"warmup_type {say(value)} is unknown, and DeepSpeed takes log in its place"
        )


@rule("SW4515")
def torch_scheduler(subject: LintedConfig) -> Iterator[Fault]:
    entry = scheduler(subject)
    wrapped = (subject.stage or 0) > 0 or precision(subject) in ("fp16", "bf16")
    if entry is not None and not entry["own"] and wrapped:
        yield Fault(
            ("scheduler", "type"),
            (
                f"torch's {subject.get('scheduler', 'type')} refuses the optimizer that ZeRO, fp16 "
                "or bf16 wraps"
            ),
            (
                "Pass a function as lr_scheduler to deepspeed.initialize, or take WarmupCosineLR "
                "or WarmupDecayLR."
            ),
        )


@rule("SW4516", "warning", at="key", help='Add "type": "WarmupLR".')
def no_scheduler_type(subject: LintedConfig) -> Iterator[Fault]:
    if subject.section("scheduler") and subject.get("scheduler", "type") is None:
        yield Fault(
            ("scheduler",),
            (
                "`scheduler` has no `type`: DeepSpeed ignores the section and the learning rate "
                "stays constant"
            ),
        )


@rule("SW4517", help="Write zero_optimization.reduce_scatter: false.")
def muon_reduce_scatter(subject: LintedConfig) -> Iterator[Fault]:
    scatters = subject.section("zero_optimization").get("reduce_scatter") is not False
    if subject.text("optimizer", "type") == "muon" and subject.stage == 3 and scatters:
        yield Fault(
            ("optimizer", "type"),
            "Muon does not go with reduce_scatter at ZeRO stage 3, which is on by default",
        )


@rule("SW4518", help='Add "zero_allow_untested_optimizer": true at the top, or take AdamW.')
def untested_optimizer(subject: LintedConfig) -> Iterator[Fault]:
    entry = optimizer(subject)
    allowed = subject.is_on("zero_allow_untested_optimizer")
    if entry is not None and not entry["zero"] and (subject.stage or 0) > 0 and not allowed:
        yield Fault(
            ("optimizer", "type"),
            f"{subject.get('optimizer', 'type')} under ZeRO needs zero_allow_untested_optimizer",
        )


@rule("SW4519", help="Write [0.9, 0.95].")
def betas(subject: LintedConfig) -> Iterator[Fault]:
    value = subject.get("optimizer", "params", "betas")
    if isinstance(value, list):
        right = len(value) == 2 and all(
            isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in value
        )
        if not right:
            yield Fault(
                ("optimizer", "params", "betas"),
                f"betas {say(value)} are not two numbers in [0, 1)",
            )


def _unknown(subject: LintedConfig, section: str, names: list[str]) -> Iterator[Fault]:
    params = subject.section(section, "params")
    for key in params:
        if key not in names and key != "max_grad_norm":
            close = [
                n for n in difflib.get_close_matches(key, names, n=1, cutoff=0.8) if n not in params
            ]
            path = (section, "params", key)
            yield Fault(
                path,
                f"{subject.get(section, 'type')} takes no {say(key)}: DeepSpeed fails on it",
                f"Did you mean `{close[0]}`?" if close else f"It takes {', '.join(names)}.",
                fix=(Edit(kind="rename", path=path, name=close[0]),) if close else (),
            )


def _capital(names: object) -> list[str]:
    return [name for name in cast("dict[str, object]", names) if name[0].isupper()]
