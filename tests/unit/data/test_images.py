"""What bad pictures get: a code with the record's line, or a count; and what a row holds of good
ones."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwright.data.image_decoder import ImageDecoders
from shardwright.data.image_files import (
    DamagedImage,
    ImageSource,
    ImageWriter,
    decode,
    extract_images,
    fit_within_pixels,
    inspect_image,
    open_images,
)
from shardwright.data.image_inputs import ImageProcessor
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_types import ImagesSection
from tests.parity.vision_language import template


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of 10,000 x 10,000 pixels in a hundred bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def animated() -> bytes:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


PLAIN = Image.effect_noise((40, 30), 80).convert("RGB")
BAD: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "cannot be read"),
    "empty": (b"", "cannot be opened as an image"),
    "text": (b"not a picture", "cannot be opened as an image"),
    "cut png": (encoded(PLAIN)[:-40], "is truncated"),
    "cut jpeg": (encoded(PLAIN, "JPEG")[:-40], "is truncated"),
    "cut webp": (encoded(PLAIN, "WEBP", lossless=True)[:-200], "it"),
    "bomb": (bomb(), "10000 x 10000 pixels"),
    "animated": (animated(), "animated"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_named_with_its_reason(name: str, tmp_path: Path) -> None:
    content, why = BAD[name]
    if content is not None:
        (tmp_path / "it").write_bytes(content)
    with pytest.raises(DamagedImage, match=why) as caught:
        inspect_image("it", tmp_path)
    assert "it'" in str(caught.value)


def test_a_web_address_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DamagedImage, match="images must be in files"):
        inspect_image("https://example.org/a.png", tmp_path)


@pytest.mark.parametrize("path", ["../it.png", "a/../../it.png", "/etc/it.png", "{outside}/it.png"])
def test_a_path_that_leads_out_of_the_folder_is_refused(path: str, tmp_path: Path) -> None:
    inside = tmp_path / "data"
    inside.mkdir()
    (tmp_path / "it.png").write_bytes(encoded(PLAIN))
    with pytest.raises(Refusal, match="SW6135"):
        inspect_image(path.format(outside=tmp_path), inside)


def test_a_path_inside_is_taken_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "it.png").write_bytes(encoded(PLAIN))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "pictures").symlink_to(tmp_path / "elsewhere")
    for path in (
        "pictures/it.png",
        "./pictures/../pictures/it.png",
        str(folder / "pictures" / "it.png"),
    ):
        assert inspect_image(path, folder).width == 40


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "huge"])
def test_what_is_no_file_neither_blocks_nor_fills_the_memory(kind: str, tmp_path: Path) -> None:
    """Behind a link, which is followed."""
    at = tmp_path / "it"
    if kind == "folder":
        at.mkdir()
    elif kind == "pipe":
        os.mkfifo(at)
    elif kind == "device":
        at.symlink_to("/dev/zero")
    else:
        with at.open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(DamagedImage, match="cannot be read: it is"):
        inspect_image("it", tmp_path)


def test_pictures_are_decoded_in_other_processes(tmp_path: Path) -> None:
    (tmp_path / "it.png").write_bytes(encoded(PLAIN))
    pictures = [
        inspect_image("it.png", tmp_path),
        inspect_image({"bytes": encoded(PLAIN, "JPEG")}, tmp_path),
    ] * 2
    decoders = ImageDecoders(2)
    found = decoders.decode(pictures, 600)
    assert [image.tobytes() for image in found] == [
        decode(picture, 600).tobytes() for picture in pictures
    ]
    (tmp_path / "it.png").write_bytes(encoded(PLAIN)[:-40])
    with pytest.raises(Refusal, match="SW6132"):
        decoders.decode(pictures, 600)


def test_a_decoding_process_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "it.png").write_bytes(encoded(PLAIN))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(Refusal, match="SW6137"):
        ImageDecoders(1).decode([inspect_image("it.png", tmp_path)], 600)


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGBA", "P", "1", "I;16"])
def test_other_colours_become_rgb(mode: str, tmp_path: Path) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    image = PLAIN.convert("L").convert("I;16") if mode == "I;16" else PLAIN.convert(mode)
    (tmp_path / "it").write_bytes(encoded(image, kind))
    picture = inspect_image("it", tmp_path)
    assert decode(picture, 10**6).mode == "RGB" and (picture.width, picture.height) == (40, 30)


def test_a_turned_picture_is_counted_as_it_is_seen(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "it.jpg").write_bytes(encoded(PLAIN, "JPEG", exif=exif))
    picture = inspect_image("it.jpg", tmp_path)
    assert (picture.width, picture.height) == (30, 40) == decode(picture, 10**6).size


@pytest.mark.parametrize("size", [(1, 1), (60, 44), (10_000, 3), (3, 10_000), (4096, 4096)])
@pytest.mark.parametrize("most", [64, 1600, 10**6])
def test_a_picture_is_made_smaller_in_its_proportions(size: tuple[int, int], most: int) -> None:
    width, height = fit_within_pixels(*size, most)
    assert 1 <= width * height <= max(most, min(size[0] * size[1], most))
    assert (width, height) == size or size[0] * size[1] > most


def test_a_picture_that_changed_since_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it.png").write_bytes(encoded(PLAIN))
    picture = inspect_image("it.png", tmp_path)
    (tmp_path / "it.png").write_bytes(encoded(PLAIN.resize((20, 20))))
    with pytest.raises(Refusal, match="SW6132"):
        decode(picture, 10**6)


def test_pictures_come_back_by_their_document(tmp_path: Path) -> None:
    inside = encoded(PLAIN)
    (tmp_path / "b.png").write_bytes(inside)
    pictures = [inspect_image({"bytes": inside}, tmp_path), inspect_image("b.png", tmp_path)]
    writer = ImageWriter(tmp_path)
    writer.add(2, pictures)
    writer.add(5, pictures[:1])
    writer.finish()
    table = open_images(tmp_path)
    assert table is not None and table.of(0) == () == table.of(3)
    assert table.of(2) == (
        pictures[0],
        ImageSource(path=str(tmp_path / "b.png"), data=None, width=40, height=30),
    )
    assert table.of(5)[0].data == inside


def user(*content: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}
    ]


def test_both_ways_of_writing_a_picture_are_taken() -> None:
    own = user(
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "and"},
        {"type": "image", "path": "b.png"},
    )
    listed = user("<image>and<image>")
    wanted = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    for given, images in ((own, None), (listed, ["a.png", "b.png"])):
        messages, found = extract_images(images, given, "data.jsonl:1")
        assert messages[0]["content"] == wanted and found == ["a.png", "b.png"]


def test_conversations_of_the_page_show_the_same_picture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")
    (block,) = (text for text in page.split("```") if text.startswith('text\n{"messages"'))
    rest, found = block.removeprefix("text").strip(), []
    while rest:
        record, end = json.JSONDecoder().raw_decode(rest)
        messages, pictures = extract_images(record.get("images"), record["messages"], "data.md")
        content: Any = messages[0]["content"]
        found.append((pictures, [part["type"] for part in content]))
        rest = rest[end:].strip()
    assert found == [(["cats/1.jpg"], ["image", "text"])] * 2


@pytest.mark.parametrize(
    ("messages", "images", "code"),
    [
        (user("no placeholder"), ["a.png"], "SW6131"),
        (user("<image><image>"), ["a.png"], "SW6131"),
        (user({"type": "image"}), None, "SW6131"),
        (user({"type": "video", "video": "a.mp4"}), None, "SW6130"),
        (user({"type": "audio", "audio": "a.wav"}), None, "SW6130"),
    ],
)
def test_pictures_and_placeholders_match(messages: Any, images: Any, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        extract_images(images, messages, "data.jsonl:7")
    assert (
        caught.value.diagnostics[0].code == code
        and "data.jsonl:7" in caught.value.diagnostics[0].message
    )


@pytest.fixture
def reader(tmp_path: Path) -> Callable[..., Any]:
    """Prepares records as a chat source of a tiny LLaVA; its counts, and the tokens of each
    document."""
    from transformers import AutoConfig

    from shardwright.data.conversations import ConversationReader
    from shardwright.data.image_inputs import ImageProcessor
    from shardwright.data.indexed_dataset import DocumentWriter, open_documents
    from shardwright.data.source_files import ReadingProgress, RecordCounts
    from shardwright.data.tokenizers import TransformersTokenizer
    from shardwright.models.image_processor import processor_files, processor_from_config
    from shardwright.recipe.recipe_types import DataSection, ImagesSection
    from tests.parity.vision_language import VlmCase, config, template

    def read(
        records: list[dict[str, Any]],
        skip: float = 0.0,
        per_row: int = 2,
        model: str = "llava",
        written: str = template("llava"),
        folder: str | None = None,
    ) -> Any:
        document = config(VlmCase(model))
        made = AutoConfig.for_model(document.pop("model_type"), **document)
        (tmp_path / "tokenizer").mkdir()
        for name, content in processor_files(processor_from_config(made), made).items():
            (tmp_path / "tokenizer" / name).write_bytes(content)
        source = tmp_path / "data.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        part = DataSection(
            kind="chat",
            path=str(source),
            tokenizer="tokenizer",
            packing=False,
            shuffle=False,
            template=written,
            images=ImagesSection(per_row=per_row, max_pixels=1600, folder=folder),
            skip_damaged=skip,
        )
        assert part.images is not None
        at = tmp_path / "prepared"
        writer, processor = (
            DocumentWriter(at, "uint16", masked=True),
            ImageProcessor(tmp_path / "tokenizer", part.images),
        )
        pictures = ImageWriter(at)
        seen = ConversationReader(
            part,
            TransformersTokenizer(tmp_path / "tokenizer"),
            writer,
            RecordCounts(share=skip),
            (processor, pictures),
        )
        for _ in seen.read((str(source),), ReadingProgress("reading", 1)):
            pass
        pictures.finish()
        writer.finish(settings="", kind="chat", source_bytes=1)
        documents, table = open_documents(at), open_images(at)
        assert table is not None
        return pictures.counts, documents, table

    return read


def talk(*images: str) -> dict[str, Any]:
    content = [
        *[{"type": "image", "image": name} for name in images],
        {"type": "text", "text": "?"},
    ]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
    return {"messages": [{"role": "user", "content": content}, answer]}


def test_damage_is_counted_up_to_its_share_and_named_beyond(
    reader: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "good.png").write_bytes(encoded(PLAIN))
    records = [
        talk("good.png"),
        talk("gone.png"),
        talk("good.png", "good.png"),
        talk(*["good.png"] * 3),
    ]
    counts, documents, table = reader(records, skip=0.25)
    assert (counts.damaged, counts.too_many_images) == (1, 1) and len(documents.ends) == 2
    assert [len(table.of(n)) for n in range(2)] == [1, 2]
    # 16 patches each; of the text every byte, and what the assistant says is trained.
    tokens = documents.tokens.tolist()
    assert tokens.count(256) == 3 * 16 and int(documents.trained.sum()) == 2 * len("yes")


def test_damage_beyond_its_share_is_refused(reader: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(encoded(PLAIN))
    with pytest.raises(Refusal, match="SW6134") as caught:
        reader([talk("good.png"), talk("gone.png")])
    assert "data.jsonl:2" in caught.value.diagnostics[0].message
    assert "gone.png" in caught.value.diagnostics[0].message


def test_pictures_lie_in_the_folder_that_the_recipe_names(
    reader: Callable[..., Any], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "good.png").write_bytes(encoded(PLAIN))
    _, _, table = reader([talk("good.png", str(elsewhere / "good.png"))], folder=str(elsewhere))
    assert [picture.path for picture in table.of(0)] == [str(elsewhere / "good.png")] * 2


def test_the_folder_that_the_recipe_names_is_the_only_one(
    reader: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "good.png").write_bytes(encoded(PLAIN))
    with pytest.raises(Refusal, match="SW6135"):
        reader([talk(str(tmp_path / "good.png"))], folder=str(tmp_path / "elsewhere"))


def test_a_text_that_holds_the_placeholder_is_refused(
    reader: Callable[..., Any], tmp_path: Path
) -> None:
    record = talk()
    record["messages"][0]["content"] = [{"type": "text", "text": "what does <image> mean?"}]
    with pytest.raises(Refusal, match="SW6131"):
        reader([record])


def test_pictures_side_by_side_are_refused_where_they_would_be_one(
    reader: Callable[..., Any], tmp_path: Path
) -> None:
    """Qwen's types find a picture's positions by runs of placeholders; LLaVA's do not ask."""
    (tmp_path / "good.png").write_bytes(encoded(PLAIN))
    with pytest.raises(Refusal, match="SW6136"):
        reader(
            [talk("good.png"), talk("good.png", "good.png")],
            model="qwen2_5_vl",
            written=template("llava"),
        )


def test_later_stages_look_at_no_picture(reader: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(encoded(PLAIN))
    _, documents, table = reader(
        [talk("good.png")], model="qwen2_5_vl", written=template("qwen2_5_vl")
    )
    images, tokens = (
        ImagesSection(per_row=2, max_pixels=1600),
        documents.tokens[None].astype("int64"),
    )
    takes = frozenset({"pixel_values", "image_grid_thw", "mm_token_type_ids"})
    first, later = (
        ImageProcessor(tmp_path / "tokenizer", images, takes, skip_decoding=alone)
        for alone in (False, True)
    )
    wanted = first.inputs(tokens, None, [table.of(0)])
    (tmp_path / "good.png").unlink()
    found = later.inputs(tokens, None, [table.of(0)])
    for name in ("image_grid_thw", "mm_token_type_ids"):
        assert found[name].equal(wanted[name]), name
    assert not found["pixel_values"].equal(wanted["pixel_values"])


def test_what_stands_behind_an_answer_is_no_prefix(
    reader: Callable[..., Any], tmp_path: Path
) -> None:
    """A prefix is seen both ways: the second question has seen the first answer, and may not be
    seen by it."""
    record = talk()
    record["messages"] = record["messages"] * 2
    _, documents, table = reader([record], model="paligemma", written=template("paligemma"))
    tokens, trained = documents.tokens[None].astype("int64"), documents.trained[None]
    images = ImagesSection(per_row=2, max_pixels=1600)
    processor = ImageProcessor(
        tmp_path / "tokenizer", images, frozenset({"pixel_values", "token_type_ids"})
    )
    kinds = processor.inputs(tokens, trained, [table.of(0)])["token_type_ids"][0].tolist()
    first = trained[0].tolist().index(True)
    assert first > 0 and kinds == [0] * first + [1] * (len(kinds) - first)
    # This template closes no turn: the next role's word ends the first answer.
    assert trained[0].sum() == 2 * len("yes") + len("\n<user>") < len(kinds) - first
