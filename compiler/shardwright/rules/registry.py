"""The rules in the order they are reported. One line a rule: its code, its severity is in the function."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.diagnostics import Diagnostic
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.ir.strategy import Strategy
from shardwright.rules import layout
from shardwright.rules.layout import Subject

Rule = Callable[[Subject], Diagnostic | None]

# Hold whatever engine runs the layout.
GENERAL_RULES: dict[str, Rule] = {
    "SW3101": layout.world_size,
    "SW3102": layout.batch,
    "SW3103": layout.heads,
    "SW3104": layout.key_value_heads,
    "SW3105": layout.feed_forward,
    "SW3126": layout.experts,
    "SW3106": layout.layers,
    "SW3110": layout.dualpipev_alone,
    "SW3112": layout.tensor_in_node,
    "SW3115": layout.not_yet,
    "SW3116": layout.learned_positions,
    "SW3117": layout.rotary_positions,
    "SW3118": layout.precision,
    "SW3121": layout.half_precision_accumulation,
    "SW3130": layout.not_causal,
    "SW3131": layout.own_loss,
}

# What DeepSpeed, or this version's use of it, does not run. `target: megatron` is estimated without them.
DEEPSPEED_RULES: dict[str, Rule] = {
    "SW3107": layout.pipeline_zero_0,
    "SW3108": layout.pipeline_zero_23,
    "SW3109": layout.dualpipev_micro_batches,
    "SW3111": layout.offload,
    "SW3113": layout.layer_drop,
    "SW3123": layout.tensor_styles,
    "SW3124": layout.selective_attention,
    "SW3125": layout.packed_documents,
    "SW3114": layout.zero_0_half_precision,
    "SW3119": layout.fp16_on_cpu,
    "SW3120": layout.zero_3_slow_links,
}

# Where these are broken there is no layout to count: no memory and no time.
UNCOUNTABLE_CODES = frozenset({"SW3101", "SW3102"})


def check_layout(recipe: Recipe, graph: ModelGraph, cluster: Cluster, strategy: Strategy) -> tuple[Diagnostic, ...]:
    """Every broken rule, errors and warnings; () is a layout that this version runs."""
    subject = Subject(recipe=recipe, graph=graph, cluster=cluster, strategy=strategy)
    rules = {**GENERAL_RULES, **DEEPSPEED_RULES} if recipe.target == "deepspeed" else GENERAL_RULES
    found = [rule(subject) for rule in rules.values()]
    return tuple(sorted((d for d in found if d is not None), key=lambda d: (d.severity != "error", d.code)))
