"""Record which run wrote a checkpoint: run.json in each step folder. No torch.

A run has a random id, made when it starts from nothing and kept by every attempt that resumes its
newest checkpoint. Resuming from a named checkpoint starts a different run there. So two runs may
share a folder or a bucket, and neither prunes or resumes the other's checkpoints.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwright.checkpoint.checkpoint_manifest import read_limited
from shardwright.monitor.run_files import read_attempt_record, write_json
from shardwright.utils.file_io import parse_strict_json
from shardwright.utils.json_values import read_record

RUN_FILE = "run.json"
_MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRun:
    """Name a run up to a step."""

    run: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """Hold a run's id and the runs that it was resumed from.

    run: "" for checkpoints that a training loop of one's own wrote, or whose run.json is damaged.
    before: earlier runs, oldest first.
    """

    run: str
    before: tuple[ParentRun, ...] = ()

    def holds(self, other: RunHistory, step: int) -> bool:
        """Return whether the checkpoint of `step` written by `other` belongs to this history."""
        return other.run == self.run or any(
            a.run == other.run and step <= a.step for a in self.before
        )


UNKNOWN_RUN = RunHistory(run="")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMetadata:
    """Hold what a checkpoint records about its writer: run history, and the manifest's rows, data
    and finite."""

    line: RunHistory
    finite: bool = True
    rows: tuple[int, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)


UNKNOWN_METADATA = SaveMetadata(line=UNKNOWN_RUN)


def new_run_history(before: tuple[ParentRun, ...] = ()) -> RunHistory:
    return RunHistory(run=secrets.token_hex(8), before=before)


def branch_run_history(line: RunHistory, step: int) -> RunHistory:
    """Start a different run from a checkpoint of `line`."""
    return new_run_history((*line.before, ParentRun(run=line.run, step=step)))


def continue_run_history(current: RunHistory | None, written: RunHistory, step: int) -> RunHistory:
    """Return the history of an attempt that resumes the checkpoint of `step` in `written`.

    current: the folder's own, None where it has none yet.
    """
    if current is not None and current.holds(written, step):
        return current
    return written if current is None and written.run else branch_run_history(written, step)


def run_history_from_json(document: object) -> RunHistory | None:
    """Read a history, None where the document holds none."""
    try:
        return read_record(RunHistory, document)
    except ValueError:
        return None


def current_run_history(folder: Path) -> RunHistory | None:
    """Return the history of the compiled folder's last attempt."""
    return run_history_from_json(read_attempt_record(folder).line)


def run_history_of(checkpoint: Path) -> RunHistory:
    try:
        return parse_run_history(read_limited(checkpoint / RUN_FILE, _MOST_BYTES))
    except (OSError, ValueError):
        return UNKNOWN_RUN


def parse_run_history(text: bytes) -> RunHistory:
    try:
        return run_history_from_json(parse_strict_json(text)) or UNKNOWN_RUN
    except ValueError:
        return UNKNOWN_RUN


def write_run_history(checkpoint: Path, line: RunHistory) -> None:
    write_json(checkpoint / RUN_FILE, asdict(line))
