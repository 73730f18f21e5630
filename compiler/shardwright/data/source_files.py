"""Opens a data file as bytes, decompressed by what it holds, whatever its name is. Other formats
are named.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from tqdm import tqdm

from shardwright.data.chat_format import drop_nulls
from shardwright.diagnostics import Refusal, refusal
from shardwright.utils.json_values import JsonObject, JsonValue

BOM = b"\xef\xbb\xbf"
"""Begins UTF-8 files that Windows programs write; it is no part of the text."""

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
    """Reads one file from its beginning, without a byte order mark. Use it as a context.

    Errors: SW6101 not readable, SW6118 a package is missing, SW6150 another format, SW6151 damaged
    compression.
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
            self._file = _decompressed(name, self._raw, head) if self.compressed else self._raw
            self._check_format()
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
        """Returns at least one byte, where there is one; `size` at most."""
        return cast(bytes, self._guarded(self._file.peek, size))[:size]

    def bytes_consumed(self) -> int:
        """Returns the bytes of the file on disk that were read since the last call: of a compressed
        file, in steps."""
        last, self._taken = self._taken, self._raw.tell()
        return self._taken - last

    def _check_format(self) -> None:
        head = self.peek(512)
        for offset, mark, what, help_text in _OTHER_FORMATS:
            if head[offset:].startswith(mark):
                within = ", compressed" if self.compressed else ""
                raise refusal(
                    "SW6150", f"{self.name!r} is {what}{within}, not text or JSON Lines", help_text
                )
        if head.startswith(BOM):
            self.read(len(BOM))

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
                    "The file is cut off or damaged: fetch or write it again.",
                ) from None
            raise


class _ZstdFrames(io.RawIOBase):
    """Reads frames one behind the other. zstandard's own reader takes a file that is cut off for
    one that ends."""

    def __init__(self, raw: BinaryIO, new_frame: Any) -> None:
        self._raw, self._new_frame = raw, new_frame
        self._frame: Any = None
        self._left = self._made = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            data = self._left or self._raw.read(2**13)  # what a bomb makes of that fits into memory
            if not data and self._frame is not None:
                raise EOFError("it ends inside of a frame")
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


def _decompressed(name: str, raw: BinaryIO, head: bytes) -> io.BufferedReader:
    stream: Any
    if head.startswith(_GZIP):
        stream = gzip.GzipFile(fileobj=raw)
    elif head.startswith(_BZIP2):
        stream = bz2.BZ2File(raw)
    elif head.startswith(_XZ):
        stream = lzma.LZMAFile(raw)  # noqa: SIM115
    else:
        try:
            import zstandard
        except ImportError:
            raise refusal(
                "SW6118",
                f"{name!r} is compressed with zstd, and the package zstandard is not installed",
                (
                    "pip install zstandard (it is in 'shardwright[data]'), or unpack the file with "
                    "`zstd -d`."
                ),
            ) from None
        stream = _ZstdFrames(raw, zstandard.ZstdDecompressor().decompressobj)
    return io.BufferedReader(stream, 2**20)


# Shows how far a long reading is: a bar on a terminal, plain lines in a log.


PLAIN_SECONDS = 2.0
"""Stands between one plain line and the next; what takes less than that says nothing."""


class ReadingProgress:
    """Says on stderr how many bytes of the sources are read. total: all of them; shown: False says
    nothing."""

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


# Counts what reading a source left out or changed, with the first records; the counts are kept
# beside the tokens.


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
        "SW6130",
        "SW6131",
        "SW6136",
        "SW6138",
    ]
)
"""Holds the codes that speak of a single record: the next one may be good."""


@dataclass(slots=True, kw_only=True)
class RecordCounts:
    """Counts the records of one source.

    share: of the records that may be left out; 0: the first bad record is refused. most: records
    that are read; None: all. records: read so far; left_out: code of the diagnostic -> records;
    first: code -> messages of the first ones; replaced: records in which half of a surrogate pair
    became U+FFFD. Of conversations: reasoning_not_rendered: those whose reasoning the template does
    not write; unclosed_conversations: those whose last turn ends without a token that says so.
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
        """Says whether as many records were read as may be."""
        return self.records == self.most

    def skip_record(self, problem: Refusal) -> None:
        """Counts a record that has no use. Raises `problem` where none may be left out, or it
        speaks of all of them."""
        first = problem.diagnostics[0]
        if not self.share or first.code not in _SINGLE_RECORD_CODES:
            raise problem
        self.left_out[first.code] = self.left_out.get(first.code, 0) + 1
        messages = self.first.setdefault(first.code, [])
        if len(messages) < MAX_EXAMPLES:
            messages.append(first.message)

    def check(self, share: float, damaged: int = 0, told: Sequence[str] = ()) -> None:
        """Raises Refusal (SW6153) where more records were left out than `share` of those that were
        read.

        damaged: records left out for an image; told: messages of the first of these.
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
        """Returns the first messages of what was left out, in one line. told: of records left out
        for an image."""
        messages = [message for found in self.first.values() for message in found]
        return "; ".join([*messages, *told][:MAX_EXAMPLES])

    def write(self, folder: Path) -> None:
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_record_counts(folder: Path) -> RecordCounts:
    """Returns the counts in a folder of prepared data; empty ones for what an earlier version
    made."""
    try:
        document: Any = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        return RecordCounts(**document)
    except (OSError, ValueError, TypeError):
        return RecordCounts()


# Reads source files piece by piece: no file is ever in memory as a whole, and every mistake is
# told with its line.


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
