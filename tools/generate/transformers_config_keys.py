"""Writes what the configuration classes of the installed transformers take, for `check`, which
imports neither them nor torch. Every value is tried on the class itself, by the
function that `compile` refuses values with."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils.import_utils import define_import_structure

from shardwright.models import config_schema
from shardwright.models.hf_config import COMMON_KEYS, config_class_keys, refused_value
from shardwright.models.model_support import vision_language_types
from shardwright.recipe.literal_types import CONTRASTIVE_MODEL_CLASSES
from tests.zoo.configs import tiny_config
from tests.zoo.overrides import IMPOSSIBLE

PATH = Path(config_schema.__file__).with_name(config_schema.TABLE)
SAMPLES: dict[str, tuple[Any, ...]] = {
    "b": (True, False),
    "i": (0, 1, 2, 7, 64, 1000),
    "f": (0.0, 0.5, 1.5, 2.0),
    "s": ("x", "auto", "silu", "gelu_new", "float32", "eager", "4"),
    "l": ([], [1], [0.5], ["x"], [[1]], [True]),
    "n": (None,),
}
"""Letter of a kind -> values of it. A kind is refused where each of these is."""
HEADS, ODD_HEADS = 4, 5  # of a hidden size of 64
KEY_VALUE_HEADS = "num_key_value_heads"


def kinds(probe: Any, name: str) -> str:
    """Letters of the kinds that the key takes; what is inside a list is free."""
    try:
        default = getattr(probe, name, None)
    except Exception:  # one value a layer: which, depends on the layers
        return config_schema.ANY_VALUE
    taken = {
        kind
        for kind, samples in SAMPLES.items()
        if any(not refused_value(probe, name, s) for s in samples)
    }
    # A closed set of words has none of the samples.
    taken |= set(
        {str: "s", bool: "b", int: "i", float: "f", list: "l", tuple: "l"}.get(type(default), "")
    )
    return config_schema.ANY_VALUE if taken == set(SAMPLES) else "".join(sorted(taken))


def heads(model_type: str) -> str:
    """Whether heads that do not divide the hidden size are refused: "always", "derived" (unless
    head_dim is given), or "" where they are not, or where the type's tiny configuration does not
    tell."""
    names = CONFIG_MAPPING[model_type].attribute_map
    head, size = (names.get(key, key) for key in ("num_attention_heads", "hidden_size"))
    tiny = {} if model_type in IMPOSSIBLE else tiny_config(model_type)
    if tiny.get(head) != HEADS or tiny.get(size) != 64:
        return ""
    tiny = {**tiny, **({KEY_VALUE_HEADS: HEADS} if KEY_VALUE_HEADS in tiny else {})}
    free = {key: value for key, value in tiny.items() if key != "head_dim"}
    odd = {head: ODD_HEADS, **({KEY_VALUE_HEADS: ODD_HEADS} if KEY_VALUE_HEADS in tiny else {})}
    if not builds(model_type, free) or builds(model_type, free | odd):
        return ""
    given = free | {"head_dim": 16}
    return "derived" if builds(model_type, given) and builds(model_type, given | odd) else "always"


def builds(model_type: str, values: dict[str, Any]) -> bool:
    try:
        config = AutoConfig.for_model(
            model_type, **{k: v for k, v in values.items() if k != "model_type"}
        )
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config)
    except Exception:
        return False
    return True


def table() -> dict[str, Any]:
    found = {name: _entry(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    common = dict.fromkeys(COMMON_KEYS, config_schema.ANY_VALUE)
    told = [entry for entry in found.values() if entry["keys"]]
    first = told[0]["keys"]
    common |= {k: v for k, v in first.items() if all(entry["keys"].get(k) == v for entry in told)}
    for entry in found.values():
        by_kind: dict[str, list[str]] = {}
        for key, kind in sorted(entry["keys"].items()):
            if key not in common:
                by_kind.setdefault(kind, []).append(key)
        entry["keys"] = dict(sorted(by_kind.items()))
    needed = _processor_packages()
    return {
        "transformers": transformers.__version__,
        "common": dict(sorted(common.items())),
        "types": found,
        "in_parts": {
            name: sorted(names - common.keys())
            for name in sorted(
                {*vision_language_types(), *CONTRASTIVE_MODEL_CLASSES} - found.keys()
            )
            if (names := _names(name))
        },
        "processors": dict(sorted(needed.items())),
        "processor_of": {
            name: kind for name, kind in sorted(PROCESSOR_MAPPING_NAMES.items()) if kind in needed
        },
    }


def _processor_packages() -> dict[str, list[str]]:
    """Processor class -> packages that transformers asks for before it imports it, torch and Pillow
    aside. Read from its files' marks, whatever is installed here."""
    structure = define_import_structure(
        str(Path(transformers.__file__).parent / "models" / "__init__.py")
    )
    classes = set(PROCESSOR_MAPPING_NAMES.values())
    return {
        name: sorted(set(packages) - {"torch", "vision"})
        for packages, modules in structure.items()
        for names in modules.values()
        for name in sorted(names)
        if name in classes and set(packages) - {"torch", "vision"}
    }


def _entry(model_type: str) -> dict[str, Any]:
    config_class = CONFIG_MAPPING[model_type]
    with contextlib.suppress(Exception):
        default = config_class()
        values = default.to_dict()
        own = {*values, *config_class.attribute_map} - set(COMMON_KEYS)
        read = config_class_keys(config_class) - own - set(COMMON_KEYS)
        sizes = dict(_sizes(default))
        keys = {name: kinds(default, name) for name in sorted(own)} | dict.fromkeys(
            sorted(read), config_schema.ANY_VALUE
        )
        entry: dict[str, Any] = {
            "keys": keys,
            "aliases": dict(sorted(config_class.attribute_map.items())),
            "sizes": sizes,
        }
        entry["tied"] = bool(getattr(default, config_schema.TIED, False))
        return {key: value for key, value in {**entry, "heads": heads(model_type)}.items() if value}
    print(f"{model_type}: its class has no defaults", file=sys.stderr)
    return {"keys": {}}


def _names(model_type: str) -> set[str]:
    """Every key that the class reads; empty where it has no defaults."""
    config_class = CONFIG_MAPPING[model_type]
    with contextlib.suppress(Exception):
        return {
            *config_class().to_dict(),
            *config_class.attribute_map,
            *config_class_keys(config_class),
        }
    return set()


def _sizes(default: Any) -> Iterator[tuple[str, int]]:
    for name in config_schema.SIZES:
        value = getattr(default, name, None)
        if isinstance(value, int):
            yield name, value


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    text = json.dumps(table(), indent=0, sort_keys=False) + "\n"
    changed = not PATH.exists() or PATH.read_text(encoding="utf-8") != text
    PATH.write_text(text, encoding="utf-8")
    print(f"{PATH}: {len(text):,} bytes, {'changed' if changed else 'as before'}")


if __name__ == "__main__":
    main()
