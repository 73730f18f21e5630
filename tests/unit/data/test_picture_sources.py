"""Where a record's picture may stand, and what its pixels become."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shardwright.data.pictures import Damaged, PictureWriter, decode, locate_picture, open_pictures, take_pictures

RAMP = np.linspace(0, 65535, 64 * 32).astype(np.uint16).reshape(32, 64)


def png(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


URI = "data:image/png;base64," + base64.b64encode(png(Image.new("RGB", (64, 32), "red"))).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": URI},
        {"type": "image", "image": URI},
        {"type": "image", "url": URI.replace("data:", "DATA:")},
    ],
)
def test_a_data_uri_is_a_picture_in_the_record(tmp_path: Path, part: dict[str, object]) -> None:
    messages, (source,) = take_pictures(None, [{"role": "user", "content": [part]}], "here")  # type: ignore[list-item]
    assert messages[0]["content"] == [{"type": "image"}]
    found = locate_picture(source, tmp_path)
    assert found.path is None and (found.width, found.height) == (64, 32)
    assert decode(found, 10**6).getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64,%%%" + "A" * 9999,
        "data:image/png," + "A" * 9999,
        URI[22:] * 99,
        "https://a/" + "b" * 9999,
    ],
)
def test_no_message_holds_a_whole_picture(tmp_path: Path, source: str) -> None:
    with pytest.raises(Damaged) as why:
        locate_picture(source, tmp_path)
    assert len(str(why.value)) < 400 and "\n" not in str(why.value)


def test_grey_of_16_bits_is_scaled(tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "a.png")
    found = np.asarray(decode(locate_picture("a.png", tmp_path), 10**6))
    assert np.abs(found[..., 0].astype(float) - RAMP / 257).max() <= 1 and (found == found[..., :1]).all()


def test_pixels_of_32_bits_are_refused(tmp_path: Path) -> None:
    for image in (Image.fromarray(RAMP.astype(np.float32)), Image.fromarray(RAMP.astype(np.int32))):
        image.save(tmp_path / "a.tiff")
        with pytest.raises(Damaged, match="nothing says what is white"):
            locate_picture("a.tiff", tmp_path)


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    try:
        (tmp_path / name).write_bytes(png(Image.new("RGB", (4, 4))))
    except OSError:
        pytest.skip("this file system wants UTF-8")
    writer = PictureWriter(tmp_path)
    writer.add(0, [locate_picture(name, tmp_path)])
    writer.finish()
    table = open_pictures(tmp_path)
    assert table is not None and decode(table.of(0)[0], 10**6).size == (4, 4)
