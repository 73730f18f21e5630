"""The model types that are cut over tensor ranks: what the Hugging Face class alone does not say. Every other type that
the probe can take apart runs with a pipeline and ZeRO.

To add one: its tensor-parallel styles (None = the transformers class's own `base_model_tp_plan`). Paths are relative to
the base model; * is the layer number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """gated: the feed-forward has a gate beside its up projection.
    embedding: base model path of the token embedding. tensor_styles: None = transformers' own plan."""

    gated: bool
    embedding: str
    tensor_styles: Mapping[str, str] | None


LLAMA = Family(gated=True, embedding="embed_tokens", tensor_styles=None)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "gpt2": Family(
        gated=False,
        embedding="wte",
        tensor_styles={
            "wpe": "replicated",
            "h.*.attn.c_attn": "packed_colwise",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
    ),
}
