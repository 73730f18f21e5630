"""Manage checkpoint folders, and their copies in remote storage. No torch.

`step-%08d` is a complete checkpoint, published by one rename; everything else under the root starts
with a dot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.checkpoint.checkpoint_manifest import (
    CHECKSUMS,
    MANIFEST,
    MOST_CHECKSUMS_BYTES,
    checksum,
    parse_checksums,
    read_checksums,
)
from shardwright.checkpoint.run_history import (
    RUN_FILE,
    UNKNOWN_RUN,
    RunHistory,
    parse_run_history,
    run_history_of,
)
from shardwright.diagnostics import Refusal, refusal
from shardwright.diagnostics.secret_values import MASK, url_credentials, without_credentials
from shardwright.utils.file_io import parse_json

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_ASIDE = re.compile(r"\.before-attempt-(\d+)")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(partial|removed|fetched)")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Return the step of a published folder's name, None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def step_of(checkpoint: Path) -> int:
    """Return the step of a published folder, 0 for another."""
    return parse_step(checkpoint.name) or 0


def published_steps(root: Path) -> list[tuple[int, Path]]:
    """Return the step folders under `root`, oldest first; only later damage makes a published one
    incomplete."""
    if not root.is_dir():
        return []
    named = ((parse_step(path.name), path) for path in root.iterdir())
    return sorted((step, path) for step, path in named if step is not None and path.is_dir())


def superseded_checkpoints(
    names: Sequence[str], keep: int, is_finite: Callable[[str], bool]
) -> list[str]:
    """Return the checkpoints beyond the last `keep`, oldest first, except the newest with a finite
    loss.

    names: oldest first.
    """
    newest, older = names[-keep:], names[:-keep]
    if any(is_finite(name) for name in reversed(newest)):
        return list(older)
    spared = next((name for name in reversed(older) if is_finite(name)), None)
    return [name for name in older if name != spared]


def publish(partial: Path, root: Path, step: int) -> None:
    """Publish a checkpoint by one rename; an existing folder of that name is moved aside."""
    target = root / step_name(step)
    if target.exists():
        _move_aside(root, [target], 0)
    os.rename(partial, target)


def move_newer_steps_aside(root: Path, attempt: int, newer_than: int) -> None:
    """Move checkpoints newer than the resumed step to a dot folder, so that none is lost."""
    later = [path for step, path in published_steps(root) if step > newer_than]
    if later:
        _move_aside(root, later, attempt)


def _move_aside(root: Path, steps: list[Path], attempt: int) -> None:
    """Move steps to a new dot folder, numbered `attempt` or higher (run/ may have been deleted)."""
    number = max([attempt, *(1 + taken for taken, _ in _moved_aside_folders(root))])
    aside = root / f".before-attempt-{number}"
    aside.mkdir(parents=True)
    for path in steps:
        path.rename(aside / path.name)


def _moved_aside_folders(root: Path) -> list[tuple[int, Path]]:
    """Return (attempt, folder), oldest first."""
    matches = ((_ASIDE.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def prune_moved_aside(root: Path, step: int) -> None:
    """Delete moved-aside folders, except the newest, once the run has passed all their steps."""
    for _, aside in _moved_aside_folders(root)[:-1]:
        if all(other <= step for other, _ in published_steps(aside)):
            shutil.rmtree(aside, ignore_errors=True)


def remove_step(path: Path) -> None:
    """Delete a checkpoint; rename it first, as a half-deleted one must not look complete."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    # Another host that shares the file system may have been first.
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def clear_unfinished(root: Path) -> None:
    """Delete what a killed attempt was writing, downloading or deleting."""
    for path in root.iterdir() if root.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# Copies of checkpoints at `checkpoint.upload_to`, any URL that fsspec opens. SHA256SUMS is uploaded
# last and marks a complete copy.


_CURRENT = ".run.json"
_CHUNK_BYTES = 8 * 2**20
_MOST_LINE_BYTES = 2**20


class CheckpointStore:
    """Access the remote copies. Every method raises SW6208 where the storage fails."""

    def __init__(self, url: str) -> None:
        self.url, self.shown_url = url, without_credentials(url)
        with self._explained("opened"):
            from fsspec.core import url_to_fs

            self._fs: Any
            self._fs, self._root = url_to_fs(url)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn any exception into SW6208: each storage raises its own types."""
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            help_text = "Set the credentials in the environment, as for the storage's own tools."
            if isinstance(error, ImportError):
                help_text = (
                    f"Install the storage's fsspec package on every host with pip ({error})."
                )
            first = without_credentials((str(error).splitlines() or [""])[0])
            for secret in url_credentials(self.url):
                first = first.replace(secret, MASK)
            raise refusal(
                "SW6208",
                (
                    f"checkpoint.upload_to {self.shown_url} cannot be {what}: "
                    f"{type(error).__name__}: {first}"
                ),
                help_text,
            ) from None

    def check(self) -> None:
        """Write and delete a probe file, before the first step."""
        with self._explained("written"):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(f"{self._root}/.probe", b"shardwright")
            self._fs.rm_file(f"{self._root}/.probe")

    def invalidate_copy(self, name: str, line: RunHistory) -> None:
        """Prepare for uploading a copy: move another run's copy of this name to `.before-RUN`, mark
        an own one incomplete."""
        with self._explained("written"):
            there = f"{self._root}/{name}"
            self._fs.invalidate_cache()
            if self._fs.exists(there) and self.run_history_of(name).run != line.run:
                aside = f"{self._root}/.before-{line.run}/{name}"
                for path in sorted(
                    map(str, self._fs.find(there)), key=lambda path: path.endswith(CHECKSUMS)
                ):
                    to = f"{aside}/{path.removeprefix(f'{there}/')}"
                    self._fs.makedirs(to.rpartition("/")[0], exist_ok=True)
                    self._fs.copy(path, to)
                self._remove(name)
            elif self._fs.exists(f"{there}/{CHECKSUMS}"):
                self._fs.rm_file(f"{there}/{CHECKSUMS}")

    def put(self, step: Path, names: Iterable[str]) -> None:
        """Upload files of a published checkpoint, and read each back."""
        sums = read_checksums(step)
        with self._explained("written"):
            for name in names:
                there = f"{self._root}/{step.name}/{name}"
                self._fs.makedirs(there.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(step / name), there)
                if name not in sums:
                    continue
                with self._fs.open(there, "rb", block_size=_CHUNK_BYTES) as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != sums[name]:
                    raise OSError(f"{step.name}/{name} differs from what was uploaded")

    def copy_missing(self, step: Path) -> bool:
        """Upload a complete checkpoint without a complete copy; return whether it was uploaded."""
        line = run_history_of(step)
        if step.name in self.steps() and self.run_history_of(step.name) == line:
            return False
        self.invalidate_copy(step.name, line)
        self.put(
            step, [*sorted(read_checksums(step), key=lambda name: name != RUN_FILE), CHECKSUMS]
        )
        self.set_current(line)
        return True

    def steps(self) -> list[str]:
        """Return the names of complete copies, oldest first."""
        return [
            name for name in self._names() if self._fs.exists(f"{self._root}/{name}/{CHECKSUMS}")
        ]

    def _names(self) -> list[str]:
        """Return the names of all copies, complete or not."""
        with self._explained("read"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            names = [
                str(path).rstrip("/").rpartition("/")[2]
                for path in self._fs.ls(self._root, detail=False)
            ]
            steps = ((parse_step(name), name) for name in names)
            return [
                name for _, name in sorted((step, name) for step, name in steps if step is not None)
            ]

    def run_history_of(self, name: str) -> RunHistory:
        """Return the run history of a copy."""
        return self._line(f"{name}/{RUN_FILE}") or UNKNOWN_RUN

    def current(self) -> RunHistory | None:
        """Return the run history that uploaded last."""
        line = self._line(_CURRENT)
        return line if line is not None and line.run else None

    def set_current(self, line: RunHistory) -> None:
        with self._explained("written"):
            self._fs.pipe_file(f"{self._root}/{_CURRENT}", json.dumps(asdict(line)).encode())

    def _line(self, path: str) -> RunHistory | None:
        with self._explained("read"):
            if not self._fs.exists(f"{self._root}/{path}"):
                return None
            return parse_run_history(
                self._fs.cat_file(f"{self._root}/{path}", start=0, end=_MOST_LINE_BYTES)
            )

    def prune(self, line: RunHistory, keep: int) -> None:
        """Delete this run's superseded copies, and its incomplete ones before the newest."""
        complete = set(self.steps())
        own = [name for name in self._names() if self.run_history_of(name).run == line.run]
        ours = [name for name in own if name in complete]
        gone = superseded_checkpoints(ours, keep, self.is_finite)
        remaining = [name for name in ours if name not in gone]
        for name in own[: own.index(remaining[-1])] if remaining else ():
            if name not in remaining:
                self.remove(name)

    def is_finite(self, name: str) -> bool:
        """Return the manifest's `finite`."""
        with self._explained("read"):
            manifest = parse_json(self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}"))
            return isinstance(manifest, dict) and manifest.get("finite") is True

    def remove(self, name: str) -> None:
        with self._explained("pruned"):
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Delete a copy, its checksums first, as these mark it complete."""
        if self._fs.exists(f"{self._root}/{name}/{CHECKSUMS}"):
            self._fs.rm_file(f"{self._root}/{name}/{CHECKSUMS}")
        self._fs.rm(f"{self._root}/{name}", recursive=True)

    def fetch(self, name: str, root: Path) -> Path:
        """Download a copy to a folder under `root`; of a partial or damaged folder, only missing or
        wrong files."""
        step = root / name
        target = step if step.exists() else root / f".{name}.fetched"
        with self._explained("read"):
            if target is not step:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
            text = self._fs.cat_file(
                f"{self._root}/{name}/{CHECKSUMS}", start=0, end=MOST_CHECKSUMS_BYTES
            )
            for file, digest in parse_checksums(
                text
            ).items():  # parse_checksums refuses names outside the folder
                if not (target / file).exists() or checksum(target / file) != digest:
                    self._get(name, file, target)
            self._get(name, CHECKSUMS, target)
            if target is not step:
                os.rename(target, step)
        return step

    def _get(self, step: str, name: str, folder: Path) -> None:
        to = folder / name
        if not to.parent.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{to.parent} is a link out of the checkpoint")
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f".{to.name}.fetched")
        temporary.unlink(missing_ok=True)  # a link would be followed
        self._fs.get_file(f"{self._root}/{step}/{name}", str(temporary))
        os.replace(temporary, to)
