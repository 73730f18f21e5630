"""What a model is trained for: the class of transformers that builds it, what it is shown to be
taken apart, and the name that peft has for it. Everything that builds, loads or registers a model
asks its task."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForZeroShotImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING,
)

from shardwright.models.model_skeleton import Batch
from shardwright.models.tasks.task_traits import TASK_TRAITS, TaskTraits
from shardwright.models.tasks.vision_language import example_images
from shardwright.models.tiny_config import (
    VOCABULARY,
    equalize_encoder_widths,
    shrink,
    tiny_vision_encoder,
    token_ids,
)
from shardwright.recipe.literal_types import CONTRASTIVE_MODEL_CLASSES, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """name: as a recipe has it.

    auto_class: of transformers. types: model_type -> the class's name, of those that transformers
    itself has. registered: configuration class -> model class, with those that came with a model
    (models/remote_code_import.py). example_shape: rows x tokens that a tiny copy is shown.
    peft_type: peft's name of the task. any_of_mapping: also types that `types` leaves out and the
    mapping has."""

    name: TaskName
    auto_class: Any
    types: Mapping[str, str]
    registered: Mapping[type[PretrainedConfig], type]
    example_shape: tuple[int, int]
    peft_type: str
    any_of_mapping: bool = True

    def trains(self, model_type: str) -> bool:
        """Whether transformers' own mapping has it, or a model's own code has registered its class
        for the task."""
        known = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in self.registered
        return model_type in self.types or (known and self.any_of_mapping)

    def build(self, config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
        """The whole model in fp32, its weights drawn. attention: None takes what transformers picks
        for the type. Where a part of a composite (a vision encoder) does not have it, that part
        takes what transformers picks.

        It returns no router logits, whatever the configuration asks for: of them a forward makes a
        loss that nothing here trains on, out of all layers at once.
        """
        if getattr(config, "output_router_logits", False):
            config = copy.deepcopy(config)
            config.update({"output_router_logits": False})
        text = text_part(config)
        if attention is None or text is None:
            return self._build(config, attention)
        untouched, state = copy.deepcopy(config), torch.get_rng_state()
        try:
            return self._build(config, attention)
        except ValueError:
            torch.set_rng_state(state)  # parts of it may have been drawn
            return self._build(untouched, {text: attention})

    def _build(
        self, config: PretrainedConfig, attention: str | dict[str, str] | None
    ) -> PreTrainedModel:
        model: PreTrainedModel = self.auto_class.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
        return model

    @property
    def traits(self) -> TaskTraits:
        """The task's row of the table."""
        return TASK_TRAITS[self.name]

    def small(
        self, document: Mapping[str, Any], *, depth: bool = True, widths: bool = True
    ) -> dict[str, Any]:
        """A complete configuration, made tiny (models/tiny_config.py)."""
        made = shrink(document, depth=depth, widths=widths)
        if not self.traits.has_images or not widths:
            return made
        return (
            equalize_encoder_widths(tiny_vision_encoder(made, document))
            if self.traits.compares_pairs
            else tiny_vision_encoder(made, document)
        )

    def shown(self, model: PreTrainedModel) -> tuple[torch.Tensor, Batch | None]:
        """(ids, what stands beside them) that a tiny copy is taken apart with. Raises
        UnsupportedImages."""
        return (
            example_images(model, VOCABULARY)
            if self.traits.has_images
            else (self.example(model.config), None)
        )

    def example(self, config: PretrainedConfig) -> torch.Tensor:
        """Token ids (rows, tokens) for a tiny copy. Beside plain ones they hold each special id of
        the configuration that stands in a text, the first id and the last: padding and the like may
        be treated in a way of its own."""
        ids = token_ids(config)
        random = torch.tensor(ids.plain)[torch.randint(len(ids.plain), self.example_shape)]
        rows, length = self.example_shape
        for number, special in enumerate(
            () if self.traits.compares_pairs else ids.special
        ):  # a caption ends at its first end
            # Behind the first token, each in a place of its own; a row begins and ends with a plain
            # one.
            random[number % rows, 1 + (3 * number + 2 * (number % rows)) % (length - 2)] = special
        return random


CAUSAL_LM = Task(
    name="causal-lm",
    auto_class=AutoModelForCausalLM,
    types=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    registered=MODEL_FOR_CAUSAL_LM_MAPPING,
    example_shape=(2, 24),
    peft_type="CAUSAL_LM",
)

IMAGE_TEXT = Task(
    name="image-text-to-text",
    auto_class=AutoModelForImageTextToText,
    types=MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    registered=MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    example_shape=(2, 24),
    peft_type="CAUSAL_LM",
)

CONTRASTIVE = Task(
    name="contrastive",
    auto_class=AutoModelForZeroShotImageClassification,  # the class that has both sides
    types=CONTRASTIVE_MODEL_CLASSES,
    registered=MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING,
    example_shape=(4, 12),
    peft_type="FEATURE_EXTRACTION",
    any_of_mapping=False,
)

TASKS = (CAUSAL_LM, IMAGE_TEXT, CONTRASTIVE)
"""A model is trained for the first whose types have its own, where the recipe names none."""


def text_part(config: PretrainedConfig) -> str | None:
    """The key of a composite's text part; None where the configuration is one part."""
    try:
        text = config.get_text_config()
    except ValueError:  # musicgen has several
        return None
    return next((key for key in config.sub_configs if getattr(config, key, None) is text), None)


def text_attention(config: PretrainedConfig) -> str:
    """What the decoder layers of a built model compute attention with."""
    text = text_part(config)
    own = None if text is None else getattr(config, text)._attn_implementation
    return str(own or config._attn_implementation)


def task_named(name: TaskName) -> Task:
    return next(task for task in TASKS if task.name == name)


def task_of_type(model_type: str) -> Task | None:
    """None: nothing here trains it."""
    return next((task for task in TASKS if task.trains(model_type)), None)


def task_of(model: PretrainedConfig | str) -> Task:
    """model: its configuration or its type, which was checked (models/hf_config.py)."""
    model_type = model if isinstance(model, str) else model.model_type
    task = task_of_type(model_type)
    assert task is not None, model_type
    return task


def trained_types() -> tuple[str, ...]:
    """Those of transformers itself, of all tasks."""
    return tuple(name for task in TASKS for name in task.types)
