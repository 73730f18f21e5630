"""The parts of ds_config.json that DeepSpeed 0.19.8 reads key by key, without a model: (types,
limits) of each key.

Read from the file named beside each section; tests/lint/test_snapshot.py compares the keys with the
constants there.
"""

from __future__ import annotations

from typing import Any

INTEGER, NUMBER, BOOLEAN, TEXT, LIST, NULL = (
    "integer",
    "number",
    "boolean",
    "string",
    "array",
    "null",
)


def key(*types: str, **limits: Any) -> dict[str, Any]:
    return {"type": list(types), **limits}


def section(properties: dict[str, Any], *types: str, **more: Any) -> dict[str, Any]:
    return {"type": ["object", *types], "checked": False, "properties": properties, **more}


DTYPES = [
    *("torch.float16", "fp16", "float16", "half"),
    *("torch.float32", "fp32", "float32", "float"),
    *("torch.int8", "int8"),
    *("torch.bfloat16", "bf16", "bfloat16"),
]
COMMUNICATION_TYPES = ["fp16", "bf16", "fp32"]
FLAG = key(BOOLEAN)
POSITIVE = key(INTEGER, minimum=1)

# runtime/config.py
TOP: dict[str, Any] = {
    "train_batch_size": key(INTEGER, NULL, minimum=1),
    "train_micro_batch_size_per_gpu": key(INTEGER, NULL, minimum=1),
    "gradient_accumulation_steps": key(INTEGER, NULL, minimum=1),
    "managed_gradient_accumulation": FLAG,
    "steps_per_print": key(INTEGER, NULL, minimum=1),
    "dump_state": FLAG,
    "disable_python_gc": FLAG,
    "disable_allgather": FLAG,
    "communication_data_type": key(TEXT, NULL, enum=COMMUNICATION_TYPES, any_case=True),
    "seq_parallel_communication_data_type": key(
        TEXT, NULL, enum=COMMUNICATION_TYPES, any_case=True
    ),
    "prescale_gradients": FLAG,
    "gradient_predivide_factor": key(NUMBER, exclusiveMinimum=0),
    "gradient_allreduce_op": key(TEXT, enum=["mean", "sum"], any_case=True),
    "gradient_clipping": key(NUMBER, minimum=0),
    "zero_allow_untested_optimizer": FLAG,
    "zero_force_ds_cpu_optimizer": FLAG,
    "wall_clock_breakdown": FLAG,
    "memory_breakdown": FLAG,
    "use_data_before_expert_parallelism": FLAG,
    "dataloader_drop_last": FLAG,
    "log_level": key(TEXT, NULL, enum=["debug", "info", "warning", "error", "critical"]),
    "vocabulary_size": key(INTEGER, NULL, minimum=1),
    # __init__.py, initialize
    "sequence_parallel_size": POSITIVE,
    "data_parallel_size": POSITIVE,
    # datastates/config.py
    "datastates_ckpt": {
        "type": ["object", BOOLEAN],
        "checked": False,
        "open": True,
        "properties": {},
    },
}

SECTIONS: dict[str, Any] = {
    # runtime/config.py, engine.py: params are the constructor's
    "optimizer": section(
        {"type": key(TEXT, NULL), "params": key("object", NULL), "legacy_fusion": FLAG}
    ),
    "scheduler": section({"type": key(TEXT, NULL), "params": key("object", NULL)}),
    # runtime/config.py get_pipeline_config and runtime/pipe/engine.py
    "pipeline": section(
        {
            "stages": key(INTEGER, TEXT),
            "partition": key(TEXT),
            "seed_layers": FLAG,
            "activation_checkpoint_interval": key(INTEGER, minimum=0),
            "pipe_partitioned": key(BOOLEAN, exact=True),
            "grad_partitioned": key(BOOLEAN, exact=True),
            "use_reentrant": key(BOOLEAN, NULL, exact=True),
        }
    ),
    # runtime/activation_checkpointing/config.py
    "activation_checkpointing": section(
        {
            "partition_activations": FLAG,
            "number_checkpoints": key(INTEGER, NULL, minimum=1),
            "contiguous_memory_optimization": FLAG,
            "synchronize_checkpoint_boundary": FLAG,
            "profile": FLAG,
            "cpu_checkpointing": FLAG,
        }
    ),
    # profiling/config.py
    "flops_profiler": section(
        {
            "enabled": FLAG,
            "recompute_fwd_factor": key(NUMBER, minimum=0),
            "profile_step": key(INTEGER, minimum=0),
            "module_depth": key(INTEGER, minimum=-1),
            "top_modules": POSITIVE,
            "detailed": FLAG,
            "output_file": key(TEXT, NULL),
        }
    ),
    # runtime/swap_tensor/aio_config.py
    "aio": section(
        {
            "block_size": POSITIVE,
            "queue_depth": POSITIVE,
            "intra_op_parallelism": POSITIVE,
            "single_submit": FLAG,
            "overlap_events": FLAG,
            "use_gds": FLAG,
        },
        NULL,
    ),
    # runtime/config.py, runtime/model_checkpointing/config.py
    "checkpoint": section(
        {
            "tag_validation": key(TEXT, enum=["Ignore", "Warn", "Fail"], any_case=True),
            "load_universal": FLAG,
            "use_node_local_storage": FLAG,
            "checkpoint_serialization": FLAG,
            "parallel_write": section({"pipeline_stage": FLAG}),
            "writer": section(
                {
                    "type": key(TEXT, NULL, enum=["mock", "python", "fast"], any_case=True),
                    "io_buffer_size": key(INTEGER, minimum=1),
                    "io_buffer_double": FLAG,
                    "io_multiplier": POSITIVE,
                    "show_statistics": FLAG,
                    "data_parallel": key(
                        TEXT, NULL, enum=["replica", "socket", "machine"], any_case=True
                    ),
                    "decoupled": FLAG,
                },
                NULL,
            ),
        }
    ),
    # runtime/config.py
    "data_types": section(
        {
            "grad_accum_dtype": key(TEXT, NULL, enum=DTYPES),
            "param_dtype": key(TEXT, NULL, enum=DTYPES),
            "buffer_dtype": key(TEXT, NULL, enum=DTYPES),
            # "auto" is a value of its own here
            "keep_in_fp32_modules": key(LIST, TEXT, enum=["auto"], auto=True),
        }
    ),
    # runtime/config.py, runtime/torch_autocast.py
    "torch_autocast": section(
        {
            "enabled": FLAG,
            "dtype": key(TEXT, enum=DTYPES),
            "lower_precision_safe_modules": key(LIST),
        }
    ),
    # runtime/data_pipeline/config.py
    "data_efficiency": section(
        {
            "enabled": FLAG,
            "seed": key(INTEGER),
            "data_sampling": section(
                {
                    "enabled": FLAG,
                    "num_epochs": POSITIVE,
                    "num_workers": key(INTEGER, minimum=0),
                    "pin_memory": FLAG,
                    "curriculum_learning": section(
                        {
                            "enabled": FLAG,
                            "data_cluster_path": key(TEXT),
                            "curriculum_metrics": key("object"),
                        }
                    ),
                    "dynamic_batching": section(
                        {
                            "enabled": FLAG,
                            "metrics_path": key(TEXT),
                            "lr_scaling_method": key(
                                TEXT, enum=["linear", "sqrt", "none"], any_case=True
                            ),
                            "min_batch_size": POSITIVE,
                            "max_batch_size": POSITIVE,
                            "sequence_picking_order": key(
                                TEXT, enum=["random", "seqlen", "dataloader"]
                            ),
                            "max_tokens": POSITIVE,
                            "verbose": FLAG,
                        }
                    ),
                }
            ),
            "data_routing": section({"enabled": FLAG, "random_ltd": key("object")}),
        }
    ),
    # autotuning/config.py, launcher/runner.py
    "autotuning": section(
        {
            **dict.fromkeys(("enabled", "fast", "overwrite"), FLAG),
            **{
                name: key(TEXT, NULL)
                for name in ("results_dir", "exps_dir", "metric_path", "model_info_path")
            },
            "start_profile_step": POSITIVE,
            "end_profile_step": POSITIVE,
            "metric": key(TEXT, enum=["latency", "throughput", "flops", "forward", "step"]),
            "tuner_type": key(TEXT, enum=["gridsearch", "random", "model_based"]),
            "tuner_early_stopping": key(INTEGER, minimum=0),
            "tuner_num_trials": key(INTEGER, minimum=0),
            "arg_mappings": key("object", NULL),
            "model_info": key("object", NULL),
            "mp_size": POSITIVE,
            "max_train_batch_size": key(INTEGER, NULL, minimum=1),
            "min_train_batch_size": POSITIVE,
            "max_train_micro_batch_size_per_gpu": POSITIVE,
            "min_train_micro_batch_size_per_gpu": POSITIVE,
            "num_tuning_micro_batch_sizes": POSITIVE,
        }
    ),
}

# module_inject/autotp_config.py, AutoTPConfig.from_dict: read key by key
PARTITION_CONFIG = section(
    {
        "tp_size": POSITIVE,
        "layer_specs": {
            "type": [LIST],
            "items": section(
                {
                    "patterns": key(LIST),
                    "partition_type": key(TEXT, enum=["row", "column", "skip"], any_case=True),
                    "gather_output": FLAG,
                    "grad_allreduce": FLAG,
                    "shape": key(LIST, NULL),
                    "partition_dim": key(INTEGER, NULL),
                    "model_types": key(LIST, NULL),
                }
            ),
        },
        "embedding_partition_dim": key(INTEGER),
        "lm_head_patterns": key(LIST),
        "use_default_specs": FLAG,
        "strict_mode": FLAG,
    },
    NULL,
)

# Values of optimizer.params; which of them an optimizer takes is in "optimizers".
OPTIMIZER_VALUES: dict[str, Any] = {
    "lr": key(NUMBER, minimum=0),
    "eps": key(NUMBER, minimum=0),
    "weight_decay": key(NUMBER, minimum=0),
    "momentum": key(NUMBER, minimum=0),
    "betas": key(LIST),
    **dict.fromkeys(
        ("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "fp32_optimizer_states"), FLAG
    ),
}
_STEPS = dict.fromkeys(("warmup_num_steps", "total_num_steps"), POSITIVE)
SCHEDULER_VALUES: dict[str, Any] = {
    "total_num_steps": POSITIVE,
    "warmup_num_steps": key(NUMBER),  # SW4512 says the rest
    "warmup_min_lr": key(NUMBER, LIST, minimum=0),
    "warmup_max_lr": key(NUMBER, LIST, NULL, minimum=0),
    "warmup_min_ratio": key(NUMBER, minimum=0),
    "cos_min_ratio": key(NUMBER, minimum=0),
    "warmup_type": key(TEXT),
    "lr_range_test_step_size": POSITIVE,
    "cycle_first_step_size": POSITIVE,
}
