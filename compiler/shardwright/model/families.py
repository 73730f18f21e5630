"""The model types that are cut over tensor ranks. Every other type that the probe can take apart runs with a pipeline
and ZeRO.

None = the transformers class's own `base_model_tp_plan`; a mapping is ours. Paths are relative to the base model, * is
the layer number. A type is listed once its parity is proved under tensor parallelism (tests/zoo).
"""

from __future__ import annotations

from collections.abc import Mapping

TENSOR_STYLES: dict[str, Mapping[str, str] | None] = {
    "llama": None,
    "mistral": None,
    "qwen2": None,
    "arcee": None,
    "cohere2": None,
    "cwm": None,
    "ernie4_5": None,
    "exaone4": None,
    "gpt_neox": None,
    "granite": None,
    "helium": None,
    "hyperclovax": None,
    "internlm3": None,
    "iquestcoder": None,
    "jais2": None,
    "nanochat": None,
    "nemotron": None,
    "olmo": None,
    "qwen3": None,
    "seed_oss": None,
    "smollm3": None,
    "starcoder2": None,
    "phi3": None,
    "olmo2": None,
    "olmo3": None,
    "glm": None,
    "glm4": None,
    "gpt2": {
        "wpe": "replicated",
        "h.*.attn.c_attn": "packed_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
}
