"""Register the tasks: the transformers class that builds a task's models, its example inputs, and
peft's name for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
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
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING,
)

from shardwright.models.model_skeleton import Batch
from shardwright.models.tasks.sequence_classification import (
    CLASSIFIED_DECODERS,
    score_each_token,
)
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
    """Describe a task.

    name: the recipe's name.
    auto_class: transformers' Auto class.
    types: model_type -> class name, of the types in transformers itself.
    registered: configuration class -> model class, including those of remote code
        (models/remote_code_import.py).
    example_shape: (sequences, tokens) of a tiny copy's input.
    peft_type: peft's name of the task.
    any_of_mapping: whether types in the mapping but not in `types` are trained too.
    """

    name: TaskName
    auto_class: Any
    types: Mapping[str, str]
    registered: Mapping[type[PretrainedConfig], type]
    example_shape: tuple[int, int]
    peft_type: str
    any_of_mapping: bool = True

    def trains(self, model_type: str) -> bool:
        """Return whether transformers' mapping has the type, or remote code has registered a class
        for it."""
        known = model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in self.registered
        return model_type in self.types or (known and self.any_of_mapping)

    def build(self, config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
        """Build the model in fp32 with random weights; it returns no router logits.

        attention: None takes transformers' choice for the type; so does a part (a vision encoder)
            that lacks this one.
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
            torch.set_rng_state(state)  # some weights may have been drawn
            return self._build(untouched, {text: attention})

    def _build(
        self, config: PretrainedConfig, attention: str | dict[str, str] | None
    ) -> PreTrainedModel:
        model: PreTrainedModel = self.auto_class.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
        if self.traits.scores_sequences:
            score_each_token(model)
        return model

    @property
    def traits(self) -> TaskTraits:
        """Return the task's traits."""
        return TASK_TRAITS[self.name]

    def small(
        self, document: Mapping[str, Any], *, depth: bool = True, widths: bool = True
    ) -> dict[str, Any]:
        """Return a tiny version of a complete configuration (models/tiny_config.py)."""
        made = shrink(document, depth=depth, widths=widths)
        if not self.traits.has_images or not widths:
            return made
        return (
            equalize_encoder_widths(tiny_vision_encoder(made, document))
            if self.traits.compares_pairs
            else tiny_vision_encoder(made, document)
        )

    def shown(self, model: PreTrainedModel) -> tuple[torch.Tensor, Batch | None]:
        """Return (ids, other forward inputs) to split a tiny copy with. Raises
        UnsupportedImages."""
        return (
            example_images(model, VOCABULARY)
            if self.traits.has_images
            else (self.example(model.config), None)
        )

    def example(self, config: PretrainedConfig) -> torch.Tensor:
        """Return token ids (sequences, tokens) for a tiny copy.

        They include every special id of the configuration, the first and the last one: a model may
            treat padding and the like differently.
        """
        ids = token_ids(config)
        random = torch.tensor(ids.plain)[torch.randint(len(ids.plain), self.example_shape)]
        rows, length = self.example_shape
        # A caption ends at its first end token, so it gets none.
        for number, special in enumerate(() if self.traits.compares_pairs else ids.special):
            # After the first token, each at its own place; a sequence starts and ends with text.
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
    auto_class=AutoModelForZeroShotImageClassification,  # the class that has both encoders
    types=CONTRASTIVE_MODEL_CLASSES,
    registered=MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING,
    example_shape=(4, 12),
    peft_type="FEATURE_EXTRACTION",
    any_of_mapping=False,
)

SEQUENCE_CLASSIFICATION = Task(
    name="sequence-classification",
    auto_class=AutoModelForSequenceClassification,
    types=CLASSIFIED_DECODERS,
    registered=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    example_shape=(2, 24),
    peft_type="SEQ_CLS",
    any_of_mapping=False,
)

TASKS = (CAUSAL_LM, IMAGE_TEXT, CONTRASTIVE, SEQUENCE_CLASSIFICATION)
"""Tasks in the order in which a type's own is chosen, where the recipe names none."""


def text_part(config: PretrainedConfig) -> str | None:
    """Return the key of a composite configuration's text part, None where it has no parts."""
    try:
        text = config.get_text_config()
    except ValueError:  # musicgen has several
        return None
    return next((key for key in config.sub_configs if getattr(config, key, None) is text), None)


def text_attention(config: PretrainedConfig) -> str:
    """Return the attention implementation of a built model's decoder layers."""
    text = text_part(config)
    own = None if text is None else getattr(config, text)._attn_implementation
    return str(own or config._attn_implementation)


def task_named(name: TaskName) -> Task:
    return next(task for task in TASKS if task.name == name)


def task_of_type(model_type: str) -> Task | None:
    """Return the first task that trains the type, None where there is none."""
    return next((task for task in TASKS if task.trains(model_type)), None)


def task_of(model: PretrainedConfig | str) -> Task:
    """Return the task of a configuration or type that was checked (models/hf_config.py)."""
    model_type = model if isinstance(model, str) else model.model_type
    task = task_of_type(model_type)
    assert task is not None, model_type
    return task


def trained_types() -> tuple[str, ...]:
    """Return transformers' own types that some task trains."""
    return tuple(name for task in TASKS for name in task.types)
