"""A configuration as written -> a checked Hugging Face configuration.

config.json is read as data; a model's own code runs only where the recipe trusts it by name
(remote_code.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Literal, cast

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.diagnostics import KeyPath, Refusal, refusal
from shardwright.models.config_class_keys import config_class_keys
from shardwright.models.config_schema import size_problem
from shardwright.models.config_special_floats import decode_special_floats, encode_special_floats
from shardwright.models.model_catalog import published_keys
from shardwright.models.model_refusals import (
    METADATA_KEYS,
    config_key_errors,
    encoder_decoder,
    not_causal_lm,
    not_contrastive,
    not_vision_language,
    unknown_type_error,
)
from shardwright.models.model_support import support
from shardwright.models.remote_code import FINGERPRINT
from shardwright.models.tasks.task_registry import Task, task_named, task_of_type, trained_types
from shardwright.recipe.literal_types import TaskName
from shardwright.utils.json_types import JsonObject, JsonValue

# Read by transformers from any configuration although no class lists them.
COMMON_KEYS = {"model_type", "torch_dtype", "rope_theta", "rope_scaling", *METADATA_KEYS}
# Say who wrote the configuration and where it lay, not what the model is.
_VOLATILE_KEYS = (
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
)
# Choose code, not a model: recipe keys choose attention, and an inline configuration runs no code
# of its own.
_CODE_KEYS = ("attn_implementation", "experts_implementation", "auto_map")
# Says how the published files are stored; what is trained and exported is not quantised.
_STORAGE_KEYS = ("quantization_config", "compression_config")


def check_model_type(
    config: JsonObject, key: KeyPath, inline: bool, asked: TaskName | Literal["auto"]
) -> Task:
    """What the type is trained for. Errors: SW2003 unknown, SW2004 no causal language model, SW2017
    an encoder-decoder, SW2019 no model that sees, SW2021 none that learns from pairs."""
    model_type = config.get("model_type")
    where = (*key, "model_type") if inline and model_type is not None else key
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise Refusal(unknown_type_error(model_type, trained_types(), where))
    if support().others.get(model_type) == "encoder-decoder":
        raise Refusal(encoder_decoder(model_type, where, decoder_alone=False))
    task = task_of_type(model_type) if asked == "auto" else task_named(asked)
    if task is None:
        raise Refusal(not_causal_lm(model_type, trained_types(), where))
    if model_type not in task.types and not (FINGERPRINT in config and task.trains(model_type)):
        told = (
            not_contrastive
            if task.contrastive
            else not_vision_language
            if task.is_vision_language
            else not_causal_lm
        )
        raise Refusal(told(model_type, tuple(task.types), where))
    return task


def resolve_config(
    config: JsonObject, key: KeyPath, inline: bool, asked: TaskName | Literal["auto"] = "auto"
) -> PretrainedConfig:
    """The transformers configuration, every value checked. asked: the recipe's task. Errors:
    SW2005, SW2006 (all of them), SW2007, SW2017, and those of check_model_type."""
    task = check_model_type(config, key, inline, asked)
    model_type = str(config["model_type"])
    config_class = CONFIG_MAPPING[model_type]
    try:
        probe = config_class()
    except Exception as error:  # some types have no defaults that agree with each other
        raise config_error(error, key) from None
    own = {*probe.to_dict(), *config_class.attribute_map}
    known = {*own, *config_class_keys(config_class), *COMMON_KEYS, *published_keys(model_type)}
    config = decode_special_floats(config)
    problem, takes = functools.partial(_value_problem, probe, own), config_class.__name__
    found = config_key_errors(config, known, problem, key, inline=inline, takes=takes)
    if wrong := [diagnostic for diagnostic in found if diagnostic.severity == "error"]:
        raise Refusal(*wrong)
    renamed = {
        "torch_dtype": "dtype"
    }  # the old name still works, with a warning of transformers' own
    left_out = {*_VOLATILE_KEYS, *_STORAGE_KEYS, *(_CODE_KEYS if inline else ()), "model_type"}
    values = {
        renamed.get(name, name): value for name, value in config.items() if name not in left_out
    }
    try:
        resolved = config_class(**values)
    except Exception as error:
        raise config_error(error, key) from None
    if resolved.is_encoder_decoder and (
        task.is_vision_language or model_type in support().decoders
    ):
        where = (
            (*key, "is_encoder_decoder") if "is_encoder_decoder" in config else (*key, "model_type")
        )
        raise Refusal(
            encoder_decoder(
                model_type, where if inline else key, decoder_alone=not task.is_vision_language
            )
        )
    return resolved


def config_error(error: Exception, key: KeyPath) -> Refusal:
    """Whatever transformers raised while it built the configuration or the model."""
    return refusal(
        "SW2007",
        f"transformers refuses this configuration: {_one_line(error)}",
        (
            "Change the keys that the message names; the configuration must build with "
            "transformers alone."
        ),
        key,
    )


def config_json(config: PretrainedConfig, architecture: str) -> dict[str, JsonValue]:
    """The complete configuration: sorted, without the keys that say where it came from."""
    plain = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE_KEYS}
    plain["architectures"] = [architecture]
    return cast(
        dict[str, JsonValue], json.loads(json.dumps(encode_special_floats(plain), sort_keys=True))
    )


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part that describes the decoder; the whole where transformers finds several (musicgen:
    its class reads the decoder's sizes from the outermost one)."""
    try:
        return config.get_text_config()
    except ValueError:
        return config


def _value_problem(probe: PretrainedConfig, own: set[str], name: str, value: JsonValue) -> str:
    """Why `value` cannot be `name`, or "". own: the names that are attributes: the class converts
    the others itself."""
    canonical = {v: k for k, v in probe.attribute_map.items()}.get(name, name)
    wrong = refused_value(probe, name, value) if name in own else ""
    return wrong or size_problem(canonical, name, value)


def refused_value(probe: PretrainedConfig, name: str, value: JsonValue) -> str:
    """What the class itself says, or "": transformers' configurations check a field's type when it
    is set."""
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
    """The last line of an error's text (transformers puts the cause there), without its own type
    prefix."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    if isinstance(error, KeyError):
        return text.strip("\"'") if " " in text else f"{text} is not known"
    return text.removeprefix("TypeError: ").removeprefix("ValueError: ") or type(error).__name__
