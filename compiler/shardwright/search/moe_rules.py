"""Refuse what expert parallelism does not run: degrees that do not divide, types whose experts
cannot be sharded, and unverified combinations."""

from __future__ import annotations

import math

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate
from shardwright.models.expert_modules import expert_modules
from shardwright.utils.divisors import nearest_divisors

_EXPERT = "parallelism.expert"


def expert_divides_ranks(x: Candidate) -> Diagnostic | None:
    """They are neighbours among the ranks that have the same layers and shards."""
    s = x.strategy
    if s.zero_world_size % s.expert == 0:
        return None
    return found(
        "SW3145",
        _EXPERT,
        (
            f"expert {s.expert} does not divide the {s.zero_world_size} ranks of data {s.data} x "
            f"context {s.context}"
        ),
        "Expert ranks are taken out of data x context ranks, which expert must divide.",
        nearest_divisors(s.zero_world_size, s.expert),
    )


def expert_divides_experts(x: Candidate) -> Diagnostic | None:
    """Refuse expert degrees that do not divide each layer's experts."""
    e = x.strategy.expert
    counts = set(expert_modules(x.graph).values())
    if all(count % e == 0 for count in counts):
        return None
    return found(
        "SW3146",
        _EXPERT,
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
        _EXPERT,
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
        _EXPERT,
        (
            f"expert {x.strategy.expert} with dropout {x.graph.max_dropout:g} is not verified "
            "against a single-process run"
        ),
        "Use expert: 1, or set dropout to 0 (keys of model.config).",
        (1,),
    )


def expert_without_lora(x: Candidate) -> Diagnostic | None:
    if x.strategy.expert == 1 or x.recipe.lora is None:
        return None
    return found(
        "SW3149",
        _EXPERT,
        f"expert {x.strategy.expert} with LoRA is not verified against a single-process run",
        "Use expert: 1; zero_stage: 3 shards the frozen experts instead.",
        (1,),
    )


# `model.router_aux_loss`: the balance loss of a mixture's routers (models/mixture_of_experts.py),
# and
# where it does not run.


_ROUTER_AUX_LOSS = "model.router_aux_loss"


def router_aux_loss_supported(x: Candidate) -> Diagnostic | None:
    """Tried on a tiny copy of this configuration."""
    if x.recipe.model.router_aux_loss is None:
        return None
    from shardwright.models.model_probe import router_affinity

    affinity = router_affinity(x.graph)
    if isinstance(affinity, str):
        return None
    return found(
        "SW3158",
        _ROUTER_AUX_LOSS,
        f"the routers of a {x.graph.model_type!r} get no balance loss: {affinity.why}",
        "Write `router_aux_loss: off`, or leave it out.",
        ("off",),
    )


def router_aux_loss_verified(x: Candidate) -> Diagnostic | None:
    """fp16 scales the loss by a factor that changes as the run goes on."""
    precision = x.recipe.training.precision
    beside = f"precision: {precision}" if FORMATS[precision].scales_loss else ""
    if x.recipe.lora is not None:
        beside = "LoRA"
    if x.recipe.model.router_aux_loss is None or not beside:
        return None
    return found(
        "SW3159",
        _ROUTER_AUX_LOSS,
        f"router_aux_loss with {beside} is not verified against a single-process run",
        "Write `router_aux_loss: off`, or train in bf16 without LoRA.",
        ("off",),
    )


def router_aux_loss_requested_by_config(x: Candidate) -> Diagnostic | None:
    """`output_router_logits` is what makes Hugging Face's own forward add its loss."""
    config = x.graph.config
    if x.recipe.model.router_aux_loss is not None or config.get("output_router_logits") is not True:
        return None
    coefficient = config.get("router_aux_loss_coef", config.get("aux_loss_alpha"))
    return found(
        "SW3160",
        _ROUTER_AUX_LOSS,
        (
            "the model's configuration asks for a balance loss (output_router_logits), which is "
            "off here"
        ),
        "Hugging Face's own loss does not add up over stages and micro-batches. "
        f"`router_aux_loss: {coefficient or 0.001}` trains with DeepSeek-V3's, which does; "
        "`output_router_logits: false` in the configuration says that none is wanted.",
        severity="warning",
    )
