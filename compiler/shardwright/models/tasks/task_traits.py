"""List the traits of each training task: its data, its loss and what is verified for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.recipe.literal_types import TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTraits:
    """The facts of a task that a stage asks for instead of its name.

    has_images: every sequence may hold images, which a processor prepares. images_in_text: images
    stand among a text's tokens, so that a rank without one runs the vision encoder on a dummy.
    compares_pairs: a sequence is an image and its caption, and the loss compares all pairs of the
    global batch. scores_sequences: the head has one output, which is read at one token of each
    sequence. chunked_loss, context_parallel, noise_scale, tiny_copy: whether the chunked loss,
    context ranks, the gradient noise scale and `verify` are there for it.
    """

    has_images: bool = False
    images_in_text: bool = False
    compares_pairs: bool = False
    scores_sequences: bool = False
    chunked_loss: bool = True
    context_parallel: bool = True
    noise_scale: bool = True
    tiny_copy: bool = True


TASK_TRAITS: Mapping[TaskName, TaskTraits] = {
    "causal-lm": TaskTraits(),
    "image-text-to-text": TaskTraits(
        has_images=True,
        images_in_text=True,
        chunked_loss=False,
        context_parallel=False,
        noise_scale=False,
        tiny_copy=False,
    ),
    "contrastive": TaskTraits(
        has_images=True,
        compares_pairs=True,
        chunked_loss=False,
        context_parallel=False,
        noise_scale=False,
        tiny_copy=False,
    ),
    "sequence-classification": TaskTraits(
        scores_sequences=True, chunked_loss=False, noise_scale=False
    ),
}
