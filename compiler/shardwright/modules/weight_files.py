"""Tensors of a model, read by slices out of safetensors files in Hugging Face's format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from shardwright.diagnostics import Refusal, refusal

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_OTHER_FILES = re.compile(r"(adapter_model|consolidated).*\.safetensors")

Range = tuple[int, int, int]
"""(dimension, start, length)."""


class Weights(Protocol):
    """Where initial weights come from; names and layout are Hugging Face's."""

    def names(self) -> Iterable[str]: ...

    def read(self, name: str, range_: Range | None) -> torch.Tensor:
        """A part of the tensor along one dimension, or all of it."""


class WeightFiles:
    """A folder of safetensors files. What the model's type stores in another form (an expert a tensor) is put together
    as from_pretrained does, one of the model's tensors at a time; everything else is read by slices.
    """

    def __init__(self, folder: Path, model: PreTrainedModel | None) -> None:
        """model: whose parameters they are, on any device; None where the files have its own names. Raises Refusal:
        SW6211."""
        self.folder = folder
        self.read_bytes = 0
        self._files: dict[str, Any] = {}
        self._converted: dict[str, tuple[WeightConverter, list[tuple[str, str]], str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        keys = {key: file for file in self._file_names() for key in self._open(file).keys()}  # noqa: SIM118
        self._where = keys
        self._direct = {key: key for key in keys} if model is None else self._map(model, list(keys))

    def names(self) -> Iterable[str]:
        return (*self._direct, *self._converted)

    def read(self, name: str, range_: Range | None) -> torch.Tensor:
        if name in self._converted:
            tensor = self._convert(name)
            return tensor if range_ is None else tensor.narrow(*range_)
        return self._slice(self._direct[name], range_)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises Refusal unless the files hold the parameter in this shape, in a type that can be trained."""
        keys = [key for key, _ in self._converted[name][1]] if name in self._converted else [self._direct[name]]
        for key in keys:
            kind = self._open(self._where[key]).get_slice(key).get_dtype()
            if kind not in _FLOATS:
                raise self.refusal(f"{key} is of type {kind}: only {', '.join(_FLOATS)} can be trained")
        found = self._shapes.get(name) or tuple(self._open(self._where[keys[0]]).get_slice(keys[0]).get_shape())
        if found != shape:
            raise self.refusal(f"{name} has the shape {found} in them, the model's is {shape}")

    def _file_names(self) -> list[str]:
        try:
            if (self.folder / INDEX).is_file():
                index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
                return sorted(set(index["weight_map"].values()))
            if (self.folder / SINGLE).is_file():
                return [SINGLE]
            found = sorted(path.name for path in self.folder.glob("*.safetensors"))
            files = [name for name in found if not _OTHER_FILES.fullmatch(name)]
        except (OSError, ValueError, KeyError) as error:
            raise self.refusal(f"{INDEX} cannot be read ({error})") from None
        if not files:
            raise self.refusal("there is no safetensors file in it")
        return files

    def refusal(self, why: str) -> Refusal:
        return refusal(
            "SW6211",
            f"the weights in {str(self.folder)!r} cannot be used: {why}",
            "Fetch them again (the plan names the revision of a hub's), or compile with another model.source.",
        )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise self.refusal(f"{file} is missing or not whole ({error})") from None
        return self._files[file]

    def _slice(self, key: str, range_: Range | None) -> torch.Tensor:
        lazy = self._open(self._where[key]).get_slice(key)
        if range_ is None:
            tensor = lazy[:] if lazy.get_shape() else self._open(self._where[key]).get_tensor(key)
        else:
            dimension, start, length = range_
            tensor = lazy[(*[slice(None)] * dimension, slice(start, start + length))]
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor  # type: ignore[no-any-return]

    def _map(self, model: PreTrainedModel, keys: list[str]) -> dict[str, str]:
        """The model's name -> the files' key, as transformers' own loading renames (core_model_loading.py,
        convert_and_load_state_dict_in_model)."""
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        wanted, prefix = model.state_dict(), model.base_model_prefix
        direct: dict[str, str] = {}
        groups: dict[str, tuple[WeightConverter, list[tuple[str, str]], str]] = {}
        for key in sorted(keys, key=_natural):
            name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted:
                continue
            if pattern is None:
                direct.setdefault(name, key)
            else:
                groups.setdefault(name, (by_pattern[pattern], [], name))[1].append((key, pattern))
        for group in groups.values():
            for name, tensor in self._realize(group, model, meta=True).items():
                self._converted[name], self._shapes[name] = group, tuple(tensor.shape)
        self._model = model
        return direct

    def _convert(self, name: str) -> torch.Tensor:
        """The last group stays: a fused tensor gives several of the model's."""
        group = self._converted[name]
        if self._last[0] != group[2]:
            self._last = (group[2], self._realize(group, self._model, meta=False))
        return self._last[1][name]

    def _realize(
        self, group: tuple[WeightConverter, list[tuple[str, str]], str], model: PreTrainedModel, *, meta: bool
    ) -> dict[str, torch.Tensor]:
        converter, sources, first = deepcopy(group[0]), group[1], group[2]
        for key, pattern in sources:
            lazy = self._open(self._where[key]).get_slice(key)
            tensor = torch.empty(lazy.get_shape(), device="meta") if meta else self._slice(key, None)
            converter.add_tensor(first, key, pattern, tensor)
        made = converter.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Experts in order of their numbers."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in key.split(".")]
