"""Copy checkpoints to host memory: each rank's files to its own host, and to a host that holds the
next node (`checkpoint.in_memory`). The files outlive the ranks; the next attempt resumes from them.

A host keeps them in tmpfs, /dev/shm/shardwright-USER/RUN/HOST-node-K/attempt-N/step-XXXXXXXX. They
have the format of a checkpoint on disk (checkpoint_saver.py), so any layout reads them, and each
file has its SHA-256. A copy is published by a rename on each host, once every rank has written its
files; the last copy that was whole is removed only before the one after the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_loader import load_checkpoint, read_file_numbers
from shardwright.checkpoint.checkpoint_manifest import (
    CHECKSUMS,
    MANIFEST,
    checksum,
    checksums_text,
    read_checksums,
    read_manifest,
)
from shardwright.checkpoint.checkpoint_saver import (
    build_manifest,
    check_master_weights,
    gather_from_ranks,
    write_rank,
)
from shardwright.checkpoint.checkpoint_storage import published_steps, step_name
from shardwright.checkpoint.run_history import (
    RUN_FILE,
    RunHistory,
    SaveMetadata,
    run_history_of,
)
from shardwright.engines.trainer_protocol import Trainer
from shardwright.plan.folder_paths import PLAN_FILE
from shardwright.plan.plan import Plan, plan_to_json

ROOT_VARIABLE = "SHARDWRIGHT_MEMORY_FOLDER"
"""Names the tmpfs to use, where it is not /dev/shm."""
METADATA = (PLAN_FILE, RUN_FILE, MANIFEST, CHECKSUMS)
CHUNK_BYTES = 64 * 2**20
OWNER_FILE = "owner"
SPARE_BYTES = 2**30
"""Host memory that a copy leaves free, so that no rank is killed for it."""


def memory_root() -> Path:
    """Return this user's folder in tmpfs."""
    return Path(os.environ.get(ROOT_VARIABLE, "/dev/shm")) / f"shardwright-{os.geteuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """Describe a file of a copy that a host holds undamaged. place: its folder there."""

    place: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopy:
    """Describe what one host holds of a copy.

    sums: digest of its SHA256SUMS, which tells two copies of one step apart
    names: all files of the copy
    files: those that this host holds undamaged
    damaged: those whose bytes are others
    """

    attempt: int
    step: int
    sums: str
    names: tuple[str, ...]
    files: Mapping[str, HeldFile]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopy:
    """Name a whole copy. holders: file -> (rank of the first rank of a host that holds it, file
    there), the lowest rank first."""

    attempt: int
    step: int
    holders: Mapping[str, Sequence[tuple[int, HeldFile]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySize:
    """Hold what one copy took: bytes of all ranks' files and of those of the node with most."""

    total_bytes: int
    node_bytes: int


class MemoryCopies:
    """Save and find copies. Every rank makes the same calls; all are collective but the last."""

    def __init__(self, plan: Plan, folder: Path, attempt: int, line: RunHistory) -> None:
        self._plan, self._attempt, self._line = plan, attempt, line
        self._rank = dist.get_rank()
        # A plan for fewer nodes is a folder of its own, whose run/ is a link to the run's.
        self._owner = str((folder / "run").resolve())
        at = plan.ranks[self._rank]
        self._leads = at.slot == 0
        # Collectives of the engine's own groups may be of a GPU; these tensors are in host memory.
        self._group = dist.new_group(backend="gloo")
        host = socket.gethostname()
        self._run = memory_root() / line.run
        self._place = self._run / f"{host}-node-{at.node}"
        everyone = gather_from_ranks((host, str(self._place)))
        self._hosts = [each for each, _ in everyone]
        self._is_first_on_host = self._hosts.index(host) == self._rank
        self._places_here = {place for each, place in everyone if each == host}
        self._whole: Path | None = None
        self._exchange_error = ""
        self._manifest_parts: list[Any] | None = None
        self.ended = ""
        """Why no further copies are made; "" while they are."""

    # Saving.

    def save(self, trainer: Trainer, step: int, origin: SaveMetadata) -> CopySize | None:
        """Copy the state after a step; return None where its loss or weights are not finite, and
        where a host has no room, after which no further copies are made."""
        if not check_master_weights(trainer.owned_shards()) or not origin.finite:
            return None
        target = self._place / f"attempt-{self._attempt}" / step_name(step)
        partial = target.with_name(f".{target.name}.partial")
        own: list[tuple[str, int, str]] = []
        fragments: list[Any] = []

        def write() -> None:
            nonlocal own, fragments
            fragments, own = write_rank(self._plan, trainer, partial, self._rank)

        bytes_here = self._plan.gpus_per_node * sum(
            values.numel() * values.element_size()
            for shard in trainer.owned_shards()
            for values in shard.states.values()
        )
        failed = self._everywhere(lambda: self._make_room(bytes_here, partial))
        failed = failed or self._everywhere(write)
        if not failed:
            files = self._exchange(partial, own)
            if self._manifest_parts is None:  # the same for every step of an attempt
                self._manifest_parts = gather_from_ranks(fragments)
            metadata = self._metadata(trainer, step, files, origin)
            failed = self._everywhere(lambda: self._write_metadata(partial, metadata))
        if not failed:
            failed = self._everywhere(lambda: self._publish(partial, target))
        if failed:
            self.ended = failed
            if self._leads:
                shutil.rmtree(partial, ignore_errors=True)
            return None
        self._whole = target
        nodes = [0] * self._plan.nodes
        for place, written in zip(self._plan.ranks, files, strict=True):
            nodes[place.node] += sum(size for _, size, _ in written)
        return CopySize(total_bytes=sum(nodes), node_bytes=max(nodes))

    def _make_room(self, bytes_here: int, partial: Path) -> None:
        """Remove all copies of this place but the last whole one. Raises OSError.

        bytes_here: of this node's ranks, about
        """
        if not self._leads:
            return
        _make_private(memory_root())
        partial.parent.mkdir(parents=True, exist_ok=True)
        (self._run / OWNER_FILE).write_text(self._owner, encoding="utf-8")
        for path in self._copies_at(self._place):
            if path != self._whole:
                shutil.rmtree(path)
        partial.mkdir()
        free = min(shutil.disk_usage(partial).free, _available_memory_bytes() - SPARE_BYTES)
        needed = bytes_here * (1 if self._plan.nodes == 1 else 2)
        if needed > free:
            raise OSError(
                f"host {socket.gethostname()} has {free / 2**30:.1f} GiB of free memory for them, "
                f"and one takes about {needed / 2**30:.1f} GiB"
            )

    def _copies_at(self, place: Path) -> Iterator[Path]:
        """Yield the folders of copies, unfinished ones included."""
        for attempt in sorted(place.glob("attempt-*")):
            yield from sorted(attempt.iterdir())

    def _exchange(self, partial: Path, own: list[tuple[str, int, str]]) -> list[Any]:
        """Send this rank's files to the same slot of the next node, and write those of the node
        before. Returns every rank's (name, bytes, SHA-256)."""
        everyone = gather_from_ranks(own)
        if self._plan.nodes == 1:
            return everyone
        at, nodes = self._plan.ranks[self._rank], self._plan.nodes
        ranks = {(each.node, each.slot): rank for rank, each in enumerate(self._plan.ranks)}
        target = ranks[(at.node + 1) % nodes, at.slot]
        source = ranks[(at.node - 1) % nodes, at.slot]
        self._exchange_error = exchange_files(
            partial, own, target, everyone[source], source, self._group
        )
        return everyone

    def _metadata(
        self, trainer: Trainer, step: int, files: list[Any], origin: SaveMetadata
    ) -> Mapping[str, str]:
        """Return the texts of the files that every host has."""
        texts: list[Any] = [None]
        if self._rank == 0:
            assert self._manifest_parts is not None
            parts = list(zip(self._manifest_parts, files, strict=True))
            manifest = build_manifest(self._plan, trainer, step, parts, origin)
            own = {
                PLAN_FILE: plan_to_json(self._plan),
                RUN_FILE: json.dumps(asdict(self._line)) + "\n",
                MANIFEST: json.dumps(asdict(manifest)) + "\n",
            }
            sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in own.items()}
            sums |= {name: digest for written in files for name, _, digest in written}
            texts = [{**own, CHECKSUMS: checksums_text(sums)}]
        dist.broadcast_object_list(texts, src=0)
        found: Mapping[str, str] = texts[0]
        return found

    def _write_metadata(self, partial: Path, texts: Mapping[str, str]) -> None:
        if self._exchange_error:
            raise OSError(self._exchange_error)
        if self._leads:
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")

    def _publish(self, partial: Path, target: Path) -> None:
        if self._leads:
            partial.rename(target)

    def _everywhere(self, work: Any) -> str:
        """Run `work` on every rank; return the first error, with its rank, or ""."""
        try:
            work()
            error = ""
        except (OSError, SafetensorError) as failed:
            error = (failed.strerror if isinstance(failed, OSError) else None) or str(failed)
        errors = gather_from_ranks(error)
        return next((f"rank {rank}: {each}" for rank, each in enumerate(errors) if each), "")

    # Finding.

    def newest(self, after: int) -> tuple[MemoryCopy | None, list[str]]:
        """Return the newest whole copy of this run that is newer than the step `after`, and why
        newer ones are not used."""
        held = list(self._held(after)) if self._is_first_on_host else []
        everyone = gather_from_ranks(held)
        copies: dict[tuple[int, int, str], list[tuple[int, HeldCopy]]] = {}
        for rank, found in enumerate(everyone):
            for copy in found:
                copies.setdefault((copy.step, copy.attempt, copy.sums), []).append((rank, copy))
        notes: list[str] = []
        for (step, attempt, _), parts in sorted(copies.items(), reverse=True):
            holders: dict[str, list[tuple[int, HeldFile]]] = {}
            for rank, copy in parts:
                for name, file in copy.files.items():
                    holders.setdefault(name, []).append((rank, file))
            missing = [name for name in (*parts[0][1].names, CHECKSUMS) if name not in holders]
            if not missing:
                return MemoryCopy(attempt=attempt, step=step, holders=holders), notes
            notes.append(self._missing_text(step, missing[0], parts))
        return None, notes

    def _missing_text(self, step: int, name: str, parts: Sequence[tuple[int, HeldCopy]]) -> str:
        damaged = [self._hosts[rank] for rank, copy in parts if name in copy.damaged]
        why = f"no host has {name}"
        if damaged:
            why = f"{name} is damaged on host {damaged[0]}, and no other host has it"
        return f"warning[SW6331]: the copy of step {step} in memory is not used: {why}"

    def _held(self, after: int) -> Iterator[HeldCopy]:
        """Yield what this host holds of each copy of this run."""
        if not _is_private(memory_root()):
            return
        found: dict[tuple[int, int, str], HeldCopy] = {}
        host = socket.gethostname()
        for attempt in sorted(self._run.glob(f"{host}-node-*/attempt-*")):
            if not (number := attempt.name.removeprefix("attempt-")).isdecimal():
                continue
            for step, path in published_steps(attempt):
                if step <= after or not self._line.holds(run_history_of(path), step):
                    continue
                copy = _read_held(path, int(number), step)
                if copy is not None:
                    key = (copy.step, copy.attempt, copy.sums)
                    other = found.get(key)
                    files = copy.files if other is None else {**other.files, **copy.files}
                    damaged = copy.damaged + (() if other is None else other.damaged)
                    found[key] = replace(copy, files=files, damaged=damaged)
        yield from found.values()

    # Loading.

    def load(self, copy: MemoryCopy, trainer: Trainer) -> Path:
        """Bring each host the files that its ranks read, and load them; return their folder."""
        target = self._place / f"attempt-{copy.attempt}" / step_name(copy.step)
        self._fetch(copy, target, dict.fromkeys(METADATA))
        needed = {f"random-{self._rank:05d}.json"} & set(copy.holders)
        manifest = read_manifest(target)
        numbers = read_file_numbers(self._plan, trainer, target)
        needed |= {manifest.files[number].name for number in numbers}
        names: dict[str, None] = {}
        for place, own in zip(self._plan.ranks, gather_from_ranks(sorted(needed)), strict=True):
            if place.node == self._plan.ranks[self._rank].node:
                names |= dict.fromkeys(own)
        self._fetch(copy, target, names)
        load_checkpoint(self._plan, trainer, target, fetches=False)
        dist.barrier()
        self._whole = target
        return target

    def _fetch(self, copy: MemoryCopy, target: Path, names: Iterable[str]) -> None:
        """Write the files that this node lacks into `target`: linked where this host has them, else
        from the first host that has them."""
        host = self._hosts[self._rank]
        lacking: list[str] = []
        if self._leads:
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                if (target / name).exists() and self._holds(copy, name, target):
                    continue
                (target / name).unlink(missing_ok=True)
                here = [f for rank, f in copy.holders[name] if self._hosts[rank] == host]
                if here:
                    os.link(Path(here[0].place) / name, target / name)
                else:
                    lacking.append(name)
        wanted = gather_from_ranks(lacking)
        for name in sorted({each for own in wanted for each in own}):
            source, file = copy.holders[name][0]
            for rank, own in enumerate(wanted):
                if name not in own or rank == source:
                    continue
                if self._rank == source:
                    for chunk in _chunks([Path(file.place) / name]):
                        dist.send(chunk, rank, group=self._group)
                elif self._rank == rank:
                    writer = _FileWriter(target, [(name, file.size_bytes, "")])
                    for size in writer.chunk_sizes():
                        received = torch.empty(size, dtype=torch.uint8)
                        dist.recv(received, source, group=self._group)
                        writer.write(received)
                    writer.close()
        dist.barrier()

    def _holds(self, copy: MemoryCopy, name: str, target: Path) -> bool:
        host = self._hosts[self._rank]
        return any(
            self._hosts[rank] == host and file.place == str(target)
            for rank, file in copy.holders[name]
        )

    # Removing.

    def remove_others(self) -> None:
        """Remove this folder's copies on this host that this attempt does not need: of other runs,
        and of nodes that this host no longer is."""
        dist.barrier()
        if not self._is_first_on_host or not _is_private(memory_root()):
            return
        for run in memory_root().iterdir():
            with contextlib.suppress(OSError):
                owner = (run / OWNER_FILE).read_text(encoding="utf-8")
                if owner != self._owner:
                    continue
                if run != self._run:
                    shutil.rmtree(run)
                    continue
                host = socket.gethostname()
                for place in run.glob(f"{host}-node-*"):
                    if str(place) not in self._places_here:
                        shutil.rmtree(place)

    def remove(self) -> None:
        """Remove this run's copies on this host: a checkpoint on disk is as new."""
        dist.barrier()
        if self._leads:
            shutil.rmtree(self._place, ignore_errors=True)
        dist.barrier()
        if self._is_first_on_host:
            others = [path for path in self._run.glob("*-node-*") if path.is_dir()]
            if not others:
                shutil.rmtree(self._run, ignore_errors=True)


def exchange_files(
    folder: Path,
    own: Sequence[tuple[str, int, str]],
    target: int,
    others: Sequence[tuple[str, int, str]],
    source: int,
    group: dist.ProcessGroup | None,
) -> str:
    """Send this rank's files in `folder` to `target`, and write those of `source` beside them.

    own, others: (name, bytes, SHA-256)

    Returns why the others were not written with the bytes that were sent, or "". An error of the
    disk does not end the exchange: the peers wait for it.
    """
    writer, failed = _FileWriter(folder, others), ""
    outgoing = _chunks(folder / name for name, _, _ in own)
    for chunk, size in itertools.zip_longest(outgoing, writer.chunk_sizes()):
        requests: list[Any] = []
        received = None
        if chunk is not None:
            requests.append(dist.isend(chunk, target, group=group))
        if size is not None:
            received = torch.empty(size, dtype=torch.uint8)
            requests.append(dist.irecv(received, source, group=group))
        for request in requests:
            request.wait()
        if received is not None and not failed:
            try:
                writer.write(received)
            except OSError as error:
                failed = error.strerror or str(error)
    writer.close()
    return failed or writer.wrong


class _FileWriter:
    """Write files from chunks in order. wrong: why the last file is not the one that was sent."""

    def __init__(self, folder: Path, files: Sequence[tuple[str, int, str]]) -> None:
        self._folder, self._files = folder, tuple(files)
        self._next = iter(self._files)
        self._file: BinaryIO | None = None
        self._left, self._expected, self._digest = 0, "", hashlib.sha256()
        self.wrong = ""

    def chunk_sizes(self) -> Iterator[int]:
        for _, size, _ in self._files:
            yield from _sizes(size)

    def write(self, chunk: torch.Tensor) -> None:
        """Raises OSError."""
        while self._left == 0:
            self._open()
        data = chunk.numpy().data
        self._digest.update(data)
        assert self._file is not None
        self._file.write(data)
        self._left -= len(data)

    def _open(self) -> None:
        self.close()
        name, self._left, self._expected = next(self._next)
        self._digest = hashlib.sha256()
        self._file = (self._folder / name).open("wb")
        if self._left == 0:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            if self._expected and self._digest.hexdigest() != self._expected:
                self.wrong = "a file arrived with other bytes than were sent"


def _sizes(size: int) -> Iterator[int]:
    for number in range(math.ceil(size / CHUNK_BYTES)):
        yield min(CHUNK_BYTES, size - number * CHUNK_BYTES)


def _chunks(paths: Iterable[Path]) -> Iterator[torch.Tensor]:
    for path in paths:
        size = path.stat().st_size
        with path.open("rb") as file:
            for part in _sizes(size):
                data = bytearray(part)
                file.readinto(data)
                yield torch.frombuffer(data, dtype=torch.uint8)


def _read_held(path: Path, attempt: int, step: int) -> HeldCopy | None:
    """Return what a folder holds of a copy; None without its list of files."""
    try:
        sums = read_checksums(path)
        digest = checksum(path / CHECKSUMS)
        listed = (path / CHECKSUMS).stat().st_size
    except (OSError, ValueError):
        return None
    files = {CHECKSUMS: HeldFile(place=str(path), size_bytes=listed)}
    damaged = []
    for name, expected in sums.items():
        try:
            if checksum(path / name) == expected:
                size = (path / name).stat().st_size
                files[name] = HeldFile(place=str(path), size_bytes=size)
            else:
                damaged.append(name)
        except OSError:
            continue
    return HeldCopy(
        attempt=attempt,
        step=step,
        sums=digest,
        names=tuple(sums),
        files=files,
        damaged=tuple(damaged),
    )


def _make_private(root: Path) -> None:
    """Create this user's folder. Raises OSError where another user has made it."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700, parents=True)
    if not _is_private(root):
        raise OSError(f"{root} belongs to another user, or others may write to it")


def _is_private(root: Path) -> bool:
    """Return whether a folder is this user's own, and no link; anybody may write to /dev/shm."""
    try:
        found = root.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )


def _available_memory_bytes() -> float:
    """Return what Linux could give to new processes; infinity where it does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return math.inf
