"""Values by themselves: of the wrong type, in quotes, no choice, out of range, `auto`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from shardwright.engines.deepspeed.schema.check import properties, text_value
from shardwright.lint.subject import Edit, Found, LintedConfig, dotted, say
from shardwright.recipe.describe import near_choices

# What the Trainer (transformers/integrations/deepspeed.py) and Accelerate (accelerator.py, _prepare_deepspeed;
# dataclasses.py, DeepSpeedPlugin) fill in. Accelerate refuses every other "auto".
FILLED = frozenset(
    {
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(f"scheduler.params.warmup_{name}" for name in ("min_lr", "max_lr", "num_steps")),
        *("scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled"),
        *(f"zero_optimization.{name}" for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage")),
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        *(f"zero_optimization.offload_{w}.{name}" for w in ("optimizer", "param") for name in ("device", "nvme_path")),
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


def wrong_type(subject: LintedConfig) -> Iterator[Found]:
    for misfit in subject.misfits:
        if misfit.kind == "type":
            types = cast("list[str]", misfit.schema["type"])
            if types == ["python"]:
                expected, help = "a Python object", "A file cannot hold it: remove the key, or pass it in code."
            else:
                expected = " or ".join(_WORDS[name] for name in types if name != "null")
                help = f"Give {expected}."
            if isinstance(misfit.value, bool) and "object" in types and "enabled" in properties(misfit.schema):
                help = f'Write {{"enabled": {say(misfit.value)}}}.'
            elif misfit.value is None:
                help = "Remove the key; its default is taken then."
            yield Found(
                code="SW4115",
                key=misfit.path,
                message=f"{dotted(misfit.path)}: expected {expected}, got {say(misfit.value)}",
                help=help,
            )


def as_text(subject: LintedConfig) -> Iterator[Found]:
    for misfit in subject.misfits:
        if misfit.kind == "text":
            value = text_value(str(misfit.value), cast("list[str]", misfit.schema["type"]))
            if misfit.checked and not (isinstance(value, int) and "e" in str(misfit.value).lower()):
                effect = "DeepSpeed converts it, other readers do not"
                severity = "warning"
            elif isinstance(value, bool):
                effect, severity = "for DeepSpeed any text is true", "error"
            else:
                effect, severity = "DeepSpeed fails on the text", "error"
            yield Found(
                code="SW4116",
                key=misfit.path,
                message=f"{dotted(misfit.path)}: {say(misfit.value)} is text; {effect}",
                help=f"Write {say(value)} without quotes.",
                severity="warning" if severity == "warning" else "error",
                fix=(Edit(kind="set", path=misfit.path, value=value),),
            )


def not_a_choice(subject: LintedConfig) -> Iterator[Found]:
    for misfit in subject.misfits:
        if misfit.kind == "choice":
            choices = [str(choice) for choice in cast("list[str]", misfit.schema["enum"])]
            close = near_choices(str(misfit.value), choices)
            yield Found(
                code="SW4117",
                key=misfit.path,
                message=f"{dotted(misfit.path)}: {say(misfit.value)} is not one of {', '.join(choices)}",
                help=f"Did you mean `{close[0]}`?" if close else f"Write one of {', '.join(choices)}.",
            )


def out_of_range(subject: LintedConfig) -> Iterator[Found]:
    for misfit in subject.misfits:
        if misfit.kind == "range":
            limits = [f"{words} {misfit.schema[word]}" for word, words in _LIMITS.items() if word in misfit.schema]
            yield Found(
                code="SW4118",
                key=misfit.path,
                message=f"{dotted(misfit.path)}: {say(misfit.value)} is out of range",
                help=f"Give a number {' and '.join(limits)}.",
            )


def auto_without_trainer(subject: LintedConfig) -> Iterator[Found]:
    autos = [misfit for misfit in subject.misfits if misfit.kind == "auto"]
    if subject.audience == "deepspeed":
        for misfit in autos:
            effect = "takes its default in place of it" if misfit.checked else "fails on the text"
            yield Found(
                code="SW4119",
                key=misfit.path,
                message=f'{dotted(misfit.path)}: only the HF Trainer fills in "auto"; DeepSpeed itself {effect}',
                help="Write the value; or pass the file to the Trainer or Accelerate (`lint --for trainer`).",
            )
    elif autos and not subject.declared:
        yield Found(
            code="SW4119",
            key=autos[0].path,
            message='linted as a file for the HF Trainer or Accelerate, for it holds "auto"',
            help="Say `--for trainer`, or `--for deepspeed` where a script of your own passes it to DeepSpeed.",
            severity="note",
        )


def auto_not_filled(subject: LintedConfig) -> Iterator[Found]:
    for misfit in subject.misfits:
        if misfit.kind == "auto" and subject.audience == "trainer" and dotted(misfit.path) not in FILLED:
            yield Found(
                code="SW4120",
                key=misfit.path,
                message=f'{dotted(misfit.path)}: neither the Trainer nor Accelerate fills in "auto" here',
                help="Write the value, or remove the key for its default.",
                # DeepSpeed's own models take the default; it is Accelerate that refuses.
                severity="warning" if misfit.checked and not subject.declared else "error",
            )
