"""What expert ranks (modules/expert/) do not run: degrees that do not divide, types whose experts
cannot be shared, and what is not proved beside them."""

from __future__ import annotations

import math

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.models.expert_modules import expert_modules
from shardwright.utils.divisors import nearest_divisors

_KEY = "parallelism.expert"


def expert_divides_ranks(x: Candidate) -> Diagnostic | None:
    """They are neighbours among the ranks that have the same layers and shards."""
    s = x.strategy
    if s.shards % s.expert == 0:
        return None
    return found(
        "SW3145",
        _KEY,
        (
            f"expert {s.expert} does not divide the {s.shards} ranks of data {s.data} x context "
            f"{s.context}"
        ),
        "Expert ranks are taken out of data x context ranks, which expert must divide.",
        nearest_divisors(s.shards, s.expert),
    )


def expert_divides_experts(x: Candidate) -> Diagnostic | None:
    """Each rank has as many of each layer."""
    e = x.strategy.expert
    counts = set(expert_modules(x.graph).values())
    if all(count % e == 0 for count in counts):
        return None
    return found(
        "SW3146",
        _KEY,
        f"expert {e} does not divide the model's {max(counts)} experts",
        "Each expert rank holds an equal share of every layer's experts.",
        nearest_divisors(math.gcd(*counts), e),
    )


def expert_parallel_supported(x: Candidate) -> Diagnostic | None:
    """Tried on a tiny copy of this configuration when the model was traced."""
    why = x.graph.expert_parallel_reason
    if x.strategy.expert == 1 or not why:
        return None
    return found(
        "SW3147",
        _KEY,
        f"experts of a {x.graph.model_type!r} are not shared out over ranks: {why}",
        (
            "Use expert: 1. ZeRO, tensor ranks and pipelines share out experts as any other "
            "parameters."
        ),
        (1,),
    )


def expert_without_dropout(x: Candidate) -> Diagnostic | None:
    """Ranks that exchange rows must have chosen experts alike; that is compared with no plain run
    yet."""
    if x.strategy.expert == 1 or x.graph.max_dropout == 0:
        return None
    return found(
        "SW3148",
        _KEY,
        (
            f"expert {x.strategy.expert} beside dropout {x.graph.max_dropout:g} is not proved "
            "against a plain run"
        ),
        "Use expert: 1, or no dropout (keys of model.config).",
        (1,),
    )


def expert_without_lora(x: Candidate) -> Diagnostic | None:
    if x.strategy.expert == 1 or x.recipe.lora is None:
        return None
    return found(
        "SW3149",
        _KEY,
        f"expert {x.strategy.expert} beside LoRA is not proved against a plain run",
        "Use expert: 1; zero_stage: 3 shares out the frozen experts instead.",
        (1,),
    )
