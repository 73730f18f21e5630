"""generation_config.json of a trained model: the model's own settings, with the end tokens that the
run trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from shardwright.checkpoint.model_reader import GENERATION_CONFIG, is_byte_level
from shardwright.data.conversations import end_of_turn_id
from shardwright.data.data_sources import data_sections
from shardwright.data.tokenizers import Tokenizer, load_tokenizer
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import TOKENIZED_KINDS, DataSection
from shardwright.utils.bounded_read import parse_json, read_regular_file

_MOST_BYTES = 2**20
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def trained_end_ids(plan: Plan, checkpoint: Path) -> tuple[int, ...]:
    """Ids that the training data writes where a text ends: the tokenizer's eos_token behind
    documents, the chat template's end of turn behind answers. () where the data are token ids
    already. Raises Refusal (SW6121)."""
    ends: dict[int, None] = {}
    for part, tokenizer in _tokenized(plan, checkpoint):
        template = part.template or tokenizer.template
        if part.kind != "chat":
            ends |= dict.fromkeys(tokenizer.end)
        elif template is not None and (end := end_of_turn_id(tokenizer, template)) is not None:
            ends[end] = None
    return tuple(end for end in ends if end < plan.model.vocabulary_size)


def special_ids(
    plan: Plan, checkpoint: Path, own: dict[str, Any]
) -> dict[str, int | list[int] | None]:
    """bos_token_id, eos_token_id and pad_token_id. own: what the model came with.

    Pretrained weights keep their own ids and ends, behind the trained ends. Random weights know the
    tokenizer's ids alone: those of the model type mean nothing. Raises Refusal (SW6121).
    """
    ids = {key: own.get(key) for key in _IDS}
    tokenizer = next((tokenizer for _, tokenizer in _tokenized(plan, checkpoint)), None)
    if tokenizer is None:
        return ids
    ends = list(trained_end_ids(plan, checkpoint))
    if plan.model.weights_path is None:
        ids |= {"bos_token_id": tokenizer.bos, "pad_token_id": tokenizer.pad}
        ends = ends or tokenizer.end
    else:
        ends = list(dict.fromkeys([*ends, *end_ids(own.get("eos_token_id"))]))
    return ids | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def end_ids(ids: Any) -> list[int]:
    """eos_token_id as a list, whichever of its three forms it has."""
    return [
        id for id in (ids if isinstance(ids, list | tuple | set) else [ids]) if isinstance(id, int)
    ]


def write_generation_config(
    plan: Plan, model: PreTrainedModel, checkpoint: Path, folder: Path
) -> None:
    """Of the file that came with the model everything else is kept: sampling settings, suppressed
    tokens."""
    own = _model_generation_config(checkpoint)
    if own is None:
        if isinstance(
            getattr(model, "generation_config", None), GenerationConfig
        ):  # a contrastive model has none
            set_special_ids(plan, model.generation_config, checkpoint)
            model.generation_config.save_pretrained(folder)
        return
    document = {
        **own,
        **{key: ids for key, ids in special_ids(plan, checkpoint, own).items() if ids is not None},
    }
    (folder / GENERATION_CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def own_generation_config(plan: Plan, model: PreTrainedModel, checkpoint: Path) -> GenerationConfig:
    """What `generate` goes by: the same ids as an export has."""
    own = _model_generation_config(checkpoint)
    config = model.generation_config if own is None else GenerationConfig.from_dict(own)
    set_special_ids(plan, config, checkpoint)
    return config


def set_special_ids(plan: Plan, config: GenerationConfig, checkpoint: Path) -> None:
    own = (
        {} if is_byte_level(plan) else {key: getattr(config, key, None) for key in _IDS}
    )  # an id is a byte there
    for key, ids in special_ids(plan, checkpoint, own).items():
        setattr(config, key, ids)


def _model_generation_config(checkpoint: Path) -> dict[str, Any] | None:
    path = checkpoint / "model" / GENERATION_CONFIG
    if not path.is_file():
        return None
    try:
        document = parse_json(read_regular_file(path, _MOST_BYTES))
    except ValueError:
        return None
    return dict(document) if isinstance(document, dict) else None


def _tokenized(plan: Plan, checkpoint: Path) -> Iterator[tuple[DataSection, Tokenizer]]:
    for part in data_sections(plan.data):
        if part.kind in TOKENIZED_KINDS and part.tokenizer is not None:
            yield part, load_tokenizer(part.tokenizer, checkpoint)
