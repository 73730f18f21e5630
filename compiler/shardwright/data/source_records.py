"""Reads source files piece by piece: no file is ever in memory as a whole, and every mistake is
told with its line."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from shardwright.data.chat_messages import drop_nulls
from shardwright.data.record_counts import RecordCounts
from shardwright.data.source_files import SourceFile
from shardwright.diagnostics import Refusal, refusal
from shardwright.utils.json_types import JsonObject, JsonValue

LONGEST_LINE_BYTES = 64 * 2**20
"""Of one JSON Lines record. A longer one is nearly always a file of another format."""

PIECE_BYTES = 4 * 2**20
"""Text files are tokenized in pieces of about this size, cut behind a line end."""

_SURROGATE = re.compile("[\ud800-\udfff]")

Record = tuple[JsonObject, str, int]
"""(the record, where it stands, bytes of the source that it took)."""


def text_chunks(name: str) -> Iterator[tuple[str, int]]:
    """Yields (text, bytes of the file) of a UTF-8 file, in order. Raises Refusal (SW6107)."""
    offset, rest = 0, b""
    with SourceFile(name) as file:
        while chunk := file.read(PIECE_BYTES):
            whole = rest + chunk
            cut = whole.rfind(b"\n") + 1
            if not cut:  # no line ends at all
                cut = _before_last_character(whole)
            yield _decode(whole[:cut], name, offset), file.bytes_consumed()
            offset, rest = offset + cut, whole[cut:]
        if rest:
            yield _decode(rest, name, offset), file.bytes_consumed()


def _before_last_character(data: bytes) -> int:
    """Returns where the last character begins if it may go on behind `data`, else the end."""
    cut = len(data)
    while cut and len(data) - cut < 3 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    cut -= bool(cut and data[cut - 1] >= 0xC0)
    return cut or len(data)


def _decode(data: bytes, name: str, offset: int, where: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(
            "SW6107",
            (
                f"{name}{where}: byte 0x{data[error.start]:02x} at offset {offset + error.start} "
                "is not UTF-8 text"
            ),
            "Convert the file (iconv -f LATIN1 -t UTF-8), or leave it out of data.path.",
        ) from None


def records(name: str, report: RecordCounts) -> Iterator[Record]:
    """Yields the records of a parquet file, of JSON Lines, or of one JSON array, whatever its name.
    Raises Refusal."""
    return _parquet(name, None, report) if _is_parquet(name) else json_records(name, report)


def _is_parquet(name: str) -> bool:
    try:
        with open(name, "rb") as file:
            return name.endswith(".parquet") or file.read(4) == b"PAR1"
    except OSError:
        return False  # told where it is opened


def json_records(name: str, report: RecordCounts) -> Iterator[Record]:
    """Yields one JSON object a line, empty lines skipped, or the objects of an array. Errors:
    SW6107 to SW6109."""
    with SourceFile(name) as file:
        found = (
            _array(name, file)
            if file.peek(512).lstrip()[:1] == b"["
            else _lines(name, file, report)
        )
        for value, where, size in found:
            if report.is_full:
                return
            report.records += 1
            if isinstance(value, Refusal):
                report.skip_record(value)
                continue
            if not isinstance(value, dict):
                report.skip_record(
                    refusal(
                        "SW6109",
                        f"{where}: this record is not a JSON object: {json.dumps(value)[:40]}",
                        'Write a record as {"text": "..."}, one a line.',
                    )
                )
                continue
            whole = _without_surrogates(value)
            report.replaced += whole is not value
            yield cast(JsonObject, whole), where, size


def _lines(
    name: str, file: SourceFile, report: RecordCounts
) -> Iterator[tuple[JsonValue | Refusal, str, int]]:
    """Yields the value of each line; a Refusal in its place for a line that cannot be read."""
    offset = number = 0
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        if len(line) > LONGEST_LINE_BYTES:
            raise _too_long(where, "line")
        offset += len(line)
        if not line.strip():
            continue
        try:
            text = _decode(line, name, offset - len(line), f":{number}").lstrip(
                "\ufeff"
            )  # files that were joined
            yield json.loads(text), where, file.bytes_consumed()
        except Refusal as problem:
            yield problem, where, file.bytes_consumed()
        except (ValueError, RecursionError) as error:
            yield (
                _invalid_json(
                    f"{where}: this line", error, f", column {getattr(error, 'colno', 0)}"
                ),
                where,
                file.bytes_consumed(),
            )


def _array(name: str, file: SourceFile) -> Iterator[tuple[JsonValue, str, int]]:
    """Yields the entries of a JSON array, each once it is there as a whole. `where` has the line
    that it begins in."""
    decode, parse = codecs.getincrementaldecoder("utf-8")().decode, json.JSONDecoder().raw_decode
    text, at, line, read = "", 0, 1, 0
    ended = False

    def more(size: int) -> None:
        """Reads on, and forgets what was parsed."""
        nonlocal text, at, read, ended
        chunk = file.read(size)
        ended = not chunk
        try:
            text, at = text[at:] + decode(chunk, final=ended), 0
        except UnicodeDecodeError as error:
            raise refusal(
                "SW6107",
                (
                    f"{name}: byte 0x{error.object[error.start]:02x} behind offset {read} is not "
                    "UTF-8 text"
                ),
                "Convert the file (iconv -f LATIN1 -t UTF-8), or leave it out of data.path.",
            ) from None
        read += len(chunk)

    def next_character() -> str:
        """Returns the next one that is no white space, and leaves it there; "" at the end of the
        file."""
        nonlocal at, line
        while True:
            begin = at
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            line += text.count("\n", begin, at)
            if at < len(text) or ended:
                return text[at : at + 1]
            more(PIECE_BYTES)

    wanted = "["
    while True:
        found = next_character()
        where = f"{name}:{line}"
        if found and wanted == "[":
            at += 1
            wanted = "entry or ]"
        elif found == "]" and wanted != "entry":
            at += 1
            if next_character():
                raise _invalid_json(
                    f"{name}:{line}: what stands behind the array", ValueError("Extra data")
                )
            return
        elif found == "," and wanted == ", or ]":
            at += 1
            wanted = "entry"
        elif found and wanted.startswith("entry"):
            while True:
                try:
                    value, stop = parse(text, at)
                    break
                except (ValueError, RecursionError) as error:
                    size = len(text) - at
                    if ended or isinstance(error, RecursionError):
                        raise _invalid_json(f"{where}: this entry of the array", error) from None
                    if size > LONGEST_LINE_BYTES:
                        raise _too_long(where, "entry of the array") from None
                    more(max(PIECE_BYTES, size))
            line += text.count("\n", at, stop)
            at, wanted = stop, ", or ]"
            yield value, where, file.bytes_consumed()
        else:
            cause = (
                f"{found!r} stands where {wanted} belongs"
                if found
                else "the file ends inside of it"
            )
            raise _invalid_json(f"{where}: this array", ValueError(cause))


def _invalid_json(what: str, error: Exception, place: str = "") -> Refusal:
    deep = isinstance(error, RecursionError)
    cause = "it is nested too deeply" if deep else getattr(error, "msg", None) or str(error)
    return refusal(
        "SW6109",
        f"{what} is not JSON: {cause}{'' if deep else place}",
        (
            "Correct or delete it. A record stands on one line (jq -c . FILE makes one of "
            "several), or in an array."
        ),
    )


def _too_long(where: str, what: str) -> Refusal:
    return refusal(
        "SW6108",
        f"{where}: the {what} is longer than {LONGEST_LINE_BYTES // 2**20} MiB",
        (
            "JSON Lines has a record a line: turn a JSON array into lines (jq -c '.[]'), or split "
            "the record."
        ),
    )


def _without_surrogates(value: Any) -> Any:
    """Writes U+FFFD for each half of a surrogate pair, which UTF-8 cannot hold. Returns `value`
    itself without any."""
    if isinstance(value, str):
        return (
            value
            if value.isascii() or not _SURROGATE.search(value)
            else _SURROGATE.sub("\ufffd", value)
        )
    if isinstance(value, dict):
        pairs = [(_without_surrogates(k), _without_surrogates(v)) for k, v in value.items()]
        same = all(k is a and v is b for (k, v), (a, b) in zip(pairs, value.items(), strict=True))
        return value if same else dict(pairs)
    if isinstance(value, list):
        items = [_without_surrogates(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value


def _parquet(name: str, column: str | None, report: RecordCounts) -> Iterator[Record]:
    """Yields records, read from row groups in batches. Errors: SW6117 no parquet file, SW6118
    pyarrow is missing."""
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
        for batch in file.iter_batches(batch_size=min(1024, report.most or 1024), columns=wanted):
            for record in batch.to_pylist(maps_as_pydicts="strict"):
                if report.is_full:
                    return
                row += 1
                report.records += 1
                record = {key: drop_nulls(value) for key, value in record.items()}
                yield record, f"{name}, row {row}", int(share)
    # ValueError: text in it that is not UTF-8; KeyError: a map with the same key twice.
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise refusal(
            "SW6117",
            f"{name!r} cannot be read as parquet: {str(error).splitlines()[0][:300]}",
            "Write the file again, for example with `datasets.Dataset.to_parquet`.",
        ) from None


def texts(name: str, kind: str, key: str, report: RecordCounts) -> Iterator[tuple[str, int]]:
    """Yields (text, bytes) of each record's `key`. Errors: those above, SW6110."""
    for record, where, size in (
        _parquet(name, key, report) if kind == "parquet" else json_records(name, report)
    ):
        try:
            text = record_text(record, where, key)
        except Refusal as problem:
            report.skip_record(problem)
            continue
        yield text, size


def record_text(record: JsonObject, where: str, key: str) -> str:
    """Returns the text under `key`. Errors: SW6110."""
    if key not in record:
        raise missing_field(where, key, record)
    value = record[key]
    if isinstance(value, str):
        return value
    raise refusal(
        "SW6110",
        f"{where}: {key!r} holds {_kind_of(value)}, not text",
        "Correct the record, or name the key that holds the text as data.field. `skip_damaged: "
        "0.01` leaves out up to that share of the records, and `prepare` counts them.",
    )


def missing_field(where: str, key: str, there: object, option: str = "field") -> Refusal:
    names = (
        ", ".join(sorted(str(name)[:40] for name in there)[:8])
        if isinstance(there, list | dict)
        else ""
    )
    return refusal(
        "SW6110",
        f"{where}: there is no {key!r}",
        f"It has {names or 'no keys'}. Name the one that holds the "
        f"{'text' if option == 'field' else 'messages'} as data.{option}.",
    )


def _kind_of(value: object) -> str:
    kinds = {
        type(None): "null",
        int: "a number",
        float: "a number",
        bool: "true or false",
        dict: "an object",
    }
    return kinds.get(type(value), "a list")
