"""Opens a data file as bytes, decompressed by what it holds, whatever its name is. Other formats
are named."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO, cast

from shardwright.diagnostics import Refusal, refusal

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
