"""ds_config.json: what DeepSpeed is told. Model sharding is not in it: the runtime's layers are
sharded already."""

from __future__ import annotations

from dataclasses import replace

from shardwright.engines.deepspeed.ds_config_extra import merge_ds_config
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema
from shardwright.engines.deepspeed.ds_config_validation import schema_mismatches
from shardwright.layout.zero_hpz_key import HPZ
from shardwright.plan.plan import Plan
from shardwright.utils.json_types import JsonObject, JsonValue

STEPS_PER_PRINT_NEVER = 1_000_000_000


def ds_config(plan: Plan) -> JsonObject:
    """No `scheduler`: the runtime sets each update's learning rate in closed form (DeepSpeed's
    WarmupLR warms up on a log curve). No `tensor_parallel`: that would shard the layers a second
    time.
    """
    strategy, training, optimizer = plan.strategy, plan.training, plan.optimizer
    config: dict[str, JsonValue] = {
        # To DeepSpeed context ranks are data ranks, each with rows of its own.
        "train_batch_size": training.global_batch_size * strategy.context,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "gradient_clipping": training.gradient_clipping,  # left out, DeepSpeed clips at 1.0
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": list(optimizer.betas),
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
                # Else DeepSpeed compiles FusedAdam on each node. States in host memory want its
                # vectorised CPUAdam.
                "torch_adam": strategy.offload == "none" or plan.gpu == "cpu",
            },
        },
        "zero_optimization": plan.zero,
        **_precision(plan),
        "steps_per_print": STEPS_PER_PRINT_NEVER,  # run/metrics.jsonl has every step
        "wall_clock_breakdown": False,
    }
    if strategy.pipeline > 1:
        # Recomputation is torch's non-reentrant checkpoint around each layer, so the engine's own
        # stays off (interval 0); its re-entrant one fails on the embedding stage.
        pipeline: dict[str, JsonValue] = {
            "activation_checkpoint_interval": 0,
            "use_reentrant": False,
        }
        if strategy.schedule == "dualpipev":
            # DualPipeV sends whole tensors between stages; the default (on) is an assertion under
            # tensor parallelism.
            pipeline |= {"pipe_partitioned": False, "grad_partitioned": False}
        config["pipeline"] = pipeline
    return merge_ds_config(config, plan.extra)


def ds_config_for_user_scripts(plan: Plan) -> JsonObject:
    """For scripts of the user's own: without hpZ, whose groups are wrong where DeepSpeed makes them
    itself (decision
    019)."""
    return ds_config(
        replace(plan, zero={key: value for key, value in plan.zero.items() if key != HPZ})
    )


def validated_ds_config(config: JsonObject) -> JsonObject:
    """`config` itself. Raises ValueError, for it is our own doing, where DeepSpeed would not take
    it, or would ignore a key: against its models and, for the sections that it leaves loose, a
    strict schema of ours."""
    wrong = [
        f"{misfit.kind} {'.'.join(map(str, misfit.path))}"
        for misfit in schema_mismatches(config, ds_config_schema())
    ]
    if wrong:
        raise ValueError(f"ds_config: {', '.join(wrong)}")
    return config


def _precision(plan: Plan) -> dict[str, JsonValue]:
    training = plan.training
    if training.precision == "bf16":
        return {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": training.gradient_accumulation_dtype},
        }
    if training.precision == "fp16":
        section: dict[str, JsonValue] = {"fp16": {"enabled": True}}
        if training.gradient_accumulation_dtype != "fp16":
            section["data_types"] = {"grad_accum_dtype": training.gradient_accumulation_dtype}
        return section
    return {}
