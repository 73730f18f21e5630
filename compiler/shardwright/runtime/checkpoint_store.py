"""Copies of checkpoints at `checkpoint.upload_to`, any URL that fsspec opens. No torch here.

A copy is whole once its SHA256SUMS is there: it is put last.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.runtime.checkpoint_manifest import CHECKSUMS, checksum, read_checksums

_STEP = re.compile(r"step-\d{8}")
_CHUNK_BYTES = 8 * 2**20


class CheckpointStore:
    """Every method raises Refusal, SW6208, where the store does not do as asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self._explained("opened"):
            from fsspec.core import url_to_fs

            self._fs: Any
            self._fs, self._root = url_to_fs(url)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Stores raise what they like: each has errors of its own."""
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            help_text = "Credentials come from the environment, as the store's own tools take them."
            if isinstance(error, ImportError):
                help_text = f"Its fsspec package is missing: {error}. Install it on every host with pip."
            first = (str(error).splitlines() or [""])[0]
            raise Refusal(
                Diagnostic(
                    code="SW6208",
                    message=f"checkpoint.upload_to {self.url} cannot be {what}: {type(error).__name__}: {first}",
                    help=help_text,
                )
            ) from None

    def check(self) -> None:
        """Before the first step: whether anything can be written there."""
        with self._explained("written"):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(f"{self._root}/.probe", b"shardwright")
            self._fs.rm_file(f"{self._root}/.probe")

    def put(self, step: Path, names: Iterable[str]) -> None:
        """Files of a published checkpoint; each is read back."""
        sums = read_checksums(step)
        with self._explained("written"):
            for name in names:
                there = f"{self._root}/{step.name}/{name}"
                self._fs.makedirs(there.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(step / name), there)
                if name in sums and self._checksum(there) != sums[name]:
                    raise OSError(f"{step.name}/{name} is not there as it was sent")

    def _checksum(self, path: str) -> str:
        found = hashlib.sha256()
        with self._fs.open(path, "rb", block_size=_CHUNK_BYTES) as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
        return found.hexdigest()

    def steps(self) -> list[str]:
        """Names of the whole copies, oldest first."""
        with self._explained("read"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
            return sorted(n for n in names if _STEP.fullmatch(n) and self._fs.exists(f"{self._root}/{n}/{CHECKSUMS}"))

    def remove(self, name: str) -> None:
        """What says that it is whole goes first."""
        with self._explained("pruned"):
            self._fs.rm_file(f"{self._root}/{name}/{CHECKSUMS}")
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def fetch(self, name: str, root: Path) -> Path:
        """A copy as a folder under `root`; of one that is there in part or damaged, what is missing or wrong."""
        step = root / name
        target = step if step.exists() else root / f".{name}.fetched"
        with self._explained("read"):
            if target is not step:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir(parents=True)
            self._get(f"{name}/{CHECKSUMS}", target / CHECKSUMS)
            for file, digest in read_checksums(target).items():
                if not (target / file).exists() or checksum(target / file) != digest:
                    self._get(f"{name}/{file}", target / file)
            if target is not step:
                os.rename(target, step)
        return step

    def _get(self, path: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_name(f".{to.name}.fetched")
        self._fs.get_file(f"{self._root}/{path}", str(temporary))
        os.replace(temporary, to)
