"""The rules, one line each: its code, its function (the severity is in there), and what of the
layout it reads."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.diagnostics import Diagnostic
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import AXES, rank_axes
from shardwright.layout.layout import Candidate, Layout, Rule, rule
from shardwright.layout.planning_problem import Problem
from shardwright.search import (
    attention_rules,
    layout_rules,
    low_precision_rules,
    moe_rules,
    runnable_recipes,
    training_rules,
    vision_rules,
)

_DEGREES = [axis.name for axis in rank_axes()]

# Hold whatever engine runs the layout.
GENERAL_RULES: dict[str, Rule] = {
    "SW3101": rule(layout_rules.degrees_multiply_to_world_size, *_DEGREES),
    "SW3102": rule(
        layout_rules.batch_is_divisible, "data", "micro_batch_size", "gradient_accumulation_steps"
    ),
    "SW3103": rule(layout_rules.tensor_divides_heads, "tensor"),
    "SW3104": rule(layout_rules.tensor_divides_key_value_heads, "tensor"),
    "SW3105": rule(layout_rules.tensor_divides_feed_forward, "tensor"),
    "SW3126": rule(layout_rules.tensor_divides_experts, "tensor"),
    "SW3106": rule(layout_rules.stages_have_layers, "pipeline", "schedule"),
    "SW3110": rule(layout_rules.dualpipev_needs_pipeline, "pipeline", "schedule"),
    "SW3112": rule(layout_rules.tensor_group_in_node, "tensor"),
    "SW3115": rule(
        layout_rules.axes_are_runnable, *(axis.name for axis in AXES if not axis.in_every_engine)
    ),
    "SW3116": rule(layout_rules.learned_positions_cover_sequence),
    "SW3117": rule(layout_rules.rotary_positions_trained),
    "SW3118": rule(layout_rules.precision_has_peak),
    "SW3121": rule(layout_rules.half_precision_accumulation, "gradient_accumulation_steps"),
    "SW3129": rule(layout_rules.nodes_fill_nvlink_domains),
    "SW3130": rule(layout_rules.model_is_causal),
    "SW3131": rule(layout_rules.hf_loss_is_next_token),
    "SW3132": rule(layout_rules.moe_without_expert_parallelism, "expert"),
    "SW3195": rule(layout_rules.modules_are_recomputed, "activation_checkpointing"),
    "SW3196": rule(
        layout_rules.modules_can_be_recomputed,
        "activation_checkpointing",
        "tensor",
        "context",
        "expert_tensor",
    ),
    "SW3135": rule(
        layout_rules.partial_checkpointing_layers,
        "activation_checkpointing",
        "pipeline",
        "schedule",
    ),
}

# What this project's own modules do not run, under whatever engine.
RUNTIME_RULES: dict[str, Rule] = {
    "SW3127": rule(layout_rules.offload_fits_host_memory, "offload"),
    "SW3113": rule(layout_rules.layer_drop_supported, "pipeline", "zero_stage"),
    "SW3123": rule(layout_rules.tensor_parallel_styles, "tensor"),
    "SW3124": rule(attention_rules.attention_module_exists, "activation_checkpointing"),
    "SW3125": rule(attention_rules.packed_documents_kept_separate),
    "SW3136": rule(attention_rules.packed_rope_length),
    "SW3128": rule(attention_rules.flash_attention_supported),
    "SW1431": rule(layout_rules.chunked_loss_verified),
    "SW1432": rule(training_rules.lora_without_pipeline, "pipeline"),
    "SW1433": rule(training_rules.lora_without_tensor_parallel, "tensor"),
    "SW1434": rule(training_rules.lora_target_modules_exist),
    "SW1435": rule(training_rules.freeze_names_exist),
    "SW1436": rule(training_rules.freeze_leaves_trainable),
    "SW1437": rule(training_rules.freeze_without_lora),
    "SW3141": rule(attention_rules.context_divides_sequence, "context"),
    "SW3142": rule(attention_rules.context_divides_heads, "context", "tensor"),
    "SW3143": rule(attention_rules.context_parallel_supported, "context"),
    "SW3144": rule(attention_rules.context_without_dropout, "context"),
    "SW3145": rule(moe_rules.expert_divides_ranks, "expert", "data", "context"),
    "SW3146": rule(moe_rules.expert_divides_experts, "expert"),
    "SW3147": rule(moe_rules.expert_parallel_supported, "expert"),
    "SW3148": rule(moe_rules.expert_without_dropout, "expert"),
    "SW3149": rule(moe_rules.expert_without_lora, "expert"),
    "SW3158": rule(moe_rules.router_aux_loss_supported),
    "SW3159": rule(moe_rules.router_aux_loss_verified),
    "SW3160": rule(moe_rules.router_aux_loss_requested_by_config),
    "SW3161": rule(training_rules.compiled_model_verified),
    "SW3162": rule(
        training_rules.compiled_layout_verified,
        "tensor",
        "context",
        "expert",
        "schedule",
        "zero_stage",
        "activation_checkpointing",
        "offload",
    ),
    "SW3171": rule(vision_rules.vision_language_verified, "schedule", "offload"),
    "SW3172": rule(vision_rules.vision_encoder_not_counted),
    "SW3173": rule(
        runnable_recipes.diloco_layout_verified,
        "expert",
        "zero_stage",
        "context",
        "offload",
        "schedule",
    ),
    "SW3181": rule(
        vision_rules.contrastive_is_data_parallel, "tensor", "pipeline", "context", "expert"
    ),
    "SW3182": rule(
        vision_rules.contrastive_has_one_micro_batch,
        "data",
        "micro_batch_size",
        "gradient_accumulation_steps",
    ),
    "SW3183": rule(vision_rules.contrastive_verified, "activation_checkpointing"),
    "SW3185": rule(low_precision_rules.gpu_has_low_precision),
    "SW3186": rule(low_precision_rules.low_precision_beside),
    "SW3187": rule(low_precision_rules.kept_linears_exist),
    "SW3188": rule(low_precision_rules.low_precision_converts),
    "SW3189": rule(low_precision_rules.tensor_ranks_keep_widths, "tensor"),
    "SW3190": rule(low_precision_rules.scales_depend_on_layout),
    "SW3193": rule(low_precision_rules.casts_are_fused),
    "SW3191": rule(training_rules.noise_scale_verified, "context", "expert", "pipeline"),
    "SW3192": rule(
        training_rules.noise_scale_has_two_batch_sizes,
        "data",
        "micro_batch_size",
        "gradient_accumulation_steps",
    ),
    "SW3231": rule(training_rules.muon_matrices_are_known),
    "SW3232": rule(training_rules.optimizer_verified, "offload"),
    "SW3233": rule(training_rules.blocks_of_moments_are_kept, "tensor", "expert"),
    "SW3234": rule(training_rules.objective_verified),
    "SW3220": rule(training_rules.learning_rate_is_zero),
    "SW3119": rule(layout_rules.fp16_on_cpu),
    "SW3120": rule(layout_rules.zero_3_over_slow_links, "zero_stage"),
}

# Where these are broken there is no layout to count: no memory and no time.
UNPRICEABLE_CODES = frozenset({"SW3101", "SW3102"})


def can_be_priced(strategy: Layout, found: Iterable[Diagnostic]) -> bool:
    """Return whether the layout can be priced. found: the result of check_layout."""
    priced = all(axis.has_cost_model for axis, _ in strategy.enabled_axes())
    return priced and not any(d.code in UNPRICEABLE_CODES for d in found)


def rules_for(target: str) -> dict[str, Rule]:
    engine = ENGINES[target]
    found = {**GENERAL_RULES, **RUNTIME_RULES, **engine.rules}
    return {code: each for code, each in found.items() if code not in engine.waived_rules}


def check_layout(problem: Problem, strategy: Layout) -> tuple[Diagnostic, ...]:
    """Return every broken rule, errors and warnings; () for a layout that this version runs."""
    recipe, graph, cluster = problem.recipe, problem.graph, problem.cluster
    candidate = Candidate(recipe=recipe, graph=graph, cluster=cluster, strategy=strategy)
    return sort_diagnostics(each.check(candidate) for each in rules_for(recipe.target).values())


def sort_diagnostics(found: Iterable[Diagnostic | None]) -> tuple[Diagnostic, ...]:
    broken = [d for d in found if d is not None]
    return tuple(sorted(broken, key=lambda d: (d.severity != "error", d.code)))
