"""Write and read the files of a run: run/attempt.json, run/metrics.jsonl, run/evaluation.jsonl,
run/saves.jsonl, run/status.json and run/errors/."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict, TypeVar, cast

import msgspec

from shardwright.diagnostics.file_errors import NO_SPACE, names_file
from shardwright.monitor.attempt_records import METRICS_FILE, attempts_json
from shardwright.monitor.skipped_batches import skipped_batches_json
from shardwright.utils.file_io import parse_strict_json, read_regular_file, write_atomically
from shardwright.utils.json_lines import (
    Count,
    Figure,
    JsonLinesWriter,
    PositiveSeconds,
    Seconds,
    StepLine,
    read_json_lines,
    rows_by_step,
)
from shardwright.utils.json_values import JsonObject, JsonValue, strict_json

Record = TypeVar("Record")
EVALUATION_FILE = "run/evaluation.jsonl"
MEMORY_COPIES_FILE = "run/memory_copies.jsonl"
SAVES_FILE, OUTER_STEPS_FILE = "run/saves.jsonl", "run/outer.jsonl"
ATTEMPT_FILE = "run/attempt.json"
PROGRESS = "@shardwright "
"""Marks rank 0's progress lines on the launcher's standard output."""


class MetricsLine(StepLine):
    """A line of run/metrics.jsonl. loss, grad_norm: null where they are not finite. time: Unix
    seconds at the step's end. margin, accuracy: of a preference objective. kl: of distillation.
    skipped: true where the step made no update (monitor/skipped_batches.py); such a line has no
    loss."""

    loss: NotRequired[Figure | None]
    grad_norm: NotRequired[Figure | None]
    learning_rate: NotRequired[Figure]
    tokens: NotRequired[Count]
    step_seconds: NotRequired[PositiveSeconds]
    attempt: NotRequired[Count]
    margin: NotRequired[float | None]
    accuracy: NotRequired[float | None]
    kl: NotRequired[float | None]
    time: NotRequired[Figure]
    skipped: NotRequired[bool]


class EvaluationLine(StepLine):
    """A line of run/evaluation.jsonl."""

    loss: NotRequired[Figure | None]
    perplexity: NotRequired[float | None]
    accuracy: NotRequired[float | None]


class SaveLine(TypedDict):
    """A line of run/saves.jsonl."""

    seconds: PositiveSeconds
    node_bytes: Figure


class OuterLine(StepLine):
    """A line of an island's run/outer.jsonl. members: () where another island's state came."""

    members: list[Count]
    seconds: Seconds


def write_json(path: Path, document: Mapping[str, JsonValue]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, strict_json(document) + "\n", flush=False)


def read_json(path: Path) -> dict[str, JsonValue]:
    """{} where there is none, or none that can be read."""
    try:
        document = parse_strict_json(read_regular_file(path))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """run/attempt.json. number: None where no attempt was begun. resume: the checkpoint that it
    goes on from; step: what that closed; steps: of the training; line: as checkpoint/run_history.py
    reads it; lease: the token of `run`; memory_step: that of the copy in memory which the ranks
    went on from instead."""

    number: int | None = None
    resume: str | None = None
    step: int | None = None
    steps: int | None = None
    line: JsonValue = None
    lease: str | None = None
    memory_step: int | None = None


def read_attempt_record(folder: Path) -> AttemptRecord:
    """folder: the compiled one. A field that is damaged or missing has its default."""
    document = read_json(folder / ATTEMPT_FILE)
    return _record_without_unknown_keys(
        AttemptRecord, {**document, "number": document.get("attempt")}
    )


def write_attempt_record(folder: Path, record: AttemptRecord) -> None:
    fields = asdict(record)
    write_json(folder / ATTEMPT_FILE, {"attempt": fields.pop("number"), **fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRecord:
    """run/status.json. status: running | done | preempted | failed; None where there is none. step:
    the last one. rank, host, stage, code, cause, help: of a failure, or of what is `stalled`."""

    status: str | None = None
    attempt: int | None = None
    step: int | None = None
    rank: int | None = None
    host: str | None = None
    stage: int | None = None
    code: str | None = None
    cause: str | None = None
    help: str | None = None
    stalled: str | None = None


def read_status(folder: Path) -> StatusRecord:
    return _record_without_unknown_keys(StatusRecord, read_json(folder / "run" / "status.json"))


_TYPES = {"int | None": Count, "str | None": str, "JsonValue": object}


def _record_without_unknown_keys(kind: type[Record], document: JsonObject) -> Record:
    """Build a record from the known keys of `document` whose values have the field's type."""
    values: dict[str, Any] = {}
    for field in fields(cast(Any, kind)):
        with contextlib.suppress(KeyError, msgspec.ValidationError):
            values[field.name] = msgspec.convert(document[field.name], _TYPES[str(field.type)])
    return kind(**values)


MAX_EXPONENT = 700.0
"""exp of more is no number that JSON can hold."""


class MetricsWriter(JsonLinesWriter):
    """Writes run/metrics.jsonl, a line per optimizer step, and rank 0's progress."""

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        super().__init__(folder / METRICS_FILE, attempt, resumed_step)

    def write(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens: int,
        seconds: float,
        pairs: int | None = None,
        others: Mapping[str, JsonValue] = MappingProxyType({}),
    ) -> None:
        """pairs: of the step, where the model learns from them. others: the objective's own
        metrics, and `noise_scale` of a measured step (monitor/gradient_noise_scale.py)."""
        more = dict(others)
        if pairs is not None:
            more["pairs_per_second"] = pairs / seconds
        text = self.write_line(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens=tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            time=round(time.time(), 3),
            **more,
        )
        print(PROGRESS + text, flush=True)

    def write_skipped(self, step: int, seconds: float) -> None:
        """Write the line of a step that makes no update."""
        self.write_line(step=step, skipped=True, step_seconds=seconds, time=round(time.time(), 3))
        print(f"step {step} makes no update: its batch is skipped", flush=True)


class EvaluationWriter(JsonLinesWriter):
    """Writes run/evaluation.jsonl, a line per evaluation of the held-out data.

    step: the last one that an earlier attempt left.
    """

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        super().__init__(folder / EVALUATION_FILE, attempt, resumed_step)
        self.step = evaluated_step(folder)

    def write(
        self,
        step: int,
        loss: float,
        predicted: int,
        seconds: float,
        own: Mapping[str, float] = MappingProxyType({}),
        *,
        counts_pairs: bool = False,
    ) -> None:
        """Write a line, and print it.

        loss: over all `predicted` tokens, or pairs
        own: metrics of the objective
        """
        shown = dict(own)
        if not counts_pairs:
            of_tokens = own.get("next_token_loss", loss)
            shown["perplexity"] = (
                math.exp(min(of_tokens, MAX_EXPONENT)) if math.isfinite(of_tokens) else math.nan
            )
        counted: dict[str, JsonValue] = {"pairs" if counts_pairs else "tokens": predicted}
        self.write_line(step=step, loss=loss, seconds=seconds, **counted, **shown)
        text = "  ".join(
            f"{name} {value:.{2 if name == 'perplexity' else 4}f}" for name, value in shown.items()
        )
        print(f"validation at step {step}  loss {loss:.4f}  {text}", flush=True)


class SaveWriter(JsonLinesWriter):
    """Writes run/saves.jsonl, a line per checkpoint that was written, or
    run/memory_copies.jsonl, a line per copy in memory."""

    def __init__(
        self, folder: Path, attempt: int, resumed_step: int, file: str = SAVES_FILE
    ) -> None:
        super().__init__(folder / file, attempt, resumed_step)

    def write(self, step: int, seconds: float, size: int, node_size: int) -> None:
        """seconds: that training waited, copies to upload_to included. size: bytes of all ranks'
        files; node_size: of those of the node that wrote most."""
        self.write_line(step=step, seconds=seconds, bytes=size, node_bytes=node_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatistics:
    """Medians: seconds that training waited for a save, GB/s of the node that wrote most."""

    count: int
    seconds: float
    gbytes_per_second: float


def read_save_statistics(folder: Path) -> SaveStatistics | None:
    """folder: the compiled one. None where no save was measured."""
    found = [
        (row["seconds"], row["node_bytes"] / row["seconds"] / 1e9)
        for row in read_json_lines(folder / SAVES_FILE, SaveLine)
        if row["node_bytes"] > 0
    ]
    if not found:
        return None
    return SaveStatistics(
        count=len(found),
        seconds=statistics.median(seconds for seconds, _ in found),
        gbytes_per_second=statistics.median(rate for _, rate in found),
    )


def number(value: object) -> float:
    """Return a number of a line that was read. null stands for one that is not finite."""
    return math.nan if value is None else float(str(value))


def evaluated_step(folder: Path) -> int:
    """Return the last step of run/evaluation.jsonl; 0 where there is none."""
    return max(rows_by_step(folder / EVALUATION_FILE, bool), default=0)


def write_status(folder: Path, status: str, attempt: int, **more: JsonValue) -> None:
    """status: running | done | preempted | failed. Raises OSError."""
    path = folder / "run" / "status.json"
    document = {"status": status, "attempt": attempt, "time": time.time(), **more}
    try:
        write_json(path, {**document, **_attempts_and_batches(folder)})
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        # No room for a new file beside it: the old one has a block of its own.
        with names_file(path), path.open("r+b", buffering=0) as file:
            file.truncate(file.write(f"{strict_json(document)}\n".encode()))


def refresh_attempts(folder: Path) -> None:
    """Write the attempts into run/status.json, once one has ended. Raises OSError."""
    path = folder / "run" / "status.json"
    document = read_json(path)
    if document:
        write_json(path, {**document, **_attempts_and_batches(folder)})


def _attempts_and_batches(folder: Path) -> dict[str, JsonValue]:
    return {"attempts": attempts_json(folder), **skipped_batches_json(folder)}
