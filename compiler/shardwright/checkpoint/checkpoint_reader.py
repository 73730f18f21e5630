"""Reads a checkpoint's tensors for any layout: a shard that was cut the same way as it lies there,
others from the whole."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardwright.checkpoint.checkpoint_compatibility import incomplete_checkpoint
from shardwright.checkpoint.checkpoint_manifest import SavedTensor, read_manifest
from shardwright.diagnostics import Refusal
from shardwright.layout.parameter_sharding import ParameterSharding

ExpertPart = tuple[int, int]
"""Of the first dimension, cut into equal parts: which one, of how many."""
ALL_EXPERTS: ExpertPart = (0, 1)


class CheckpointReader:
    """One open checkpoint; files are opened when they are first needed, and mapped, not read."""

    def __init__(self, folder: Path) -> None:
        """Raises Refusal: SW6201."""
        self.folder = folder
        try:
            self.manifest = read_manifest(folder)
        except (OSError, ValueError) as error:
            raise self.incomplete_checkpoint(str(error).splitlines()[0]) from None
        self._files: dict[int, Any] = {}
        # Of the parameter that was asked for last: an engine that holds it in pieces asks once a
        # piece.
        self._resharded: tuple[tuple[str, int, ExpertPart], dict[str, torch.Tensor]] = (
            ("", 0, ALL_EXPERTS),
            {},
        )

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._files.clear()

    def incomplete_checkpoint(self, why: str) -> Refusal:
        help = (
            "Give another `step-XXXXXXXX` folder; with --resume auto `run` takes the newest "
            "whole one."
        )
        return incomplete_checkpoint(self.folder, why, help)

    def saved(self, name: str) -> SavedTensor:
        if name not in self.manifest.tensors:
            raise self.incomplete_checkpoint(f"it holds no {name}")
        return self.manifest.tensors[name]

    def whole(self, name: str, state: str) -> torch.Tensor:
        """The unsplit parameter in Hugging Face's layout."""
        saved = self.saved(name)
        if saved.experts > 1:
            return self._experts(name, state, ALL_EXPERTS)
        split = saved.split
        parts = []
        for shard in range(len(saved.shards)):
            rank = shard * split.copies
            shape = split.shard_shape(rank)
            flat = self._range(name, state, shard, 0, split.shard_numel(rank))
            parts.append(flat.view(shape[::-1]).t() if saved.transposed else flat.view(shape))
        return join(split, parts)

    def fragment(
        self,
        name: str,
        state: str,
        split: ParameterSharding,
        tensor_rank: int,
        start: int,
        numel: int,
        experts: ExpertPart = ALL_EXPERTS,
    ) -> torch.Tensor:
        """Elements [start, start + numel) of the flattened shard that `split` gives `tensor_rank`
        of one part of the experts. 1-D. Of other experts nothing is read."""
        saved = self.saved(name)
        if split.shape != saved.split.shape:
            raise self.incomplete_checkpoint(
                f"{name} has the shape {saved.split.shape} in it, the model's is {split.shape}"
            )
        if split == saved.split and experts[1] == saved.experts:
            shard = tensor_rank // split.copies if split.dimension is not None else 0
            return self._range(
                name, state, experts[0] * saved.tensor_shard_count + shard, start, numel
            )
        if self._resharded[0] != (name, tensor_rank, experts):
            self._resharded = ((name, tensor_rank, experts), {})
        flats = self._resharded[1]
        if state not in flats:
            own = (
                self.whole(name, state)
                if experts == ALL_EXPERTS
                else self._experts(name, state, experts)
            )
            shard_of = cut(split, own, tensor_rank)
            flats[state] = (shard_of.t() if saved.transposed else shard_of).reshape(-1)
        return flats[state].narrow(0, start, numel)

    def _experts(self, name: str, state: str, part: ExpertPart) -> torch.Tensor:
        """A part of the experts, unsplit otherwise. They lie one behind the other in each shard."""
        saved = self.saved(name)
        split, count = saved.split, saved.split.shape[0]
        first, stop, size = (
            part[0] * count // part[1],
            (part[0] + 1) * count // part[1],
            count // saved.experts,
        )
        found = []
        for at in range(first // size, -(-stop // size)):
            begin, end = max(first - at * size, 0), min(stop - at * size, size)
            shards = []
            for shard in range(saved.tensor_shard_count):
                shape = split.shard_shape(shard * split.copies)[1:]
                numel = math.prod(shape)
                place = at * saved.tensor_shard_count + shard
                flat = self._range(name, state, place, begin * numel, (end - begin) * numel)
                shards.append(flat.view(end - begin, *shape))
            found.append(join(split, shards))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _range(self, name: str, state: str, shard: int, start: int, numel: int) -> torch.Tensor:
        parts, at, stop = [], start, start + numel
        for fragment in self.saved(name).shards[shard]:
            if fragment.start <= at < fragment.start + fragment.numel:
                first = at - fragment.start
                last = min(stop - fragment.start, fragment.numel)
                parts.append(
                    self._read(
                        fragment.file, f"{state}/{name}", fragment.at + first, fragment.at + last
                    )
                )
                at = fragment.start + last
                if at == stop:
                    break
        if at != stop:
            raise self.incomplete_checkpoint(
                f"{name} ({state}) has no elements {at} to {stop} in it"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, number: int, key: str, first: int, last: int) -> torch.Tensor:
        name = self.manifest.files[number].name
        try:
            if number not in self._files:
                self._files[number] = safe_open(self.folder / name, framework="pt", device="cpu")
            return self._files[number].get_slice(key)[first:last]
        except (OSError, SafetensorError) as error:
            raise self.incomplete_checkpoint(f"{name} cannot be read ({error})") from None


def join(split: ParameterSharding, parts: list[torch.Tensor]) -> torch.Tensor:
    """Distinct shards, in order of tensor ranks -> the whole. A replicated parameter is its one
    copy."""
    if split.dimension is None:
        return parts[0].contiguous()
    shape = [
        split.shape[d] if d == split.dimension else size for d, size in enumerate(parts[0].shape)
    ]
    whole = parts[0].new_empty(shape)
    for shard, part in enumerate(parts):
        pieces = split.pieces(shard * split.copies)
        held = part.split([length for _, length in pieces], dim=split.dimension)
        for (start, length), values in zip(pieces, held, strict=True):
            whole.narrow(split.dimension, start, length).copy_(values)
    return whole


def cut(split: ParameterSharding, whole: torch.Tensor, tensor_rank: int) -> torch.Tensor:
    """What `split` gives `tensor_rank` of the whole: the inverse of join."""
    if split.dimension is None:
        return whole
    pieces = split.pieces(tensor_rank)
    return torch.cat(
        [whole.narrow(split.dimension, start, length) for start, length in pieces],
        dim=split.dimension,
    )
