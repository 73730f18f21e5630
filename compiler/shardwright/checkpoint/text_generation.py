"""Text from a trained model, a checkpoint of any layout or a Hugging Face folder, by transformers'
own generate. One process, no deepspeed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from shardwright.checkpoint.checkpoint_manifest import MANIFEST
from shardwright.checkpoint.checkpoint_reader import CheckpointReader
from shardwright.checkpoint.generation_config import end_ids, own_generation_config
from shardwright.checkpoint.model_reader import (
    GENERATION,
    is_byte_level,
    open_checkpoint,
    require_trust,
    tokenizer_files,
    whole_parameter,
)
from shardwright.data.chat_format import Message, TemplateError
from shardwright.data.chat_template_renderer import Overrun, Renderer
from shardwright.data.data_sources import every_part
from shardwright.data.image_files import MOST_PIXELS, Damaged, locate_picture
from shardwright.data.image_inputs import Sight
from shardwright.data.tokenizers import special_tokens
from shardwright.diagnostics import Refusal, refusal
from shardwright.models.byte_tokenizer import byte_tokenizer
from shardwright.models.remote_code_import import needs_own_code, own_code_in, register
from shardwright.models.tasks.task_registry import CAUSAL_LM, CONTRASTIVE, task_of_type
from shardwright.parallel.model_config_loading import load_config
from shardwright.parallel.torch_dtypes import DTYPES
from shardwright.parallel.weight_files import Range
from shardwright.parallel.weight_loader import Filler, empty_model
from shardwright.plan.plan import Plan
from shardwright.recipe.foreign_checkpoints import other_program
from shardwright.recipe.recipe_types import ImagesSection
from shardwright.utils.json_types import JsonValue

_RENDERER = Renderer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """temperature: 0 is greedy, the most probable token each time. images: files; the prompt is
    then a user's message about them, in the model's chat template."""

    prompt: str
    tokens: int
    temperature: float
    seed: int
    images: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """sight: of a model that sees, else None. template: its chat template, "" where it has none."""

    model: Any
    tokenizer: Any
    sight: Sight | None = None
    template: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """text: what follows the prompt. stopped: the model wrote its end token."""

    text: str
    prompt_tokens: int
    tokens: int
    stopped: bool
    device: str


def generate(folder: Path, wish: Wish, trust_code: str | None = None) -> Generated:
    """folder: a step folder, or one that from_pretrained loads. Raises Refusal: SW2014, SW6132,
    SW6201, SW6402."""
    return answer(open_model(folder, trust_code), wish, folder)


def open_model(folder: Path, trust_code: str | None = None) -> Loaded:
    """For any number of wishes. Raises Refusal as generate does."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load = _of_checkpoint if (folder / MANIFEST).is_file() else _of_folder
    with _explained(folder, device):
        return load(folder, device, trust_code)


def answer(loaded: Loaded, wish: Wish, folder: Path) -> Generated:
    """folder: for what is said of a failure. Raises Refusal as generate does."""
    with _explained(folder, loaded.model.device):
        return _continue(loaded, wish, folder)


@contextmanager
def _explained(folder: Path, device: torch.device) -> Iterator[None]:
    try:
        yield
    except Refusal:
        raise
    except torch.OutOfMemoryError:
        help = (
            "`CUDA_VISIBLE_DEVICES= shardwright generate ...` uses the CPU and the host's memory."
        )
        raise _unusable(folder, f"the model does not fit on {device}", help) from None
    except Exception as error:  # whatever a folder of somebody else's makes transformers raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise _unusable(folder, f"{type(error).__name__}: {lines[0][:300]}") from None


def _continue(loaded: Loaded, wish: Wish, folder: Path) -> Generated:
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = (
        asked_about(loaded, wish.prompt, wish.images, folder)
        if wish.images
        else tokenizer(wish.prompt, return_tensors="pt")
    )
    ids = inputs["input_ids"].to(model.device)
    beside = {
        n: v.to(model.device)
        for n, v in inputs.items()
        if wish.images and n not in ("input_ids", "attention_mask")
    }
    beside = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in beside.items()}
    length = int(ids.shape[1])
    positions = int(
        getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    )
    room = positions - length
    if not length or room < 1:
        why = f"the prompt's {length:,} tokens leave no room in the model's {positions:,} positions"
        raise _unusable(folder, why if length else "the prompt is empty", "Give another prompt.")
    # Of its own, so that "greedy" is greedy: a folder's file may ask for beams, penalties, other
    # lengths.
    model.generation_config = GenerationConfig(
        max_new_tokens=min(wish.tokens, room),
        do_sample=wish.temperature > 0,
        **({"temperature": wish.temperature, "top_k": 0} if wish.temperature > 0 else {}),
        **_special_ids(model, tokenizer),
        # A vocabulary is often padded: these ids are no text, and were never trained.
        suppress_tokens=list(range(len(tokenizer), model.get_output_embeddings().weight.shape[0]))
        or None,
    )
    torch.manual_seed(wish.seed)
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **beside)[0, length:]
    ends = end_ids(model.generation_config.eos_token_id)
    return Generated(
        text=tokenizer.decode(made, skip_special_tokens=True),
        prompt_tokens=length,
        tokens=len(made),
        stopped=len(made) > 0 and int(made[-1]) in ends,
        device=str(model.device),
    )


def _special_ids(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The ends that the model's generation_config names (chat models have several), else the
    tokenizer's."""
    ends = end_ids(model.generation_config.eos_token_id) or end_ids(tokenizer.eos_token_id)
    return {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0}


def asked_about(
    loaded: Loaded, prompt: str, images: tuple[Path, ...], folder: Path
) -> dict[str, torch.Tensor]:
    """What the forward takes of a user's message with these pictures, as a row of the training has
    it. Raises Refusal: SW6132, SW6402."""
    sight = loaded.sight
    if sight is None:
        raise _unusable(folder, "its model takes no pictures", "Leave --image out.")
    try:
        found = [locate_picture(str(image.absolute()), Path("/")) for image in images]
    except Damaged as why:
        raise _unusable(folder, str(why), "Give a picture that Pillow opens.") from None
    content: list[JsonValue] = [
        *[{"type": "image"}] * len(images),
        {"type": "text", "text": prompt},
    ]
    text = sight.token * len(images) + prompt
    if loaded.template:
        message: Message = {"role": "user", "content": content}
        try:
            text = _RENDERER.prompt(loaded.template, [message], special_tokens(loaded.tokenizer))
        except (TemplateError, Overrun) as error:
            raise _unusable(folder, f"its chat template refuses the question: {error}") from None
    written = sight.expand(text, [], found)
    if written is None:
        cause = (
            f"its chat template does not write {sight.token!r} once for each picture, or the "
            "prompt holds it"
        )
        raise _unusable(
            folder, cause, "Ask without it, or give the folder a chat template that takes pictures."
        )
    # A template writes the special tokens itself.
    ids = loaded.tokenizer(written[0], add_special_tokens=not loaded.template, return_tensors="pt")[
        "input_ids"
    ]
    tokens = ids.numpy()
    return {
        "input_ids": ids,
        **sight.inputs(tokens, np.zeros(tokens.shape, dtype=np.bool_), [found]),
    }


def _of_checkpoint(checkpoint: Path, device: torch.device, trust_code: str | None) -> Loaded:
    """Read straight into the model, adapters merged: the layout that trained it does not matter."""
    plan = open_checkpoint(checkpoint, trust_code)
    if plan.model.contrastive:
        raise _writes_nothing(checkpoint, plan.model.model_type)
    tokenizer = _tokenizer_of(plan, checkpoint)
    model = empty_model(load_config(plan, checkpoint), None, plan.model.task)
    with CheckpointReader(checkpoint) as reader:
        weights = _Stored(plan, reader)
        Filler(model, weights, {}, frozenset(), 0).fill([""])
        for name, buffer in model.named_buffers():
            if name in weights.names():
                buffer.copy_(weights.read(name, None))
    model.generation_config = own_generation_config(plan, model, checkpoint)
    dtype = torch.float32 if device.type == "cpu" else DTYPES[plan.training.precision]
    loaded = Loaded(model=model.to(device, dtype).eval(), tokenizer=tokenizer)
    part = next((part for part in every_part(plan) if part.images is not None), None)
    if not plan.model.sees or part is None or part.images is None:
        return loaded
    return _seeing(loaded, checkpoint / str(part.tokenizer), part.images, part.template)


class _Stored:
    """A checkpoint's parameters as initial weights."""

    def __init__(self, plan: Plan, reader: CheckpointReader) -> None:
        self._plan, self._reader = plan, reader

    def names(self) -> Iterable[str]:
        return self._reader.manifest.tensors

    def read(self, name: str, range_: Range | None) -> torch.Tensor:
        tensor = whole_parameter(self._plan, self._reader, name)
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
            "`shardwright export` it and save the tokenizer that made the ids into the same folder."
        )
        raise _unusable(checkpoint, "it was trained on token ids, and holds no tokenizer", help)
    return AutoTokenizer.from_pretrained(
        max(folders), local_files_only=True, trust_remote_code=False
    )


def _of_folder(folder: Path, device: torch.device, trust_code: str | None) -> Loaded:
    try:
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        alone = (folder / "adapter_config.json").is_file()
        if not alone and (other := other_program(folder)) is not None:
            raise Refusal(other) from None
        why = (
            "it holds adapters alone"
            if alone
            else "it is neither a checkpoint nor a Hugging Face model"
        )
        raise _unusable(folder, why, _rather(folder, alone=alone)) from None
    if needs_own_code(document):
        code = own_code_in(folder, document)
        require_trust(code, folder, trust_code)
        register(folder, code)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if task_of_type(config.model_type) is CONTRASTIVE:
        raise _writes_nothing(folder, config.model_type)
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
    if tokenizer.eos_token_id is None and not (folder / GENERATION).is_file():
        model.generation_config.eos_token_id = (
            None  # the type's default id, which may be a byte of text
        )
    loaded = Loaded(model=model.to(device).eval(), tokenizer=tokenizer)
    if (
        not (folder / "processor_config.json").is_file()
        and not (folder / "preprocessor_config.json").is_file()
    ):
        return loaded
    return _seeing(loaded, folder, ImagesSection(per_row=1, max_pixels=MOST_PIXELS), None)


def _seeing(loaded: Loaded, processor: Path, images: ImagesSection, template: str | None) -> Loaded:
    takes = frozenset(inspect.signature(type(loaded.model).forward).parameters)
    sight = Sight(processor, images, takes)
    template = template or sight.template or loaded.tokenizer.chat_template or ""
    return replace(loaded, sight=sight, template=template)


def _writes_nothing(folder: Path, model_type: str) -> Refusal:
    help = (
        "`shardwright export` it: transformers' AutoModel and AutoProcessor compare pictures "
        "with texts."
    )
    return _unusable(
        folder, f"a {model_type!r} compares pictures with captions, and writes no text", help
    )


def _rather(folder: Path, *, alone: bool) -> str:
    if alone:
        return "Export the step folder again with --merge, or give the step folder itself."
    steps = sorted(str(path.parent) for path in folder.glob(f"*/step-*/{MANIFEST}"))
    if steps:
        return f"It is a run's folder; its newest checkpoint is {steps[-1]}"
    return (
        "Give a `step-XXXXXXXX` folder of a run, or a folder with config.json and "
        "safetensors files."
    )


def _unusable(folder: Path, why: str, help: str = "") -> Refusal:
    return refusal(
        "SW6402",
        f"no text can be generated from {str(folder)!r}: {why}",
        help
        or f"It must load with transformers' {CAUSAL_LM.auto_class.__name__} and AutoTokenizer.",
    )
