"""Values by themselves: of the wrong type, in quotes, no choice, out of range, `auto`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from shardwright.diagnostics import Severity
from shardwright.engines.deepspeed.ds_config_validation import number_or_bool_from_text, properties
from shardwright.lint.lint_rule import (
    Edit,
    LintedDsConfig,
    RuleViolation,
    dotted,
    json_snippet,
    rule,
)
from shardwright.recipe.key_descriptions import close_choices

# What the Trainer (transformers/integrations/deepspeed.py) and Accelerate (accelerator.py,
# _prepare_deepspeed; dataclasses.py, DeepSpeedPlugin) fill in. Accelerate refuses every other
# "auto".
TRAINER_AUTO_KEYS = frozenset(
    {
        *(
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ),
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(f"scheduler.params.warmup_{name}" for name in ("min_lr", "max_lr", "num_steps")),
        *("scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled"),
        *(
            f"zero_optimization.{name}"
            for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage")
        ),
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        *(
            f"zero_optimization.offload_{w}.{name}"
            for w in ("optimizer", "param")
            for name in ("device", "nvme_path")
        ),
    }
)

_WORDS: dict[str, str] = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_LIMITS: dict[str, str] = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
}


@rule("SW4115")
def wrong_type(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit in ds_config.schema_mismatches:
        if misfit.kind == "type":
            types = cast("list[str]", misfit.schema["type"])
            if types == ["python"]:
                expected, help = (
                    "a Python object",
                    "A file cannot hold it: remove the key, or pass it in code.",
                )
            else:
                expected = " or ".join(_WORDS[name] for name in types if name != "null")
                help = f"Give {expected}."
            if (
                isinstance(misfit.value, bool)
                and "object" in types
                and "enabled" in properties(misfit.schema)
            ):
                help = f'Write {{"enabled": {json_snippet(misfit.value)}}}.'
            elif misfit.value is None:
                help = "Remove the key; its default is taken then."
            yield RuleViolation(
                misfit.path,
                f"{dotted(misfit.path)}: expected {expected}, got {json_snippet(misfit.value)}",
                help,
            )


@rule("SW4116")
def quoted_value(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit in ds_config.schema_mismatches:
        if misfit.kind == "text":
            value = number_or_bool_from_text(
                str(misfit.value), cast("list[str]", misfit.schema["type"])
            )
            severity: Severity = "error"
            if misfit.checked and not (isinstance(value, int) and "e" in str(misfit.value).lower()):
                effect, severity = "DeepSpeed converts it, other readers do not", "warning"
            else:
                effect = (
                    "for DeepSpeed any text is true"
                    if isinstance(value, bool)
                    else "DeepSpeed fails on the text"
                )
            message = f"{dotted(misfit.path)}: {json_snippet(misfit.value)} is text; {effect}"
            fix = (Edit(kind="set", path=misfit.path, value=value),)
            yield RuleViolation(
                misfit.path, message, f"Write {json_snippet(value)} without quotes.", fix, severity
            )


@rule("SW4117")
def not_a_choice(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit in ds_config.schema_mismatches:
        if misfit.kind == "choice":
            choices = [str(choice) for choice in cast("list[str]", misfit.schema["enum"])]
            close = close_choices(str(misfit.value), choices)
            yield RuleViolation(
                misfit.path,
                (
                    f"{dotted(misfit.path)}: {json_snippet(misfit.value)} is not one of "
                    f"{', '.join(choices)}"
                ),
                f"Did you mean `{close[0]}`?" if close else f"Write one of {', '.join(choices)}.",
            )


@rule("SW4118")
def out_of_range(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit in ds_config.schema_mismatches:
        if misfit.kind == "range":
            limits = [
                f"{words} {misfit.schema[word]}"
                for word, words in _LIMITS.items()
                if word in misfit.schema
            ]
            yield RuleViolation(
                misfit.path,
                f"{dotted(misfit.path)}: {json_snippet(misfit.value)} is out of range",
                f"Give a number {' and '.join(limits)}.",
            )


@rule("SW4119")
def auto_without_trainer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    autos = [misfit for misfit in ds_config.schema_mismatches if misfit.kind == "auto"]
    if ds_config.audience == "deepspeed":
        for misfit in autos:
            effect = "takes its default in place of it" if misfit.checked else "fails on the text"
            yield RuleViolation(
                misfit.path,
                (
                    f'{dotted(misfit.path)}: only the HF Trainer fills in "auto"; DeepSpeed itself '
                    f"{effect}"
                ),
                (
                    "Write the value; or pass the file to the Trainer or Accelerate (`lint --for "
                    "trainer`)."
                ),
            )
    elif autos and not ds_config.is_audience_given:
        yield RuleViolation(
            autos[0].path,
            'linted as a file for the HF Trainer or Accelerate, for it holds "auto"',
            (
                "Say `--for trainer`, or `--for deepspeed` where a script of your own passes it to "
                "DeepSpeed."
            ),
            severity="note",
        )


@rule("SW4120")
def auto_not_filled(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit in ds_config.schema_mismatches:
        if (
            misfit.kind == "auto"
            and ds_config.audience == "trainer"
            and dotted(misfit.path) not in TRAINER_AUTO_KEYS
        ):
            message = (
                f'{dotted(misfit.path)}: neither the Trainer nor Accelerate fills in "auto" here'
            )
            # DeepSpeed's own models take the default; it is Accelerate that refuses.
            severity: Severity = (
                "warning" if misfit.checked and not ds_config.is_audience_given else "error"
            )
            help = "Write the value, or remove the key for its default."
            yield RuleViolation(misfit.path, message, help, severity=severity)
