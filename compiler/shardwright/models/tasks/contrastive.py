"""Models that learn from pairs of a picture and a caption: their two losses, and what a tiny copy
shows of one.

Their text side is what is traced layer by layer, as the decoder layers of other models are; the
picture's side is the tower. Nothing is cut: a pair's features of both sides meet in the loss.
Letters: b pairs of a rank, N of the global batch, P width of the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from shardwright.models.layer_split import (
    ModelStructure,
    NotSplittable,
    attention_module,
    find_layer_split,
    parameters_with_gradient,
)
from shardwright.models.model_graph import PipelineSplit
from shardwright.models.model_skeleton import Skeleton
from shardwright.models.tasks.vision_language import UnsupportedImages, vision_encoder_config

SOFTMAX, SIGMOID = "softmax", "sigmoid"
"""`Cut.loss`: CLIP's symmetric cross-entropy (arXiv 2103.00020, figure 3), SigLIP's sigmoid of
every pair (arXiv
2303.15343, algorithm 1)."""


def contrastive_loss(
    kind: str,
    own: tuple[torch.Tensor, torch.Tensor],
    every: tuple[torch.Tensor, torch.Tensor],
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    first: int = 0,
) -> torch.Tensor:
    """The share of one rank, in fp32: the mean of all ranks' is the loss of the global batch.

    own: features of texts and of pictures, each (b, P), normalized. every: of all ranks, each (N,
    P); this rank's begin at row `first`. scale: the logarithm of what similarities are multiplied
    by; bias: of the sigmoid.
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
    """In one process, over all rows of the batch."""
    output = model(input_ids=input_ids, pixel_values=pixel_values)
    own = output.text_embeds, output.image_embeds
    return contrastive_loss(kind, own, own, model.logit_scale, getattr(model, "logit_bias", None))


def use_text_encoder(model: PreTrainedModel) -> None:
    """Its forward becomes that of its text side alone, (B, S) ids -> features (B, P) as `logits`:
    what traces and cuts decoder layers finds those of the text. Copies of it keep that."""
    whole = type(model)
    model.__class__ = type(whole.__name__, (whole,), {"forward": _text_alone})


def _text_alone(self: Any, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
    return SimpleNamespace(logits=self.get_text_features(input_ids=input_ids).pooler_output)


def pairs(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch for a tiny copy: a picture of noise beside each row of tokens (B, S). Raises
    UnsupportedImages."""
    config: Any = model.config
    tower: Any = vision_encoder_config(config)
    end = getattr(config.get_text_config(), "eos_token_id", None)
    ids = tokens.clone()
    if isinstance(end, int) and 2 < end < config.get_text_config().vocab_size:
        ids[:, -1] = end  # what some types take a text's features at
    side = getattr(tower, "image_size", None)
    if not isinstance(side, int):
        raise UnsupportedImages("its pictures have no size of their own")
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(len(ids), getattr(tower, "num_channels", 3), side, side),
    }


def probe_contrastive(model: PreTrainedModel, tokens: torch.Tensor) -> ModelStructure:
    """`model`: tiny, on the CPU, in training mode without anything random. It is the text side
    alone afterwards. Raises NotSplittable where its loss is none of the two that are known,
    UnsupportedImages."""
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
    cut = find_layer_split(model, batch["input_ids"])
    before = seen | _embedding(model, cut, batch["input_ids"], named)
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
    wanted = model(**batch, return_loss=True).loss
    for other in (
        {**batch, "pixel_values": batch["pixel_values"].roll(1, -1)},
        {**batch, "input_ids": batch["input_ids"].roll(1, 0)},
    ):
        if torch.equal(model(**other, return_loss=True).loss, wanted):
            raise NotSplittable("its loss does not depend on both the pictures and the captions")
    for kind in (SOFTMAX, SIGMOID):
        if torch.allclose(
            contrastive_batch_loss(model, kind, **batch), wanted, rtol=1e-5, atol=1e-6
        ):
            return kind
    raise NotSplittable("its loss is neither CLIP's nor SigLIP's")


def _embedding(
    model: nn.Module, cut: PipelineSplit, ids: torch.Tensor, named: dict[str, nn.Parameter]
) -> set[str]:
    """What the state before the first layer of the text side depends on."""
    state = Skeleton(model, cut, (ids.shape[0], ids.shape[1])).embed(ids, None)
    return parameters_with_gradient([state.hidden], named)
