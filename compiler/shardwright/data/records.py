"""Source files, read piece by piece: no file is ever in memory as a whole, and every mistake is told with its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from shardwright.data.messages import without_nulls
from shardwright.diagnostics import refusal
from shardwright.ir.json_value import JsonObject

LONGEST_LINE_BYTES = 64 * 2**20
"""Of one JSON Lines record. A longer one is nearly always a file of another format."""

PIECE_BYTES = 4 * 2**20
"""Text files are tokenized in pieces of about this size, cut behind a line end."""

Record = tuple[JsonObject, str, int]
"""(the record, where it stands, bytes of the source that it took)."""


def text_pieces(name: str) -> Iterator[tuple[str, int]]:
    """(text, bytes) of a UTF-8 file, in order. Raises Refusal (SW6107)."""
    offset, rest = 0, b""
    with _open(name) as file:
        while chunk := file.read(PIECE_BYTES):
            whole = rest + chunk
            cut = whole.rfind(b"\n") + 1
            if not cut:  # no line ends at all
                cut = _before_last_character(whole)
            yield _decode(whole[:cut], name, offset), cut
            offset, rest = offset + cut, whole[cut:]
        if rest:
            yield _decode(rest, name, offset), len(rest)


def _before_last_character(data: bytes) -> int:
    """Where the last character begins if it may go on behind `data`, else the end."""
    cut = len(data)
    while cut and len(data) - cut < 3 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    cut -= bool(cut and data[cut - 1] >= 0xC0)
    return cut or len(data)


def _open(name: str) -> BinaryIO:
    try:
        return open(name, "rb")
    except OSError as error:
        raise refusal(
            "SW6101", f"{name!r} cannot be read: {error.strerror}", "Make it readable, or correct data.path."
        ) from None


def _decode(data: bytes, name: str, offset: int, where: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(
            "SW6107",
            f"{name}{where}: byte 0x{data[error.start]:02x} at offset {offset + error.start} is not UTF-8 text",
            "Convert the file (iconv -f LATIN1 -t UTF-8), or leave it out of data.path.",
        ) from None


def records(name: str) -> Iterator[Record]:
    """The records of a .parquet file, or of one in JSON Lines, whatever its name. Raises Refusal."""
    return _parquet(name, None) if name.endswith(".parquet") else json_lines(name)


def json_lines(name: str) -> Iterator[Record]:
    """One JSON object a line; empty lines are skipped. Errors: SW6107 to SW6109."""
    offset = 0
    with _open(name) as file:
        number = 0
        while line := file.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            if len(line) > LONGEST_LINE_BYTES:
                raise refusal(
                    "SW6108",
                    f"{name}:{number}: the line is longer than {LONGEST_LINE_BYTES // 2**20} MiB",
                    "JSON Lines has a record a line: turn a JSON array into lines (jq -c '.[]'), or split the record.",
                )
            where = f"{name}:{number}"
            text = _decode(line, name, offset, f":{number}")
            offset += len(line)
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                cause = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"
                column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
                raise refusal(
                    "SW6109", f"{where}: this line is not JSON: {cause}{column}", "Correct or delete the line."
                ) from None
            if not isinstance(record, dict):
                raise refusal(
                    "SW6109",
                    f"{where}: this line is not a JSON object",
                    'Write a record as {"text": "..."}, one a line.',
                )
            yield cast(JsonObject, record), where, len(line)


def _parquet(name: str, column: str | None) -> Iterator[Record]:
    """Row groups in batches. Errors: SW6117 no parquet file, SW6118 pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise refusal(
            "SW6118",
            "parquet files need pyarrow, which is not installed",
            "pip install 'shardwright[data]'",
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(name)
        names = file.schema_arrow.names
        wanted = names if column is None else [column] if column in names else names[:0]
        if column is not None and not wanted:
            raise missing_field(name, column, names)
        share = Path(name).stat().st_size / max(1, file.metadata.num_rows)
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for record in batch.to_pylist():
                row += 1
                record = {key: without_nulls(value) for key, value in record.items()}
                yield record, f"{name}, row {row}", int(share)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # ValueError: text in it that is not UTF-8
        raise refusal(
            "SW6117",
            f"{name!r} cannot be read as parquet: {str(error).splitlines()[0][:300]}",
            "Write the file again, for example with `datasets.Dataset.to_parquet`.",
        ) from None


def texts(name: str, kind: str, field: str) -> Iterator[tuple[str, int]]:
    """(text, bytes) of each record's `field`. Errors: those above, SW6110."""
    for record, where, size in _parquet(name, field) if kind == "parquet" else json_lines(name):
        value = record.get(field)
        if field not in record:
            raise missing_field(where, field, record)
        if not isinstance(value, str):
            raise refusal(
                "SW6110",
                f"{where}: {field!r} holds {_kind_of(value)}, not text",
                "Correct the record, or name the key that holds the text as data.field.",
            )
        yield value, size


def missing_field(where: str, field: str, there: object, key: str = "field") -> Exception:
    names = ", ".join(sorted(str(name)[:40] for name in there)[:8]) if isinstance(there, list | dict) else ""
    return refusal(
        "SW6110",
        f"{where}: there is no {field!r}",
        f"It has {names or 'no keys'}. Name the one that holds the {'text' if key == 'field' else 'messages'} "
        f"as data.{key}.",
    )


def _kind_of(value: object) -> str:
    kinds = {type(None): "null", int: "a number", float: "a number", bool: "true or false", dict: "an object"}
    return kinds.get(type(value), "a list")
