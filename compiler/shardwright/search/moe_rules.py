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
    """Expert ranks are neighbours among the data x context ranks, which hold the same layers and
    tensor shards."""
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
        f"Use an expert degree that divides {s.zero_world_size}, or change data or context.",
        nearest_divisors(s.zero_world_size, s.expert),
    )


def expert_divides_experts(x: Candidate) -> Diagnostic | None:
    """Each expert rank holds an equal share of every layer's experts."""
    e = x.strategy.expert
    counts = set(expert_modules(x.graph).values())
    indivisible = [count for count in counts if count % e]
    if not indivisible:
        return None
    common = math.gcd(*counts)
    return found(
        "SW3146",
        _EXPERT,
        f"expert {e} does not divide the {max(indivisible)} experts of a layer",
        f"Choose an expert degree that divides {common}.",
        nearest_divisors(common, e),
    )


def expert_parallel_supported(x: Candidate) -> Diagnostic | None:
    """Expert parallelism gives each rank an equal share of every layer's experts. Whether a model's
    experts can be divided is tested on a tiny copy of its configuration when the model is traced.
    """
    why = x.graph.expert_parallel_reason
    if x.strategy.expert == 1 or not why:
        return None
    return found(
        "SW3147",
        _EXPERT,
        f"the experts of a {x.graph.model_type!r} cannot be divided over expert ranks: {why}",
        (
            "Use expert: 1. ZeRO, tensor parallelism and pipelines shard experts like any other "
            "parameters."
        ),
        (1,),
    )


def expert_without_dropout(x: Candidate) -> Diagnostic | None:
    """Expert parallelism with dropout has not been compared with a single-process run."""
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
    """Expert parallelism with LoRA has not been compared with a single-process run."""
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
    """The balance loss needs the logits, weights and chosen experts of every router. Whether the
    model's routers give them is tested on a tiny copy of its configuration."""
    if x.recipe.model.router_aux_loss is None:
        return None
    from shardwright.models.model_probe import router_affinity

    affinity = router_affinity(x.graph)
    if isinstance(affinity, str):
        return None
    return found(
        "SW3158",
        _ROUTER_AUX_LOSS,
        f"model.router_aux_loss is not supported for a {x.graph.model_type!r}: {affinity.why}",
        "Write `router_aux_loss: off`, or leave it out.",
        ("off",),
    )


def router_aux_loss_verified(x: Candidate) -> Diagnostic | None:
    """With LoRA or fp16, router_aux_loss was not compared with a single-process run. In fp16 the
    loss is scaled by a factor that changes during the run."""
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
        "Write `router_aux_loss: off`, or train in bf16 or fp32 without LoRA.",
        ("off",),
    )


def router_aux_loss_requested_by_config(x: Candidate) -> Diagnostic | None:
    """With `output_router_logits: true` Hugging Face's forward adds a balance loss of its routers.
    Training adds one only if `model.router_aux_loss` is set. Without a balance loss, the routers
    may send most tokens to a few experts."""
    config = x.graph.config
    if x.recipe.model.router_aux_loss is not None or config.get("output_router_logits") is not True:
        return None
    coefficient = config.get("router_aux_loss_coef", config.get("aux_loss_alpha"))
    return found(
        "SW3160",
        _ROUTER_AUX_LOSS,
        (
            "the model's configuration asks for a balance loss (output_router_logits: true), but "
            "model.router_aux_loss is not set"
        ),
        f"Write `router_aux_loss: {coefficient or 0.001}` to train with DeepSeek-V3's balance "
        "loss. It is another formula than Hugging Face's, which cannot be computed by stages and "
        "micro-batches. To train without one, write `output_router_logits: false` in model.config.",
        severity="warning",
    )
