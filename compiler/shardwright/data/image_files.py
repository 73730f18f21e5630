"""Find the images of a record, check their headers, store them beside the tokens, and decode them.

pictures.bin holds the path (UTF-8) of an image in a file, or the bytes of an image in the record.
pictures.npy is int64 (n, 6): document, first byte and end in pictures.bin, 1 for a path, width and
height in pixels. No torch; Pillow decodes.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardwright.data.chat_format import Message
from shardwright.data.indexed_dataset import damaged_data
from shardwright.diagnostics import refusal
from shardwright.utils.file_io import read_regular_file
from shardwright.utils.json_values import JsonValue

IMAGE_BYTES_FILE, IMAGE_INDEX_FILE, IMAGE_COUNTS_FILE = (
    "pictures.bin",
    "pictures.npy",
    "pictures.json",
)
MAX_IMAGE_PIXELS = 2**26
"""Largest image that is opened: a small file can hold gigabytes of one colour."""
MAX_IMAGE_BYTES = 2**29
IMAGE_PLACEHOLDER = "<image>"
"""Placeholder of the next of a record's `images` in a plain-text message."""
MAX_DAMAGED_MESSAGES = 5

_SOURCE_KEYS = ("path", "image", "url")
_TRANSPOSED_ORIENTATIONS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}


class DamagedImage(Exception):
    """An image cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Locate an image's bytes, by path or data.

    width, height: in pixels, with its EXIF orientation applied.
    """

    path: str | None
    data: bytes | None
    width: int
    height: int


@dataclass(slots=True, kw_only=True)
class ImageCounts:
    """Count the conversations that were left out.

    damaged: because of a damaged image.
    too_many_images: because of more than images.per_row.
    told: messages about the first damaged images.
    """

    damaged: int = 0
    too_many_images: int = 0
    told: list[str]


def extract_images(
    given: object, messages: list[Message], where: str
) -> tuple[list[Message], list[JsonValue]]:
    """Return (messages for the template, the record's image entries in the order of the text).

    given: the record's `images`. An image is a content part `{"type": "image"}` with `image`,
        `path` or `url`, or the next of the record's `images`; in plain text PLACEHOLDER stands for
        the latter.
    Raises SW6130 (a part that is neither text nor image), SW6131 (placeholders and images do not
    match).
    """
    one = [] if given is None else [cast(JsonValue, given)]
    images: list[JsonValue] = list(given) if isinstance(given, list) else one
    rest, out = iter(images), []
    sources: list[JsonValue] = []
    for message in messages:
        given_content = message.get("content")
        parts: list[JsonValue] = []
        if isinstance(given_content, list):
            parts = given_content
        elif isinstance(given_content, str) and images and IMAGE_PLACEHOLDER in given_content:
            for text in re.split(f"({IMAGE_PLACEHOLDER})", given_content):
                if text:
                    is_image = text == IMAGE_PLACEHOLDER
                    parts.append({"type": "image"} if is_image else {"type": "text", "text": text})
        else:
            out.append(message)
            continue
        content: list[JsonValue] = []
        for part in parts:
            part = part if isinstance(part, dict) else {"type": type(part).__name__}
            kind = part.get("type")
            if kind in ("image", "image_url"):  # the latter is OpenAI's
                named = (part.get(key) for key in (*_SOURCE_KEYS, "image_url"))
                own = next((value for value in named if value is not None), None)
                source = next(rest, None) if own is None else own
                if source is None:
                    raise _unmatched(
                        where, f"it has more placeholders than its {len(images)} images"
                    )
                sources.append(source)
                content.append({"type": "image"})
            elif kind == "text":
                content.append({"type": "text", "text": part.get("text")})
            else:
                raise refusal(
                    "SW6130",
                    f"{where}: a content part has the type {kind!r}",
                    "Only text and image parts can be trained on. Leave such records out.",
                )
        out.append({**message, "content": content})
    left = sum(1 for _ in rest)
    if left:
        raise _unmatched(where, f"{left} of its {len(images)} images have no placeholder")
    return out, sources


def _unmatched(where: str, why: str) -> Exception:
    return refusal(
        "SW6131",
        f"{where}: {why}",
        (
            'Write a part {"type": "image"} (or `<image>` in plain text) for each entry of '
            "`images`, in their order."
        ),
    )


def inspect_image(source: JsonValue, folder: Path) -> ImageSource:
    """Read an image's header.

    source: a path relative to `folder`, or an object with `path` or `bytes`.
    Raises DamagedImage, and SW6135 for a path outside `folder`: data must not choose which files
    are read. A link in the folder is followed.
    """
    if isinstance(source, dict):
        data = source.get("bytes")
        if isinstance(data, bytes) and data:
            return _read_header(str(source.get("path") or "an image in the record"), None, data)
        source = next((source[key] for key in _SOURCE_KEYS if source.get(key)), None)
    if isinstance(source, str) and source[:5].lower() == "data:":
        head, _, text = source.partition(",")
        try:
            if not head.lower().endswith(";base64"):
                raise ValueError
            data = base64.b64decode("".join(text.split()) + "=" * (-len(text) % 4), validate=True)
        except ValueError:
            raise DamagedImage(f"{head[:60]!r} is not followed by base64 text") from None
        return _read_header("an image in the record", None, data)
    if not isinstance(source, str) or "://" in source:
        raise DamagedImage(
            f"{str(source)[:120]!r} is not a file; images must be in files or in the record, and "
            "are not downloaded"
        )
    inside = os.path.abspath(folder)
    # Without `..`, which leads elsewhere after a link.
    path = os.path.abspath(os.path.join(inside, source))
    if os.path.commonpath([inside, path]) != inside:
        raise refusal(
            "SW6135",
            (f"the image {source[:120]!r} is outside {inside!r}, the folder of the data's images"),
            ("Set data.images.folder to the images' folder, or move them into the data's folder."),
        )
    try:
        data = read_regular_file(path, MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not a regular file, or is too large"
        raise DamagedImage(f"{_short(path)} cannot be read: {why}") from None
    return _read_header(_short(path), path, data)


def _short(path: str) -> str:
    return repr(path if len(path) <= 300 else f"{path[:120]}... ({len(path):,} characters)")


def _read_header(name: str, path: str | None, data: bytes) -> ImageSource:
    with _opened(name, data) as image:
        if getattr(image, "n_frames", 1) > 1:
            raise DamagedImage(f"{name} is animated ({image.n_frames} frames)")
        width, height = image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise DamagedImage(
                f"{name} has {width} x {height} pixels, more than {MAX_IMAGE_PIXELS:,}"
            )
        if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
            raise DamagedImage(
                f"{name} has 32 bits a pixel (Pillow's mode {image.mode}) and no known white level"
            )
        end = _ENDS.get(image.format or "")
        if end is None:
            _load(name, image)
        elif end not in data[-4096:]:
            raise DamagedImage(f"{name} is truncated")
        if image.getexif().get(0x0112) in _TRANSPOSED_ORIENTATIONS:
            width, height = height, width
    return ImageSource(path=path, data=None if path else data, width=width, height=height)


@contextlib.contextmanager
def _opened(name: str, data: bytes) -> Iterator[Any]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own size limit is higher
            with Image.open(io.BytesIO(data)) as image:
                yield image
    except DamagedImage:
        raise
    except Exception as error:  # any of Pillow's decoders
        why = _first_line(error)
        if "cannot identify" in why:  # Pillow names its own object
            why = f"Pillow does not know its format (it begins with {data[:8]!r})"
        raise DamagedImage(f"{name} cannot be opened as an image: {why}") from None


def _load(name: str, image: Any) -> None:
    try:
        image.load()
    except Exception as error:
        raise DamagedImage(f"{name} cannot be decoded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def decode(picture: ImageSource, max_pixels: int) -> Any:
    """Return Pillow's RGB image, with its orientation applied, scaled down to `max_pixels`. Raises
    SW6132."""
    from PIL import Image, ImageOps

    name = "an image in the data" if picture.path is None else repr(picture.path)
    try:
        data = (
            picture.data
            if picture.path is None
            else read_regular_file(picture.path, MAX_IMAGE_BYTES)
        )
        with _opened(name, data or b"") as image:
            _load(name, image)
            turned: Any = ImageOps.exif_transpose(image)
            if turned.mode.startswith("I"):  # Pillow's conversion clips 16 bits above 255
                levels = np.asarray(turned).astype(np.int64) // 257
                turned = Image.fromarray(levels.clip(0, 255).astype(np.uint8))
            rgb = turned.convert("RGB")
    except (OSError, DamagedImage) as error:
        raise refusal(
            "SW6132",
            f"an image that `prepare` accepted cannot be used: {error}",
            "Keep other programs from changing the images, remove the damaged one, and prepare "
            "again.",
        ) from None
    if rgb.size != (picture.width, picture.height):
        raise refusal(
            "SW6132",
            f"{name} has {rgb.width} x {rgb.height} pixels, but had {picture.width} x "
            f"{picture.height} when it was prepared",
            "Keep other programs from changing the images, and prepare again.",
        )
    size = fit_within_pixels(picture.width, picture.height, max_pixels)
    return rgb if size == rgb.size else rgb.resize(size)


def fit_within_pixels(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the size scaled down to at most max_pixels in the same proportions, at least 1 pixel a
    side."""
    if width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    low = min(max(1, int(height * scale)), max_pixels)
    return max(1, min(int(width * scale), max_pixels // low)), low


class ImageWriter:
    """Write images beside DocumentWriter's tokens, in the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts = folder, ImageCounts(told=[])
        self._bytes = (folder / IMAGE_BYTES_FILE).open("wb")
        self._rows: list[tuple[int, ...]] = []
        self._at = 0

    def add(self, document: int, pictures: list[ImageSource]) -> None:
        for picture in pictures:
            data = (
                picture.data if picture.path is None else os.fsencode(os.path.abspath(picture.path))
            )
            assert data is not None
            self._bytes.write(data)
            end = self._at + len(data)
            self._rows.append(
                (
                    document,
                    self._at,
                    end,
                    int(picture.path is not None),
                    picture.width,
                    picture.height,
                )
            )
            self._at = end

    def damaged(self, why: str) -> None:
        self.counts.damaged += 1
        if len(self.counts.told) < MAX_DAMAGED_MESSAGES:
            self.counts.told.append(why)

    def check_damaged(self, share: float, records: int, kind: str) -> None:
        """Raise SW6134 where more than `share` of the records read have a damaged image.

        kind: "conversations" or "pairs".
        """
        damaged = self.counts.damaged
        if damaged > share * records:
            raise refusal(
                "SW6134",
                f"{damaged} of {records} {kind} have a damaged image: "
                f"{'; '.join(self.counts.told)}",
                "Repair or delete them; `skip_damaged: 0.01` leaves out up to that share of the "
                f"{kind}, and `prepare` counts them.",
            )

    def finish(self) -> None:
        self._bytes.flush()
        os.fsync(self._bytes.fileno())
        self._bytes.close()
        np.save(
            self.folder / IMAGE_INDEX_FILE, np.asarray(self._rows, dtype=np.int64).reshape(-1, 6)
        )
        (self.folder / IMAGE_COUNTS_FILE).write_text(
            json.dumps(asdict(self.counts)), encoding="utf-8"
        )

    def close(self) -> None:
        self._bytes.close()


@dataclass(frozen=True, slots=True)
class ImageTable:
    """Read the images of a prepared source.

    data: pictures.bin; index: pictures.npy.
    """

    data: npt.NDArray[np.uint8]
    index: npt.NDArray[np.int64]

    def of(self, document: int) -> tuple[ImageSource, ...]:
        """Return the images of a document."""
        first, stop = np.searchsorted(self.index[:, 0], (document, document + 1))
        sources = []
        for _, begin, end, is_path, width, height in self.index[first:stop].tolist():
            data = self.data[begin:end].tobytes()
            sources.append(
                ImageSource(
                    path=os.fsdecode(data) if is_path else None,
                    data=None if is_path else data,
                    width=width,
                    height=height,
                )
            )
        return tuple(sources)


def open_images(folder: Path) -> ImageTable | None:
    """Open a prepared source's images, None where it has none."""
    if not (folder / IMAGE_INDEX_FILE).is_file():
        return None
    path = folder / IMAGE_BYTES_FILE
    data = (
        np.memmap(path, dtype=np.uint8, mode="r")
        if path.stat().st_size
        else np.empty(0, dtype=np.uint8)
    )
    return ImageTable(data, np.load(folder / IMAGE_INDEX_FILE, mmap_mode="r"))


def read_image_counts(folder: Path) -> ImageCounts:
    """Return the counts of prepared data with images. Raises SW6120."""
    try:
        return ImageCounts(**json.loads((folder / IMAGE_COUNTS_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        raise damaged_data(folder, f"{IMAGE_COUNTS_FILE} cannot be read") from None
