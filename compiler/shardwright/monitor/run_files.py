"""What a run leaves for its readers: run/attempt.json (in), run/metrics.jsonl,
run/evaluation.jsonl, run/saves.jsonl, run/status.json, run/errors/ (out)."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from shardwright.utils.file_io import write_atomically
from shardwright.utils.json_values import JsonObject, JsonValue, strict_json

Record = TypeVar("Record")
OUTER_STEPS_FILE = "run/outer.jsonl"
ATTEMPT_FILE = "run/attempt.json"
PROGRESS = "@shardwright "
"""Marks rank 0's progress lines on the launcher's standard output."""


def write_json(path: Path, document: Mapping[str, JsonValue]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(strict_json(document) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, JsonValue]:
    """{} where there is none, or none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """run/attempt.json. number: None where no attempt was begun. resume: the checkpoint that it
    goes on from; step: what that closed; steps: of the training; line: as checkpoint/run_history.py
    reads it; lease: the token of `run`."""

    number: int | None = None
    resume: str | None = None
    step: int | None = None
    steps: int | None = None
    line: JsonValue = None
    lease: str | None = None


def read_attempt_record(folder: Path) -> AttemptRecord:
    """folder: the compiled one. A file of an earlier version lacks some."""
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
    the last one. rank, host, stage, cause, help: of a failure, or of what is `stalled`."""

    status: str | None = None
    attempt: int | None = None
    step: int | None = None
    rank: int | None = None
    host: str | None = None
    stage: int | None = None
    cause: str | None = None
    help: str | None = None
    stalled: str | None = None


def read_status(folder: Path) -> StatusRecord:
    return _record_without_unknown_keys(StatusRecord, read_json(folder / "run" / "status.json"))


_TYPES = {"int | None": int, "str | None": str, "JsonValue": object}


def _record_without_unknown_keys(kind: type[Record], document: JsonObject) -> Record:
    """Without what `kind` has no field for, or a field of another type."""
    types = {f.name: _TYPES[str(f.type)] for f in fields(cast(Any, kind)) if f.name in document}
    return kind(
        **{name: document[name] for name, of in types.items() if isinstance(document[name], of)}
    )


_INCOMPLETE_LINE = 2**62
"""Stands for the step of a line that is none."""

MAX_EXPONENT = 700.0
"""exp of more is no number that JSON can hold."""


class MetricsWriter:
    """run/metrics.jsonl: a line per optimizer step, cut back to where an attempt resumes."""

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        self.attempt = attempt
        self._file = _open_truncated(folder / "run" / "metrics.jsonl", resumed_step)

    def write(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        tokens: int,
        seconds: float,
        pairs: int | None = None,
        noise: JsonObject | None = None,
    ) -> None:
        """pairs: of the step, of a model that learns from them. noise: of a measured step
        (monitor/gradient_noise_scale.py)."""
        line = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": tokens,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            **({} if pairs is None else {"pairs_per_second": pairs / seconds}),
            **({} if noise is None else {"noise_scale": noise}),
            "attempt": self.attempt,
        }
        text = strict_json(line)
        self._file.write(text + "\n")
        print(PROGRESS + text, flush=True)


class EvaluationWriter:
    """run/evaluation.jsonl: a line per evaluation of the held-out data, cut back like the metrics.
    step: the last one that an earlier attempt left."""

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        self.attempt = attempt
        self._file = _open_truncated(folder / "run" / "evaluation.jsonl", resumed_step)
        self.step = evaluated_step(folder)

    def write(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """loss: over all `tokens`, which are the predicted ones."""
        perplexity = math.exp(min(loss, MAX_EXPONENT)) if math.isfinite(loss) else math.nan
        figures = {
            "step": step,
            "loss": loss,
            "perplexity": perplexity,
            "tokens": tokens,
            "seconds": seconds,
        }
        line = {**figures, "attempt": self.attempt}
        self._file.write(strict_json(line) + "\n")
        print(
            f"validation at step {step}  loss {loss:.4f}  perplexity {perplexity:.2f}", flush=True
        )


class OuterStepWriter:
    """run/outer.jsonl: a line per outer step between islands, cut back like the metrics."""

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        self.attempt = attempt
        self._file = _open_truncated(folder / OUTER_STEPS_FILE, resumed_step)

    def write(self, step: int, members: tuple[int, ...], seconds: float, sent_bytes: int) -> None:
        """members: () where another island's state was taken. seconds: that training waited.
        sent_bytes: by rank 0."""
        line = {"step": step, "members": list(members), "seconds": seconds, "bytes": sent_bytes}
        self._file.write(strict_json({**line, "attempt": self.attempt}) + "\n")
        what = (
            f"islands {', '.join(map(str, members))}" if members else "another island's state taken"
        )
        print(f"outer step at {step}  {what}  {seconds:.3g} s", flush=True)


class SaveWriter:
    """run/saves.jsonl: a line per checkpoint that was written, cut back like the metrics."""

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        self.attempt = attempt
        self._file = _open_truncated(folder / "run" / "saves.jsonl", resumed_step)

    def write(self, step: int, seconds: float, size: int, node_size: int) -> None:
        """seconds: that training waited, copies to upload_to included. size: bytes of all ranks'
        files; node_size: of those of the node that wrote most."""
        line = {
            "step": step,
            "seconds": seconds,
            "bytes": size,
            "node_bytes": node_size,
            "attempt": self.attempt,
        }
        self._file.write(strict_json(line) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatistics:
    """Medians: seconds that training waited for a save, GB/s of the node that wrote most."""

    count: int
    seconds: float
    gbytes_per_second: float


def read_save_statistics(folder: Path) -> SaveStatistics | None:
    """folder: the compiled one. None where no save was measured."""
    found: list[tuple[float, float]] = []
    try:
        lines = (folder / "run" / "saves.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines:
        try:
            row = json.loads(line)
            seconds, size = float(row["seconds"]), float(row["node_bytes"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # half written
        if 0 < seconds < math.inf and 0 < size < math.inf:
            found.append((seconds, size / seconds / 1e9))
    if not found:
        return None
    return SaveStatistics(
        count=len(found),
        seconds=statistics.median(seconds for seconds, _ in found),
        gbytes_per_second=statistics.median(rate for _, rate in found),
    )


def number(value: object) -> float:
    """Of a line that was read: null stands for one that is not finite."""
    return math.nan if value is None else float(str(value))


def evaluated_step(folder: Path) -> int:
    """The last one in run/evaluation.jsonl; 0 where there is none."""
    try:
        lines = (folder / "run" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return max((step for line in lines if (step := _step_of(line)) < _INCOMPLETE_LINE), default=0)


def _open_truncated(path: Path, step: int) -> TextIO:
    """For appending, with the lines up to `step`."""
    kept = []
    if step and path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    write_atomically(path, "".join(line + "\n" for line in kept))
    return path.open("a", buffering=1)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return _INCOMPLETE_LINE  # a last line


def write_status(folder: Path, status: str, attempt: int, **more: JsonValue) -> None:
    """status: running | done | preempted | failed."""
    write_json(
        folder / "run" / "status.json",
        {"status": status, "attempt": attempt, "time": time.time(), **more},
    )
