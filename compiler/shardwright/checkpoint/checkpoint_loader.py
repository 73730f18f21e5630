"""Load a checkpoint into a trainer, whatever layout wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_compatibility import incomplete_checkpoint, same_sharding
from shardwright.checkpoint.checkpoint_manifest import SavedTensor, damage, read_manifest
from shardwright.checkpoint.checkpoint_storage import CheckpointStore
from shardwright.checkpoint.random_state import set_random_state
from shardwright.diagnostics import Refusal
from shardwright.engines.trainer_protocol import (
    OptimizerCounters,
    OwnedShard,
    Trainer,
    state_name,
)
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.layout.quantized_moments import is_quantized, scale_sharding
from shardwright.parallel.learning_rate import learning_rate
from shardwright.plan.plan import Plan, read_plan

# Reading a checkpoint's tensors for any layout: a shard that was split the same way is read
# directly, others from the full tensor.


ExpertPart = tuple[int, int]
"""(index, count) of one of `count` equal parts of the first dimension."""
ALL_EXPERTS: ExpertPart = (0, 1)


class CheckpointReader:
    """Read an open checkpoint; files are opened on first use and memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest. Raises SW6201."""
        self.folder = folder
        try:
            self.manifest = read_manifest(folder)
        except (OSError, ValueError) as error:
            raise self.incomplete_checkpoint(str(error).splitlines()[0]) from None
        self._files: dict[int, Any] = {}
        # The last resharded parameter: an engine may request it in several pieces.
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
        help = "Name another `step-XXXXXXXX` folder; --resume auto uses the newest complete one."
        return incomplete_checkpoint(self.folder, why, help)

    def saved(self, name: str) -> SavedTensor:
        if name not in self.manifest.tensors:
            raise self.incomplete_checkpoint(f"it has no parameter {name}")
        return self.manifest.tensors[name]

    def whole(self, name: str, state: str) -> torch.Tensor:
        """Return the unsplit parameter in Hugging Face's layout."""
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
        """Return elements [start, start + numel) of a flattened shard, 1-D.

        split, tensor_rank: the shard.
        experts: the part of the experts; no other experts are read.
        """
        saved = self.saved(name)
        if split.shape != saved.split.shape:
            raise self.incomplete_checkpoint(
                f"shape mismatch for {name}: checkpoint {saved.split.shape}, model {split.shape}"
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
        """Return a part of the experts, unsplit otherwise; experts are contiguous in each shard."""
        saved = self.saved(name)
        split, count = saved.split, saved.split.shape[0]
        first, stop, size = (
            part[0] * count // part[1],
            (part[0] + 1) * count // part[1],
            count // saved.experts,
        )
        tensors = []
        for at in range(first // size, -(-stop // size)):
            begin, end = max(first - at * size, 0), min(stop - at * size, size)
            shards = []
            for shard in range(saved.tensor_shard_count):
                shape = split.shard_shape(shard * split.copies)[1:]
                numel = math.prod(shape)
                place = at * saved.tensor_shard_count + shard
                flat = self._range(name, state, place, begin * numel, (end - begin) * numel)
                shards.append(flat.view(end - begin, *shape))
            tensors.append(join(split, shards))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

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
                f"elements {at} to {stop} of {name} ({state}) are missing"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, number: int, key: str, first: int, last: int) -> torch.Tensor:
        name = self.manifest.files[number].name
        try:
            if number not in self._files:
                self._files[number] = safe_open(self.folder / name, framework="pt", device="cpu")
            rows: torch.Tensor = self._files[number].get_slice(key)[first:last]
        except (OSError, SafetensorError) as error:
            raise self.incomplete_checkpoint(f"{name} cannot be read ({error})") from None
        if rows.shape != (last - first,):
            raise self.incomplete_checkpoint(f"{name} has no elements {first} to {last} of {key}")
        return rows


def join(split: ParameterSharding, parts: list[torch.Tensor]) -> torch.Tensor:
    """Merge distinct shards, in order of tensor ranks, into the full tensor; a replicated parameter
    is its one copy."""
    if split.dimension is None:
        return parts[0].contiguous()
    shape = [
        split.shape[d] if d == split.dimension else size for d, size in enumerate(parts[0].shape)
    ]
    merged = parts[0].new_empty(shape)
    for shard, part in enumerate(parts):
        pieces = split.shard_ranges(shard * split.copies)
        held = part.split([length for _, length in pieces], dim=split.dimension)
        for (start, length), values in zip(pieces, held, strict=True):
            merged.narrow(split.dimension, start, length).copy_(values)
    return merged


def cut(split: ParameterSharding, whole: torch.Tensor, tensor_rank: int) -> torch.Tensor:
    """Return the shard of the full tensor that `split` gives `tensor_rank`: the inverse of join."""
    if split.dimension is None:
        return whole
    pieces = split.shard_ranges(tensor_rank)
    return torch.cat(
        [whole.narrow(split.dimension, start, length) for start, length in pieces],
        dim=split.dimension,
    )


def parameter_splits(plan: Plan, transposed: frozenset[str]) -> dict[str, ParameterSharding]:
    """Return the sharding of each parameter, and of the scales of quantized moments.

    transposed: the trainer's
    """
    found = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    if not OPTIMIZERS[plan.optimizer.name].quantizes:
        return found
    for p in tuple(found.values()):
        if is_quantized(math.prod(p.shape)):
            turned = p
            if p.name in transposed:
                dimension = None if p.dimension is None else 1 - p.dimension
                turned = replace(p, shape=p.shape[::-1], dimension=dimension)
            for moment in OPTIMIZERS[plan.optimizer.name].moments:
                name = state_name(p.name, f"{moment}_scale")
                found[name] = scale_sharding(turned, name)
    return found


def replicated_split(
    plan: Plan, name: str, shape: tuple[int, ...], trainer: Trainer
) -> ParameterSharding:
    """Return the sharding of a parameter that every tensor rank holds unsplit.

    shape: in this process, which may have a part of the experts.
    """
    shape = shape[::-1] if name in trainer.transposed else shape
    if (experts := plan.expert_shard_count(name)) > 1:
        shape = (shape[0] * experts, *shape[1:])
    return ParameterSharding(name=name, shape=shape, dimension=None, blocks=(), sizes=())


def read_states(plan: Plan, trainer: Trainer, checkpoint: Path, names: tuple[str, ...]) -> set[str]:
    """Read those states that the checkpoint has into the trainer's; return their names. Raises
    SW6201."""
    present: set[str] = set()
    splits = parameter_splits(plan, trainer.transposed)
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        for f in trainer.owned_shards():
            saved = reader.saved(f.name).states
            states = tuple(name for name in names if name in f.states and name in saved)
            _read_fragment(plan, trainer, reader, f, states, splits)
            present.update(states)
    return present


def _read_fragment(
    plan: Plan,
    trainer: Trainer,
    reader: CheckpointReader,
    f: OwnedShard,
    states: tuple[str, ...],
    splits: dict[str, ParameterSharding],
) -> None:
    for state in states:
        values = f.states[state]
        values.copy_(_range_of_fragment(plan, trainer, reader, f, state, values.numel(), splits))


def _range_of_fragment(
    plan: Plan,
    trainer: Trainer,
    reader: CheckpointReader,
    f: OwnedShard,
    state: str,
    numel: int,
    splits: dict[str, ParameterSharding],
) -> torch.Tensor:
    """Return the checkpoint's values of one state of a shard of this rank, 1-D."""
    at = plan.ranks[dist.get_rank()]
    split = splits.get(f.name) or replicated_split(plan, f.name, f.shard_shape, trainer)
    part = (
        (plan.expert_rank_of(at), plan.strategy.expert)
        if plan.expert_shard_count(f.name) > 1
        else ALL_EXPERTS
    )
    return reader.fragment(f.name, state, split, at.tensor, f.start, numel, part)


class _FileNumbers(CheckpointReader):
    """Collect the numbers of the files that reads would touch, without reading them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.numbers: set[int] = set()

    def _read(self, number: int, key: str, first: int, last: int) -> torch.Tensor:
        self.numbers.add(number)
        return torch.empty(last - first, device="meta")


def read_file_numbers(plan: Plan, trainer: Trainer, checkpoint: Path) -> set[int]:
    """Return the numbers of the manifest's files that this rank reads. Raises SW6201."""
    splits = parameter_splits(plan, trainer.transposed)
    reader = _FileNumbers(checkpoint)
    with reader:
        for f in trainer.owned_shards():
            for state, values in f.states.items():
                _range_of_fragment(plan, trainer, reader, f, state, values.numel(), splits)
        return reader.numbers


def load_checkpoint(plan: Plan, trainer: Trainer, checkpoint: Path, *, fetches: bool = True) -> int:
    """Load a checkpoint of any layout (collective); return its step. Raises SW6201.

    fetches: files that this host lacks are copied from checkpoint.upload_to
    """
    rank, splits = dist.get_rank(), parameter_splits(plan, trainer.transposed)
    if (
        fetches
        and plan.checkpoint.upload_to
        and plan.ranks[rank].slot == 0
        and damage(checkpoint, contents=False)
    ):
        # Where hosts share no file system, files of other hosts' ranks are missing.
        CheckpointStore(plan.checkpoint.upload_to).fetch(checkpoint.name, checkpoint.parent)
    dist.barrier()
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        for f in trainer.owned_shards():
            _read_fragment(plan, trainer, reader, f, tuple(f.states), splits)
        manifest = reader.manifest
    trainer.finish_restore(
        manifest.step,
        OptimizerCounters(updates=manifest.optimizer_step, loss_scale=manifest.loss_scale),
    )
    if same_sharding(plan, read_plan(checkpoint)):
        path = checkpoint / f"random-{rank:05d}.json"
        try:
            set_random_state(json.loads(path.read_text(encoding="utf-8")))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
        ) as error:  # the file is untrusted input
            raise reader.incomplete_checkpoint(
                f"{path.name} holds no random state ({error})"
            ) from None
    else:
        # Ranks of another layout hold other parts: start new random streams.
        torch.manual_seed(torch.initial_seed() + (manifest.step + 1) * plan.strategy.world_size)
    return manifest.step


# Changes since a checkpoint was written that do not prevent resuming; for rank 0, once the data is
# prepared and its epochs are counted.


def data_changes(
    checkpoint: Path, rows: tuple[int, ...], data: Mapping[str, str]
) -> tuple[str, ...]:
    """Return warnings about data that changed under the same paths.

    rows: training sequences of each part.
    data: data.path -> digest.
    """
    saved = read_manifest(checkpoint)
    changed = []
    if saved.rows and saved.rows != rows:
        had, has = (" + ".join(f"{n:,}" for n in counts) for counts in (saved.rows, rows))
        changed.append(f"the data had {had} sequences and has {has}")
    if names := [
        repr(name) for name, digest in data.items() if saved.data.get(name, digest) != digest
    ]:
        changed.append(f"the content of {', '.join(names)} changed")
    if not changed:
        return ()
    return (
        f"warning[SW6207]: the order of the samples differs from {checkpoint.name}'s: "
        f"{'; '.join(changed)}; some samples will be trained on twice, others never",
    )


def schedule_changes(plan: Plan, checkpoint: Path, step: int) -> tuple[str, ...]:
    """Return warnings about a changed learning rate schedule.

    plan: with epochs counted, like the checkpoint's.
    step: the checkpoint's step.
    """
    saved = read_plan(checkpoint)
    was, now = _schedule(saved), _schedule(plan)
    changed = [
        f"training.{key} {_format_value(was[key])} -> {_format_value(now[key])}"
        for key in now
        if was[key] != now[key]
    ]
    if not changed:
        return ()
    before, after = (
        learning_rate(p.optimizer, p.scheduler, p.training.steps, step + 1) for p in (saved, plan)
    )
    return (
        f"warning[SW6217]: the learning rate schedule differs from {checkpoint.name}'s "
        f"({', '.join(changed)}): step {step + 1:,} uses {after:.4g}, not {before:.4g}",
    )


def _schedule(plan: Plan) -> dict[str, object]:
    """Return the schedule by recipe keys below `training`."""
    steps = {
        "epochs": plan.training.epochs,
        "steps": plan.training.steps,
        "optimizer.lr": plan.optimizer.lr,
        "optimizer.adamw_lr": plan.optimizer.adamw_lr,
    }
    return steps | {
        f"scheduler.{f.name}": getattr(plan.scheduler, f.name) for f in fields(plan.scheduler)
    }


def _format_value(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
