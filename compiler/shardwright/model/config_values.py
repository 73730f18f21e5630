"""Sizes that no configuration may have, by transformers' common names. No transformers here."""

from __future__ import annotations

from shardwright.ir.json_value import JsonValue

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
    "n_inner",
    "max_position_embeddings",
    "head_dim",
)
# Each layer becomes a module, even on the meta device: ten times the deepest published models.
MOST_LAYERS = 2048
ANY_VALUE = "any"
"""In place of kinds: the key takes what it is given."""


def size_problem(canonical: str, name: str, value: JsonValue) -> str:
    """Why the value of this key cannot be, or "". canonical: the class's own name for `name`."""
    if not isinstance(value, int | float):
        return ""
    if canonical in _SIZES and value < 1:
        return "is not a positive size"
    if canonical == "num_hidden_layers" and isinstance(value, int) and value > MOST_LAYERS:
        return f"is beyond {MOST_LAYERS}, the most layers that this version builds"
    if name.endswith(("dropout", "pdrop")) and not 0 <= value < 1:
        return "is not a probability below 1"
    return ""
