"""Generate text from a checkpoint of any layout or a Hugging Face folder, with transformers'
generate, in one process."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from shardwright.checkpoint.checkpoint_loader import CheckpointReader
from shardwright.checkpoint.checkpoint_manifest import MANIFEST
from shardwright.checkpoint.huggingface_export import (
    GENERATION_CONFIG,
    end_ids,
    is_byte_level,
    merged_parameter,
    open_checkpoint,
    own_generation_config,
    require_trust,
    tokenizer_files,
)
from shardwright.checkpoint.model_folder_checks import cannot_generate, read_model_config
from shardwright.data.chat_format import Message, TemplateError
from shardwright.data.chat_template import ChatTemplateRenderer, RenderLimitExceeded
from shardwright.data.data_sources import all_data_sections
from shardwright.data.image_files import MAX_IMAGE_PIXELS, DamagedImage, inspect_image
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.tokenizers import special_tokens
from shardwright.diagnostics import Refusal
from shardwright.models.byte_tokenizer import byte_tokenizer
from shardwright.models.remote_code_import import needs_remote_code, read_remote_code, register
from shardwright.models.tasks.task_registry import CAUSAL_LM, CONTRASTIVE, task_of_type
from shardwright.parallel.model_loading import DTYPES, load_config
from shardwright.parallel.weight_files import SliceRange
from shardwright.parallel.weight_loader import WeightLoader, empty_model
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import ImagesSection
from shardwright.utils.json_values import JsonValue

_RENDERER = ChatTemplateRenderer()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Describe what to generate.

    temperature: 0 is greedy.
    images: image files; the prompt is then a user message about them, in the model's chat template.
    """

    prompt: str
    tokens: int
    temperature: float
    seed: int
    images: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Hold a loaded model.

    image_processor: of a vision-language model, else None.
    template: its chat template, "" where it has none.
    """

    model: Any
    tokenizer: Any
    image_processor: ImageProcessor | None = None
    template: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """Hold generated text.

    text: the text after the prompt.
    stopped: whether the model wrote its end token.
    """

    text: str
    prompt_tokens: int
    tokens: int
    stopped: bool
    device: str


def generate(
    folder: Path, request: GenerationRequest, trust_code: str | None = None
) -> GenerationResult:
    """Generate text. Raises SW2014, SW6132, SW6201, SW6402.

    folder: a step folder, or one that from_pretrained loads.
    """
    return answer(open_model(folder, trust_code), request, folder)


def open_model(folder: Path, trust_code: str | None = None) -> LoadedModel:
    """Load a model for any number of requests. Raises as generate does."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load = _load_checkpoint_model if (folder / MANIFEST).is_file() else _load_huggingface_model
    with _explained(folder, device):
        return load(folder, device, trust_code)


def answer(loaded: LoadedModel, request: GenerationRequest, folder: Path) -> GenerationResult:
    """Generate text with a loaded model. Raises as generate does.

    folder: named in error messages.
    """
    with _explained(folder, loaded.model.device):
        return _generate_text(loaded, request, folder)


@contextmanager
def _explained(folder: Path, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Refusal:
        raise
    except torch.OutOfMemoryError:
        help = (
            "Run `CUDA_VISIBLE_DEVICES= shardwright generate ...` to use the CPU and host memory."
        )
        raise cannot_generate(folder, f"the model does not fit on {device}", help) from None
    except Exception as error:  # an untrusted folder may make transformers raise anything
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise cannot_generate(folder, f"{type(error).__name__}: {lines[0][:300]}") from None


def _generate_text(
    loaded: LoadedModel, request: GenerationRequest, folder: Path
) -> GenerationResult:
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = (
        image_prompt_inputs(loaded, request.prompt, request.images, folder)
        if request.images
        else tokenizer(request.prompt, return_tensors="pt")
    )
    ids = inputs["input_ids"].to(model.device)
    model_inputs = {
        n: v.to(model.device)
        for n, v in inputs.items()
        if request.images and n not in ("input_ids", "attention_mask")
    }
    model_inputs = {
        n: v.to(model.dtype) if v.is_floating_point() else v for n, v in model_inputs.items()
    }
    length = int(ids.shape[1])
    positions = int(
        getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    )
    free_positions = positions - length
    if not length or free_positions < 1:
        why = f"the prompt's {length:,} tokens fill the model's {positions:,} positions"
        raise cannot_generate(
            folder, why if length else "the prompt is empty", "Use another prompt."
        )
    # The end ids of the model's generation_config (chat models have several), else the tokenizer's.
    ends = end_ids(model.generation_config.eos_token_id) or end_ids(tokenizer.eos_token_id)
    # A new configuration: the folder's file may set beams, penalties or lengths.
    model.generation_config = GenerationConfig(
        max_new_tokens=min(request.tokens, free_positions),
        do_sample=request.temperature > 0,
        **({"temperature": request.temperature, "top_k": 0} if request.temperature > 0 else {}),
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        # Ids of a padded vocabulary are not text, and were never trained.
        suppress_tokens=list(range(len(tokenizer), model.get_output_embeddings().weight.shape[0]))
        or None,
    )
    torch.manual_seed(request.seed)
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **model_inputs)[0, length:]
    ends = end_ids(model.generation_config.eos_token_id)
    return GenerationResult(
        text=tokenizer.decode(made, skip_special_tokens=True),
        prompt_tokens=length,
        tokens=len(made),
        stopped=len(made) > 0 and int(made[-1]) in ends,
        device=str(model.device),
    )


def image_prompt_inputs(
    loaded: LoadedModel, prompt: str, images: tuple[Path, ...], folder: Path
) -> dict[str, torch.Tensor]:
    """Return the forward's inputs for a user message with these images, as in training. Raises
    SW6132 and SW6402."""
    image_processor = loaded.image_processor
    if image_processor is None:
        raise cannot_generate(folder, "its model takes no images", "Leave --image out.")
    try:
        sources = [inspect_image(str(image.absolute()), Path("/")) for image in images]
    except DamagedImage as why:
        raise cannot_generate(folder, str(why), "Use an image that Pillow can open.") from None
    content: list[JsonValue] = [
        *[{"type": "image"}] * len(images),
        {"type": "text", "text": prompt},
    ]
    text = image_processor.token * len(images) + prompt
    if loaded.template:
        message: Message = {"role": "user", "content": content}
        try:
            text = _RENDERER.prompt(loaded.template, [message], special_tokens(loaded.tokenizer))
        except (TemplateError, RenderLimitExceeded) as error:
            raise cannot_generate(
                folder, f"its chat template refuses the question: {error}"
            ) from None
    written = image_processor.expand(text, [], sources)
    if written is None:
        cause = (
            f"its chat template does not write {image_processor.token!r} once for each image, or "
            "the prompt contains it"
        )
        raise cannot_generate(
            folder, cause, "Remove it from the prompt, or add a chat template that supports images."
        )
    # A template writes the special tokens itself.
    ids = loaded.tokenizer(written[0], add_special_tokens=not loaded.template, return_tensors="pt")[
        "input_ids"
    ]
    tokens = ids.numpy()
    return {
        "input_ids": ids,
        **image_processor.inputs(tokens, np.zeros(tokens.shape, dtype=np.bool_), [sources]),
    }


def _load_checkpoint_model(
    checkpoint: Path, device: torch.device, trust_code: str | None
) -> LoadedModel:
    """Load a checkpoint into the model, with merged adapters, whatever layout trained it."""
    plan = open_checkpoint(checkpoint, trust_code)
    if plan.model.task_traits.compares_pairs:
        raise _contrastive_refusal(checkpoint, plan.model.model_type)
    if plan.model.task_traits.scores_sequences:
        raise _reward_refusal(checkpoint)
    tokenizer = _tokenizer_of(plan, checkpoint)
    model = empty_model(load_config(plan, checkpoint), None, plan.model.task)
    with CheckpointReader(checkpoint) as reader:
        weights = _CheckpointWeights(plan, reader)
        WeightLoader(model, weights, {}, frozenset(), 0).fill([""])
        for name, buffer in model.named_buffers():
            if name in weights.names():
                buffer.copy_(weights.read(name, None))
    model.generation_config = own_generation_config(plan, model, checkpoint)
    dtype = torch.float32 if device.type == "cpu" else DTYPES[plan.training.precision]
    loaded = LoadedModel(model=model.to(device, dtype).eval(), tokenizer=tokenizer)
    part = next((part for part in all_data_sections(plan) if part.images is not None), None)
    if not plan.model.task_traits.has_images or part is None or part.images is None:
        return loaded
    return _with_image_processor(
        loaded, checkpoint / str(part.tokenizer), part.images, part.template
    )


class _CheckpointWeights:
    """Provide a checkpoint's parameters as initial weights."""

    def __init__(self, plan: Plan, reader: CheckpointReader) -> None:
        self._plan, self._reader = plan, reader

    def names(self) -> Iterable[str]:
        return self._reader.manifest.tensors

    def read(self, name: str, range_: SliceRange | None) -> torch.Tensor:
        tensor = merged_parameter(self._plan, self._reader, name)
        return tensor if range_ is None else tensor.narrow(*range_)

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        return dtype != torch.float32


def _tokenizer_of(plan: Plan, checkpoint: Path) -> Any:
    if is_byte_level(plan):
        return PreTrainedTokenizerFast(
            tokenizer_object=byte_tokenizer(), clean_up_tokenization_spaces=False
        )
    folders = {path.parent for path in tokenizer_files(checkpoint)}
    if not folders:
        help = (
            "Run `shardwright export`, and save the tokenizer of the ids into the exported folder."
        )
        raise cannot_generate(checkpoint, "it was trained on token ids and has no tokenizer", help)
    return AutoTokenizer.from_pretrained(
        max(folders), local_files_only=True, trust_remote_code=False
    )


def _load_huggingface_model(
    folder: Path, device: torch.device, trust_code: str | None
) -> LoadedModel:
    document = read_model_config(folder)
    if needs_remote_code(document):
        code = read_remote_code(folder, document)
        require_trust(code, folder, trust_code)
        register(folder, code)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if task_of_type(config.model_type) is CONTRASTIVE:
        raise _contrastive_refusal(folder, config.model_type)
    if "ForSequenceClassification" in str(config.architectures):
        raise _reward_refusal(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    model = (task_of_type(config.model_type) or CAUSAL_LM).auto_class.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32 if device.type == "cpu" else "auto",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    if tokenizer.eos_token_id is None and not (folder / GENERATION_CONFIG).is_file():
        # The type's default id may be a byte of text.
        model.generation_config.eos_token_id = None
    loaded = LoadedModel(model=model.to(device).eval(), tokenizer=tokenizer)
    if (
        not (folder / "processor_config.json").is_file()
        and not (folder / "preprocessor_config.json").is_file()
    ):
        return loaded
    return _with_image_processor(
        loaded, folder, ImagesSection(per_row=1, max_pixels=MAX_IMAGE_PIXELS), None
    )


def _with_image_processor(
    loaded: LoadedModel, processor: Path, images: ImagesSection, template: str | None
) -> LoadedModel:
    takes = frozenset(inspect.signature(type(loaded.model).forward).parameters)
    image_processor = ImageProcessor(processor, images, takes)
    template = template or image_processor.template or loaded.tokenizer.chat_template or ""
    return replace(loaded, image_processor=image_processor, template=template)


def _reward_refusal(folder: Path) -> Refusal:
    help = "Run `shardwright export`, and use transformers' AutoModelForSequenceClassification."
    return cannot_generate(folder, "the model scores texts and writes none", help)


def _contrastive_refusal(folder: Path, model_type: str) -> Refusal:
    help = "Run `shardwright export`, and use transformers' AutoModel and AutoProcessor."
    return cannot_generate(
        folder, f"a {model_type!r} compares images with captions and writes no text", help
    )
