"""Read source files piece by piece: decompression, JSON, parquet and text, with errors by line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from tqdm import tqdm

from shardwright.data.chat_format import drop_nulls
from shardwright.data.indexed_dataset import damaged_data
from shardwright.data.tokenizers import without_surrogates
from shardwright.diagnostics import Refusal, refusal
from shardwright.utils.installation import install_command
from shardwright.utils.json_values import JsonObject, JsonValue

BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8 files that Windows programs write; it is not part of the text."""

_GZIP, _BZIP2, _XZ, _ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_OTHER_FORMATS = (
    (0, b"PAR1", "a parquet file", "Write `kind: parquet`, or `kind: chat` for conversations."),
    (
        0,
        b"ARROW1",
        "an Arrow file",
        "Convert it with `datasets.Dataset.to_parquet`, and write `kind: parquet`.",
    ),
    (
        0,
        b"\xff\xff\xff\xff",
        "an Arrow stream",
        "Convert it with `datasets.Dataset.to_parquet`: `kind: parquet`.",
    ),
    (0, b"\x93NUMPY", "a NumPy array", "Write `kind: tokens` for token ids."),
    (0, b"PK\x03\x04", "a zip archive", "Unpack it, and name the files in it as data.path."),
    (0, b"%PDF-", "a PDF document", "Extract its text first, or leave it out of data.path."),
    (257, b"ustar", "a tar archive", "Unpack it, and name the files in it as data.path."),
    (0, b"\xff\xfe", "text in UTF-16", "Convert the file: iconv -f UTF-16 -t UTF-8."),
    (0, b"\xfe\xff", "text in UTF-16", "Convert the file: iconv -f UTF-16 -t UTF-8."),
)


class SourceFile:
    """Read a file as bytes, decompressed by its content, without a byte order mark. Use it as a
    context.

    Raises SW6101 (not readable), SW6118 (a package is missing), SW6150 (another format), SW6151
    (damaged compression).
    """

    def __init__(self, name: str) -> None:
        self.name, self._taken = name, 0
        try:
            self._raw = open(name, "rb")  # noqa: SIM115
            head = self._raw.peek(8)
        except OSError as error:
            raise _unreadable(name, error) from None
        self.compressed = head.startswith((_GZIP, _BZIP2, _XZ, _ZSTD))
        try:
            self._file = self._raw
            if self.compressed:
                stream: Any
                if head.startswith(_GZIP):
                    stream = gzip.GzipFile(fileobj=self._raw)
                elif head.startswith(_BZIP2):
                    stream = bz2.BZ2File(self._raw)
                elif head.startswith(_XZ):
                    stream = lzma.LZMAFile(self._raw)  # noqa: SIM115
                else:
                    stream = _ZstdFrames(name, self._raw)
                self._file = io.BufferedReader(stream, 2**20)
            head = self.peek(512)
            for offset, mark, what, help_text in _OTHER_FORMATS:
                if head[offset:].startswith(mark):
                    within = ", compressed" if self.compressed else ""
                    message = f"{self.name!r} is {what}{within}, not text or JSON Lines"
                    raise refusal("SW6150", message, help_text)
            if head.startswith(BOM):
                self.read(len(BOM))
        except Refusal:
            self._raw.close()
            raise

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        return cast(bytes, self._guarded(self._file.read, size))

    def readline(self, size: int) -> bytes:
        return cast(bytes, self._guarded(self._file.readline, size))

    def peek(self, size: int) -> bytes:
        """Return between one and `size` bytes, where there are any."""
        return cast(bytes, self._guarded(self._file.peek, size))[:size]

    def bytes_consumed(self) -> int:
        """Return the bytes read from disk since the last call; of a compressed file, in steps."""
        last, self._taken = self._taken, self._raw.tell()
        return self._taken - last

    def _guarded(self, read: Any, size: int) -> Any:
        try:
            return read(size)
        except Exception as error:
            if not self.compressed and isinstance(error, OSError):
                raise _unreadable(self.name, error) from None
            if (
                isinstance(error, OSError | EOFError | zlib.error | lzma.LZMAError)
                or "Zstd" in type(error).__name__
            ):
                raise refusal(
                    "SW6151",
                    f"{self.name!r} is compressed and cannot be read to its end: {error}",
                    "The file is truncated or damaged: download or write it again.",
                ) from None
            raise


class _ZstdFrames(io.RawIOBase):
    """Read concatenated frames; zstandard's own reader takes a truncated file for a complete
    one."""

    def __init__(self, name: str, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise refusal(
                "SW6118",
                f"{name!r} is compressed with zstd, and the package zstandard is not installed",
                f"Run {install_command('zstandard')}, or unpack the file with `zstd -d`.",
            ) from None
        self._raw, self._new_frame = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._left = self._made = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            data = self._left or self._raw.read(
                2**13
            )  # a decompression bomb of this size fits into memory
            if not data and self._frame is not None:
                raise EOFError("it ends inside a frame")
            if not data:
                return 0
            self._frame = self._frame or self._new_frame()
            self._made = self._frame.decompress(data)
            self._left = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._made))
        buffer[:size], self._made = self._made[:size], self._made[size:]
        return size


def _unreadable(name: str, error: OSError) -> Refusal:
    return refusal(
        "SW6101",
        f"{name!r} cannot be read: {error.strerror}",
        "Make it readable, or correct data.path.",
    )


# Progress of long reading: a bar on a terminal, plain lines in a log.


PLAIN_SECONDS = 2.0
"""Seconds between plain lines; shorter reading prints nothing."""


class ReadingProgress:
    """Print to stderr how many bytes of the sources are read.

    total: bytes of all sources.
    shown: whether to print.
    """

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self.what, self.total, self.done, self.shown = what, max(1, total), 0, shown
        has_bar = shown and sys.stderr.isatty()
        self._bar = (
            tqdm(total=total, desc=what, unit="B", unit_scale=True, dynamic_ncols=True)
            if has_bar
            else None
        )
        self._began = self._last = time.monotonic()

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        if self._bar is not None:
            self._bar.update(size_bytes)
            return
        now = time.monotonic()
        if self.shown and now - self._last >= PLAIN_SECONDS:
            self._last = now
            rate = self.done / (now - self._began)
            left = max(0.0, (self.total - self.done) / rate)
            print(
                f"{self.what}: {self.done / self.total:.0%} of {self.total / 2**20:,.0f} MiB, "
                f"{rate / 2**20:,.1f} MiB/s, {left:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


# Counts of the records that were left out or changed, stored beside the tokens.


REPORT_FILE = "records.json"
MAX_EXAMPLES = 3
_SINGLE_RECORD_CODES = frozenset(
    [
        "SW6107",
        "SW6109",
        "SW6110",
        "SW6111",
        "SW6112",
        "SW6113",
        "SW6124",
        "SW6125",
        "SW6130",
        "SW6131",
        "SW6136",
        "SW6138",
    ]
)
"""Codes of errors in a single record: the next one may be usable."""


@dataclass(slots=True, kw_only=True)
class RecordCounts:
    """Count the records of one source.

    share: share of the records that may be left out; 0 refuses the first bad record.
    most: records to read; None is all.
    records: records read so far.
    left_out: diagnostic code -> records.
    first: diagnostic code -> messages of the first records.
    replaced: records in which an unpaired surrogate became U+FFFD.
    reasoning_not_rendered: conversations whose reasoning the template does not write.
    unclosed_conversations: conversations whose last turn has no end token.
    """

    share: float = 0.0
    most: int | None = None
    records: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    replaced: int = 0
    reasoning_not_rendered: int = 0
    unclosed_conversations: int = 0

    @property
    def is_full(self) -> bool:
        """Return whether all records to read were read."""
        return self.records == self.most

    def skip_record(self, problem: Refusal) -> None:
        """Count an unusable record. Raises `problem` where none may be left out, or where it is
        about all records."""
        first = problem.diagnostics[0]
        if not self.share or first.code not in _SINGLE_RECORD_CODES:
            raise problem
        self.left_out[first.code] = self.left_out.get(first.code, 0) + 1
        messages = self.first.setdefault(first.code, [])
        if len(messages) < MAX_EXAMPLES:
            messages.append(first.message)

    def check(self, share: float, damaged: int = 0, told: Sequence[str] = ()) -> None:
        """Raise SW6153 where more records were left out than `share` of those read.

        damaged: records left out for an image.
        told: messages of the first of these.
        """
        count = sum(self.left_out.values()) + damaged
        if count > share * self.records:
            read = f"{'the first ' if self.is_full else ''}{self.records:,} records"
            raise refusal(
                "SW6153",
                f"{count:,} of {read} cannot be used, more than `skip_damaged: {share:g}` allows: "
                f"{self.examples(told)}",
                "Correct or delete them, or raise skip_damaged.",
            )

    def examples(self, told: Sequence[str] = ()) -> str:
        """Return the first messages about left-out records in one line.

        told: messages about images.
        """
        messages = [message for group in self.first.values() for message in group]
        return "; ".join([*messages, *told][:MAX_EXAMPLES])

    def write(self, folder: Path) -> None:
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_record_counts(folder: Path) -> RecordCounts:
    """Return the counts of a folder of prepared data. Raises SW6120."""
    try:
        document: Any = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        return RecordCounts(**document)
    except (OSError, ValueError, TypeError):
        raise damaged_data(folder, f"{REPORT_FILE} cannot be read") from None


# Records and text, piece by piece: no file is ever completely in memory.


LONGEST_LINE_BYTES = 64 * 2**20
"""Longest JSON Lines record; a longer line nearly always means another format."""

PIECE_BYTES = 4 * 2**20
"""Size of the pieces of a text file, cut after a line end."""

Record = tuple[JsonObject, str, int]
"""(record, where it is, bytes of the source that it took)"""


def text_chunks(name: str) -> Iterator[tuple[str, int]]:
    """Yield (text, bytes of the file) of a UTF-8 file, in order. Raises SW6107."""
    decode, rest, read = codecs.getincrementaldecoder("utf-8")().decode, "", 0
    with SourceFile(name) as file:
        while True:
            chunk = file.read(PIECE_BYTES)
            read += len(chunk)
            try:
                text = rest + decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _not_utf8(name, error, read - len(error.object)) from None
            cut = text.rfind("\n") + 1 if chunk else 0
            piece, rest = text[: cut or len(text)], text[cut or len(text) :]
            if piece:
                yield piece, file.bytes_consumed()
            if not chunk:
                return


def _not_utf8(where: str, error: UnicodeDecodeError, offset: int) -> Refusal:
    """Build SW6107.

    offset: place in the file where the bytes begin that could not be decoded.
    """
    return refusal(
        "SW6107",
        f"{where}: byte 0x{error.object[error.start]:02x} at offset {offset + error.start} is not "
        "UTF-8 text",
        "Convert the file (iconv -f LATIN1 -t UTF-8), or leave it out of data.path.",
    )


def records(name: str, report: RecordCounts) -> Iterator[Record]:
    """Yield the records of a parquet file, JSON Lines, or one JSON array, whatever its name. Raises
    Refusal."""
    try:
        with open(name, "rb") as file:
            is_parquet = name.endswith(".parquet") or file.read(4) == b"PAR1"
    except OSError:
        is_parquet = False  # opening it reports the error
    return _parquet(name, None, report) if is_parquet else json_records(name, report)


def json_records(name: str, report: RecordCounts) -> Iterator[Record]:
    """Yield one JSON object a line (empty lines skipped), or the objects of an array. Raises SW6107
    to SW6109."""
    with SourceFile(name) as file:
        is_array = file.peek(512).lstrip()[:1] == b"["
        for value, where, size in _array(name, file) if is_array else _lines(name, file):
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
                        'Write each record as {"text": "..."}, one a line.',
                    )
                )
                continue
            cleaned = _clean(value)
            report.replaced += cleaned != value
            yield cast(JsonObject, cleaned), where, size


def _lines(name: str, file: SourceFile) -> Iterator[tuple[JsonValue | Refusal, str, int]]:
    """Yield the value of each line, or a Refusal for an unreadable line."""
    offset = number = 0
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        number += 1
        where = f"{name}:{number}"
        if len(line) > LONGEST_LINE_BYTES:
            raise _too_long(where, "line")
        offset += len(line)
        if not line.strip():
            continue
        value: JsonValue | Refusal
        try:
            text = line.decode("utf-8").lstrip("\ufeff")  # concatenated files
            value = json.loads(text)
        except UnicodeDecodeError as error:
            value = _not_utf8(where, error, offset - len(line))
        except (ValueError, RecursionError) as error:
            place = f", column {getattr(error, 'colno', 0)}"
            value = _invalid_json(f"{where}: this line", error, place)
        yield value, where, file.bytes_consumed()


def _array(name: str, file: SourceFile) -> Iterator[tuple[JsonValue, str, int]]:
    """Yield the entries of a JSON array, each as soon as it is complete; `where` has its first
    line."""
    decode, parse = codecs.getincrementaldecoder("utf-8")().decode, json.JSONDecoder().raw_decode
    text, at, line, read = "", 0, 1, 0
    ended = False

    def more(size: int) -> None:
        """Read on, and drop the parsed text."""
        nonlocal text, at, read, ended
        chunk = file.read(size)
        ended = not chunk
        read += len(chunk)
        try:
            text, at = text[at:] + decode(chunk, final=ended), 0
        except UnicodeDecodeError as error:
            raise _not_utf8(name, error, read - len(error.object)) from None

    def next_character() -> str:
        """Return the next character that is not white space, without consuming it; "" at the end of
        the file."""
        nonlocal at, line
        while True:
            begin = at
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            line += text.count("\n", begin, at)
            if at < len(text) or ended:
                return text[at : at + 1]
            more(PIECE_BYTES)

    expected = "["
    while True:
        character = next_character()
        where = f"{name}:{line}"
        if character and expected == "[":
            at += 1
            expected = "entry or ]"
        elif character == "]" and expected != "entry":
            at += 1
            if next_character():
                raise _invalid_json(
                    f"{name}:{line}: the text after the array", ValueError("Extra data")
                )
            return
        elif character == "," and expected == ", or ]":
            at += 1
            expected = "entry"
        elif character and expected.startswith("entry"):
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
            at, expected = stop, ", or ]"
            yield value, where, file.bytes_consumed()
        else:
            cause = (
                f"{character!r} is in place of {expected}"
                if character
                else "the file ends inside it"
            )
            raise _invalid_json(f"{where}: this array", ValueError(cause))


def _invalid_json(what: str, error: Exception, place: str = "") -> Refusal:
    deep = isinstance(error, RecursionError)
    cause = "it is nested too deeply" if deep else getattr(error, "msg", None) or str(error)
    return refusal(
        "SW6109",
        f"{what} is not JSON: {cause}{'' if deep else place}",
        (
            "Correct or delete it. A record must be on one line (jq -c . FILE joins several), or "
            "in an array."
        ),
    )


def _too_long(where: str, what: str) -> Refusal:
    return refusal(
        "SW6108",
        f"{where}: the {what} is longer than {LONGEST_LINE_BYTES // 2**20} MiB",
        (
            "Write one record a line: turn a JSON array into lines (jq -c '.[]'), or split the "
            "record."
        ),
    )


def _clean(value: Any) -> Any:
    """Replace each unpaired surrogate of a JSON value by U+FFFD."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(inner) for key, inner in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _parquet(name: str, column: str | None, report: RecordCounts) -> Iterator[Record]:
    """Yield records, read from row groups in batches. Raises SW6117 (not parquet), SW6118 (pyarrow
    is missing)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise refusal(
            "SW6118",
            "parquet files need pyarrow, which is not installed",
            f"Run {install_command('pyarrow')}",
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(name)
        names = file.schema_arrow.names
        columns = names if column is None else [column] if column in names else names[:0]
        if column is not None and not columns:
            raise missing_field(name, column, names)
        share = Path(name).stat().st_size / max(1, file.metadata.num_rows)
        row = 0
        for batch in file.iter_batches(batch_size=min(1024, report.most or 1024), columns=columns):
            for record in batch.to_pylist(maps_as_pydicts="strict"):
                if report.is_full:
                    return
                row += 1
                report.records += 1
                record = {key: drop_nulls(value) for key, value in record.items()}
                yield record, f"{name}, row {row}", int(share)
    # ValueError: text that is not UTF-8; KeyError: a map with a duplicate key.
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise refusal(
            "SW6117",
            f"{name!r} cannot be read as parquet: {str(error).splitlines()[0][:300]}",
            "Write the file again, for example with `datasets.Dataset.to_parquet`.",
        ) from None


def texts(name: str, kind: str, key: str, report: RecordCounts) -> Iterator[tuple[str, int]]:
    """Yield (text, bytes) of each record's `key`. Raises SW6110 and the errors above."""
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
    """Return the text under `key`. Raises SW6110."""
    if key not in record:
        raise missing_field(where, key, record)
    value = record[key]
    if isinstance(value, str):
        return value
    kinds: dict[type, str] = {
        type(None): "null",
        int: "a number",
        float: "a number",
        bool: "true or false",
        dict: "an object",
    }
    raise refusal(
        "SW6110",
        f"{where}: {key!r} holds {kinds.get(type(value), 'a list')}, not text",
        "Correct the record, or set data.field to the key of the text. `skip_damaged: 0.01` "
        "leaves out up to that share of the records, and `prepare` counts them.",
    )


def missing_field(where: str, key: str, record: object, option: str = "field") -> Refusal:
    names = (
        ", ".join(sorted(str(name)[:40] for name in record)[:8])
        if isinstance(record, list | dict)
        else ""
    )
    return refusal(
        "SW6110",
        f"{where}: there is no {key!r}",
        f"Set data.{option} to the key of the {'text' if option == 'field' else 'messages'}; "
        f"the record has {names or 'no keys'}.",
    )
