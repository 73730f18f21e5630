"""Check a configuration against transformers' configuration classes, without transformers or torch.

config_keys.json, written by `make generated`, holds what the classes accept. Nothing is refused
here that the classes accept; `compile` asks the classes themselves (hf_config.py).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.models.model_sources import published_keys
from shardwright.models.model_support import (
    config_key_errors,
    encoder_decoder,
    support,
    unknown_type_error,
    untrained_task_error,
    vision_language_types,
)
from shardwright.recipe.literal_types import CONTRASTIVE_MODEL_CLASSES
from shardwright.utils.installation import installed_version
from shardwright.utils.json_values import JsonObject, JsonValue

# Infinity and NaN, which JSON lacks: transformers writes {"__float__": "Infinity"}.


_TAG = "__float__"
_NAMES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def decode_special_floats(value: Any) -> Any:
    """Replace every tagged float of a JSON document by the number."""
    if isinstance(value, dict):
        if value.keys() == {_TAG} and value[_TAG] in _NAMES:
            return _NAMES[value[_TAG]]
        return {name: decode_special_floats(inner) for name, inner in value.items()}
    return (
        [decode_special_floats(inner) for inner in value]
        if isinstance(value, list | tuple)
        else value
    )


def encode_special_floats(value: Any) -> Any:
    """Replace every infinite or NaN float by its tag, so that every JSON reader accepts the
    document."""
    if isinstance(value, dict):
        return {name: encode_special_floats(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encode_special_floats(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: next(name for name, number in _NAMES.items() if str(number) == str(value))}
    return value


TABLE = "config_keys.json"
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
    "n_inner",
    "max_position_embeddings",
    "head_dim",
)
# Each layer becomes a module, even on the meta device: ten times the deepest published models.
MAX_LAYERS = 2048
ANY_VALUE = "any"
"""Kind of a key that accepts any value."""
TIED = "tie_word_embeddings"
SIZES = ("vocab_size", "hidden_size", "num_attention_heads")
# Letter of a kind -> its values; a section is not checked. A bool is an int, too.
_TYPES: dict[str, type] = {
    "n": type(None),
    "b": bool,
    "i": int,
    "f": float,
    "s": str,
    "l": list,
}
_WORDS: dict[str, str] = {
    "b": "true or false",
    "i": "an integer",
    "f": "a number",
    "s": "text",
    "l": "a list",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeKeys:
    """Describe the configuration class of one model type.

    keys: key -> letters of the kinds that it accepts.
    aliases: other name -> the class's own name.
    sizes: default sizes.
    heads: whether heads must divide the hidden size: "always", "derived" (unless head_dim is set)
        or "" (unknown).
    tied: whether the head is the embedding by default.
    """

    keys: Mapping[str, str]
    aliases: Mapping[str, str]
    sizes: Mapping[str, int]
    heads: str
    tied: bool

    def size(self, config: JsonObject, name: str) -> int | None:
        """Return the configuration's value under either name, else the default."""
        for key in (name, self.aliases.get(name, name)):
            if key in config:
                value = config[key]
                return value if isinstance(value, int) and not isinstance(value, bool) else None
        return self.sizes.get(name)


@functools.cache
def _table() -> dict[str, Any]:
    return cast(
        "dict[str, Any]",
        json.loads(resources.files("shardwright.models").joinpath(TABLE).read_text("utf-8")),
    )


def type_keys(model_type: str) -> TypeKeys | None:
    """Return the type's keys; None where the table lacks the type or its class has no usable
    defaults."""
    entry = _table()["types"].get(model_type)
    if entry is None or not entry["keys"]:
        return None
    own = {key: kinds for kinds, names in entry["keys"].items() for key in names}
    keys = {**dict.fromkeys(published_keys(model_type), ANY_VALUE), **_table()["common"], **own}
    return TypeKeys(
        keys=keys,
        aliases=entry.get("aliases", {}),
        sizes=entry.get("sizes", {}),
        heads=entry.get("heads", ""),
        tied=entry.get("tied", False),
    )


def matches_installed_transformers() -> bool:
    """Return whether the table was written for the installed transformers, or none is installed."""
    return installed_version("transformers") in (None, _table()["transformers"])


def config_errors(config: JsonObject, key: KeyPath, inline: bool) -> tuple[Diagnostic, ...]:
    """Return SW2003 to SW2007 and SW2017, as far as the table can tell.

    inline: whether the configuration is in the recipe, at `key`.
    """
    if not matches_installed_transformers() or (not inline and has_remote_code(config)):
        return ()
    model_type = config.get("model_type")
    if (
        isinstance(model_type, str)
        and model_type
        in {*vision_language_types(), *CONTRASTIVE_MODEL_CLASSES} - support().types.keys()
    ):
        # Only its class can check the values of a composite configuration.
        names = _table()["in_parts"].get(model_type) if inline else None
        if names is None:
            return ()
        known_names = {*names, *_table()["common"], *published_keys(model_type)}
        takes = f"configuration of a {model_type}"
        return tuple(
            config_key_errors(
                config, known_names, lambda name, value: "", key, inline=True, takes=takes
            )
        )
    if not isinstance(model_type, str) or model_type not in support().types:
        where = (*key, "model_type") if inline and model_type is not None else key
        table = support()
        if not isinstance(model_type, str) or model_type not in table.others:
            return (unknown_type_error(model_type, table.types, where),)
        if table.others[model_type] == "encoder-decoder":
            return (encoder_decoder(model_type, where, decoder_alone=False),)
        return (untrained_task_error("causal-lm", model_type, table.types, where),)
    known = type_keys(model_type)
    return () if known is None else tuple(_values(config, known, key, inline, model_type))


def config_warnings(config: JsonObject) -> tuple[Diagnostic, ...]:
    """Return warnings about a configuration in the recipe that transformers accepts."""
    found = config_errors(config, ("model", "config"), inline=True)
    return tuple(diagnostic for diagnostic in found if diagnostic.severity == "warning")


def has_remote_code(config: JsonObject) -> bool:
    """Return whether the model runs on its own Python code: transformers does not have its type."""
    if "auto_map" not in config or not matches_installed_transformers():
        return False
    model_type, known = config.get("model_type"), support()
    return model_type not in {
        *known.types,
        *known.others,
        *vision_language_types(),
        *CONTRASTIVE_MODEL_CLASSES,
    }


def processor_packages(model_type: str, processor_class: str | None) -> tuple[str, tuple[str, ...]]:
    """Return a processor's class and the packages that it needs beside torch and Pillow.

    processor_class: the class that the model's files name; None takes transformers' class of the
        type.
    """
    name = processor_class or _table()["processor_of"].get(model_type, "")
    return name, tuple(
        _table()["processors"].get(name, ())
    ) if matches_installed_transformers() else ()


def vocabulary_size(config: JsonObject) -> int | None:
    """Return the vocabulary size; None where transformers is needed to tell (a composite
    configuration)."""
    model_type = config.get("model_type")
    known = (
        type_keys(model_type)
        if isinstance(model_type, str) and matches_installed_transformers()
        else None
    )
    if isinstance(config.get("text_config"), Mapping):
        return None
    found = None if known is None else known.size(config, "vocab_size")
    written = config.get("vocab_size")  # a composite configuration written flat (Qwen2.5-VL)
    return written if found is None and isinstance(written, int) else found


def is_tied(config: JsonObject) -> bool:
    """Return whether the head is the embedding, by the configuration or the type's default."""
    if TIED in config:
        return config[TIED] is True
    text = config.get("text_config")
    if isinstance(text, dict) and TIED in text:
        return text[TIED] is True
    model_type = config.get("model_type")
    known = (
        type_keys(model_type)
        if isinstance(model_type, str) and matches_installed_transformers()
        else None
    )
    return known is not None and known.tied


def _values(
    config: JsonObject, known: TypeKeys, key: KeyPath, inline: bool, model_type: str
) -> Iterator[Diagnostic]:
    common = {own: name for name, own in known.aliases.items()}

    def problem(name: str, value: JsonValue) -> str:
        # An alias takes what the class's own name does, which decides where both are given.
        own = known.aliases.get(name, name)
        kinds = known.keys[name if own in config or own not in known.keys else own]
        kind = next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "")
        if kind and kinds != ANY_VALUE and kind not in kinds:
            expected = " or ".join(words for letter, words in _WORDS.items() if letter in kinds)
            if expected:
                return f"is not {expected}"
        return size_problem(common.get(name, name), name, value)

    takes = f"configuration of a {model_type}"
    wrong = list(
        config_key_errors(config, known.keys.keys(), problem, key, inline=inline, takes=takes)
    )
    yield from wrong
    if any(diagnostic.severity == "error" for diagnostic in wrong):
        return
    hidden, heads = known.size(config, "hidden_size"), known.size(config, "num_attention_heads")
    is_derived = known.heads == "derived"
    divides = not hidden or not heads or hidden % heads == 0
    if divides or not known.heads or (is_derived and config.get("head_dim") is not None):
        return
    more = ", or set head_dim" if is_derived else ""
    yield found(
        "SW2007",
        key,
        f"hidden size {hidden} is not divisible by {heads} attention heads",
        f"Set a number of heads that divides the hidden size{more}.",
    )


def size_problem(canonical: str, name: str, value: JsonValue) -> str:
    """Return why the value is not a valid size, or "".

    canonical: the class's own name for `name`.
    """
    if not isinstance(value, int | float):
        return ""
    if canonical in _SIZES and value < 1:
        return "is not a positive size"
    if canonical == "num_hidden_layers" and isinstance(value, int) and value > MAX_LAYERS:
        return f"is more than {MAX_LAYERS}, the most layers that this version builds"
    if name.endswith(("dropout", "pdrop")) and not 0 <= value < 1:
        return "is not a probability below 1"
    return ""
