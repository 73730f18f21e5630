"""What the configuration classes of transformers take, as data: config_keys.json, written by `make config-keys`.

`check` answers without transformers and torch. What it says of a configuration here, `compile` says by the classes
themselves (config.py): nothing is refused here that is accepted there.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath
from shardwright.ir.json_value import JsonObject, JsonValue
from shardwright.model.cache import installed_version
from shardwright.model.config_values import ANY_VALUE, size_problem
from shardwright.model.popular.shipped import published_keys
from shardwright.model.refusals import encoder_decoder, no_causal_lm, unknown_type
from shardwright.model.support import support

TABLE = "config_keys.json"
SIZES = ("vocab_size", "hidden_size", "num_attention_heads")
_WORDS: dict[str, str] = {"b": "true or false", "i": "an integer", "f": "a number", "s": "text", "l": "a list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeKeys:
    """Of one model type. keys: name -> letters of the kinds that it takes. aliases: other name -> the class's own.
    sizes: defaults. heads: whether heads must divide the hidden size: always | derived (where head_dim is not given) |
    "" (unknown)."""

    keys: Mapping[str, str]
    aliases: Mapping[str, str]
    sizes: Mapping[str, int]
    heads: str

    def size(self, config: JsonObject, name: str) -> int | None:
        """That of the configuration, under either name; else the default."""
        for key in (name, self.aliases.get(name, name)):
            if key in config:
                value = config[key]
                return value if isinstance(value, int) and not isinstance(value, bool) else None
        return self.sizes.get(name)


@functools.cache
def _table() -> JsonObject:
    return cast(JsonObject, json.loads(resources.files("shardwright.model").joinpath(TABLE).read_text("utf-8")))


def type_keys(model_type: str) -> TypeKeys | None:
    """None where the type is none of the table, or its class has no defaults to try values on."""
    entry = cast("JsonObject | None", cast(JsonObject, _table()["types"]).get(model_type))
    if entry is None or not entry["keys"]:
        return None
    own = cast("Mapping[str, list[str]]", entry["keys"])
    keys = dict(cast("Mapping[str, str]", _table()["common"]))
    keys |= {key: kinds for kinds, names in own.items() for key in names}
    keys = {**dict.fromkeys(published_keys(model_type), ANY_VALUE), **keys}
    aliases = cast("Mapping[str, str]", entry.get("aliases", {}))
    return TypeKeys(
        keys=keys,
        aliases=aliases,
        sizes=cast("Mapping[str, int]", entry.get("sizes", {})),
        heads=str(entry.get("heads", "")),
    )


def is_of_installed() -> bool:
    """Whether the table speaks of the installed transformers. What is not installed cannot disagree."""
    return installed_version("transformers") in (None, _table()["transformers"])


def config_errors(config: JsonObject, key: KeyPath, inline: bool) -> tuple[Diagnostic, ...]:
    """SW2003 to SW2007 and SW2017, as far as the table tells. inline: it stands in the recipe at `key`."""
    if not is_of_installed() or (not inline and "auto_map" in config):  # auto_map: it may bring its own type
        return ()
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in support().types:
        where = (*key, "model_type") if inline and model_type is not None else key
        return (_no_type(model_type, where),)
    known = type_keys(model_type)
    return () if known is None else tuple(_values(config, known, key, inline, model_type))


def vocabulary_size(config: JsonObject) -> int | None:
    """None where it is not known without transformers (a part of a configuration in parts)."""
    model_type = config.get("model_type")
    known = type_keys(model_type) if isinstance(model_type, str) and is_of_installed() else None
    if known is None or isinstance(config.get("text_config"), Mapping):
        return None
    return known.size(config, "vocab_size")


def _no_type(model_type: JsonValue, where: KeyPath) -> Diagnostic:
    table = support()
    if not isinstance(model_type, str) or model_type not in table.others:
        return unknown_type(model_type, table.types, where)
    if table.others[model_type] == "encoder-decoder":
        return encoder_decoder(model_type, where, decoder_alone=False)
    return no_causal_lm(model_type, table.types, where)


def _values(config: JsonObject, known: TypeKeys, key: KeyPath, inline: bool, model_type: str) -> Iterator[Diagnostic]:
    wrong = False
    common = {own: name for name, own in known.aliases.items()}
    for name, value in config.items():
        where = (*key, name) if inline else key
        if name not in known.keys:
            # A config.json in the wild often carries keys that transformers ignores; a recipe's own keys are checked.
            if inline:
                wrong = True
                yield Diagnostic(
                    code="SW2005",
                    message=f"unknown key {name!r} for model_type {model_type!r}",
                    help=f"model.config takes the keys of transformers' configuration of a {model_type}.",
                    key=where,
                    valid=tuple(difflib.get_close_matches(name, sorted(known.keys), n=3)),
                )
            continue
        problem = _kind_problem(value, _kinds(name, config, known)) or size_problem(common.get(name, name), name, value)
        if problem:
            wrong = True
            yield Diagnostic(
                code="SW2006",
                message=f"{name}: {value!r} {problem}",
                help=f"See transformers' configuration of a {model_type} for what this key takes.",
                key=where,
            )
    if not wrong:
        yield from _heads(config, known, key)


def _kinds(name: str, config: JsonObject, known: TypeKeys) -> str:
    """An alias takes what the class's own name does, which decides where both are given."""
    own = known.aliases.get(name, name)
    return known.keys[name] if own in config or own not in known.keys else known.keys[own]


def _kind_problem(value: JsonValue, kinds: str) -> str:
    letter = _letter(value)
    if not letter or kinds == ANY_VALUE or letter in kinds:
        return ""
    wanted = " or ".join(words for kind, words in _WORDS.items() if kind in kinds)
    return f"is not {wanted}" if wanted else ""


def _letter(value: JsonValue) -> str:
    """ "" for what is not judged: a section."""
    letters: tuple[tuple[type, str], ...] = ((bool, "b"), (int, "i"), (float, "f"), (str, "s"), (list, "l"))
    if value is None:
        return "n"
    return next((letter for kind, letter in letters if isinstance(value, kind)), "")


def _heads(config: JsonObject, known: TypeKeys, key: KeyPath) -> Iterator[Diagnostic]:
    hidden, heads = known.size(config, "hidden_size"), known.size(config, "num_attention_heads")
    given = config.get("head_dim") is not None
    if not hidden or not heads or hidden % heads == 0 or not known.heads or (known.heads == "derived" and given):
        return
    yield Diagnostic(
        code="SW2007",
        message=f"a hidden size of {hidden} does not divide by {heads} attention heads",
        help="transformers refuses it: take a number of heads that divides it"
        + (", or give head_dim." if known.heads == "derived" else "."),
        key=key,
    )
