"""A type's own processor: what turns a picture into the tensors that its forward takes, and says
which text stands for it in a row. transformers' classes, with Pillow alone.

Of a configuration that stands in a recipe the processor is made here: its sizes are the tower's,
its tokenizer is a token a byte, with a token more for each placeholder that the configuration
names.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import requires_backends

from shardwright.models.byte_tokenizer import byte_tokenizer
from shardwright.models.tasks.vision_language import image_token, vision_encoder_config
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
