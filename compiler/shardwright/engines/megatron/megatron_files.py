"""From a plan to Megatron-Core's arguments (engines.engine.Lowering)."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, refusal
from shardwright.engines.megatron.pretrain_gpt_arguments import arguments_file
from shardwright.plan.plan import Plan
from shardwright.utils.json_types import JsonObject


def zero_settings(plan: Plan) -> JsonObject:
    """distributed_optimizer: Megatron's own word for states that are shared out."""
    stage = plan.strategy.zero_stage
    return {"stage": stage, "distributed_optimizer": stage > 0 and plan.strategy.shards > 1}


def files(plan: Plan, config: JsonObject) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    """megatron_args.sh alone, for a script that is not ours: train.py reads plan.json. Raises
    Refusal where the model does not compute the same: SW2051 to SW2054."""
    if plan.model.dropout > 0:
        raise refusal(
            "SW2054",
            f"the model's dropout of {plan.model.dropout} does not run under target: megatron",
            "Set its probabilities to 0 in model.config, or write `target: deepspeed`.",
        )
    from shardwright.engines.megatron.megatron_equivalence import check_megatron_equivalence

    check_megatron_equivalence(plan, config)
    return arguments_file(plan, config)
