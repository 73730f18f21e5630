"""Score each token of a sequence-classification model with one label, a reward model.

transformers computes the score of every token, and returns that of the last one before the padding.
Training reads it by its place, which the data knows, so that any rank can hold that token. Letters:
B sequences, S tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from shardwright.models.layer_split import NotSplittable
from shardwright.recipe.objectives import SCORING_HEAD

HEAD, HEAD_WEIGHT = SCORING_HEAD, f"{SCORING_HEAD}.weight"
"""Names of the linear that transformers' decoders have for sequence classification, and of its
parameter."""

CLASSIFIED_DECODERS = {
    model_type: name
    for model_type, name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.items()
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
"""model_type -> class, of the types that are causal language models too."""


def score_each_token(model: PreTrainedModel) -> None:
    """Replace the model's forward: ids (B, S) -> the scores of all tokens (B, S, 1) as `logits`.

    Tracing, splitting and training then have one output a token, as of a language model. Copies of
    the model keep the change. A model without a head of this name keeps its forward, and `probe`
    refuses it.
    """
    whole = type(model)
    if not isinstance(getattr(model, HEAD, None), torch.nn.Linear):
        return

    def forward(self: Any, input_ids: torch.Tensor, **more: Any) -> SimpleNamespace:
        base = getattr(self, self.base_model_prefix)
        hidden = base(input_ids=input_ids, **more).last_hidden_state
        return SimpleNamespace(logits=getattr(self, HEAD)(hidden))

    model.__class__ = type(whole.__name__, (whole,), {"forward": forward, "pools": whole.forward})


@torch.no_grad()
def pooled_loss(model: PreTrainedModel, input_ids: torch.Tensor, _: object = None) -> str:
    """Return `PipelineSplit.loss`: "pooled". Raises NotSplittable unless transformers returns the
    score of the last token before the padding.

    model: tiny, after score_each_token. input_ids: (B, S).
    """
    pools = getattr(model, "pools", None)
    if pools is None:
        raise NotSplittable(f"it has no linear named {HEAD!r} for its score")
    scores = model(input_ids=input_ids, use_cache=False).logits
    if scores.shape != (*input_ids.shape, 1):
        raise NotSplittable("its scores are not one number a token")
    text: Any = model.config.get_text_config()
    before, padding = text.pad_token_id, int(input_ids[0, -1])
    padded, last = input_ids.clone(), input_ids.shape[1] // 2
    padded[:, last + 1 :] = padding
    padded[:, last] = torch.where(input_ids[:, last] == padding, padding - 1, input_ids[:, last])
    text.pad_token_id = padding
    try:
        found = pools(input_ids=padded, use_cache=False).logits
    finally:
        text.pad_token_id = before
    expected = model(input_ids=padded, use_cache=False).logits[:, last]
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
        raise NotSplittable("its score is not that of the last token before the padding")
    return "pooled"
