"""The two sides of a processor for pairs of a picture and a caption: a tokenizer and an image
processor, which need Pillow alone. Of a configuration that stands in a recipe they are made here:
the tower's size, and a token a byte.
"""

from __future__ import annotations

import json
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

from shardwright.models.byte_tokenizer import byte_tokenizer
from shardwright.models.image_processor import BYTES, ProcessorUnavailable
from shardwright.models.tasks.image_formats import vision_encoder_config
from shardwright.utils.exception_summary import exception_summary

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
