"""A type's own processor: what turns a picture into the tensors that its forward takes, and says
which text stands for it in a row. transformers' classes, with Pillow alone.

Of a configuration that stands in a recipe the processor is made here: its sizes are the tower's,
its tokenizer is a token a byte, with a token more for each placeholder that the configuration
names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import requires_backends

from shardwright.diagnostics import Refusal, refusal
from shardwright.models.byte_tokenizer import byte_tokenizer
from shardwright.models.config_schema import decode_special_floats
from shardwright.models.model_graph import ModelGraph, VisionEncoder
from shardwright.models.model_support import missing_processor_package
from shardwright.models.tasks.vision_language import (
    VisionEncoderShape,
    image_token,
    vision_encoder_config,
    vision_encoder_shape,
)
from shardwright.utils.exception_summary import exception_summary

_FILE = "processor_config.json"
_CUTTING = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")
"""Switches of processors that cut pictures into tiles."""
BYTES = 256

# Attribute of a tokenizer -> (its text, names of a configuration that hold its id).
_PLACEHOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "boi_token": ("<start_of_image>", ("boi_token_index", "boi_token_id")),
    "eoi_token": ("<end_of_image>", ("eoi_token_index", "eoi_token_id")),
    "vision_start_token": ("<|vision_start|>", ("vision_start_token_id",)),
    "vision_end_token": ("<|vision_end|>", ("vision_end_token_id",)),
    "video_token": ("<video>", ("video_token_id", "video_token_index")),
}


class ProcessorUnavailable(Exception):
    """transformers' processor of the type cannot be made, or not be used: one line, the reason."""


class MissingPackage(ProcessorUnavailable):
    """transformers' processor of the type needs a package that is not installed."""

    def __init__(self, kind: str, package: str) -> None:
        super().__init__(f"its {kind} needs {package}, which is not installed here")
        self.package = package


def _class_of(name: str) -> Any:
    """transformers' class of this name. Raises MissingPackage where transformers has a placeholder
    for it."""
    kind = getattr(transformers, name)
    try:
        requires_backends(kind, getattr(kind, "_backends", []))
    except ImportError as error:
        named = re.search(r"requires the (\S+) library", str(error))
        raise MissingPackage(
            name, named[1].lower() if named else exception_summary(error, 160)
        ) from None
    return kind


def load_processor(folder: Path) -> Any:
    """Of a folder with the files of a processor and its tokenizer. A part for videos is left out:
    it needs torchvision.

    Raises ProcessorUnavailable.
    """
    try:
        document = (
            json.loads((folder / _FILE).read_text("utf-8")) if (folder / _FILE).is_file() else {}
        )
        before = folder / "preprocessor_config.json"
        name = (
            document.get("processor_class")
            or json.loads(before.read_text("utf-8"))["processor_class"]
        )
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        images = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="pil"
        )
        return _assembled(_class_of(name), images, tokenizer, document)
    except ProcessorUnavailable:
        raise
    except Exception as error:  # whatever the files make a stranger's class raise
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def processor_from_config(config: PretrainedConfig) -> Any:
    """For a model whose configuration stands in a recipe. Raises ProcessorUnavailable."""
    name, images = _pillow_classes(config)
    try:
        kind = _class_of(name)
        tokenizer = _byte_tokenizer(config, kind)
        made = _image_processor(getattr(transformers, images), config, cut=False)
        return _assembled(kind, made, tokenizer, _own(config))
    except ProcessorUnavailable:
        raise
    except Exception as error:
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def default_image_processor(config: PretrainedConfig) -> tuple[Any, dict[str, Any]]:
    """(what makes tensors of a picture, the options that it is called with) of the type's own
    defaults, at the sizes of the configuration. Raises ProcessorUnavailable."""
    name, images = _pillow_classes(config)
    try:
        made = _image_processor(getattr(transformers, images), config, cut=True)
        return made, dict(getattr(getattr(transformers, name), "images_kwargs", None) or {})
    except Exception as error:
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def _pillow_classes(config: PretrainedConfig) -> tuple[str, str]:
    """Names of the type's processor, and of the part for pictures that needs Pillow alone. Raises
    ProcessorUnavailable."""
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    images = classes.get("pil") if isinstance(classes, dict) else None
    if not isinstance(name, str) or images is None:
        raise ProcessorUnavailable(
            f"transformers has no processor for a {config.model_type} that needs Pillow alone"
        )
    return name, images


def _assembled(kind: Any, images: Any, tokenizer: Any, own: dict[str, Any]) -> Any:
    taken = inspect.signature(kind.__init__).parameters
    values = {
        n: v for n, v in own.items() if n in taken and n not in ("image_processor", "tokenizer")
    }
    if getattr(tokenizer, "chat_template", None):
        values.setdefault("chat_template", tokenizer.chat_template)
    return _without_videos(kind)(**{**values, "image_processor": images, "tokenizer": tokenizer})


def image_processor_arguments(processor: Any, *, tiles: bool = True) -> dict[str, Any]:
    """That it calls its part for pictures with. tiles: whether it may cut them. Raises
    ProcessorUnavailable."""
    kept = processor.tokenizer.init_kwargs
    found: dict[str, Any] = processor._merge_kwargs(
        tokenizer_init_kwargs=kept, return_tensors="pt"
    )["images_kwargs"]
    if tiles:
        return found
    if hasattr(processor.image_processor, "image_grid_pinpoints"):
        raise ProcessorUnavailable(
            "it cuts every picture into tiles, and has no switch for it (images.tiles: false)"
        )
    return found | {name: False for name in _CUTTING if hasattr(processor.image_processor, name)}


def _without_videos(kind: Any) -> Any:
    """The class with None in the place of its processor of videos, which needs torchvision."""
    if "video_processor" not in inspect.signature(kind.__init__).parameters:
        return functools.partial(kind)

    def check(self: Any, name: str, argument: Any) -> Any:
        return (
            None
            if name == "video_processor"
            else kind.check_argument_for_proper_class(self, name, argument)
        )

    sighted = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    return functools.partial(sighted, video_processor=None)


def processor_files(processor: Any, config: PretrainedConfig) -> dict[str, bytes]:
    """Name -> content of what load_processor reads."""
    with tempfile.TemporaryDirectory() as folder:
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
        document = {"processor_class": PROCESSOR_MAPPING_NAMES[config.model_type], **_own(config)}
        Path(folder, _FILE).write_text(
            json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        _check(load_processor(Path(folder)))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _check(processor: Any) -> None:
    """What it writes for a picture must come back as tokens that stand for one. Raises
    ProcessorUnavailable."""
    from PIL import Image

    try:
        _, written = processor._process_images(
            [Image.new("RGB", (40, 30))], **image_processor_arguments(processor)
        )
        ids = processor.tokenizer(written[0], add_special_tokens=False)["input_ids"]
    except Exception as error:  # whatever its class raises with these sizes
        raise ProcessorUnavailable(exception_summary(error, 160)) from None
    if not set(ids) & set(processor.image_token_ids):
        raise ProcessorUnavailable("its tokenizer does not know the text that stands for a picture")


def _image_processor(kind: Any, config: PretrainedConfig, *, cut: bool) -> Any:
    """cut: into tiles, where the type's own default does it and the model would take a whole
    picture too."""
    tower = vision_encoder_config(config)
    side, patch = _number(getattr(tower, "image_size", None)), _number(tower.patch_size)
    default = kind()
    values: dict[str, Any] = {}
    if side and patch and hasattr(default, "image_seq_length"):
        values["image_seq_length"] = (side // patch) ** 2
    for name, value in (
        ("patch_size", patch),
        ("merge_size", getattr(tower, "spatial_merge_size", None)),
        ("temporal_patch_size", getattr(tower, "temporal_patch_size", None)),
    ):
        if isinstance(value, int) and isinstance(getattr(default, name, None), int):
            values[name] = value
    if side:
        for name in ("size", "crop_size", "max_image_size"):
            edges = getattr(default, name, None)
            edges = (
                None if edges is None else {k: v for k, v in dict(edges).items() if v is not None}
            )
            if edges and not ({"shortest_edge", "longest_edge"} <= set(edges)):
                values[name] = dict.fromkeys(edges, side)
        values |= _of_tiles(default, config, values, side if cut else None)
    elif "patch_size" in values and {"shortest_edge", "longest_edge"} <= set(
        dict(default.size or {})
    ):
        cell = (values["patch_size"] * values.get("merge_size", 1)) ** 2
        values["size"] = {"shortest_edge": cell, "longest_edge": default.size["longest_edge"]}
    return kind(**values)


def _of_tiles(
    default: Any, config: PretrainedConfig, values: dict[str, Any], side: int | None
) -> dict[str, Any]:
    """default: the processor as its class makes it; values: what it is told else. side: of a tile;
    None leaves pictures whole."""
    grid = getattr(config, "image_grid_pinpoints", None)
    if grid and hasattr(default, "image_grid_pinpoints"):
        return {"image_grid_pinpoints": grid}
    if not hasattr(default, "do_image_splitting"):
        return {}
    if side is None:
        return {"do_image_splitting": False}
    tile = getattr(default, "max_image_size", None)
    if not tile or "longest_edge" not in values.get("size", {}):
        return {}
    return {"size": {"longest_edge": default.size["longest_edge"] * side // tile["longest_edge"]}}


def _number(size: Any) -> int | None:
    """Of a side: some towers say height and width."""
    first = size[0] if isinstance(size, list | tuple) and size else size
    return first if isinstance(first, int) else None


def _own(config: PretrainedConfig) -> dict[str, Any]:
    """What a processor's class is told of its model, beside its parts."""
    tower: Any = vision_encoder_config(config)
    side, patch = _number(getattr(tower, "image_size", None)), _number(tower.patch_size)
    found = {
        "patch_size": patch,
        "num_image_tokens": (side // patch) ** 2 if side and patch else None,
        "vision_aspect_ratio": getattr(config, "vision_aspect_ratio", None),
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "image_seq_length": getattr(config, "mm_tokens_per_image", None)
        or getattr(config, "image_seq_length", None),
        # CLIP's tower has a token of its own beside the patches.
        "num_additional_image_tokens": 1
        if "clip" in tower.model_type and "siglip" not in tower.model_type
        else 0,
    }
    scale = getattr(config, "scale_factor", None)
    if isinstance(scale, int) and side and patch:
        found["image_seq_len"] = (side // patch) ** 2 // scale**2
    return {name: value for name, value in found.items() if value is not None}


def _byte_tokenizer(config: PretrainedConfig, kind: Any) -> PreTrainedTokenizerFast:
    """A token a byte, and each placeholder of the configuration under its id. Raises
    ProcessorUnavailable."""
    token = image_token(config)
    if token is None or token < BYTES:
        raise ProcessorUnavailable(
            f"the token that stands for a picture has the id {token}: the first {BYTES} ids "
            "are bytes"
        )
    names = {"image_token": ("<image>", token)}
    for attribute, (text, keys) in _PLACEHOLDERS.items():
        value = next((v for key in keys if isinstance(v := getattr(config, key, None), int)), None)
        if value is not None and value >= BYTES:
            names[attribute] = (text, value)
    if len({value for _, value in names.values()}) < len(names):
        raise ProcessorUnavailable("two of its placeholder tokens have one id")
    document = json.loads(byte_tokenizer().to_str())
    settings = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    ordered = sorted(names.values(), key=lambda each: each[1])
    document["model"]["vocab"] |= dict(ordered)
    document["added_tokens"] = [
        {"id": value, "content": text, **settings} for text, value in ordered
    ]
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(document)),
        clean_up_tokenization_spaces=False,
        extra_special_tokens={attribute: text for attribute, (text, _) in names.items()},
    )


# Into how many tiles a type's processor cuts a picture: asked of the processor itself, on pictures
# of one colour.


SIDES = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (4, 3), (3, 4), (1, 4), (4, 1), (1, 12), (12, 1))
"""Of a picture, in sides of the tower's own: where a processor cuts by area, by proportions or by a
list of sizes."""


def tile_counts(processor: Any, tower: VisionEncoderShape) -> list[tuple[int, int]]:
    """Of pictures of several sizes: (tiles, the whole one among them; tokens of a row that stand
    for them). tower: whose pictures have one size. Raises ProcessorUnavailable."""
    found = []
    options = image_processor_arguments(processor)
    for image in _pictures(tower):
        made, written = _called(processor._process_images, image, options)
        found.append((_tiles(made, tower), str(written[0]).count(processor.image_token)))
    return found


def max_tiles(images: Any, options: dict[str, Any], tower: VisionEncoderShape) -> int:
    """images: a processor's part for pictures; options: that it is called with. Raises
    ProcessorUnavailable."""
    options = {**options, "return_tensors": "pt"}
    return max(_tiles(_called(images, image, options), tower) for image in _pictures(tower))


def _called(processor: Callable[..., Any], image: Image.Image, options: dict[str, Any]) -> Any:
    try:
        return processor([image], **options)
    except Exception as error:  # whatever a type's own class raises at this size
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def _pictures(tower: VisionEncoderShape) -> Iterator[Image.Image]:
    yield from (Image.new("RGB", (a * tower.side, b * tower.side)) for a, b in SIDES)


def _tiles(made: Any, tower: VisionEncoderShape) -> int:
    return max(1, int(made["pixel_values"].numel()) // (tower.channels * tower.side**2))


# The two sides of a processor for pairs of a picture and a caption: a tokenizer and an image
# processor, which need Pillow alone. Of a configuration that stands in a recipe they are made here:
# the tower's size, and a token a byte.


START, END = "<|startoftext|>", "<|endoftext|>"
_HIGHEST = 2
"""As eos_token_id of a CLIP: features are taken at a text's highest id (transformers,
CLIPTextModel)."""
_ANYWHERE = ("siglip",)
"""Types that take a text's features at the last place, whatever stands there."""


def load_pair_processor(folder: Path) -> tuple[Any, Any]:
    """(tokenizer, image processor) of a folder with their files. Raises ProcessorUnavailable."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        images = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except Exception as error:  # whatever the files make a stranger's class raise
        raise ProcessorUnavailable(exception_summary(error, 160)) from None
    return tokenizer, images


def pair_processor_files(config: PretrainedConfig) -> dict[str, bytes]:
    """Name -> content of what load_pair_processor reads, and transformers' AutoProcessor. Raises
    ProcessorUnavailable."""
    classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    images = classes.get("pil") if isinstance(classes, dict) else None
    if images is None:
        raise ProcessorUnavailable(
            f"transformers has no processor for a {config.model_type} that needs Pillow alone"
        )
    with tempfile.TemporaryDirectory() as folder:
        _caption_tokenizer(config).save_pretrained(folder)
        _pair_image_processor(getattr(transformers, images), config).save_pretrained(folder)
        document = {"processor_class": PROCESSOR_MAPPING_NAMES[config.model_type]}
        Path(folder, "processor_config.json").write_text(
            json.dumps(document, indent=2) + "\n", encoding="utf-8"
        )
        load_pair_processor(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _pair_image_processor(kind: Any, config: PretrainedConfig) -> Any:
    side, default = getattr(vision_encoder_config(config), "image_size", None), kind()
    if not isinstance(side, int):
        raise ProcessorUnavailable("its tower's pictures have no size of their own")
    values = {
        name: dict.fromkeys((key for key, value in dict(edges).items() if value is not None), side)
        for name in ("size", "crop_size")
        if (edges := getattr(default, name, None)) is not None
    }
    return kind(**values)


def _caption_tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """A token a byte between the configuration's own start and end of a text. Raises
    ProcessorUnavailable."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    text = config.get_text_config()
    start, end = _ends(config.model_type, text)
    names = {START: start, END: end} if start is not None else {END: end}
    settings = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    document = json.loads(byte_tokenizer().to_str())
    ordered = sorted(names.items(), key=lambda each: each[1])
    document["model"]["vocab"] |= dict(ordered)
    document["added_tokens"] = [
        {"id": value, "content": name, **settings} for name, value in ordered
    ]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    around = f"{START} $A {END}" if start is not None else f"$A {END}"
    tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=list(names.items()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=text.max_position_embeddings,
        eos_token=END,
        pad_token=END,
        **({} if start is None else {"bos_token": START}),
    )


def _ends(model_type: str, text: Any) -> tuple[int | None, int]:
    """Ids of the start (None where there is none) and the end of a text."""
    size, start, end = text.vocab_size, text.bos_token_id, text.eos_token_id
    if end == _HIGHEST or (model_type in _ANYWHERE and not _is_free(end, size)):
        start, end = (None if model_type in _ANYWHERE else size - 2), size - 1
    if not _is_free(end, size):
        raise ProcessorUnavailable(
            f"text_config.eos_token_id {end} is no id from {BYTES} to {size - 1}: the first "
            f"{BYTES} ids are bytes, and the end of a text has one of its own in the vocabulary"
        )
    return (start if _is_free(start, size) and start != end else None), end


def _is_free(token: Any, size: int) -> bool:
    return isinstance(token, int) and BYTES <= token < size


# The processor of a model that sees: as files of the compiled folder, where its configuration
# stands in the recipe; and into how many tiles it cuts a picture.


def with_usual_tiles(
    vision: VisionEncoder, config: PretrainedConfig, *, inline: bool
) -> VisionEncoder:
    """As the type's own defaults cut a picture, or the processor that a configuration in the recipe
    gets; whole where it has none, or one that needs a package which is not here (compiling
    tells)."""
    if not vision.patches:
        return vision
    tower = vision_encoder_shape(config)
    try:
        if inline:
            return _cut(vision, tile_counts(processor_from_config(config), tower))
        return dataclasses.replace(vision, tiles=max_tiles(*default_image_processor(config), tower))
    except ProcessorUnavailable:
        return vision


def with_processor_tiles(graph: ModelGraph, folder: Path) -> ModelGraph:
    """As the processor in `folder` cuts. The graph itself where its files cannot be used: preparing
    tells why. Where a package is missing, compiling does (check_processor)."""
    assert graph.vision is not None
    tower = vision_encoder_shape(_config(graph))
    try:
        found = tile_counts(load_processor(folder), tower)
    except ProcessorUnavailable:
        return graph
    return dataclasses.replace(graph, vision=_cut(graph.vision, found))


def _cut(vision: VisionEncoder, found: list[tuple[int, int]]) -> VisionEncoder:
    """found: (tiles, tokens) of pictures of several sizes."""
    per_token = (
        max((tiles / tokens for tiles, tokens in found if tokens), default=0.0) * vision.patches
    )
    tiles = max(tiles for tiles, _ in found)
    return dataclasses.replace(
        vision, tiles=tiles, patches_per_token=per_token or vision.patches_per_token
    )


def _config(graph: ModelGraph) -> PretrainedConfig:
    document = dict(decode_special_floats(dict(graph.config)))
    return AutoConfig.for_model(str(document.pop("model_type")), **document)


def check_processor(graph: ModelGraph, folder: Path) -> None:
    """Raises Refusal where the model's own processor needs a package that is not installed:
    SW2080."""
    try:
        load_processor(folder)
    except MissingPackage as why:
        raise Refusal(missing_processor_package(graph.model_type, str(why), why.package)) from None
    except ProcessorUnavailable:
        return  # preparing tells why


def processor_files_from_config(graph: ModelGraph) -> dict[str, bytes]:
    """Name -> content. Errors: SW2020, SW2080."""
    config = _config(graph)
    try:
        return (
            pair_processor_files(config)
            if graph.task_traits.compares_pairs
            else processor_files(processor_from_config(config), config)
        )
    except MissingPackage as why:
        raise Refusal(missing_processor_package(graph.model_type, str(why), why.package)) from None
    except ProcessorUnavailable as why:
        raise refusal(
            "SW2020",
            f"a {graph.model_type!r} of this configuration gets no processor: {why}",
            "A model.source brings its own; of a configuration in the recipe the processor is made "
            "from the tower's sizes, and its tokenizer is a token a byte.",
            ("model", "config"),
        ) from None
