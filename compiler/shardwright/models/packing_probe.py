"""Whether documents that share a sequence stay apart, given positions that start again at each one
(also for the masks: document_masks.py)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from shardwright.models.layer_split import run_in_pieces
from shardwright.models.packed_attention import packed_attention_arguments
from shardwright.models.packed_document_masks import packed_document_masks
from shardwright.models.pipeline_split import PipelineSplit
from shardwright.utils.numeric_difference import max_abs_diff

LENGTHS = ((7, 5, 12), (1, 16, 7))
"""Of the documents in each row of the probe: borders differ between the rows, and one document is a
single token."""
TOLERANCE = 2e-5
"""Of the largest logit: other shapes of a matrix product sum in another order."""


def positions() -> torch.Tensor:
    """(2, 24) int64: each document counts from 0."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@torch.no_grad()
def packing_blocker(model: PreTrainedModel, cut: PipelineSplit, input_ids: torch.Tensor) -> str:
    """ "" where it is proved. model: tiny, nothing random; input_ids: (2, 24).

    In one piece, each document's logits must be those of the document alone; in isolated pieces, as
    pipeline stages run, those of one piece.
    """
    place = positions()
    with packed_document_masks(model, place):
        keywords = packed_attention_arguments(model.config._attn_implementation, place)
        whole = model(input_ids=input_ids, use_cache=False, **keywords).logits
    if not whole.isfinite().all():
        return "a tiny copy's logits are not finite"
    scale = TOLERANCE * max(1.0, float(whole.abs().max()))
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            alone = model(
                input_ids=input_ids[row : row + 1, at : at + length], use_cache=False
            ).logits[0]
            off = max_abs_diff(whole[row, at : at + length], alone)
            if not off <= scale:
                return f"a packed document's logits differ by {off:.1e} from its own"
            at += length
    outside = {id(p) for p in model.parameters()} - {
        id(p) for p in model.get_submodule(cut.stack).parameters()
    }
    off = max_abs_diff(run_in_pieces(model, cut, outside, outside, input_ids, place), whole)
    return (
        ""
        if off <= scale
        else f"packed logits of isolated layers differ by {off:.1e} from the model's"
    )
