"""Read slices of a model's tensors from safetensors files in Hugging Face's format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from shardwright.diagnostics import Refusal, refusal
from shardwright.models.model_files import INDEX, SINGLE, weight_file_names
from shardwright.models.weight_conversion import Conversion, dequantizer, map_keys, meta_tensor
from shardwright.models.weights_check import FLOATS
from shardwright.utils.file_io import parse_json, read_regular_file

_EXACT_IN = {
    torch.float32: ("F32", "F16", "BF16"),
    torch.float16: ("F16",),
    torch.bfloat16: ("BF16",),
}
_OTHER_FILES = re.compile(r"(adapter_model|consolidated).*\.safetensors")

SliceRange = tuple[int, int, int]
"""Holds (dimension, start, length)."""


class Weights(Protocol):
    """Provide initial weights under Hugging Face's names and layout."""

    def names(self) -> Iterable[str]: ...

    def read(self, name: str, range_: SliceRange | None) -> torch.Tensor:
        """Read a slice of the tensor along one dimension, or all of it."""

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether the tensor's stored type loses bits in dtype."""


class _UnshardedShapes:
    """Show transformers' conversions a model whose parameters have their shapes before sharding.

    core_model_loading.Split reads the sizes of a fused tensor's parts from the model.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        live = self._model.get_parameter(name)
        shape = self._shapes.get(name, live.shape)
        return torch.empty(shape, dtype=live.dtype, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class WeightFiles:
    """Read a folder of safetensors files by slices.

    A tensor that the model type stores in another form (one tensor an expert) is converted as
    from_pretrained does, one of the model's tensors at a time.
    """

    def __init__(self, folder: Path, model: PreTrainedModel | None) -> None:
        """Open the files. Raises Refusal with SW6211.

        model: owner of the parameters, on any device; None where the files use its names
        """
        self.folder = folder
        self.read_bytes = 0
        self._files: dict[str, Any] = {}
        self._converted: dict[str, Conversion] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        keys = {key: file for file in self._file_names() for key in self._open(file).keys()}  # noqa: SIM118
        self._where = keys
        self._direct = {key: key for key in keys}
        self._parameters: frozenset[str] = frozenset()
        if model is not None:
            self._parameters = frozenset(
                name for name, _ in model.named_parameters(remove_duplicate=False)
            )
            self._map(model)

    def names(self) -> Iterable[str]:
        return (*self._direct, *self._converted)

    def read(self, name: str, range_: SliceRange | None) -> torch.Tensor:
        """Read a parameter. Raises Refusal with SW6219 where it is not finite."""
        if conversion := self._converted.get(name):
            # The last conversion is memoized, because a fused tensor gives several.
            if self._last[0] != conversion.first:
                model: Any = _UnshardedShapes(self._model, self._shapes)
                made = conversion.convert(model, lambda key: self._slice(key, None))
                self._last = (conversion.first, made)
            whole = self._last[1][name]
            tensor = whole if range_ is None else whole.narrow(*range_)
        else:
            tensor = self._slice(self._direct[name], range_)
        if name in self._parameters and tensor.numel() and tensor.is_floating_point():
            low, high = torch.aminmax(tensor)  # NaN is in both
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise refusal(
                    "SW6219",
                    f"{name} in {str(self.folder)!r} holds values that are infinite or not a "
                    f"number ({str(tensor.dtype).removeprefix('torch.')})",
                    "Training from it gives no finite loss. Take weights that were saved in bf16 "
                    "or fp32, or an earlier checkpoint.",
                )
        return tensor

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        kinds = {
            self._open(self._where[key]).get_slice(key).get_dtype() for key in self._keys(name)
        }
        return not kinds <= set(_EXACT_IN[dtype])

    def _keys(self, name: str) -> list[str]:
        """Return the file keys that the tensor is made from."""
        converted = self._converted.get(name)
        return [self._direct[name]] if converted is None else [key for key, _ in converted.sources]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise Refusal unless the files hold the parameter in this shape and in a type that can
        be trained."""
        converted, keys = self._converted.get(name), self._keys(name)
        for key in keys:
            kind = self._open(self._where[key]).get_slice(key).get_dtype()
            if kind not in FLOATS and (converted is None or self._quantizer is None):
                raise self.refusal(
                    f"{key} is of type {kind}: only {', '.join(FLOATS)} can be trained"
                )
        found = self._shapes.get(name) or tuple(
            self._open(self._where[keys[0]]).get_slice(keys[0]).get_shape()
        )
        if found != shape:
            raise self.refusal(f"shape mismatch for {name}: files {found}, model {shape}")

    def _file_names(self) -> list[str]:
        try:
            if (self.folder / SINGLE).is_file() or (self.folder / INDEX).is_file():
                return list(weight_file_names(self.folder))
            found = sorted(path.name for path in self.folder.glob("*.safetensors"))
            files = [name for name in found if not _OTHER_FILES.fullmatch(name)]
        except (OSError, ValueError) as error:
            raise self.refusal(f"{INDEX} cannot be read ({error})") from None
        if not files:
            raise self.refusal("the folder has no safetensors file")
        return files

    def refusal(self, why: str) -> Refusal:
        return refusal(
            "SW6211",
            f"the weights in {str(self.folder)!r} cannot be used: {why}",
            (
                "Fetch them again (the plan names the revision of a hub's), or compile with "
                "another model.source."
            ),
        )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise self.refusal(f"{file} is missing or incomplete ({error})") from None
        return self._files[file]

    def _slice(self, key: str, range_: SliceRange | None) -> torch.Tensor:
        lazy = self._open(self._where[key]).get_slice(key)
        if range_ is None:
            tensor = lazy[:] if lazy.get_shape() else self._open(self._where[key]).get_tensor(key)
        else:
            dimension, start, length = range_
            tensor = lazy[(*[slice(None)] * dimension, slice(start, start + length))]
        self.read_bytes += tensor.numel() * tensor.element_size()
        return tensor  # type: ignore[no-any-return]

    def _map(self, model: PreTrainedModel) -> None:
        """Rename, merge and dequantize tensors as from_pretrained does."""
        try:  # the configuration beside the weights tells how they are stored
            config = parse_json(read_regular_file(self.folder / "config.json"))
        except (OSError, ValueError):
            config = {}
        self._model = model
        self._quantizer = dequantizer(config if isinstance(config, dict) else {})

        def meta(key: str) -> torch.Tensor:
            lazy = self._open(self._where[key]).get_slice(key)
            return meta_tensor(lazy.get_shape(), lazy.get_dtype())

        found = map_keys(model, self._where, self._quantizer)
        self._direct = dict(found.direct)
        for conversion in found.conversions:
            try:
                made = conversion.convert(model, meta)
            except Exception as error:  # transformers' own operations, on an incomplete set
                raise self.refusal(f"{conversion.first} cannot be assembled ({error})") from None
            for name, tensor in made.items():
                self._converted[name], self._shapes[name] = conversion, tuple(tensor.shape)
