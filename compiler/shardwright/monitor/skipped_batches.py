"""Keep the batches that a run leaves out because their loss was not finite twice:
run/skipped_batches.json. The supervisor adds them (supervise/), and every attempt reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.utils.file_io import parse_strict_json, read_regular_file, write_atomically
from shardwright.utils.json_values import read_record, strict_json

SKIPPED_BATCHES_FILE = "run/skipped_batches.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedBatch:
    """Name a step that makes no update. rows: the data that it would train, in words; None where
    the data could not be opened."""

    step: int
    rows: str | None


def read_skipped_batches(folder: Path) -> tuple[SkippedBatch, ...]:
    """Return the skipped batches of a compiled folder's run; () where there is no readable
    file."""
    try:
        document = parse_strict_json(read_regular_file(folder / SKIPPED_BATCHES_FILE))
        if not isinstance(document, list):
            return ()
        return tuple(read_record(SkippedBatch, each) for each in document)
    except (OSError, ValueError):
        return ()


def skipped_steps(folder: Path) -> tuple[int, ...]:
    return tuple(each.step for each in read_skipped_batches(folder))


def add_skipped_batch(folder: Path, batch: SkippedBatch) -> None:
    """Add a batch to the run's list. Raises OSError."""
    batches: Sequence[SkippedBatch] = (*read_skipped_batches(folder), batch)
    text = strict_json([asdict(each) for each in batches])
    write_atomically(folder / SKIPPED_BATCHES_FILE, text + "\n")


def remove_skipped_batches(folder: Path) -> None:
    """Forget the list: a different run begins in this folder. Raises OSError."""
    (folder / SKIPPED_BATCHES_FILE).unlink(missing_ok=True)


def skipped_batches_json(folder: Path) -> dict[str, list[dict[str, int | str | None]]]:
    """Return the key of run/status.json; {} where no batch is skipped."""
    found = [asdict(each) for each in read_skipped_batches(folder)]
    return {"skipped_batches": found} if found else {}
