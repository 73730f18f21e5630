"""Compute the two contrastive losses, and probe a contrastive model on a tiny copy.

The text encoder is traced layer by layer, like the decoder layers of other models; the image
encoder is the vision encoder. Neither is split: the features of a pair meet in the loss. Letters: b
pairs of a rank, N pairs of the global batch, P width of the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from shardwright.models.layer_split import (
    ModelStructure,
    NotSplittable,
    attention_module,
    find_layer_split,
    parameters_with_gradient,
)
from shardwright.models.model_skeleton import Skeleton
from shardwright.models.tasks.vision_language import UnsupportedImages, vision_encoder_config

SOFTMAX, SIGMOID = "softmax", "sigmoid"
"""`PipelineSplit.loss`: CLIP's symmetric cross-entropy (arXiv 2103.00020, figure 3), SigLIP's
pairwise sigmoid (arXiv 2303.15343, algorithm 1)."""


def contrastive_loss(
    kind: str,
    own: tuple[torch.Tensor, torch.Tensor],
    every: tuple[torch.Tensor, torch.Tensor],
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    first: int = 0,
) -> torch.Tensor:
    """Return one rank's loss in fp32; the mean over ranks is the loss of the global batch.

    own: normalized text and image features of this rank, each (b, P).
    every: those of all ranks, each (N, P); this rank's start at row `first`.
    scale: logarithm of the similarities' factor.
    bias: bias of the sigmoid loss.
    """
    (texts, images), (all_texts, all_images) = ([x.float() for x in each] for each in (own, every))
    factor, rows = scale.float().exp(), len(texts)
    labels = torch.arange(first, first + rows, device=texts.device)
    by_text = texts @ all_images.t() * factor
    if kind == SOFTMAX:
        by_image = images @ all_texts.t() * factor
        return (F.cross_entropy(by_text, labels) + F.cross_entropy(by_image, labels)) / 2
    if bias is not None:
        by_text = by_text + bias.float()
    signs = -torch.ones_like(by_text)
    signs[torch.arange(rows, device=texts.device), labels] = 1
    return -F.logsigmoid(signs * by_text).sum() / rows


def contrastive_batch_loss(
    model: Any, kind: str, input_ids: torch.Tensor, pixel_values: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a batch in one process."""
    output = model(input_ids=input_ids, pixel_values=pixel_values)
    own = output.text_embeds, output.image_embeds
    return contrastive_loss(kind, own, own, model.logit_scale, getattr(model, "logit_bias", None))


def use_text_encoder(model: PreTrainedModel) -> None:
    """Replace the model's forward by its text encoder's: ids (B, S) -> features (B, P) as `logits`.

    Tracing and splitting then find the text encoder's layers. Copies of the model keep the change.
    """

    def forward(self: Any, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.get_text_features(input_ids=input_ids).pooler_output)

    whole = type(model)
    model.__class__ = type(whole.__name__, (whole,), {"forward": forward})


def pairs(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make a batch for a tiny copy: a random image for each sequence of tokens (B, S). Raises
    UnsupportedImages."""
    config: Any = model.config
    vision: Any = vision_encoder_config(config)
    end = getattr(config.get_text_config(), "eos_token_id", None)
    ids = tokens.clone()
    if isinstance(end, int) and 2 < end < config.get_text_config().vocab_size:
        ids[:, -1] = end  # some types take a text's features at its end token
    side = getattr(vision, "image_size", None)
    if not isinstance(side, int):
        raise UnsupportedImages("its configuration has no image size")
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(len(ids), getattr(vision, "num_channels", 3), side, side),
    }


def probe_contrastive(model: PreTrainedModel, tokens: torch.Tensor) -> ModelStructure:
    """Probe a tiny model on the CPU, in training mode without dropout; only its text encoder is
    left afterwards.

    Raises NotSplittable where its loss is neither CLIP's nor SigLIP's, and UnsupportedImages.
    """
    batch = pairs(model, tokens)
    loss = _own_loss(model, batch)
    named = dict(model.named_parameters())
    reached = parameters_with_gradient(
        [contrastive_batch_loss(model, loss, **batch).reshape(1)], named
    )
    seen = parameters_with_gradient(
        [model.get_image_features(pixel_values=batch["pixel_values"]).pooler_output],
        named,
    )
    use_text_encoder(model)
    ids = batch["input_ids"]
    cut = find_layer_split(model, ids)
    # Parameters that the state before the text encoder's first layer depends on.
    state = Skeleton(model, cut, (ids.shape[0], ids.shape[1])).embed(ids, None)
    before = seen | parameters_with_gradient([state.hidden], named)
    outside = [name for name in named if not name.startswith(f"{cut.stack}.")]
    untrained = tuple(name for name in named if name not in reached)
    return ModelStructure(
        cut=replace(cut, loss=loss, untrained=untrained),
        embedding=tuple(name for name in outside if name in before),
        head=tuple(name for name in outside if name not in before),
        attention=attention_module(model, cut),
        packing="its rows are pairs of a picture and a caption",
    )


@torch.no_grad()
def _own_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> str:
    expected = model(**batch, return_loss=True).loss
    for other in (
        {**batch, "pixel_values": batch["pixel_values"].roll(1, -1)},
        {**batch, "input_ids": batch["input_ids"].roll(1, 0)},
    ):
        if torch.equal(model(**other, return_loss=True).loss, expected):
            raise NotSplittable("its loss does not depend on both the images and the captions")
    for kind in (SOFTMAX, SIGMOID):
        if torch.allclose(
            contrastive_batch_loss(model, kind, **batch), expected, rtol=1e-5, atol=1e-6
        ):
            return kind
    raise NotSplittable("its loss is neither CLIP's nor SigLIP's")
