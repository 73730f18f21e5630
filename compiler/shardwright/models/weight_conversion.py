"""Map a checkpoint's keys to the model's tensors, without loading.

The renamings and conversions are transformers' own (core_model_loading.py,
convert_and_load_state_dict_in_model).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from shardwright.models.model_files import DEQUANTIZED_METHODS
from shardwright.utils.json_values import JsonObject

_TYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
}
"""safetensors' types that dequantization reads; every other type is a float."""


def meta_tensor(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return a tensor without storage.

    dtype: safetensors' name.
    """
    return torch.empty(tuple(shape), dtype=_TYPES.get(dtype, torch.float32), device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Convert tensors of the files, merged or split, into tensors of the model.

    sources: (key, pattern) of the files' tensors.
    """

    converter: WeightConverter
    first: str
    sources: list[tuple[str, str]]

    def convert(
        self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the model's tensors by name.

        read: returns a complete tensor of the files; meta tensors give shapes only.
        """
        converter = deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.first, key, pattern, read(key))
        made = converter.convert(self.first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """Map a checkpoint's keys.

    direct: the model's name -> the files' key.
    conversions: tensors that are merged or split.
    unexpected: the files' key -> the name that it would have in the model, which lacks that tensor.
    doubled: (name, first key, second key) of keys that become one tensor.
    """

    direct: Mapping[str, str]
    conversions: tuple[Conversion, ...]
    unexpected: Mapping[str, str]
    doubled: tuple[tuple[str, str, str], ...]


def dequantizer(config: JsonObject) -> HfQuantizer | None:
    """Return transformers' quantizer that dequantizes on loading.

    None where nothing is quantized, or the method needs a GPU or calibration. config: as published.
    """
    section = config.get("quantization_config")
    if not isinstance(section, dict) or section.get("quant_method") not in DEQUANTIZED_METHODS:
        return None
    settings: dict[str, Any] = {**section, "dequantize": True}
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    assert isinstance(quantizer, HfQuantizer)
    return quantizer


def map_keys(
    model: PreTrainedModel, keys: Iterable[str], quantizer: HfQuantizer | None = None
) -> KeyMap:
    """Map the checkpoint's keys to the tensors of `model`, which may be on any device."""
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    model_tensors, prefix = model.state_dict(), model.base_model_prefix
    direct: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unexpected: dict[str, str] = {}
    doubled: list[tuple[str, str, str]] = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, model_tensors)
        if name not in model_tensors and key in model_tensors:
            name, pattern = rename_source_key(key, [], [], prefix, model_tensors)
        if name not in model_tensors:
            unexpected[key] = name
        elif pattern is not None:
            empty = Conversion(converter=by_pattern[pattern], first=name, sources=[])
            conversions.setdefault(name, empty).sources.append((key, pattern))
        elif name in direct:
            doubled.append((name, direct[name], key))
        else:
            direct[name] = key
    return KeyMap(
        direct=direct,
        conversions=tuple(conversions.values()),
        unexpected=unexpected,
        doubled=tuple(doubled),
    )


def ignored_keys(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """Return the unexpected names that transformers ignores silently.

    The class lists them, or they are buffers of older versions
    (_adjust_missing_and_unexpected_keys).
    """
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return frozenset(
        name for name in names if any(re.search(pattern, name) for pattern in patterns)
    )
