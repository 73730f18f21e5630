"""The rules, one line each: its code, its function (the severity is in there), and what of the
layout it reads."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.diagnostics import Diagnostic
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import AXES, rank_axes
from shardwright.layout.layout import Strategy
from shardwright.layout.layout_rule import Candidate, Rule, rule
from shardwright.layout.planning_problem import Problem
from shardwright.search import (
    attention_rules,
    context_parallel_rules,
    contrastive_rules,
    diloco_rules,
    expert_parallel_rules,
    freeze_rules,
    kernel_rules,
    layout_rules,
    lora_rules,
    noise_scale_rules,
    offload_rules,
    router_aux_loss_rules,
    scheduler_rules,
    vision_language_rules,
)

_DEGREES = [axis.name for axis in rank_axes()]

# Hold whatever engine runs the layout.
GENERAL_RULES: dict[str, Rule] = {
    "SW3101": rule(layout_rules.world_size, *_DEGREES),
    "SW3102": rule(layout_rules.batch, "data", "micro_batch_size", "gradient_accumulation_steps"),
    "SW3103": rule(layout_rules.heads, "tensor"),
    "SW3104": rule(layout_rules.key_value_heads, "tensor"),
    "SW3105": rule(layout_rules.feed_forward, "tensor"),
    "SW3126": rule(layout_rules.experts, "tensor"),
    "SW3106": rule(layout_rules.layers, "pipeline", "schedule"),
    "SW3110": rule(layout_rules.dualpipev_alone, "pipeline", "schedule"),
    "SW3112": rule(layout_rules.tensor_in_node, "tensor"),
    "SW3115": rule(layout_rules.not_yet, *(axis.name for axis in AXES if not axis.runs)),
    "SW3116": rule(layout_rules.learned_positions),
    "SW3117": rule(layout_rules.rotary_positions),
    "SW3118": rule(layout_rules.precision),
    "SW3121": rule(layout_rules.half_precision_accumulation, "gradient_accumulation_steps"),
    "SW3130": rule(layout_rules.not_causal),
    "SW3131": rule(layout_rules.own_loss),
    "SW3132": rule(layout_rules.no_expert_parallelism, "expert"),
    "SW3135": rule(
        layout_rules.checkpointed_layers, "activation_checkpointing", "pipeline", "schedule"
    ),
}

# What this project's own modules do not run, under whatever engine.
RUNTIME_RULES: dict[str, Rule] = {
    "SW3127": rule(offload_rules.host_memory, "offload"),
    "SW3113": rule(layout_rules.layer_drop, "pipeline", "zero_stage"),
    "SW3123": rule(layout_rules.tensor_styles, "tensor"),
    "SW3124": rule(attention_rules.selective_attention, "activation_checkpointing"),
    "SW3125": rule(attention_rules.packed_documents),
    "SW3136": rule(attention_rules.packed_lengths),
    "SW3128": rule(attention_rules.flash_attention),
    "SW1431": rule(layout_rules.chunked_loss),
    "SW1432": rule(lora_rules.no_pipeline, "pipeline"),
    "SW1433": rule(lora_rules.no_tensor, "tensor"),
    "SW1434": rule(lora_rules.modules),
    "SW1435": rule(freeze_rules.names),
    "SW1436": rule(freeze_rules.something_trained),
    "SW1437": rule(freeze_rules.without_lora),
    "SW3141": rule(context_parallel_rules.row, "context"),
    "SW3142": rule(context_parallel_rules.heads, "context", "tensor"),
    "SW3143": rule(context_parallel_rules.model_type, "context"),
    "SW3144": rule(context_parallel_rules.dropout, "context"),
    "SW3145": rule(expert_parallel_rules.groups, "expert", "data", "context"),
    "SW3146": rule(expert_parallel_rules.experts, "expert"),
    "SW3147": rule(expert_parallel_rules.model_type, "expert"),
    "SW3148": rule(expert_parallel_rules.dropout, "expert"),
    "SW3149": rule(expert_parallel_rules.lora, "expert"),
    "SW3158": rule(router_aux_loss_rules.routers),
    "SW3159": rule(router_aux_loss_rules.unproved),
    "SW3160": rule(router_aux_loss_rules.asked_for),
    "SW3161": rule(kernel_rules.compiled_model),
    "SW3162": rule(
        kernel_rules.compiled_layout,
        "tensor",
        "context",
        "expert",
        "schedule",
        "zero_stage",
        "activation_checkpointing",
        "offload",
    ),
    "SW3163": rule(kernel_rules.liger),
    "SW3171": rule(vision_language_rules.unproved, "schedule", "offload"),
    "SW3172": rule(vision_language_rules.tower_uncounted),
    "SW3173": rule(diloco_rules.unproved, "expert", "zero_stage", "context", "offload", "schedule"),
    "SW3181": rule(contrastive_rules.data_ranks_alone, "tensor", "pipeline", "context", "expert"),
    "SW3182": rule(
        contrastive_rules.one_micro_batch, "data", "micro_batch_size", "gradient_accumulation_steps"
    ),
    "SW3183": rule(contrastive_rules.unproved, "activation_checkpointing"),
    "SW3191": rule(noise_scale_rules.unproved, "context", "expert", "pipeline"),
    "SW3192": rule(
        noise_scale_rules.nothing_to_compare,
        "data",
        "micro_batch_size",
        "gradient_accumulation_steps",
    ),
    "SW3220": rule(scheduler_rules.rate_zero),
    "SW3119": rule(layout_rules.fp16_on_cpu),
    "SW3120": rule(layout_rules.zero_3_slow_links, "zero_stage"),
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
