"""The rules, one line each: its code, its function (the severity is in there), and what of the layout it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import UNPRICED_AXES, Strategy
from shardwright.rules import attention, extra, layout, lora, offload
from shardwright.rules.layout import Candidate

Check = Callable[[Candidate], Diagnostic | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """reads: the strategy's keys that decide whether the layout breaks it (its message may name others). A search that
    has settled these rules out everything below at once."""

    check: Check
    reads: frozenset[str]


def _rule(check: Check, *reads: str) -> Rule:
    return Rule(check=check, reads=frozenset(reads))


_DEGREES = ("tensor", "pipeline", "data")

# Hold whatever engine runs the layout.
GENERAL_RULES: dict[str, Rule] = {
    "SW3101": _rule(layout.world_size, *_DEGREES),
    "SW3102": _rule(layout.batch, "data", "micro_batch_size", "gradient_accumulation_steps"),
    "SW3103": _rule(layout.heads, "tensor"),
    "SW3104": _rule(layout.key_value_heads, "tensor"),
    "SW3105": _rule(layout.feed_forward, "tensor"),
    "SW3126": _rule(layout.experts, "tensor"),
    "SW3106": _rule(layout.layers, "pipeline", "schedule"),
    "SW3110": _rule(layout.dualpipev_alone, "pipeline", "schedule"),
    "SW3112": _rule(layout.tensor_in_node, "tensor"),
    "SW3115": _rule(layout.not_yet),
    "SW3116": _rule(layout.learned_positions),
    "SW3117": _rule(layout.rotary_positions),
    "SW3118": _rule(layout.precision),
    "SW3121": _rule(layout.half_precision_accumulation, "gradient_accumulation_steps"),
    "SW3130": _rule(layout.not_causal),
    "SW3131": _rule(layout.own_loss),
    "SW3132": _rule(layout.no_expert_parallelism),
}

# What DeepSpeed, or this version's use of it, does not run. `target: megatron` is estimated without them.
DEEPSPEED_RULES: dict[str, Rule] = {
    "SW3107": _rule(layout.pipeline_zero_0, "pipeline", "zero_stage"),
    "SW3108": _rule(layout.pipeline_zero_23, "pipeline", "zero_stage"),
    "SW3109": _rule(layout.dualpipev_micro_batches, "pipeline", "schedule", "gradient_accumulation_steps"),
    "SW3111": _rule(offload.ignored, "zero_stage", "offload"),
    "SW3127": _rule(offload.host_memory, "offload"),
    "SW3113": _rule(layout.layer_drop, "pipeline", "zero_stage"),
    "SW3123": _rule(layout.tensor_styles, "tensor"),
    "SW3124": _rule(attention.selective_attention, "activation_checkpointing"),
    "SW3125": _rule(attention.packed_documents),
    "SW3128": _rule(attention.flash_attention),
    "SW3133": _rule(extra.no_pipeline, "pipeline"),
    "SW1431": _rule(layout.chunked_loss),
    "SW1432": _rule(lora.no_pipeline, "pipeline"),
    "SW1433": _rule(lora.no_tensor, "tensor"),
    "SW1434": _rule(lora.modules),
    "SW3114": _rule(layout.zero_0_half_precision, "pipeline", "zero_stage"),
    "SW3119": _rule(layout.fp16_on_cpu),
    "SW3120": _rule(layout.zero_3_slow_links, "zero_stage"),
}

# Where these are broken there is no layout to count: no memory and no time.
UNCOUNTABLE_CODES = frozenset({"SW3101", "SW3102"})


def is_countable(strategy: Strategy, found: Iterable[Diagnostic]) -> bool:
    """Whether numbers can be given. found: of check_layout."""
    known = all(getattr(strategy, axis) == 1 for axis in UNPRICED_AXES)
    return known and not any(d.code in UNCOUNTABLE_CODES for d in found)


def rules_for(target: str) -> dict[str, Rule]:
    return {**GENERAL_RULES, **DEEPSPEED_RULES} if target == "deepspeed" else GENERAL_RULES


def check_layout(problem: Problem, strategy: Strategy) -> tuple[Diagnostic, ...]:
    """Every broken rule, errors and warnings; () is a layout that this version runs."""
    recipe, graph, cluster = problem.recipe, problem.graph, problem.cluster
    candidate = Candidate(recipe=recipe, graph=graph, cluster=cluster, strategy=strategy)
    return in_order(rule.check(candidate) for rule in rules_for(recipe.target).values())


def in_order(found: Iterable[Diagnostic | None]) -> tuple[Diagnostic, ...]:
    return tuple(sorted((d for d in found if d is not None), key=lambda d: (d.severity != "error", d.code)))
