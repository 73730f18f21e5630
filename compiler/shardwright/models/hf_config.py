"""Build and check a transformers configuration from a config.json or the recipe's `model.config`.

config.json is read as data; a model's own code runs only where the recipe trusts it
(remote_code.py).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, cast

from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.diagnostics import KeyPath, Refusal, refusal
from shardwright.models.config_schema import (
    decode_special_floats,
    encode_special_floats,
    size_problem,
)
from shardwright.models.model_sources import published_keys
from shardwright.models.model_support import (
    METADATA_KEYS,
    config_key_errors,
    encoder_decoder,
    support,
    unknown_type_error,
    untrained_task_error,
)
from shardwright.models.remote_code import FINGERPRINT
from shardwright.models.tasks.task_registry import Task, task_named, task_of_type, trained_types
from shardwright.recipe.literal_types import TaskName
from shardwright.utils.json_values import JsonObject, JsonValue

# The keys that transformers reads for a configuration class: its fields, names that its
# __post_init__ takes from the keywords, and names that the modeling code reads with getattr. Other
# keywords become attributes that nothing reads.


@functools.cache
def config_class_keys(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """Return every key that `config_class`, its bases or its modeling code reads, without metadata
    keys."""
    keys = {field.name for field in dataclasses.fields(config_class)} | set(
        config_class.attribute_map
    )
    methods = ["__init__", "__post_init__"]
    if "rope_parameters" in config_class.__dataclass_fields__:
        methods.append("convert_rope_params_to_dict")
    for method in methods:
        for base, source in _sources(config_class, method):
            keys |= set(_looked_up(config_class, base, ast.parse(source)))
    keys |= _flat_keys(config_class)
    keys |= {name for name in _modeling_keys(config_class) if not hasattr(PretrainedConfig, name)}
    # The base class reads and drops these.
    keys |= set(GenerationConfig._get_default_generation_params())
    return frozenset(key for key in keys if not key.startswith("_"))


def _sources(config_class: type[PretrainedConfig], method: str) -> Iterator[tuple[type, str]]:
    """Yield (class, source) of each definition of `method` that a call runs, the class's own
    first."""
    for base in config_class.__mro__:
        function = inspect.unwrap(vars(base).get(method, object))
        if not inspect.isfunction(function) or not function.__module__.startswith("transformers."):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except OSError:  # made by the dataclass decorator
            continue
        yield base, source
        if "super()" not in source and f".{method}(" not in source:
            return


def _looked_up(config_class: type, base: type, tree: ast.AST) -> Iterator[str]:
    """Yield the strings that `kwargs.pop`, `.get`, `.setdefault`, `[...]` or `in kwargs` name, also
    in loops over names."""
    loops = dict(_loops(config_class, tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get" | "setdefault"),
                args=[key, *_],
            ):
                pass
            case ast.Subscript(value=ast.Name(id="kwargs"), slice=key):
                pass
            case ast.Compare(comparators=[ast.Name(id="kwargs"), *_], left=key):
                pass
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="self"), key, *_]) if (
                base is not PretrainedConfig
            ):
                pass
            case _:
                continue
        match key:
            case ast.Constant(value=str(name)):
                yield name
            case ast.Name(id=variable):
                yield from loops.get(variable, ())
            case ast.JoinedStr(
                values=[
                    ast.Constant(value=str(prefix)),
                    ast.FormattedValue(value=ast.Name(id=variable)),
                ]
            ):
                yield from (prefix + name for name in loops.get(variable, ()))


def _loops(config_class: type, tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield (loop variable, strings it runs through) for loops over literals or a table of the
    class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.For | ast.comprehension):
            continue
        first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
        if not isinstance(first, ast.Name):
            continue
        written = [part.value for part in ast.walk(node.iter) if isinstance(part, ast.Constant)]
        tables = [
            getattr(config_class, part.attr, ())
            for part in ast.walk(node.iter)
            if isinstance(part, ast.Attribute)
        ]
        named = [
            name for table in tables if isinstance(table, dict | list | tuple) for name in table
        ]
        yield first.id, [name for name in (*written, *named) if isinstance(name, str)]


def _flat_keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Return the keys of a sub-configuration that the class also takes at the top level
    (Qwen2.5-VL).

    These are keys that the class passes on instead of keeping them as attributes.
    """
    defaults: dict[str, object] = {}
    for part in getattr(config_class, "sub_configs_defaults", {}).values():
        try:
            defaults |= part.default_config_fields()
        except Exception:  # a sub-configuration whose class has no defaults
            continue
    defaults = {
        name: value
        for name, value in defaults.items()
        if not hasattr(config_class, name) and value is not None
    }
    try:
        attributes = vars(config_class(**defaults))
    except Exception:  # the class refuses keys of its sub-configurations
        return set()
    return {name for name in defaults if name not in attributes}


def _modeling_keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Return the attributes that the modeling files beside the class read from its
    configuration."""
    source = sys.modules[config_class.__module__].__file__
    if source is None or ".models." not in config_class.__module__:
        return set()
    names = {base.__name__ for base in config_class.__mro__}
    files = sorted(Path(source).parent.glob("modeling_*.py"))
    # Unannotated code of a composite model may belong to any part.
    is_one = not getattr(config_class, "sub_configs_defaults", {})
    reads = (each for file in files for each in _reads(file))
    return {
        key for owners, keys in reads if owners & names or (is_one and not owners) for key in keys
    }


@functools.cache
def _reads(file: Path) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
    """Return, for each class and function, (annotated configuration classes, attributes read)."""
    reads = []
    for part in ast.parse(file.read_text(encoding="utf-8")).body:
        owners: set[str] = set()
        attributes: set[str] = set()
        for node in ast.walk(part):
            match node:
                case (
                    ast.arg(arg="config", annotation=ast.expr() as annotation)
                    | ast.AnnAssign(target=ast.Name(id="config"), annotation=annotation)
                ):
                    owners |= {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
                case ast.Attribute(value=owner, attr=attribute) if _is_config(owner):
                    attributes.add(attribute)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[owner, ast.Constant(value=attribute), *_],
                ) if _is_config(owner):
                    attributes.add(str(attribute))
        reads.append((frozenset(owners), frozenset(attributes)))
    return tuple(reads)


def _is_config(node: ast.expr) -> bool:
    """Return whether the expression is `config` or `self.config`."""
    return (isinstance(node, ast.Name) and node.id == "config") or (
        isinstance(node, ast.Attribute)
        and node.attr == "config"
        and isinstance(node.value, ast.Name)
    )


# Sizes that modules and configurations hold under several names.


HEAD_ATTRIBUTES: dict[str, str] = {
    "num_heads": "heads",
    "num_attention_heads": "heads",
    "n_heads": "heads",
    "n_head": "heads",
    "num_key_value_heads": "key_value_heads",
    "num_kv_heads": "key_value_heads",
    "kv_heads": "key_value_heads",
    "num_key_value_groups": "groups",
    "embed_dim": "width",
    "hidden_size": "width",
    "split_size": "width",
    "all_head_size": "width",
}
"""Attributes of attention modules that hold head counts -> what they count. Widths are heads x head
size."""


def first_size(owner: nn.Module | PretrainedConfig, *names: str) -> int | None:
    """Return the first of these names that the owner has as one number; some types have one per
    layer, or none."""
    for name in names:
        try:
            value = getattr(owner, name, None)
        except Exception:  # transformers raises for an attribute that varies by layer
            continue
        if isinstance(value, int) and value:
            return value
    return None


def head_counts(module: nn.Module, config: PretrainedConfig) -> tuple[int, int]:
    """Return (query heads, key/value heads) from the attention module, else from the
    configuration."""
    names = {
        kind: [n for n, k in HEAD_ATTRIBUTES.items() if k == kind]
        for kind in HEAD_ATTRIBUTES.values()
    }
    heads = first_size(module, *names["heads"]) or first_size(config, *names["heads"]) or 1
    key_value_heads = first_size(module, *names["key_value_heads"])
    groups = first_size(module, *names["groups"])
    if key_value_heads is None and groups:
        key_value_heads = heads // groups
    return heads, key_value_heads or first_size(config, *names["key_value_heads"][:1]) or heads


# Keys that transformers reads from any configuration although no class lists them.
COMMON_KEYS = {"model_type", "torch_dtype", "rope_theta", "rope_scaling", *METADATA_KEYS}
# Keys about the file's author and origin, not about the model.
_VOLATILE_KEYS = (
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
)
# Keys that choose code: recipe keys choose attention, and an inline configuration runs no remote
# code.
_CODE_KEYS = ("attn_implementation", "experts_implementation", "auto_map")
# Keys about storage: what is trained and exported is not quantized.
_STORAGE_KEYS = ("quantization_config", "compression_config")


def check_model_type(
    config: JsonObject, key: KeyPath, inline: bool, asked: TaskName | Literal["auto"]
) -> Task:
    """Return the task that the type is trained for.

    Raises SW2003 (unknown type), SW2004 (no causal language model), SW2017 (encoder-decoder),
    SW2019 (no vision-language model), SW2021 (no contrastive model), SW1245 (no reward model).
    asked: the recipe's
    `model.task`.
    """
    model_type = config.get("model_type")
    where = (*key, "model_type") if inline and model_type is not None else key
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise Refusal(unknown_type_error(model_type, trained_types(), where))
    if support().others.get(model_type) == "encoder-decoder":
        raise Refusal(encoder_decoder(model_type, where, decoder_alone=False))
    task = task_of_type(model_type) if asked == "auto" else task_named(asked)
    if task is None:
        raise Refusal(untrained_task_error("causal-lm", model_type, trained_types(), where))
    if model_type not in task.types and not (FINGERPRINT in config and task.trains(model_type)):
        raise Refusal(untrained_task_error(task.name, model_type, tuple(task.types), where))
    return task


def resolve_config(
    config: JsonObject, key: KeyPath, inline: bool, asked: TaskName | Literal["auto"] = "auto"
) -> PretrainedConfig:
    """Return the transformers configuration with every value checked.

    Raises SW1247, SW2005, SW2006 (all of them), SW2007, SW2017, and those of check_model_type.
    asked: the recipe's `model.task`.
    """
    task = check_model_type(config, key, inline, asked)
    model_type = str(config["model_type"])
    config_class = CONFIG_MAPPING[model_type]
    try:
        probe = config_class()
    except Exception as error:  # the defaults of some types contradict each other
        raise config_error(error, key) from None
    own = {*probe.to_dict(), *config_class.attribute_map}
    known = {*own, *config_class_keys(config_class), *COMMON_KEYS, *published_keys(model_type)}
    config = decode_special_floats(config)
    canonical = {name: own_name for own_name, name in probe.attribute_map.items()}

    def problem(name: str, value: JsonValue) -> str:
        # Names that are no attributes are converted by the class.
        wrong = refused_value(probe, name, value) if name in own else ""
        return wrong or size_problem(canonical.get(name, name), name, value)

    takes = config_class.__name__
    found = config_key_errors(config, known, problem, key, inline=inline, takes=takes)
    if wrong := [diagnostic for diagnostic in found if diagnostic.severity == "error"]:
        raise Refusal(*wrong)
    renamed = {"torch_dtype": "dtype"}  # transformers warns about the old name
    left_out = {*_VOLATILE_KEYS, *_STORAGE_KEYS, *(_CODE_KEYS if inline else ()), "model_type"}
    values = {
        renamed.get(name, name): value for name, value in config.items() if name not in left_out
    }
    if task.traits.scores_sequences:
        _check_labels(config, key)
        values = {n: v for n, v in values.items() if n not in ("id2label", "label2id")}
        values["num_labels"] = 1
    try:
        resolved = config_class(**values)
    except Exception as error:
        raise config_error(error, key) from None
    if resolved.is_encoder_decoder and (task.traits.has_images or model_type in support().decoders):
        where = (
            (*key, "is_encoder_decoder") if "is_encoder_decoder" in config else (*key, "model_type")
        )
        raise Refusal(
            encoder_decoder(
                model_type, where if inline else key, decoder_alone=not task.traits.has_images
            )
        )
    return resolved


def _check_labels(config: JsonObject, key: KeyPath) -> None:
    """Raise SW1247 for a classifier of several classes, which is no reward model. A language
    model's configuration may have transformers' default labels."""
    names, count = config.get("id2label"), config.get("num_labels")
    classes = len(names) if isinstance(names, Mapping) else count
    architectures = str(config.get("architectures"))
    if "ForSequenceClassification" not in architectures or classes in (None, 1):
        return
    raise refusal(
        "SW1247",
        f"the model is a classifier of {classes} classes, and a reward model has one output",
        "Start from a language model, or from a classification model with `num_labels: 1`.",
        key,
    )


def config_error(error: Exception, key: KeyPath) -> Refusal:
    """Build SW2007 from what transformers raised while it built the configuration or the model."""
    return refusal(
        "SW2007",
        f"transformers refuses this configuration: {_one_line(error)}",
        "Change the keys that the message names.",
        key,
    )


def config_json(config: PretrainedConfig, architecture: str) -> dict[str, JsonValue]:
    """Return the complete configuration with sorted keys, without the keys about its origin."""
    plain = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE_KEYS}
    plain["architectures"] = [architecture]
    return cast(
        dict[str, JsonValue], json.loads(json.dumps(encode_special_floats(plain), sort_keys=True))
    )


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the decoder's configuration; the outer one where transformers finds several (musicgen
    reads it there)."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def refused_value(probe: PretrainedConfig, name: str, value: JsonValue) -> str:
    """Return what the class raises for this value, or "": transformers checks a field's type when
    it is set."""
    if name in (
        "model_type",
        "torch_dtype",
        "rope_parameters",
        "rope_scaling",
        *_VOLATILE_KEYS,
    ) or isinstance(value, Mapping):
        return ""
    try:
        setattr(probe, name, value)
    except Exception as error:
        return f"is refused: {_one_line(error)}"
    return ""


def _one_line(error: Exception) -> str:
    """Return the last line of an error's text, where transformers puts the cause, without the
    type's prefix."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    if isinstance(error, KeyError):
        return text.strip("\"'") if " " in text else f"{text} is not known"
    return text.removeprefix("TypeError: ").removeprefix("ValueError: ") or type(error).__name__
