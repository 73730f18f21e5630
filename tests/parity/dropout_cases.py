"""Models with dropout, and layouts that cut them over tensor ranks."""

from __future__ import annotations

from typing import Any

from tests.parity.models import GPT2

OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
MODELS = {"gpt2": {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, "opt": OPT}
LAYOUTS = {"tp2-dp2": {"tensor": 2, "data": 2}, "pp2-tp2": {"tensor": 2, "pipeline": 2}}
