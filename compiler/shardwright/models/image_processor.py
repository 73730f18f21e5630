"""Load or make a model's processor, and count the tiles that it makes of an image.

A processor turns an image into its forward's tensors and into the text that stands for it.
transformers' classes are used, with Pillow only. For a configuration in a recipe the processor is
made here: the vision encoder's sizes, and a byte tokenizer with a token for each placeholder of the
configuration.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
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
from shardwright.models.model_files import exception_summary
from shardwright.models.model_graph import ModelGraph, VisionEncoder
from shardwright.models.model_support import missing_processor_package
from shardwright.models.tasks.vision_language import (
    VisionEncoderShape,
    first_side,
    image_token,
    vision_encoder_config,
    vision_encoder_shape,
)

if TYPE_CHECKING:  # Pillow is of the extra `vision`; models without images do without it
    from PIL import Image

_FILE = "processor_config.json"
_CUTTING = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")
"""Switches of processors that split images into tiles."""
BYTES = 256

# Attribute of a tokenizer -> (its text, names of its id in a configuration).
_PLACEHOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "boi_token": ("<start_of_image>", ("boi_token_index", "boi_token_id")),
    "eoi_token": ("<end_of_image>", ("eoi_token_index", "eoi_token_id")),
    "vision_start_token": ("<|vision_start|>", ("vision_start_token_id",)),
    "vision_end_token": ("<|vision_end|>", ("vision_end_token_id",)),
    "video_token": ("<video>", ("video_token_id", "video_token_index")),
}


class ProcessorUnavailable(Exception):
    """transformers' processor of the type cannot be made or used: one line, the reason."""


class MissingPackage(ProcessorUnavailable):
    """transformers' processor of the type needs a package that is not installed."""

    def __init__(self, kind: str, package: str) -> None:
        super().__init__(f"its {kind} needs {package}, which is not installed here")
        self.package = package


def _class_of(name: str) -> Any:
    """Return transformers' class of this name. Raises MissingPackage where it is a placeholder for
    a missing backend."""
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
    """Load a processor and its tokenizer, without its video part, which needs torchvision.

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
        tokenizer, images = load_pair_processor(folder)
        return _assembled(_class_of(name), images, tokenizer, document)
    except ProcessorUnavailable:
        raise
    except Exception as error:  # a model's files may make its class raise anything
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def processor_from_config(config: PretrainedConfig) -> Any:
    """Make the processor of a configuration in a recipe. Raises ProcessorUnavailable."""
    name, images = _pillow_classes(config)
    try:
        kind = _class_of(name)
        tokenizer = _byte_tokenizer(config)
        image_processor = _image_processor(getattr(transformers, images), config, cut=False)
        return _assembled(kind, image_processor, tokenizer, _own(config))
    except ProcessorUnavailable:
        raise
    except Exception as error:
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def default_image_processor(config: PretrainedConfig) -> tuple[Any, dict[str, Any]]:
    """Return the type's default image processor at the configuration's sizes, and its call options.

    Raises ProcessorUnavailable.
    """
    name, images = _pillow_classes(config)
    try:
        image_processor = _image_processor(getattr(transformers, images), config, cut=True)
        return image_processor, dict(
            getattr(getattr(transformers, name), "images_kwargs", None) or {}
        )
    except Exception as error:
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def _pillow_classes(config: PretrainedConfig) -> tuple[str, str]:
    """Return the names of the type's processor and of its image processor that needs only Pillow.

    Raises ProcessorUnavailable.
    """
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    classes = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type)
    images = classes.get("pil") if isinstance(classes, dict) else None
    if not isinstance(name, str) or images is None:
        raise ProcessorUnavailable(
            f"transformers has no processor for {config.model_type!r} that needs only Pillow"
        )
    return name, images


def _assembled(kind: Any, images: Any, tokenizer: Any, own: dict[str, Any]) -> Any:
    taken = inspect.signature(kind.__init__).parameters
    values = {n: v for n, v in own.items() if n in taken}
    if getattr(tokenizer, "chat_template", None):
        values.setdefault("chat_template", tokenizer.chat_template)
    values |= {"image_processor": images, "tokenizer": tokenizer}
    if "video_processor" not in taken:
        return kind(**values)

    def check(self: Any, name: str, argument: Any) -> Any:  # a video processor needs torchvision
        is_video = name == "video_processor"
        return None if is_video else kind.check_argument_for_proper_class(self, name, argument)

    without_videos = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    return without_videos(**{**values, "video_processor": None})


def image_processor_arguments(processor: Any, *, tiles: bool = True) -> dict[str, Any]:
    """Return the arguments of the image processor.

    tiles: whether it may split images. Raises ProcessorUnavailable.
    """
    arguments: dict[str, Any] = processor._merge_kwargs(
        tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt"
    )["images_kwargs"]
    if tiles:
        return arguments
    if hasattr(processor.image_processor, "image_grid_pinpoints"):
        raise ProcessorUnavailable(
            "it splits every image into tiles, and has no switch for it (images.tiles: false)"
        )
    return arguments | {
        name: False for name in _CUTTING if hasattr(processor.image_processor, name)
    }


def processor_files(processor: Any, config: PretrainedConfig) -> dict[str, bytes]:
    """Return name -> content of the files that load_processor reads.

    Raises ProcessorUnavailable unless the text for an image becomes its placeholder tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
        document = {"processor_class": PROCESSOR_MAPPING_NAMES[config.model_type], **_own(config)}
        Path(folder, _FILE).write_text(
            json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
        loaded = load_processor(Path(folder))
        from PIL import Image

        try:
            _, written = loaded._process_images(
                [Image.new("RGB", (40, 30))], **image_processor_arguments(loaded)
            )
            ids = loaded.tokenizer(written[0], add_special_tokens=False)["input_ids"]
        except Exception as error:  # its class may raise anything at these sizes
            raise ProcessorUnavailable(exception_summary(error, 160)) from None
        if not set(ids) & set(loaded.image_token_ids):
            raise ProcessorUnavailable(
                "its tokenizer does not know the text that stands for an image"
            )
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _image_processor(kind: Any, config: PretrainedConfig, *, cut: bool) -> Any:
    """Make the image processor.

    cut: whether to split into tiles, where the type does so by default and the model also takes
        unsplit images.
    """
    tower = vision_encoder_config(config)
    side, patch = first_side(getattr(tower, "image_size", None)), first_side(tower.patch_size)
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
        values |= _tile_settings(default, config, values, side if cut else None)
    elif "patch_size" in values and {"shortest_edge", "longest_edge"} <= set(
        dict(default.size or {})
    ):
        cell = (values["patch_size"] * values.get("merge_size", 1)) ** 2
        values["size"] = {"shortest_edge": cell, "longest_edge": default.size["longest_edge"]}
    return kind(**values)


def _tile_settings(
    default: Any, config: PretrainedConfig, values: dict[str, Any], side: int | None
) -> dict[str, Any]:
    """Return the settings about tiles.

    default: the processor as its class makes it.
    values: the settings so far.
    side: side of a tile (pixels); None leaves images unsplit.
    """
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


def _own(config: PretrainedConfig) -> dict[str, Any]:
    """Return the arguments of a processor's class beside its parts."""
    tower: Any = vision_encoder_config(config)
    side, patch = first_side(getattr(tower, "image_size", None)), first_side(tower.patch_size)
    arguments = {
        "patch_size": patch or None,
        "num_image_tokens": (side // patch) ** 2 if side and patch else None,
        "vision_aspect_ratio": getattr(config, "vision_aspect_ratio", None),
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "image_seq_length": getattr(config, "mm_tokens_per_image", None)
        or getattr(config, "image_seq_length", None),
        # CLIP's encoder has one more token beside the patches.
        "num_additional_image_tokens": 1
        if "clip" in tower.model_type and "siglip" not in tower.model_type
        else 0,
    }
    scale = getattr(config, "scale_factor", None)
    if isinstance(scale, int) and side and patch:
        arguments["image_seq_len"] = (side // patch) ** 2 // scale**2
    return {name: value for name, value in arguments.items() if value is not None}


def _byte_tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """Make a byte tokenizer with each placeholder of the configuration under its id. Raises
    ProcessorUnavailable."""
    token = image_token(config)
    if token is None or token < BYTES:
        raise ProcessorUnavailable(
            f"the image token has the id {token}, but the first {BYTES} ids are bytes"
        )
    names = {"image_token": ("<image>", token)}
    for attribute, (text, keys) in _PLACEHOLDERS.items():
        value = next((v for key in keys if isinstance(v := getattr(config, key, None), int)), None)
        if value is not None and value >= BYTES:
            names[attribute] = (text, value)
    if len({value for _, value in names.values()}) < len(names):
        raise ProcessorUnavailable("two of its placeholder tokens share an id")
    return PreTrainedTokenizerFast(
        tokenizer_object=_with_special_tokens(dict(names.values())),
        clean_up_tokenization_spaces=False,
        extra_special_tokens={attribute: text for attribute, (text, _) in names.items()},
    )


def _with_special_tokens(ids: dict[str, int]) -> Tokenizer:
    """Return the byte tokenizer with these special tokens under their ids."""
    document = json.loads(byte_tokenizer().to_str())
    settings = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ordered = sorted(ids.items(), key=lambda each: each[1])
    document["model"]["vocab"] |= dict(ordered)
    document["added_tokens"] = [
        {"id": id_, "content": text, **settings, "special": True} for text, id_ in ordered
    ]
    return Tokenizer.from_str(json.dumps(document))


# The number of tiles that a processor makes of an image, tested on images of one colour.


SIDES = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (4, 3), (3, 4), (1, 4), (4, 1), (1, 12), (12, 1))
"""Test image sizes (in encoder image sides): processors split by area, proportion or a list of
sizes."""


def tile_counts(processor: Any, tower: VisionEncoderShape) -> list[tuple[int, int]]:
    """Return (tiles, the unsplit image included; tokens) for images of several sizes.

    tower: an encoder of fixed image size. Raises ProcessorUnavailable.
    """
    counts = []
    options = image_processor_arguments(processor)
    for image in _test_images(tower):
        inputs, text = _called(processor._process_images, image, options)
        counts.append((_tiles(inputs, tower), str(text[0]).count(processor.image_token)))
    return counts


def max_tiles(images: Any, options: dict[str, Any], tower: VisionEncoderShape) -> int:
    """Return the largest number of tiles.

    images: the image processor; options: its call options. Raises ProcessorUnavailable.
    """
    options = {**options, "return_tensors": "pt"}
    return max(_tiles(_called(images, image, options), tower) for image in _test_images(tower))


def _called(processor: Callable[..., Any], image: Image.Image, options: dict[str, Any]) -> Any:
    try:
        return processor([image], **options)
    except Exception as error:  # a type's class may raise anything at this size
        raise ProcessorUnavailable(exception_summary(error, 160)) from None


def _test_images(tower: VisionEncoderShape) -> Iterator[Image.Image]:
    from PIL import Image

    yield from (Image.new("RGB", (a * tower.side, b * tower.side)) for a, b in SIDES)


def _tiles(made: Any, tower: VisionEncoderShape) -> int:
    return max(1, int(made["pixel_values"].numel()) // (tower.channels * tower.side**2))


# A contrastive model's tokenizer and image processor, which need only Pillow. For a configuration
# in a recipe: the encoder's image size, and a byte tokenizer.


START, END = "<|startoftext|>", "<|endoftext|>"
_HIGHEST = 2
"""eos_token_id of a CLIP that takes features at a text's highest id (transformers,
CLIPTextModel)."""
_ANYWHERE = ("siglip",)
"""Types that take a text's features at the last place."""


def load_pair_processor(folder: Path) -> tuple[Any, Any]:
    """Return (tokenizer, image processor) of a folder. Raises ProcessorUnavailable."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        images = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except Exception as error:  # a model's files may make its class raise anything
        raise ProcessorUnavailable(exception_summary(error, 160)) from None
    return tokenizer, images


def pair_processor_files(config: PretrainedConfig) -> dict[str, bytes]:
    """Return name -> content of the files that load_pair_processor and AutoProcessor read.

    Raises ProcessorUnavailable.
    """
    name, images = _pillow_classes(config)
    with tempfile.TemporaryDirectory() as folder:
        _caption_tokenizer(config).save_pretrained(folder)
        side = getattr(vision_encoder_config(config), "image_size", None)
        if not isinstance(side, int):
            raise ProcessorUnavailable("its configuration has no image size")
        kind = getattr(transformers, images)
        default, sizes = kind(), {}
        for key in ("size", "crop_size"):
            if (edges := getattr(default, key, None)) is not None:
                sizes[key] = {edge: side for edge, v in dict(edges).items() if v is not None}
        kind(**sizes).save_pretrained(folder)
        document = {"processor_class": name}
        Path(folder, "processor_config.json").write_text(
            json.dumps(document, indent=2) + "\n", encoding="utf-8"
        )
        load_pair_processor(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def _caption_tokenizer(config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """Make a byte tokenizer with the configuration's start and end of a text. Raises
    ProcessorUnavailable."""
    text, anywhere = config.get_text_config(), config.model_type in _ANYWHERE
    size, start, end = text.vocab_size, text.bos_token_id, text.eos_token_id
    if end == _HIGHEST or (anywhere and not _is_free(end, size)):
        start, end = (None if anywhere else size - 2), size - 1
    if not _is_free(end, size):
        raise ProcessorUnavailable(
            f"text_config.eos_token_id {end} is not an id from {BYTES} to {size - 1} (the first "
            f"{BYTES} ids are bytes)"
        )
    ids, around, begin = {END: end}, f"$A {END}", {}
    if _is_free(start, size) and start != end:
        ids, around, begin = {START: start, END: end}, f"{START} {around}", {"bos_token": START}
    tokenizer = _with_special_tokens(ids)
    tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=list(ids.items()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=text.max_position_embeddings,
        eos_token=END,
        pad_token=END,
        **begin,
    )


def _is_free(token: Any, size: int) -> bool:
    return isinstance(token, int) and BYTES <= token < size


# The processor of a vision-language model: its tiles, and its files in the compiled folder.


def with_usual_tiles(
    vision: VisionEncoder, config: PretrainedConfig, *, inline: bool
) -> VisionEncoder:
    """Set the number of tiles by the type's defaults, or by the processor made for a configuration
    in the recipe.

    The encoder is unchanged where there is no processor, or a package is missing (compiling reports
    that).
    """
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
    """Set the number of tiles by the processor in `folder`; unchanged where its files cannot be
    used.

    Preparing data reports why; check_processor reports a missing package.
    """
    assert graph.vision is not None
    tower = vision_encoder_shape(_config(graph))
    try:
        counts = tile_counts(load_processor(folder), tower)
    except ProcessorUnavailable:
        return graph
    return dataclasses.replace(graph, vision=_cut(graph.vision, counts))


def _cut(vision: VisionEncoder, counts: list[tuple[int, int]]) -> VisionEncoder:
    """Set tiles and patches per token from (tiles, tokens) of images of several sizes."""
    per_token = (
        max((tiles / tokens for tiles, tokens in counts if tokens), default=0.0) * vision.patches
    )
    tiles = max(tiles for tiles, _ in counts)
    return dataclasses.replace(
        vision, tiles=tiles, patches_per_token=per_token or vision.patches_per_token
    )


def _config(graph: ModelGraph) -> PretrainedConfig:
    document = dict(decode_special_floats(dict(graph.config)))
    return AutoConfig.for_model(str(document.pop("model_type")), **document)


def check_processor(graph: ModelGraph, folder: Path) -> None:
    """Raise Refusal (SW2080) where the model's own processor needs a package that is not
    installed."""
    try:
        load_processor(folder)
    except MissingPackage as why:
        raise Refusal(missing_processor_package(graph.model_type, str(why), why.package)) from None
    except ProcessorUnavailable:
        return  # preparing data reports why


def processor_files_from_config(graph: ModelGraph) -> dict[str, bytes]:
    """Return name -> content of the processor's files. Raises SW2020 and SW2080."""
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
            f"no processor can be made for this {graph.model_type!r} configuration: {why}",
            "Set model.source to a model with its own processor; for model.config it is made "
            "from the vision encoder's sizes, with a byte tokenizer.",
            ("model", "config"),
        ) from None
