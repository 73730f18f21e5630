"""Open a plan's data: training sequences, their order, held-out sequences, and the number of
steps."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwright.data.data_preparation import data_folder, explain_disk_errors, prepared_folder
from shardwright.data.data_sources import all_data_sections, data_sections
from shardwright.data.image_captions import (
    PADDING_FILE,
    CaptionPadding,
    CaptionSequences,
    has_image_captions,
)
from shardwright.data.image_files import IMAGE_BYTES_FILE, IMAGE_INDEX_FILE, open_images
from shardwright.data.indexed_dataset import MANIFEST, open_documents, open_megatron, read_manifest
from shardwright.data.sequences import (
    DESIRABLE_FILE,
    ArraySequences,
    ChunkedSequences,
    ConcatSequences,
    EpochSampler,
    GroupedSequences,
    Indices,
    MixtureSampler,
    Sampler,
    SequenceDataset,
    SubsetSequences,
    open_document_sequences,
)
from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.recipe.objectives import PREFERENCE_KIND
from shardwright.recipe.recipe_types import MASKED_KINDS, DataSection
from shardwright.utils.file_io import write_atomically

CHECKED_TOKENS = 2**26
"""Token ids checked in an array that `prepare` did not make: reading terabytes would idle the
GPUs."""

STEPS_FILE = "steps.json"
_VALIDATION_SEED = 0x76616C
"""Seeds the choice of held-out sequences, beside training.seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Hold opened data.

    steps: training steps, with epochs resolved.
    parts: sequences of each part of a mixture, which with the seed determine the order.
    """

    train: SequenceDataset
    order: Sampler
    parts: tuple[int, ...]
    validation: SequenceDataset | None
    steps: int


def open_dataset(plan: Plan, folder: Path, *, check_all_ids: bool = False) -> Dataset:
    """Open the prepared data of a plan. Raises Refusal where it does not fit the plan.

    check_all_ids: check every token id, not only the first CHECKED_TOKENS.
    """
    t = plan.training
    limit = None if check_all_ids else CHECKED_TOKENS
    parts = [open_sequences(plan, part, folder, limit) for part in data_sections(plan.data)]
    held_out: list[SequenceDataset] = []
    if plan.validation is not None and plan.validation.fraction is not None:
        # Drawn by the seed, at least one of each part; both sides keep the part's order.
        for number, rows in enumerate(parts):
            count = max(1, round(plan.validation.fraction * len(rows))) if len(rows) else 0
            generator = np.random.default_rng([t.seed, _VALIDATION_SEED, number])
            is_held_out = np.zeros(len(rows), dtype=np.bool_)
            is_held_out[generator.permutation(len(rows))[:count]] = True
            held_out.append(SubsetSequences(rows, np.flatnonzero(is_held_out)))
            parts[number] = SubsetSequences(rows, np.flatnonzero(~is_held_out))
    elif plan.validation is not None and plan.validation.data is not None:
        held_out = [
            open_sequences(plan, part, folder, limit)
            for part in data_sections(plan.validation.data)
        ]
    counts = [len(rows) for rows in parts]
    if sum(counts) < plan.sequences_per_step or not all(counts):
        raise _too_little(plan, counts)
    if held_out and not sum(map(len, held_out)):
        raise refusal(
            "SW6123",
            f"the validation data has no complete sequence of {t.sequence_length} tokens",
            "Add validation data, or raise validation.fraction.",
        )
    order: Sampler
    if plan.data.mixture:
        weights = [part.weight for part in plan.data.mixture]
        order = MixtureSampler(
            counts, weights, plan.sequences_per_step, t.seed, shuffle=plan.data.shuffle
        )
    else:
        order = EpochSampler(counts[0], plan.sequences_per_step, t.seed, shuffle=plan.data.shuffle)
    return Dataset(
        train=_joined(parts),
        order=order,
        parts=tuple(counts),
        validation=_joined(held_out) if held_out else None,
        steps=t.steps if t.epochs is None else epochs_to_steps(t.epochs, order.steps_per_epoch),
    )


def epochs_to_steps(epochs: float, steps_per_epoch: int) -> int:
    """Convert epochs to steps, rounded up. 1e-9 absorbs the rounding error of a decimal
    fraction."""
    return max(1, math.ceil(epochs * steps_per_epoch - 1e-9))


def resolve(plan: Plan, folder: Path, *, check_all_ids: bool = False) -> tuple[Plan, Dataset]:
    """Return the plan with its epochs counted in steps, recorded for `status`, and its data. Raises
    Refusal."""
    data = open_dataset(plan, folder, check_all_ids=check_all_ids)
    if plan.training.epochs is None:
        return plan, data
    resolved = with_resolved_epochs(plan, data.steps)
    with explain_disk_errors(data_folder(folder)):
        data_folder(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(data_folder(folder) / STEPS_FILE, json.dumps({"steps": data.steps}))
    return resolved, data


def recorded_step_count(plan: Plan, folder: Path) -> int:
    """Return the training steps, 0 where epochs have not been counted yet."""
    if plan.training.epochs is None:
        return plan.training.steps
    try:
        return int(
            json.loads((data_folder(folder) / STEPS_FILE).read_text(encoding="utf-8"))["steps"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def with_resolved_epochs(plan: Plan, steps: int) -> Plan:
    """Return the plan with epochs resolved. Raises SW6122 where the learning rate schedule does not
    fit."""
    s = plan.scheduler
    warmup = s.warmup_steps if s.warmup_ratio is None else round(s.warmup_ratio * steps)
    too_long = s.warmup_ratio is None and 0 < warmup >= steps
    if too_long or (s.decay_steps is not None and warmup + s.decay_steps > steps):
        raise refusal(
            "SW6122",
            f"{plan.training.epochs:g} epochs of this data are {steps} steps, fewer than warm-up "
            f"({warmup}) and decay ({s.decay_steps or 0}) need",
            (
                "Lower training.scheduler's warmup_steps or decay_steps (or set warmup_ratio), or "
                "train more epochs."
            ),
        )
    return replace(
        plan,
        training=replace(plan.training, steps=steps),
        scheduler=replace(s, warmup_steps=warmup),
    )


def _joined(parts: list[SequenceDataset]) -> SequenceDataset:
    return parts[0] if len(parts) == 1 else ConcatSequences(tuple(parts))


def open_sequences(
    plan: Plan, part: DataSection, folder: Path, limit: int | None
) -> SequenceDataset:
    """Open the sequences of one prepared source.

    limit: token ids of an array to check; None checks all.
    """
    length, vocabulary = plan.training.sequence_length, plan.model.vocabulary_size
    if part.kind == "synthetic":
        # Learnable and equal on every host: arithmetic sequences modulo the vocabulary.
        random = np.random.default_rng(plan.training.seed)
        n = max(1024, plan.sequences_per_step)
        first, step = random.integers(0, vocabulary, (n, 1)), random.integers(1, 8, (n, 1))
        return ArraySequences((first + step * np.arange(length)) % vocabulary)
    if part.kind == "tokens":
        try:
            tokens = np.load(str(part.path), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise refusal(
                "SW6102",
                f"cannot read {part.path!r} as a NumPy .npy array: {error}",
                "Save an array of integers of shape (samples, sequence_length) with numpy.save.",
            ) from None
        is_integer = np.issubdtype(tokens.dtype, np.integer)
        if tokens.ndim != 2 or tokens.shape[1] != length or not is_integer:
            raise refusal(
                "SW6103",
                f"{part.path!r} holds {tokens.dtype} of shape {tokens.shape}, not integers "
                f"(samples, {length})",
                "Cut the samples to training.sequence_length, or set sequence_length to the "
                "array's width.",
            )
        _check_range(part, tokens[: None if limit is None else max(1, limit // length)], vocabulary)
        return ArraySequences(tokens)
    if part.kind == "megatron":
        documents = open_megatron(str(part.path))
        _check_range(part, documents.tokens[:limit], vocabulary)
        return ChunkedSequences(documents, length, part.packing)
    here = prepared_folder(part, folder)
    manifest = read_manifest(here)
    if manifest is not None and manifest.largest_id >= vocabulary:
        raise _outside(part, manifest.largest_id, vocabulary)
    if part.kind in MASKED_KINDS:
        rows = open_document_sequences(here, open_documents(here), length, part)
        each = 1 if part.joins_documents else part.documents_per_example
        return rows if each == 1 else GroupedSequences(rows, each)
    if has_image_captions(part):
        images = open_images(here)
        assert images is not None, "its folder was prepared with them"
        padding = CaptionPadding(**json.loads((here / PADDING_FILE).read_text("utf-8")))
        return CaptionSequences(open_documents(here), length, padding, images)
    return ChunkedSequences(open_documents(here), length, part.packing)


def _check_range(part: DataSection, tokens: npt.NDArray[np.integer], vocabulary: int) -> None:
    if tokens.size:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocabulary:
            raise _outside(part, high if high >= vocabulary else low, vocabulary)


def _outside(part: DataSection, token: int, vocabulary: int) -> Exception:
    return refusal(
        "SW6105",
        (
            f"{part.path!r} holds token id {token}, but the model's vocabulary has ids 0 to "
            f"{vocabulary - 1}"
        ),
        "Use the tokenizer that belongs to this model, or a model with a larger vocabulary.",
    )


def _too_little(plan: Plan, counts: list[int]) -> Exception:
    """Build SW6104 with the ways to more sequences of this kind of data."""
    t, parts = plan.training, data_sections(plan.data)
    # In a mixture, name the empty part.
    empty = [part.path for part, n in zip(parts, counts, strict=True) if not n]
    name, count = (empty[0], 0) if empty else (plan.data.path or "the mixture", sum(counts))
    splits = plan.validation is not None and plan.validation.fraction is not None
    held = ", apart from those held out for validation" if splits else ""
    kinds = {part.kind for part in parts}
    counts_pairs = kinds == {PREFERENCE_KIND} and not t.objective.packed
    what = "pairs" if counts_pairs else "sequences"
    ways = ["add text", "lower training.sequence_length"]
    if kinds == {"tokens"}:
        ways = ["add samples"]
    elif all(has_image_captions(part) for part in parts):
        ways = ["add pairs"]
    elif kinds == {PREFERENCE_KIND}:
        ways = ["add records"]
        if not any(counts):
            ways.append("raise training.sequence_length (both completions must start within it)")
        elif t.objective.packed:
            ways.append("set `packing: false` for a completion per sequence")
    elif kinds == {"chat"}:
        ways = ["add conversations"]
        if not any(counts):
            ways.append("raise training.sequence_length (an answer must start within it)")
        elif any(part.packing for part in parts):
            ways.append("set `packing: false` for one conversation per sequence")
    if splits:
        ways.append("lower validation.fraction")
    if any(counts):
        ways.append("lower training.global_batch_size")
    help = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"
    return refusal(
        "SW6104",
        f"{name!r} gives {count} {what} of "
        f"{t.sequence_length} tokens{held}, fewer than "
        f"{'one' if empty else f'one global batch of {plan.sequences_per_step}'}",
        f"{help[0].upper()}{help[1:]}.",
    )


def validation_batches(count: int, rows_at_once: int, batches_at_once: int) -> Indices:
    """Return indices (batches, rows_at_once): each held-out sequence once, then -1;
    `batches_at_once` divides batches."""
    batches = -(-count // (rows_at_once * batches_at_once)) * batches_at_once
    numbers = np.full(batches * rows_at_once, -1, dtype=np.int64)
    numbers[:count] = np.arange(count)
    return numbers.reshape(batches, rows_at_once)


# Digests of what the ranks read, to compare the data of two hosts or days; without torch.


_PREPARED = (
    *("tokens.bin", "documents.bin", "trained.bin"),
    *(DESIRABLE_FILE, IMAGE_BYTES_FILE, IMAGE_INDEX_FILE),
)
BLOCK_BYTES, BLOCKS = 2**16, 1024
"""Blocks hashed of a larger file, from its first to its last bytes, beside its size. Prepared data
has a digest of all tokens in its manifest."""


def data_fingerprints(plan: Plan, folder: Path) -> dict[str, str]:
    """Return data.path -> digest (hex) of each prepared part that is read from files. Raises
    OSError."""
    digests: dict[str, str] = {}
    for part in all_data_sections(plan):
        if part.kind == "synthetic":
            continue
        if part.kind == "tokens":
            paths = [Path(str(part.path))]
        elif part.kind == "megatron":
            paths = [Path(f"{part.path}.idx"), Path(f"{part.path}.bin")]
        else:
            paths = prepared_files(prepared_folder(part, folder))
        digests[str(part.path)] = files_digest(paths)
    return digests


def prepared_files(folder: Path) -> list[Path]:
    """Return the files that a prepared folder's sequences are read from."""
    return [path for name in (MANIFEST, *_PREPARED) if (path := folder / name).exists()]


def files_digest(paths: Iterable[Path], blocks: int = BLOCKS) -> str:
    """Return the digest (hex) of files' names, sizes and content, or `blocks` blocks of it. Raises
    OSError."""
    total = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= blocks * BLOCK_BYTES:
                total.update(file.read())
                continue
            for number in range(blocks):
                file.seek((size - BLOCK_BYTES) * number // (blocks - 1))
                total.update(file.read(BLOCK_BYTES))
    return total.hexdigest()
