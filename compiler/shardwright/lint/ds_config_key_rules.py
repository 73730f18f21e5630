"""Check keys by themselves: unknown, misspelt, misplaced, removed, deprecated."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from shardwright.diagnostics import KeyPath, Severity
from shardwright.engines.deepspeed.ds_config_schema import (
    SchemaMismatch,
    ds_config_schema,
    is_comment_key,
    limits_text,
    number_or_bool_from_text,
    properties,
)
from shardwright.lint.lint_rule import (
    Edit,
    LintedDsConfig,
    RuleViolation,
    dotted,
    json_snippet,
    rule,
)
from shardwright.recipe.recipe_schema import close_choices
from shardwright.utils.json_values import JsonObject

NEAR = 0.8
"""difflib's ratio from which a key is taken for a misspelling."""
MAX_SUGGESTION_SEARCHES = 200
"""Unknown keys for which a near one is looked for: nobody mistypes more."""

# Names from other libraries and from older DeepSpeed -> the key that does it today.
SYNONYMS: dict[str, KeyPath] = {
    "max_grad_norm": ("gradient_clipping",),
    "clip_grad": ("gradient_clipping",),
    "fp32_allreduce": ("communication_data_type",),
    "lr_scheduler": ("scheduler",),
    "zero": ("zero_optimization",),
    "zero_stage": ("zero_optimization", "stage"),
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "check_overflow": ("bf16", "check_grad_overflow"),
    "partitioned_activations": ("activation_checkpointing", "partition_activations"),
}

# Sections whose missing `enabled` turns them off, with the keys that such a section may hold all
# the same.
OPT_IN_SECTIONS = (
    *(
        "fp16",
        "bf16",
        "bfloat16",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "comms_logger",
    ),
    *("torch_autocast", "hybrid_engine", "autotuning", "expert_parallel"),
)

# Removed in 0.19.8 -> what to do instead.
REMOVED_KEYS: dict[str, str] = {
    "nebula": (
        "Remove the section; checkpoints are written by torch.save, or by `checkpoint.writer`."
    ),
    "compression_training": (
        "Remove the section; compress the model after training, with another library."
    ),
    "amp": "Remove the section; use `bf16`, `fp16` or `torch_autocast`.",
    "quantize_training": "Remove the section; quantize after training, with another library.",
    "sparse_gradients": "Remove the key; an embedding with sparse=True is still reduced sparsely.",
    "eigenvalue": "Remove the section; it served quantize_training, which is gone.",
    "sparse_attention": (
        "Remove the section; choose the attention in the model, such as flash attention."
    ),
    "elasticity": "Remove the section and give the three batch sizes.",
    "graph_harvesting": "Remove the key; `compile` has what is left of graph capture.",
    "curriculum_learning": "Move it to data_efficiency.data_sampling.curriculum_learning.",
    "progressive_layer_drop": "Remove the section; drop layers in the model itself.",
    "zero_optimization.mics_shard_size": (
        "Remove the key; zero_hpz_partition_size keeps a copy of the weights a node."
    ),
    "zero_optimization.mics_hierarchical_params_gather": "Remove the key.",
    "zero_optimization.zeropp_loco_param": (
        "Remove the key; zero_quantized_gradients works without it."
    ),
}


@rule("SW4111", at="key")
def unknown_key_refused(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit, meant, help, _ in _unknown(ds_config):
        if misfit.checked:
            fix = _rename(misfit.path, meant) if meant else ()
            yield RuleViolation(
                misfit.path,
                (
                    f"unknown key `{misfit.path[-1]}` in `{dotted(misfit.path[:-1])}`: DeepSpeed "
                    "refuses it"
                ),
                help,
                fix=fix,
            )


@rule("SW4112", at="key")
def misspelled_key(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit, meant, help, _ in _unknown(ds_config):
        if not misfit.checked and meant:
            yield RuleViolation(
                misfit.path,
                (f"`{dotted(misfit.path)}` is not a key of DeepSpeed, which ignores it silently"),
                help,
                fix=_rename(misfit.path, meant),
            )


@rule("SW4114", at="key")
def misplaced_key(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit, meant, _, home in _unknown(ds_config):
        if home is not None and not misfit.checked and not meant:
            taken = ds_config.has(*map(str, home))
            there = isinstance(ds_config.get(*map(str, home[:-1])), Mapping)
            move: tuple[Edit, ...] = ()
            if there and not taken:
                remove = Edit(kind="remove", path=misfit.path)
                move = (remove, Edit(kind="add", path=home, value=misfit.value))
            yield RuleViolation(
                misfit.path,
                f"`{dotted(misfit.path)}` is ignored: the key belongs "
                + (f"under `{dotted(home[:-1])}`" if home[:-1] else "at the top")
                + (f", as `{home[-1]}`" if home[-1] != misfit.path[-1] else ""),
                f"Write `{dotted(home)}`."
                if not taken
                else f"Remove it; `{dotted(home)}` is given.",
                fix=move,
            )


@rule("SW4113", "warning", at="key")
def unknown_key_ignored(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit, meant, help, home in _unknown(ds_config):
        if not misfit.checked and not meant and home is None:
            yield RuleViolation(
                misfit.path,
                (f"`{dotted(misfit.path)}` is not a key of DeepSpeed, which ignores it silently"),
                help,
            )


@rule("SW4121", at="key")
def removed(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for name in ds_config.ds_config_schema.removed:
        path = tuple(name.split("."))
        if ds_config.has(*path):
            value = ds_config.get(*path)
            off = value in (False, None) or (
                isinstance(value, Mapping) and value.get("enabled") is False
            )
            yield RuleViolation(
                path,
                (
                    f"`{name}` was removed from DeepSpeed {ds_config.ds_config_schema.version}, "
                    "which refuses the file"
                ),
                REMOVED_KEYS[name],
                fix=(Edit(kind="remove", path=path),) if off else (),
            )


@rule("SW4122", "warning", at="key")
def deprecated(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for path, new in _deprecated(ds_config):
        if not _replacement_given(ds_config, path, new):
            value, is_device = (
                ds_config.get(*path),
                new.startswith("offload_") and " or " not in new,
            )
            fix: tuple[Edit, ...] = ()
            if is_device and value is True:
                remove, add = Edit(kind="remove", path=path), (*path[:-1], new)
                fix = (remove, Edit(kind="add", path=add, value={"device": "cpu"}))
            elif is_device or " or " in new:
                fix = (Edit(kind="remove", path=path),)
            elif new in _siblings(ds_config, path):
                fix = (Edit(kind="rename", path=path, name=_official(ds_config, path, new)),)
            shown = f'{new}: {{"device": "cpu"}}' if is_device else _official(ds_config, path, new)
            yield RuleViolation(
                path,
                f"`{dotted(path)}` is deprecated",
                f"Write `{shown}` instead." if value is not False else "Remove it.",
                fix=fix,
            )


@rule("SW4123", at="key")
def deprecated_key_and_replacement(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for path, new in _deprecated(ds_config):
        if path[0] != "bfloat16" and _replacement_given(ds_config, path, new):
            yield RuleViolation(
                path,
                f"`{dotted(path)}` is deprecated, and its replacement is given too",
                f"Remove it; `{_official(ds_config, path, new)}` is given.",
                fix=(Edit(kind="remove", path=path),),
            )


@rule("SW4124", "warning", at="key")
def section_without_enabled(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for name in OPT_IN_SECTIONS:
        section = ds_config.section(name)
        if any(not is_comment_key(key) for key in section) and "enabled" not in section:
            yield RuleViolation(
                (name,),
                f"`{name}` is off: it has no `enabled`",
                'Add "enabled": true, or remove the section.',
            )


class _Unknown(NamedTuple):
    """Hold an unknown key.

    meant: the key of the same section that it probably means, or ""
    home: as _home returns it
    """

    misfit: SchemaMismatch
    meant: str
    help: str
    home: KeyPath | None


@functools.lru_cache(maxsize=1)
def _unknown(ds_config: LintedDsConfig) -> tuple[_Unknown, ...]:
    """Return the unknown keys of a file, which four rules use."""
    found: list[_Unknown] = []
    for misfit in ds_config.schema_mismatches:
        if (
            misfit.kind == "unknown"
            and dotted(misfit.path) not in ds_config.ds_config_schema.removed
        ):
            home = _home(ds_config, misfit)
            searched = len(found) < MAX_SUGGESTION_SEARCHES
            meant, help = _meant(ds_config, misfit, home) if searched else ("", "Remove it.")
            found.append(_Unknown(misfit, meant, help, home))
    return tuple(found)


def _meant(
    ds_config: LintedDsConfig, misfit: SchemaMismatch, home: KeyPath | None
) -> tuple[str, str]:
    """Return (the key of the same section that was probably meant, or ""; help)."""
    known = [
        name for name, schema in properties(misfit.schema).items() if "deprecated" not in schema
    ]
    given = ds_config.section(*map(str, misfit.path[:-1]))
    key = str(misfit.path[-1])
    other = properties(misfit.schema).get(key, {}).get("same_as")
    if other is not None:
        return "", f"Keep one: `{other}` is another name of the key, and given too."
    close = [
        n for n in difflib.get_close_matches(key.lower(), known, n=3, cutoff=NEAR) if n not in given
    ]
    synonym = SYNONYMS.get(key)
    if synonym is not None and synonym[:-1] == misfit.path[:-1] and synonym[-1] not in given:
        close = [str(synonym[-1])]
    if close:
        return close[0], f"Did you mean `{close[0]}`?"
    if key in _LOSS_SCALE and misfit.path[0] == "bf16":
        return "", "Remove it: bf16 needs no loss scaling; the key is fp16's."
    if home is not None:
        return "", f"`{home[-1]}` belongs " + (
            f"under `{dotted(home[:-1])}`." if home[:-1] else "at the top."
        )
    nearest = difflib.get_close_matches(key.lower(), known, n=3, cutoff=0.5) or sorted(known)[:8]
    more = " and others" if len(known) > len(nearest) else ""
    return "", f"Remove it. Keys here are {', '.join(nearest)}{more}."


_LOSS_SCALE = frozenset(
    {
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "min_loss_scale",
        "auto_cast",
    }
)


def _home(ds_config: LintedDsConfig, misfit: SchemaMismatch) -> KeyPath | None:
    """Return where DeepSpeed reads a key of this name, if there is only one such place."""
    key = str(misfit.path[-1])
    synonym = SYNONYMS.get(key)
    if synonym is not None and synonym[:-1] != misfit.path[:-1]:
        return synonym
    if misfit.path[:-1] in (("optimizer",), ("scheduler",)):
        values = (
            ds_config.ds_config_schema.optimizer_values
            if misfit.path[0] == "optimizer"
            else ds_config.ds_config_schema.scheduler_values
        )
        if key in values:
            return (misfit.path[0], "params", key)
    section = properties(ds_config.ds_config_schema.schema).get(key, {})
    if len(misfit.path) > 1 and "properties" in section:
        return (key,)
    homes = [
        path
        for path in _places(ds_config.ds_config_schema.version).get(key, ())
        if path[0] not in _SECTIONS_WITH_COMMON_KEYS
    ]
    return (
        homes[0] if len(homes) == 1 and len(key) > 4 and key not in ("enabled", "device") else None
    )


# Their keys have everyday names.
_SECTIONS_WITH_COMMON_KEYS = frozenset(
    {"autotuning", "expert_parallel", "data_efficiency", "comet", "bfloat16", "hybrid_engine"}
)


@functools.cache
def _places(version: str) -> Mapping[str, Sequence[tuple[str, ...]]]:
    """Map the last part of each DeepSpeed key to its paths."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for path in _paths(ds_config_schema(version).schema, ()):
        found.setdefault(path[-1], []).append(path)
    return found


def _paths(schema: JsonObject, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, below in properties(schema).items():
        if "deprecated" not in below and "same_as" not in below:
            yield (*path, name)
            yield from _paths(below, (*path, name))


def _rename(path: KeyPath, name: str) -> tuple[Edit, ...]:
    return (Edit(kind="rename", path=path, name=name),)


def _deprecated(ds_config: LintedDsConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, replacement) of each deprecated key in the file."""
    for parent in ((), ("zero_optimization",)):
        for key in ds_config.section(*parent):
            schema = _siblings(ds_config, (*parent, key)).get(key, {})
            if "deprecated" in schema:
                yield (*parent, key), str(schema["deprecated"])


def _siblings(ds_config: LintedDsConfig, path: tuple[str, ...]) -> Mapping[str, JsonObject]:
    top = properties(ds_config.ds_config_schema.schema)
    return top if len(path) == 1 else properties(top[path[0]])


def _official(ds_config: LintedDsConfig, path: tuple[str, ...], new: str) -> str:
    """Return the documented name: `gather_...` is `stage3_gather_...` in a file."""
    return str(_siblings(ds_config, path).get(new, {}).get("same_as", new))


def _replacement_given(ds_config: LintedDsConfig, path: tuple[str, ...], new: str) -> bool:
    given = ds_config.section(*path[:-1])
    return any(name in given for name in (new, _official(ds_config, path, new)))


# Values by themselves: of the wrong type, in quotes, no choice, out of range, `auto`.


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


TRAINER_READ_KEYS = frozenset({"bf16.enabled", "fp16.enabled", "zero_optimization.stage"})
"""Keys of DeepSpeed's models that transformers and Accelerate compare as they stand in the file
(accelerate/utils/deepspeed.py, is_true and is_zero3)."""


@rule("SW4116")
def quoted_value(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    for misfit in ds_config.schema_mismatches:
        if misfit.kind == "text":
            value = number_or_bool_from_text(
                str(misfit.value), cast("list[str]", misfit.schema["type"])
            )
            effect, severity = _effect_of_quotes(ds_config, misfit, value)
            message = f"{dotted(misfit.path)}: {json_snippet(misfit.value)} is text; {effect}"
            fix = (Edit(kind="set", path=misfit.path, value=value),)
            yield RuleViolation(
                misfit.path, message, f"Write {json_snippet(value)} without quotes.", fix, severity
            )


def _effect_of_quotes(
    ds_config: LintedDsConfig, misfit: SchemaMismatch, value: int | float | bool | None
) -> tuple[str, Severity]:
    """Return what the readers of the file make of a number or boolean in quotes."""
    is_boolean = isinstance(value, bool)
    if not misfit.checked:
        effect = "for DeepSpeed any text is true" if is_boolean else "DeepSpeed fails on the text"
        return effect, "error"
    if type(value) is int and "e" in str(misfit.value).lower():
        return "DeepSpeed fails on the text", "error"
    is_deepspeeds = ds_config.audience == "deepspeed" and ds_config.is_audience_given
    if is_deepspeeds or dotted(misfit.path) not in TRAINER_READ_KEYS:
        return "DeepSpeed converts it", "note"
    if ds_config.audience == "trainer" and value is False:
        return "for the Trainer any text is true", "error"
    return "DeepSpeed converts it, other readers do not", "warning"


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
            yield RuleViolation(
                misfit.path,
                f"{dotted(misfit.path)}: {json_snippet(misfit.value)} is out of range",
                f"Give a number {limits_text(misfit.schema)}.",
            )


@rule("SW4119")
def auto_without_trainer(ds_config: LintedDsConfig) -> Iterator[RuleViolation]:
    autos = [misfit for misfit in ds_config.schema_mismatches if misfit.kind == "auto"]
    if ds_config.audience != "trainer":
        for misfit in autos:
            effect = "takes the default instead" if misfit.checked else "fails on the text"
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
            'linted as a file for the HF Trainer or Accelerate, because it holds "auto"',
            (
                "Give `--for trainer`, or `--for deepspeed` if your own script passes the file to "
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
