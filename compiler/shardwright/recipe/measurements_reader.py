"""`cluster.measured`: the file that it names, read strictly. Somebody else may have written it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, refusal
from shardwright.recipe.key_descriptions import quote_text
from shardwright.recipe.measurements import (
    MEASURED_FILE,
    MeasuredValue,
    Measurements,
    MeasurementsFile,
)
from shardwright.recipe.recipe_paths import absolute_path
from shardwright.utils.bounded_read import parse_json, read_regular_file
from shardwright.utils.json_records import RecordError, read_record
from shardwright.utils.json_types import JsonObject, JsonValue

KEY: KeyPath = ("cluster", "measured")
MOST_BYTES = 4 * 2**20
_MEASURE_HELP = (
    "`shardwright calibrate RECIPE -o FILE` writes one; `shardwright tune` adds runs to it."
)


def read_measured(named: JsonValue, directory: str) -> MeasurementsFile:
    """named: the recipe's value, a path or {file, sha256}. Raises Refusal: SW1301, SW1302,
    SW1303."""
    document = named if isinstance(named, Mapping) else {"file": named}
    path, expected_sha256 = absolute_path(str(document["file"]), directory), document.get("sha256")
    try:
        content = read_regular_file(path, MOST_BYTES)
    except FileNotFoundError:
        why = f"cluster.measured: the file {quote_text(path, 200)} does not exist"
        help = f"Relative paths start at the recipe's folder. {_MEASURE_HELP}"
        raise refusal("SW1301", why, help, KEY) from None
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    digest = hashlib.sha256(content).hexdigest()
    if expected_sha256 not in (None, digest):
        raise refusal(
            "SW1303",
            (
                f"cluster.measured: {quote_text(path, 200)} is not the file that its sha256 "
                "says: it "
                f"begins {digest[:12]}"
            ),
            "Name the file alone to take it as it is, or put the measured one back.",
            KEY,
        )
    return MeasurementsFile(path=path, sha256=digest, content=content, found=_parsed(path, content))


def measurements_entry(measured: MeasurementsFile) -> JsonObject:
    """As a resolved recipe has it: by its content, wherever it lay. The recipe's hash is made of
    this."""
    return {"file": MEASURED_FILE, "sha256": measured.sha256}


def _parsed(path: str, content: bytes) -> Measurements:
    try:
        found = read_record(Measurements, parse_json(content))
    except RecordError as error:
        raise _unusable(path, str(error)) from None
    except ValueError as error:
        raise _unusable(path, f"it is not JSON: {error}") from None
    if wrong := next(_invalid_numbers(found, ""), ""):
        raise _unusable(path, wrong)
    return found


def _invalid_numbers(value: Any, place: str) -> Iterator[str]:
    """Numbers that no measurement gives; a reader of JSON lets NaN and a negative time through."""
    if isinstance(value, int | float):
        if not (math.isfinite(value) and value >= 0):
            yield f"{place} is {value!r}"
    elif isinstance(value, MeasuredValue) and value.n < 1:
        yield f"{place}.n is {value.n}"
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _invalid_numbers(
                getattr(value, field.name), f"{place}.{field.name}".lstrip(".")
            )
            if field.name in _ABOVE_ZERO and not _number(getattr(value, field.name)) > 0:
                yield f"{place}.{field.name} is not above 0".lstrip(".")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _invalid_numbers(item, f"{place}[{i}]")
    elif hasattr(value, "items"):
        for key, item in value.items():
            yield from _invalid_numbers(item, f"{place}.{key}")


_ABOVE_ZERO = (
    *("predicted_step_seconds", "forward_seconds", "cores", "nodes", "ranks", "threads", "tensor"),
    *("micro_batch_size", "sequence_length"),
)


def _number(value: Any) -> float:
    return float(value.value if isinstance(value, MeasuredValue) else value)


def _unusable(path: str, why: str) -> Refusal:
    return Refusal(
        Diagnostic(
            code="SW1302",
            message=(
                f"cluster.measured: {quote_text(os.path.normpath(path), 200)} is no file of "
                "measurements: "
            )
            + " ".join(why.split())[:300],
            help=_MEASURE_HELP,
            key=KEY,
        )
    )
