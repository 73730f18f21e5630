"""The rules, one line each: its code, its function (the severity is in there), and what of the
layout it reads."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.diagnostics import Diagnostic
from shardwright.engines.table import ENGINES
from shardwright.layout.axes import AXES, rank_axes
from shardwright.layout.problem import Problem
from shardwright.layout.rule import Candidate, Rule, rule
from shardwright.layout.strategy import Strategy
from shardwright.rules import (
    attention,
    balance,
    context,
    contrastive,
    expert,
    freeze,
    islands,
    kernels,
    layout,
    lora,
    noise,
    offload,
    schedule,
    sight,
)

_DEGREES = [axis.name for axis in rank_axes()]

# Hold whatever engine runs the layout.
GENERAL_RULES: dict[str, Rule] = {
    "SW3101": rule(layout.world_size, *_DEGREES),
    "SW3102": rule(layout.batch, "data", "micro_batch_size", "gradient_accumulation_steps"),
    "SW3103": rule(layout.heads, "tensor"),
    "SW3104": rule(layout.key_value_heads, "tensor"),
    "SW3105": rule(layout.feed_forward, "tensor"),
    "SW3126": rule(layout.experts, "tensor"),
    "SW3106": rule(layout.layers, "pipeline", "schedule"),
    "SW3110": rule(layout.dualpipev_alone, "pipeline", "schedule"),
    "SW3112": rule(layout.tensor_in_node, "tensor"),
    "SW3115": rule(layout.not_yet, *(axis.name for axis in AXES if not axis.runs)),
    "SW3116": rule(layout.learned_positions),
    "SW3117": rule(layout.rotary_positions),
    "SW3118": rule(layout.precision),
    "SW3121": rule(layout.half_precision_accumulation, "gradient_accumulation_steps"),
    "SW3130": rule(layout.not_causal),
    "SW3131": rule(layout.own_loss),
    "SW3132": rule(layout.no_expert_parallelism, "expert"),
    "SW3135": rule(layout.checkpointed_layers, "activation_checkpointing", "pipeline", "schedule"),
}

# What this project's own modules do not run, under whatever engine.
RUNTIME_RULES: dict[str, Rule] = {
    "SW3127": rule(offload.host_memory, "offload"),
    "SW3113": rule(layout.layer_drop, "pipeline", "zero_stage"),
    "SW3123": rule(layout.tensor_styles, "tensor"),
    "SW3124": rule(attention.selective_attention, "activation_checkpointing"),
    "SW3125": rule(attention.packed_documents),
    "SW3136": rule(attention.packed_lengths),
    "SW3128": rule(attention.flash_attention),
    "SW1431": rule(layout.chunked_loss),
    "SW1432": rule(lora.no_pipeline, "pipeline"),
    "SW1433": rule(lora.no_tensor, "tensor"),
    "SW1434": rule(lora.modules),
    "SW1435": rule(freeze.names),
    "SW1436": rule(freeze.something_trained),
    "SW1437": rule(freeze.without_lora),
    "SW3141": rule(context.row, "context"),
    "SW3142": rule(context.heads, "context", "tensor"),
    "SW3143": rule(context.model_type, "context"),
    "SW3144": rule(context.dropout, "context"),
    "SW3145": rule(expert.groups, "expert", "data", "context"),
    "SW3146": rule(expert.experts, "expert"),
    "SW3147": rule(expert.model_type, "expert"),
    "SW3148": rule(expert.dropout, "expert"),
    "SW3149": rule(expert.lora, "expert"),
    "SW3158": rule(balance.routers),
    "SW3159": rule(balance.unproved),
    "SW3160": rule(balance.asked_for),
    "SW3161": rule(kernels.compiled_model),
    "SW3162": rule(
        kernels.compiled_layout,
        "tensor",
        "context",
        "expert",
        "schedule",
        "zero_stage",
        "activation_checkpointing",
        "offload",
    ),
    "SW3163": rule(kernels.liger),
    "SW3171": rule(sight.unproved, "schedule", "offload"),
    "SW3172": rule(sight.tower_uncounted),
    "SW3173": rule(islands.unproved, "expert", "zero_stage", "context", "offload", "schedule"),
    "SW3181": rule(contrastive.data_ranks_alone, "tensor", "pipeline", "context", "expert"),
    "SW3182": rule(
        contrastive.one_micro_batch, "data", "micro_batch_size", "gradient_accumulation_steps"
    ),
    "SW3183": rule(contrastive.unproved, "activation_checkpointing"),
    "SW3191": rule(noise.unproved, "context", "expert", "pipeline"),
    "SW3192": rule(
        noise.nothing_to_compare, "data", "micro_batch_size", "gradient_accumulation_steps"
    ),
    "SW3220": rule(schedule.rate_zero),
    "SW3119": rule(layout.fp16_on_cpu),
    "SW3120": rule(layout.zero_3_slow_links, "zero_stage"),
}

# Where these are broken there is no layout to count: no memory and no time.
UNCOUNTABLE_CODES = frozenset({"SW3101", "SW3102"})


def is_countable(strategy: Strategy, found: Iterable[Diagnostic]) -> bool:
    """Whether numbers can be given. found: of check_layout."""
    priced = all(axis.priced for axis, _ in strategy.beyond_plain())
    return priced and not any(d.code in UNCOUNTABLE_CODES for d in found)


def rules_for(target: str) -> dict[str, Rule]:
    engine = ENGINES[target]
    found = {**GENERAL_RULES, **RUNTIME_RULES, **engine.rules}
    return {code: each for code, each in found.items() if code not in engine.lifts}


def check_layout(problem: Problem, strategy: Strategy) -> tuple[Diagnostic, ...]:
    """Every broken rule, errors and warnings; () is a layout that this version runs."""
    recipe, graph, cluster = problem.recipe, problem.graph, problem.cluster
    candidate = Candidate(recipe=recipe, graph=graph, cluster=cluster, strategy=strategy)
    return in_order(each.check(candidate) for each in rules_for(recipe.target).values())


def in_order(found: Iterable[Diagnostic | None]) -> tuple[Diagnostic, ...]:
    return tuple(
        sorted((d for d in found if d is not None), key=lambda d: (d.severity != "error", d.code))
    )
