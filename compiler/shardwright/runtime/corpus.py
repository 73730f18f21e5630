"""Rows of token ids on disk: every data kind becomes an (n, S) array that is memory-mapped by each rank."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.plan.plan import Plan

_SKIPPED_STDLIB = ("site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """tokens: (n, S) integer ids. starts: (n, S) bool, True where a document begins; None where rows are whole."""

    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.bool_] | None


def text_files(path: str) -> list[str]:
    """The documents behind data.path, in a fixed order."""
    if path == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not set(f.relative_to(root).parts) & set(_SKIPPED_STDLIB)]
        return sorted(str(f) for f in files)
    found = path if os.path.isfile(path) else None
    return [found] if found else sorted(f for f in glob.glob(path, recursive=True) if os.path.isfile(f))


def prepare_rows(plan: Plan, folder: Path, cache: Path) -> None:
    """Tokenizes text once per host into `cache`; nothing to do for the other kinds. One process a host calls it."""
    if plan.data.kind != "text" or (cache / "tokens.npy").exists():
        return
    assert plan.data.path is not None
    files = text_files(plan.data.path)
    if not files:
        raise Refusal(
            Diagnostic(
                code="SW6101",
                message=f"no text file matches {plan.data.path!r} on this host",
                help="Make the corpus visible at the same path on every host, or correct data.path and compile again.",
            )
        )
    documents = list(_documents(files, plan.data.tokenizer or "byte", folder))
    length = plan.training.sequence_length
    total = sum(len(d) for d in documents) // length * length
    tokens = np.concatenate(documents)[:total].reshape(-1, length)
    starts = np.zeros(sum(len(d) for d in documents), dtype=np.bool_)
    starts[np.cumsum([0, *(len(d) for d in documents[:-1])])] = True
    cache.mkdir(parents=True, exist_ok=True)
    for name, array in (("starts", starts[:total].reshape(-1, length)), ("tokens", tokens)):
        temporary = cache / f".{name}-{os.getpid()}.npy"
        np.save(temporary, array)
        os.replace(temporary, cache / f"{name}.npy")


def _documents(files: list[str], tokenizer: str, folder: Path) -> Iterator[npt.NDArray[np.integer]]:
    if tokenizer == "byte":
        for file in files:
            document = np.frombuffer(Path(file).read_bytes(), dtype=np.uint8)
            if len(document):
                yield document
        return
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder / tokenizer, local_files_only=True)
    end = [hf.eos_token_id] if hf.eos_token_id is not None else []
    for file in files:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        ids = hf(text, add_special_tokens=False, verbose=False)["input_ids"] + end
        if ids:
            yield np.asarray(ids, dtype=np.int32)


def open_rows(plan: Plan, cache: Path) -> Rows:
    """Raises Refusal where the rows do not fit the plan."""
    length, vocabulary = plan.training.sequence_length, plan.model.vocabulary_size
    if plan.data.kind == "synthetic":
        # Learnable and the same everywhere: arithmetic sequences modulo the vocabulary.
        random = np.random.default_rng(plan.training.seed)
        n = max(1024, plan.training.global_batch_size)
        first, step = random.integers(0, vocabulary, (n, 1)), random.integers(1, 8, (n, 1))
        return Rows(tokens=(first + step * np.arange(length)) % vocabulary, starts=None)
    if plan.data.kind == "tokens":
        assert plan.data.path is not None
        rows = Rows(tokens=_load_tokens(plan.data.path), starts=None)
    else:
        starts = np.load(cache / "starts.npy", mmap_mode="r") if plan.data.packing else None
        rows = Rows(tokens=np.load(cache / "tokens.npy", mmap_mode="r"), starts=starts)
    _check(plan, rows, length, vocabulary)
    return rows


def _load_tokens(path: str) -> npt.NDArray[np.integer]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise Refusal(
            Diagnostic(
                code="SW6102",
                message=f"cannot read {path!r} as a NumPy .npy array: {error}",
                help="Give an array of integers of shape (samples, sequence_length), saved with numpy.save.",
            )
        ) from None
    return tokens  # type: ignore[no-any-return]


def _check(plan: Plan, rows: Rows, length: int, vocabulary: int) -> None:
    tokens, path = rows.tokens, plan.data.path
    if tokens.ndim != 2 or tokens.shape[1] != length or not np.issubdtype(tokens.dtype, np.integer):
        raise Refusal(
            Diagnostic(
                code="SW6103",
                message=f"{path!r} holds {tokens.dtype} of shape {tokens.shape}, not integers (samples, {length})",
                help="Cut the samples to training.sequence_length, or set sequence_length to the array's width.",
            )
        )
    if len(tokens) < plan.training.global_batch_size:
        raise Refusal(
            Diagnostic(
                code="SW6104",
                message=f"{path!r} gives {len(tokens)} sequences of {length}, fewer than one global batch "
                f"of {plan.training.global_batch_size}",
                help="Add data, or lower training.global_batch_size or training.sequence_length.",
            )
        )
    # A corpus is checked by its first 64 Mi tokens: a full pass over terabytes would idle the GPUs.
    sample = tokens[: max(1, 2**26 // length)]
    low, high = int(sample.min()), int(sample.max())
    if low < 0 or high >= vocabulary:
        raise Refusal(
            Diagnostic(
                code="SW6105",
                message=f"{path!r} holds token id {high if high >= vocabulary else low}, the model's vocabulary "
                f"has ids 0 to {vocabulary - 1}",
                help="Use the tokenizer that belongs to this model, or a model with a larger vocabulary.",
            )
        )
