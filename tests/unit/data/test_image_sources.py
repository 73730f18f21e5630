"""Where a record's picture may stand, and what its pixels become."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image

from shardwright.data.image_files import (
    DamagedImage,
    ImageWriter,
    decode,
    extract_images,
    inspect_image,
    open_images,
)

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
    messages, (source,) = extract_images(None, [{"role": "user", "content": [part]}], "here")  # type: ignore[list-item]
    assert messages[0]["content"] == [{"type": "image"}]
    found = inspect_image(source, tmp_path)
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
    with pytest.raises(DamagedImage) as why:
        inspect_image(source, tmp_path)
    assert len(str(why.value)) < 400 and "\n" not in str(why.value)


def test_grey_of_16_bits_is_scaled(tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "a.png")
    found = np.asarray(decode(inspect_image("a.png", tmp_path), 10**6))
    assert (
        np.abs(found[..., 0].astype(float) - RAMP / 257).max() <= 1
        and (found == found[..., :1]).all()
    )


def test_pixels_of_32_bits_are_refused(tmp_path: Path) -> None:
    for image in (Image.fromarray(RAMP.astype(np.float32)), Image.fromarray(RAMP.astype(np.int32))):
        image.save(tmp_path / "a.tiff")
        with pytest.raises(DamagedImage, match="no known white level"):
            inspect_image("a.tiff", tmp_path)


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    try:
        (tmp_path / name).write_bytes(png(Image.new("RGB", (4, 4))))
    except OSError:
        pytest.skip("this file system wants UTF-8")
    writer = ImageWriter(tmp_path)
    writer.add(0, [inspect_image(name, tmp_path)])
    writer.finish()
    table = open_images(tmp_path)
    assert table is not None and decode(table.of(0)[0], 10**6).size == (4, 4)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>"""  # noqa: E501


def of_every_mode() -> Iterator[tuple[str, Image.Image, dict[str, Any]]]:
    """(file name, image, options of its save), by Pillow's modes, kinds of transparency and
    orientations."""
    yield from ((f"{mode}.png", NOISE.convert(mode), {}) for mode in ("RGB", "L", "1"))
    palette = NOISE.convert("P", palette=Image.Palette.ADAPTIVE)
    for name in ("P.png", "P.gif"):
        yield name, palette, {}
        yield f"one-clear-{name}", palette, {"transparency": 3}
    yield "all-clear-P.png", palette, {"transparency": bytes(range(256))}
    yield "clear-L.png", NOISE.convert("L"), {"transparency": 100}
    yield "clear-RGB.png", NOISE, {"transparency": NOISE.getpixel((3, 3))}
    clear = NOISE.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(NOISE.size))
    yield from ((name, clear, {}) for name in ("RGBA.png", "RGBA.webp"))
    yield "LA.png", clear.convert("LA"), {}
    yield from ((name, NOISE.convert("CMYK"), {}) for name in ("CMYK.jpg", "CMYK.tiff"))
    yield "LAB.tiff", NOISE.convert("LAB"), {}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("jpg", "png", "webp", "tiff"):
            yield f"orientation-{orientation}.{kind}", NOISE, {"exif": exif}
        yield f"orientation-{orientation}-CMYK.jpg", NOISE.convert("CMYK"), {"exif": exif}
        yield f"orientation-{orientation}-P.png", palette, {"exif": exif}
    note = PngImagePlugin.PngInfo()
    note.add_itxt("XML:com.adobe.xmp", XMP)
    yield "xmp.png", NOISE, {"pnginfo": note}
    yield from ((name, NOISE, {"xmp": XMP.encode()}) for name in ("xmp.jpg", "xmp.webp"))


EVERY_MODE = {name: (image, options) for name, image, options in of_every_mode()}


@pytest.mark.parametrize("name", EVERY_MODE)
@pytest.mark.filterwarnings(
    "ignore:Palette images with Transparency"
)  # Pillow's, of transformers' own conversion
def test_an_image_is_what_transformers_loads(tmp_path: Path, name: str) -> None:
    image, options = EVERY_MODE[name]
    image.save(tmp_path / name, **options)
    expected = load_image(str(tmp_path / name))
    for source in (name, {"bytes": (tmp_path / name).read_bytes()}):
        found = inspect_image(source, tmp_path)
        assert (found.width, found.height) == expected.size
        assert np.array_equal(np.asarray(decode(found, 2**20)), np.asarray(expected))
