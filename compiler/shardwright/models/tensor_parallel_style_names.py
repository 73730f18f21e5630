"""The names of the tensor-parallel styles, by what they cut. transformers' own, and ours."""

from __future__ import annotations

FUSED_QKV = "fused_qkv_colwise"
"""Query, key and value, one behind the other: three blocks, the last two as wide as the key/value
heads."""

GROUPED_QKV = "grouped_qkv_colwise"
"""Fused by key/value head: each with its query heads. Cut plainly, between key/value heads."""

MULTI_QUERY = "multi_query_colwise"
"""Fused query heads and a single key/value head, which every rank needs."""

COLUMN_STYLES = (
    "colwise",
    "packed_colwise",
    FUSED_QKV,
    GROUPED_QKV,
    MULTI_QUERY,
    "colwise_gather_output",
    "mla_kv_a_proj",
)
ROW_STYLES = ("rowwise", "packed_rowwise", "rowwise_split_input", "embedding_colwise")
VOCABULARY_STYLES = ("vocabulary_embedding", "vocabulary_head")
STYLES_THAT_MAY_STAY_UNSHARDED = (
    MULTI_QUERY,
    "colwise_gather_output",
    "mla_kv_a_proj",
    "rowwise_split_input",
    "embedding_colwise",
)
"""Whole in, whole out: where their dimension does not divide they stay plain layers."""
