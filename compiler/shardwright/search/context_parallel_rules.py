"""What context ranks (modules/context/) do not run: sizes that do not divide, models that look
beyond a token, and dropout, which is not proved beside them."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.layout.tensor_parallel_map import is_attention_sharded
from shardwright.utils.divisors import nearest_divisors, nearest_multiples

_KEY = "parallelism.context"


def context_divides_sequence(x: Candidate) -> Diagnostic | None:
    """Each rank has as many tokens of a row."""
    s, length = x.strategy.context, x.recipe.training.sequence_length
    if length % s == 0:
        return None
    return found(
        "SW3141",
        "training.sequence_length",
        f"sequence_length {length} is not a multiple of context {s}",
        "Each context rank takes an equal piece of a row.",
        nearest_multiples(s, length),
    )


def context_divides_heads(x: Candidate) -> Diagnostic | None:
    """In attention each rank has as many heads; those of keys are repeated where they are fewer.
    Not asked of a type that context ranks refuse altogether (SW3143)."""
    s = x.strategy
    if x.graph.context_parallel_reason:
        return None
    own = x.graph.attention_heads // (s.tensor if is_attention_sharded(x.graph) else 1)
    if s.context == 1 or own % s.context == 0:
        return None
    return found(
        "SW3142",
        _KEY,
        f"{own} attention heads of a tensor rank do not divide over context {s.context}",
        "In attention a context rank has a share of the heads, and all tokens of the row.",
        nearest_divisors(own, s.context),
    )


def context_parallel_supported(x: Candidate) -> Diagnostic | None:
    """Tried on a tiny copy of this configuration when the model was traced."""
    why = x.graph.context_parallel_reason
    if x.strategy.context == 1 or not why:
        return None
    return found(
        "SW3143",
        _KEY,
        f"rows of a {x.graph.model_type!r} are not cut over ranks: {why}",
        (
            "Use context: 1. Recomputation, the chunked loss and tensor ranks make long rows fit "
            "as well."
        ),
        (1,),
    )


def context_without_dropout(x: Candidate) -> Diagnostic | None:
    """A rank would draw for its own tokens, and in attention for its own heads; that is compared
    with no plain run yet."""
    largest = max(x.graph.max_dropout, 0.0 if x.recipe.lora is None else x.recipe.lora.dropout)
    if x.strategy.context == 1 or largest == 0:
        return None
    return found(
        "SW3144",
        _KEY,
        (
            f"context {x.strategy.context} beside dropout {largest:g} is not proved against a "
            "plain run"
        ),
        "Use context: 1, or no dropout (keys of model.config, and lora.dropout).",
        (1,),
    )
