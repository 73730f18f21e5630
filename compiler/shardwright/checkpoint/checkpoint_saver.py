"""Save checkpoints: each rank writes its own fragments, and one rename publishes the `step-%08d`
folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_loader import parameter_splits, replicated_split
from shardwright.checkpoint.checkpoint_manifest import (
    CHECKSUMS,
    MANIFEST,
    MANIFEST_VERSION,
    Fragment,
    Manifest,
    SavedFile,
    SavedTensor,
    checksum,
    checksums_text,
    is_finite,
    read_checksums,
    write_manifest,
)
from shardwright.checkpoint.checkpoint_storage import (
    CheckpointStore,
    clear_unfinished,
    move_newer_steps_aside,
    prune_moved_aside,
    publish,
    published_steps,
    remove_step,
    step_name,
    superseded_checkpoints,
)
from shardwright.checkpoint.random_state import random_state
from shardwright.checkpoint.resume_checkpoint import checkpoint_root
from shardwright.checkpoint.run_history import (
    RUN_FILE,
    UNKNOWN_METADATA,
    RunHistory,
    SaveMetadata,
    run_history_of,
    write_run_history,
)
from shardwright.diagnostics import Refusal, refusal
from shardwright.engines.trainer_protocol import OwnedShard, Trainer
from shardwright.plan.plan import Plan, plan_to_json
from shardwright.utils.file_io import umask

# Checks that the fp32 masters equal the model's weights and are finite. An option that rearranges
# masters would put right values under wrong names, which only a run on another layout would notice.


CHUNK_ELEMENTS = 2**24
"""Elements compared at a time, which bounds temporary memory."""


def check_master_weights(fragments: Iterable[OwnedShard]) -> bool:
    """Raise SW6210 on all ranks unless every master, cast, equals its live weight (collective).

    Returns whether all weights are finite. fragments: all of this rank; nothing is gathered.
    """
    compared = [(f, *_compare_bits(f)) for f in fragments if "fp32" in f.states]
    # Reading the results synchronizes with the GPU, so it comes last.
    suspects = [f for f, other_bits, _ in compared if bool(other_bits)]
    other = next(
        ((f.name, count, f.live.numel()) for f in suspects if (count := _count_differing(f))), None
    )
    finite = all(bool(finite) for *_, finite in compared)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (other, finite))
    for rank, (difference, _) in enumerate(everyone):
        if difference is not None:
            name, count, of = difference
            raise refusal(
                "SW6210",
                f"rank {rank}: the fp32 master copy of {name} differs from the model's weights in "
                f"{count:,} of {of:,} elements, so this checkpoint would be wrong",
                "Nothing was written; earlier checkpoints are unchanged. Remove `extra` from the "
                "recipe and compile again: one of its keys may rearrange the optimizer. Without "
                "`extra` this is a defect: report it with plan.json.",
            )
    return all(finite for _, finite in everyone)


@torch.no_grad()
def _compare_bits(f: OwnedShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (whether any live weight has other bits, whether all are finite) in one pass, without
    synchronizing."""
    other = torch.zeros((), dtype=torch.bool, device=f.live.device)
    finite = torch.ones_like(other)
    for cast, live in _pieces(f):
        other |= (_bits(cast) != _bits(live)).any()
        if live.numel():
            low, high = torch.aminmax(live)  # NaN where there is one
            finite &= low.isfinite() & high.isfinite()
    return other, finite


@torch.no_grad()
def _count_differing(f: OwnedShard) -> int:
    """Count elements with different values: NaN has many bit patterns, and zero has two."""
    return sum(
        int(((cast != live) & ~(cast.isnan() & live.isnan())).sum()) for cast, live in _pieces(f)
    )


def _pieces(f: OwnedShard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield chunks of the master, cast, and of the live weight."""
    for master, live in zip(
        f.states["fp32"].split(CHUNK_ELEMENTS), f.live.split(CHUNK_ELEMENTS), strict=True
    ):
        yield master.to(live.dtype).to(live.device), live


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


FILE_BYTES = 2 * 2**30
"""Size of a rank's file: device tensors are copied to the host one file at a time."""
_RANK_FILE = re.compile(r"(rank|random)-\d.*")

WrittenFiles = list[tuple[str, int, str]]
"""(name, bytes, SHA-256) of each"""

WrittenFragment = tuple[int, str, tuple[int, ...], tuple[str, ...], int, int, int, int]
"""(shard, name, shard shape, states, number of the rank's file, start, elements, offset in the
file's tensor)"""


def save_checkpoint(
    plan: Plan,
    folder: Path,
    trainer: Trainer,
    step: int,
    *,
    last: bool = True,
    origin: SaveMetadata = UNKNOWN_METADATA,
) -> list[int]:
    """Save a checkpoint (collective); return the bytes of the ranks' files by node.

    Everything goes to a dot folder and to the disk; global rank 0 renames it. Then each rank
    uploads its files to checkpoint.upload_to, and rank 0 prunes to `keep`.
    last: whether this is the last step.
    origin: the writing run.
    Raises, on every rank, SW6205 (a rank cannot write), SW6210 (wrong masters); published
    checkpoints stay unchanged. A failed upload ends the run only after the last step (SW6208);
    before it, a warning is printed and nothing is pruned.
    """
    root = checkpoint_root(plan, folder)
    name, rank = step_name(step), dist.get_rank()
    partial = root / f".{name}.partial"
    finite = check_master_weights(trainer.owned_shards())
    origin = replace(origin, finite=origin.finite and finite)
    # A second time on hosts that do not share rank 0's file system.
    leads = (rank == 0, rank != 0 and plan.ranks[rank].slot == 0)

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, exist_ok=rank != 0)
        if not (partial / RUN_FILE).exists():
            write_run_history(partial, origin.line)

    for mine in leads:
        _run_on_every_rank(begin if mine else lambda: None, partial)
    rank_files = _run_on_every_rank(lambda: write_rank(plan, trainer, partial, rank), partial)
    _run_on_every_rank(
        lambda: (
            _finish(plan, folder, trainer, partial, step, rank_files, origin) if rank == 0 else None
        ),
        partial,
    )
    _run_on_every_rank(lambda: _publish(partial, root, step) if leads[0] else None, partial)
    _run_on_every_rank(
        lambda: _publish(partial, root, step) if leads[1] and partial.exists() else None, partial
    )
    store = CheckpointStore(plan.checkpoint.upload_to) if plan.checkpoint.upload_to else None
    failed = (
        _upload(store, root / name, [file for file, _, _ in rank_files[rank][1]], origin.line)
        if store
        else None
    )
    if failed is not None:
        if last:
            raise failed
        if rank == 0:
            print(
                f"warning[SW6208]: {failed.diagnostics[0].message}; {name} is on this disk only",
                flush=True,
            )
    elif plan.checkpoint.keep:
        _prune(root, store, plan.checkpoint.keep, origin.line, step, leads)
    dist.barrier()
    nodes = [0] * plan.nodes
    for place, (_, files) in zip(plan.ranks, rank_files, strict=True):
        nodes[place.node] += sum(size for _, size, _ in files)
    return nodes


def _publish(partial: Path, root: Path, step: int) -> None:
    publish(partial, root, step)
    _flush(root)


def _prune(
    root: Path,
    store: CheckpointStore | None,
    keep: int,
    line: RunHistory,
    step: int,
    leads: tuple[bool, bool],
) -> None:
    """Delete superseded checkpoints of this run, locally and remotely, and old moved-aside
    folders."""
    for mine in leads:
        own = (
            [path for _, path in published_steps(root) if run_history_of(path).run == line.run]
            if mine
            else []
        )
        for old in superseded_checkpoints(
            [path.name for path in own], keep, lambda name: is_finite(root / name)
        ):
            with contextlib.suppress(OSError):  # the next save tries again
                remove_step(root / old)
        if mine:
            prune_moved_aside(root, step)
        dist.barrier()
    if leads[0] and store is not None:
        try:
            store.prune(line, keep)
        except Refusal as refusal:
            print(f"warning[SW6208]: {refusal.diagnostics[0].message}", flush=True)


def _upload(
    store: CheckpointStore, step: Path, mine: list[str], line: RunHistory
) -> Refusal | None:
    """Upload each rank's own files (collective); rank 0 uploads the others next, and the checksums
    last."""
    rank = dist.get_rank()

    def rest() -> None:
        names = [name for name in read_checksums(step) if not _RANK_FILE.fullmatch(name)]
        store.put(step, [*names, CHECKSUMS])
        store.set_current(line)

    def begin() -> None:
        store.invalidate_copy(step.name, line)
        store.put(step, [RUN_FILE])

    for phase, is_mine in (
        (begin, rank == 0),
        (lambda: store.put(step, mine), True),
        (rest, rank == 0),
    ):
        error = None
        try:
            if is_mine:
                phase()
        except Refusal as refused:
            error = refused.diagnostics[0]
        if diagnostics := [d for d in gather_from_ranks(error) if d is not None]:
            return Refusal(diagnostics[0])
    return None


PROBE = ".probe-"


def prepare_checkpoint_folder(plan: Plan, folder: Path, attempt: int, resumed_step: int) -> None:
    """Test that checkpoints can be written, before the first step (collective). Raises SW6209.

    On every host, later checkpoints are moved aside, and unfinished ones are deleted.
    """
    root, rank = checkpoint_root(plan, folder), dist.get_rank()

    def prepare() -> None:
        write_probe(root)
        clear_unfinished(root)
        move_newer_steps_aside(root, attempt, newer_than=resumed_step)
        if plan.checkpoint.upload_to and rank == 0:
            CheckpointStore(plan.checkpoint.upload_to).check()

    for leads in (rank == 0, rank != 0 and plan.ranks[rank].slot == 0):
        _run_on_every_rank(prepare if leads else lambda: None, root / PROBE, code="SW6209")


def write_probe(root: Path) -> None:
    """Make `root`, and a folder in it for a moment. Hosts of a shared file system do so at once."""
    root.mkdir(parents=True, exist_ok=True)
    os.rmdir(tempfile.mkdtemp(prefix=PROBE, dir=root))


def _run_on_every_rank(work: Any, partial: Path, code: str = "SW6205") -> list[Any]:
    """Run `work` on every rank and return all results; where one fails, all ranks raise `code`."""
    try:
        mine: tuple[Any, str | None] = (work(), None)
    except (OSError, SafetensorError) as error:
        mine = (None, (error.strerror if isinstance(error, OSError) else None) or str(error))
    everyone = gather_from_ranks(mine)
    failed = [(rank, error) for rank, (_, error) in enumerate(everyone) if error is not None]
    if not failed:
        return [value for value, _ in everyone]
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    what = "checkpoints" if code == "SW6209" else "the checkpoint " + partial.name.split(".")[1]
    raise refusal(
        code,
        f"rank {failed[0][0]} cannot write {what} in {str(partial.parent)!r}: {failed[0][1]}",
        "Free space or make the folder writable, then `run` again: it resumes from the newest "
        "checkpoint, which is unharmed. checkpoint.keep limits the number of checkpoints.",
    )


def gather_from_ranks(mine: Any) -> list[Any]:
    """Gather an object from every rank, in order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def write_rank(
    plan: Plan, trainer: Trainer, partial: Path, rank: int
) -> tuple[list[WrittenFragment], WrittenFiles]:
    """Write this rank's files; return their fragments and the files."""
    mine = fragments_to_write(plan, trainer, rank)
    rooms = itertools.accumulate(
        sum(t.numel() * t.element_size() for t in f.states.values()) for _, f in mine
    )
    written: list[WrittenFragment] = []
    files: WrittenFiles = []
    numbered = zip((room // FILE_BYTES for room in rooms), mine, strict=True)
    for number, (_, group) in enumerate(itertools.groupby(numbered, key=lambda pair: pair[0])):
        parts: dict[str, list[torch.Tensor]] = {}
        for _, (shard, f) in group:
            state, values = next(iter(f.states.items()))
            at = sum(part.numel() for part in parts.get(f"{state}/{f.name}", ()))
            written.append(
                (shard, f.name, f.shard_shape, tuple(f.states), number, f.start, values.numel(), at)
            )
            for state, values in f.states.items():
                parts.setdefault(f"{state}/{f.name}", []).append(values.detach().cpu())
        tensors = {
            key: chunks[0].clone() if len(chunks) == 1 else torch.cat(chunks)
            for key, chunks in parts.items()
        }
        path = partial / f"rank-{rank:05d}-{number:03d}.safetensors"
        save_safetensors(tensors, path)
        files.append(_flushed(path, partial))
    path = partial / f"random-{rank:05d}.json"
    path.write_text(json.dumps(random_state()), encoding="utf-8")
    files.append(_flushed(path, partial))
    return written, files


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Save tensors with the permissions of any new file; safetensors restricts its files to the
    owner."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o666 & ~umask())


def fragments_to_write(plan: Plan, trainer: Trainer, rank: int) -> list[tuple[int, OwnedShard]]:
    """Return (shard, fragment) for what this rank writes: only one rank writes each replica."""
    at = plan.ranks[rank]
    splits = parameter_splits(plan, trainer.transposed)
    mine = []
    for f in trainer.owned_shards():
        split = splits.get(f.name)
        cut = split is not None and split.dimension is not None
        copies = split.copies if split is not None and cut else plan.strategy.tensor
        part, copy = 0, at.data * plan.strategy.context + at.context
        if plan.is_expert_parameter(f.name):
            part, copy = plan.expert_coordinates(at)
            copies = copies if cut else 1
        if not f.copied and at.tensor % copies == 0 and (f.partitioned or copy == 0):
            shards = plan.strategy.tensor // copies if cut else 1
            mine.append((part * shards + (at.tensor // copies if cut else 0), f))
    return mine


def _flushed(path: Path, partial: Path) -> tuple[str, int, str]:
    """Flush a file to disk; return (name, bytes, SHA-256)."""
    _flush(path)
    return str(path.relative_to(partial)), path.stat().st_size, checksum(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish(
    plan: Plan,
    folder: Path,
    trainer: Trainer,
    partial: Path,
    step: int,
    rank_files: list[Any],
    origin: SaveMetadata,
) -> None:
    """Write the manifest, the folder's model, tokenizer and plan, and the checksums."""
    for part in ("model", "tokenizer"):
        if (folder / part).is_dir():
            shutil.copytree(folder / part, partial / part)
    (partial / "plan.json").write_text(plan_to_json(plan), encoding="utf-8")
    write_manifest(partial, build_manifest(plan, trainer, step, rank_files, origin))
    rest = [
        path
        for part in ("model", "tokenizer")
        for path in (partial / part).rglob("*")
        if path.is_file()
    ]
    top = [partial / name for name in ("plan.json", RUN_FILE, MANIFEST)]
    own = [_flushed(path, partial) for path in (*rest, *top)]
    sums = {
        name: digest
        for name, _, digest in (*own, *(file for _, files in rank_files for file in files))
    }
    (partial / CHECKSUMS).write_text(checksums_text(sums), encoding="utf-8")
    _flush(partial / CHECKSUMS)
    _flush(partial)


def build_manifest(
    plan: Plan,
    trainer: Trainer,
    step: int,
    rank_files: list[tuple[list[WrittenFragment], WrittenFiles]],
    origin: SaveMetadata,
) -> Manifest:
    splits = parameter_splits(plan, trainer.transposed)
    files: list[SavedFile] = []
    tensors: dict[str, SavedTensor] = {}
    shards: dict[str, dict[int, list[Fragment]]] = {}
    for written, names in rank_files:
        first = len(files)
        files += [SavedFile(name=name, size_bytes=size) for name, size, _ in names]
        for shard, name, shape, states, number, start, numel, at in written:
            split = splits.get(name) or replicated_split(plan, name, shape, trainer)
            tensors[name] = SavedTensor(
                split=split,
                transposed=name in trainer.transposed,
                states=states,
                shards=(),
                experts=plan.expert_shard_count(name),
            )
            fragments = shards.setdefault(name, {}).setdefault(shard, [])
            fragments.append(Fragment(file=first + number, start=start, numel=numel, at=at))
    for name, by_shard in shards.items():
        in_order = tuple(
            tuple(sorted(by_shard[s], key=lambda f: f.start)) for s in sorted(by_shard)
        )
        tensors[name] = replace(tensors[name], shards=in_order)
    counters = trainer.counters()
    return Manifest(
        version=MANIFEST_VERSION,
        step=step,
        optimizer_step=counters.updates,
        loss_scale=counters.loss_scale,
        tensors=tensors,
        files=tuple(files),
        rows=origin.rows,
        finite=origin.finite,
        data=dict(origin.data),
    )
