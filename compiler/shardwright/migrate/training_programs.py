"""Programs that train: how their scripts and settings are called, and which defaults are known.

A new program is a row. A default stands in `defaults` where every version of the program has it;
in `unknown_defaults` where it depends on the version or on the script's own class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.utils.json_values import JsonObject, JsonValue

ValueMap = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgram:
    """Describe a program.

    scripts: patterns of a script or module
    keys: sets of settings; a file that has all of one set is this program's
    file_phrase: what lint calls such a file, where it is not "a configuration of" the program
    typed_keys: the same of a command
    aliases: its name -> the name that is read, and its values -> those that are read (None: the
        same)
    defaults, unknown_defaults: by the name that is read
    defaults_of: what a comment calls the program of the defaults
    reasons: its setting -> why a recipe does not have it
    lora_dropout: the default of every version; None where it is 0, as a recipe's
    next_token_values: setting -> its values with which the program trains next tokens; any other
        value is another training
    commands: what starts its trainings, where its files do not say which of them reads them
    pair_scripts: patterns of scripts that train on pairs of completions as a recipe does
    reward_scripts: patterns of scripts that train a reward model as a recipe does
    """

    name: str
    scripts: tuple[str, ...] = ()
    keys: tuple[frozenset[str], ...] = ()
    file_phrase: str = ""
    typed_keys: tuple[frozenset[str], ...] = ()
    aliases: Mapping[str, tuple[str, ValueMap | None]] = field(default_factory=dict)
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    unknown_defaults: Mapping[str, str] = field(default_factory=dict)
    defaults_of: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    lora_dropout: float | None = None
    next_token_values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    commands: str = ""
    target: str = ""
    pair_scripts: tuple[str, ...] = ()
    reward_scripts: tuple[str, ...] = ()


def _keys(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in sets)


def _because(why: str, names: str) -> dict[str, str]:
    """Return one reason for several names."""
    return dict.fromkeys(names.split(), why)


# transformers 4.30 to 5.x, TrainingArguments.
_TRAINER_DEFAULTS: dict[str, JsonValue] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
    "gradient_checkpointing": False,
    "bf16": False,
}
# What scripts' own subclasses of TrainingArguments change.
_OFTEN_CHANGED = ("learning_rate", "gradient_checkpointing", "bf16")
_TRAINER_BASE = {k: v for k, v in _TRAINER_DEFAULTS.items() if k not in _OFTEN_CHANGED}
_SUBCLASS = {
    "learning_rate": "the learning rate; TrainingArguments' is 5e-05, the script may have its own",
    "gradient_checkpointing": (
        "none or full; TrainingArguments' is none, the script may have its own"
    ),
    "bf16": "bf16, fp16 or fp32; TrainingArguments' is fp32, the script may have its own",
}
_ON_OFF: ValueMap = {"true": "true", "false": "false"}
_NOT_ON: ValueMap = {"true": "false", "false": "true"}
_ATTENTION: ValueMap = {
    "fa2": "flash_attention_2",
    "flash_attn": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "sdpa": "sdpa",
    "eager": "eager",
    "disabled": "eager",
}


def _by_name(tasks: dict[str, str]) -> dict[str, str]:
    return {name: task for task, names in tasks.items() for name in names.split()}


OTHER_TASKS = _by_name(
    {
        "preferences": "bco cpo dpo gdpo ipo kto mpo nash_md online_dpo orpo simpo tpo xpo rlhf",
        "a reward model": "prm reward reward_model reward_modeling rm process_reward_model",
        "a policy by reinforcement": "async_grpo grpo gspo papo ppo rloo",
        "a student by distillation": "distill distillation gkd kd minillm sdft sdpo",
        "a classifier": "seq_cls",
        "embeddings": "embedding",
        "a reranker": "reranker generative_reranker",
    }
)
"""Maps what programs call a training to what it trains in the place of next tokens."""
SETTINGS_OF_OTHER_TASKS = _by_name(
    {
        "preferences": "beta rpo_alpha desirable_weight undesirable_weight simpo_gamma ref_model "
        "reference_free precompute_ref_log_probs max_prompt_length",
        "a reward model": "center_rewards_coefficient reward_model process_reward_model",
        "a policy by reinforcement": "num_generations reward_funcs max_completion_length "
        "reward_model_path reward_model_name_or_path",
        "a student by distillation": "teacher_model teacher_model_name_or_path lmbda",
    }
)
"""Maps settings that only the trainers of these take to what they train."""
PAIR_LOSSES: Mapping[str, JsonObject] = {
    "sigmoid": {"name": "dpo"},
    "ipo": {"name": "ipo", "average": True},
}
"""Maps TRL's `loss_type` to the recipe's objective."""
PAIR_SETTINGS = {"loss_type", "beta", "precompute_ref_log_probs"}
"""Lists the settings of DPO that a recipe has, or makes without a key."""
_OF_OTHER_TASKS = dict.fromkeys(SETTINGS_OF_OTHER_TASKS, frozenset[str]())
_DEFAULT_OF_VERSION = "its default depends on {}'s version"


_MEANINGS = {
    "per_device_train_batch_size": "sequences of a GPU at once",
    "gradient_accumulation_steps": "steps of accumulation",
    "num_train_epochs": "epochs; or write steps: or tokens: in its place",
    "learning_rate": "the learning rate",
    "lr_scheduler_type": "constant, linear, cosine or wsd",
    "gradient_checkpointing": "none or full",
    "bf16": "bf16, fp16 or fp32",
    "adam_beta1": "two numbers",
    "adam_beta2": "two numbers",
    "adam_epsilon": "AdamW's eps",
    "weight_decay": "the weight decay",
    "max_grad_norm": "the norm that gradients are clipped to",
    "warmup_steps": "updates with a rising learning rate",
    "global_batch_size": "sequences of an optimizer step",
    "zero_stage": "the ZeRO stage",
    "max_seq_length": "tokens of a sequence",
}
"""Says what a user writes for a setting whose default is not known."""


def _by_version(program: str, names: str, **own: str) -> dict[str, str]:
    """Return the reason of each setting's FILL_IN. own: meanings that differ from _MEANINGS."""
    default = _DEFAULT_OF_VERSION.format(program)
    return {name: f"{own.get(name, _MEANINGS[name])}; {default}" for name in names.split()}


_SETTINGS_BY_VERSION = (
    "per_device_train_batch_size gradient_accumulation_steps num_train_epochs learning_rate "
    "lr_scheduler_type gradient_checkpointing bf16 adam_beta1 adam_beta2 adam_epsilon weight_decay "
    "max_grad_norm warmup_steps"
)

_MEGATRON_ALIASES: dict[str, tuple[str, ValueMap | None]] = {
    "train_iters": ("max_steps", None),
    "lr": ("learning_rate", None),
    "clip_grad": ("max_grad_norm", None),
    "adam_eps": ("adam_epsilon", None),
    "lr_decay_style": ("lr_scheduler_type", None),
    "lr_warmup_iters": ("warmup_steps", None),
    "micro_batch_size": ("per_device_train_batch_size", None),
    "save_interval": ("save_steps", None),
    "tokenizer_model": ("tokenizer_name", None),
    "tensor_model_parallel_size": ("tensor_parallel_size", None),
    "pipeline_model_parallel_size": ("pipeline_parallel_size", None),
    "expert_model_parallel_size": ("expert_parallel_size", None),
}
_MEGATRON_REASONS: dict[str, str] = {
    **_because(
        "the model's configuration has it",
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
        "group_query_attention kv_channels max_position_embeddings swiglu "
        "normalization norm_epsilon position_embedding_type rotary_base "
        "rotary_percent use_rotary_position_embeddings "
        "untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias "
        "qk_layernorm make_vocab_size_divisible_by vocab_size padded_vocab_size "
        "num_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq "
        "attention_dropout hidden_dropout multi_latent_attention",
    ),
    **_because(
        "compile writes it by the layout",
        "use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
        "use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d",
    ),
    "optimizer_offload_fraction": "it does nothing without --optimizer-cpu-offload",
    "use_torch_optimizer_for_cpu_offload": "Megatron-Core takes torch's AdamW there without it",
    **_because(
        "a recipe's muon splits joined matrices and gathers those that tensor ranks cut",
        "muon_no_split_qkv muon_tp_mode",
    ),
    "muon_fp32_matmul_prec": "compile writes it by training.precision",
    "muon_scalar_optimizer": "AdamW has what a recipe's muon does not",
    **_because(
        "compile writes it by the format and the layout",
        "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag",
    ),
    **_because(
        "training.low_precision_keep names the layers that stay in bf16",
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    ),
    **_because("see `validation` in the recipe", "eval_interval eval_iters"),
    **_because("run/metrics.jsonl has every step", "log_interval log_throughput timing_log_level"),
    **_because("a run lies in the folder that compile writes", "save load"),
    "tokenizer_type": "data.tokenizer names the tokenizer",
    "mock_data": "write data.kind: synthetic by hand",
    "attention_backend": "model.attention names the attention",
    "split": "see `validation` in the recipe",
    "init_method_std": "the model's configuration has it: initializer_range",
}
PROGRAMS = (
    TrainingProgram(
        name="Megatron-LM",
        scripts=(r"pretrain_(gpt|mamba|bert|t5|vlm|llama|qwen)\w*\.py", r"pretrain\w*_megatron\w*"),
        typed_keys=_keys(
            "tensor_model_parallel_size micro_batch_size",
            "train_iters seq_length",
            "num_layers hidden_size num_attention_heads",
        ),
        aliases=_MEGATRON_ALIASES,
        defaults={
            "weight_decay": 0.01,
            "gradient_accumulation_steps": 1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "seed": 1234,
            "gradient_checkpointing": False,
            "bf16": False,
        },
        defaults_of="Megatron-LM",
        target="megatron",
        reasons=_MEGATRON_REASONS,
    ),
    TrainingProgram(
        name="LLaMA-Factory v1",
        keys=_keys("model model_class", "model train_dataset"),
        aliases={
            "model": ("model_name_or_path", None),
            "train_dataset": ("dataset", None),
            "micro_batch_size": ("per_device_train_batch_size", None),
            "flash_attn": ("attn_implementation", _ATTENTION),
            "dist_config.config_file": ("deepspeed", None),
            "dist_config.name": ("fsdp", {"fsdp2": "fsdp2"}),
            "dist_config.cp_size": ("sequence_parallel_size", None),
            "peft_config.name": ("use_peft", {"lora": "true"}),
            "peft_config.r": ("lora_r", None),
            "peft_config.lora_alpha": ("lora_alpha", None),
            "peft_config.lora_dropout": ("lora_dropout", None),
            "peft_config.target_modules": ("lora_target_modules", None),
        },
        unknown_defaults=_by_version(
            "LLaMA-Factory",
            _SETTINGS_BY_VERSION,
        ),
        scripts=(r"(llamafactory-cli|lmf) (sft|dpo|rm)",),
        next_token_values={"model_class": frozenset({"llm", "other"})},
        commands="llamafactory-cli sft, dpo or rm",
        reasons={
            "model_class": "the model's type says what it is",
            **_because("it is for generation", "sample_backend max_new_tokens"),
        },
    ),
    TrainingProgram(
        name="LLaMA-Factory",
        scripts=(r"llamafactory-cli|lmf train", r"(src/)?llamafactory/(launcher|cli)\.py"),
        keys=_keys(
            "finetuning_type",
            "stage cutoff_len",
            "stage template",
            "cutoff_len dataset",
            "cutoff_len template",
        ),
        aliases={
            "flash_attn": ("attn_implementation", _ATTENTION),
            "disable_gradient_checkpointing": ("gradient_checkpointing", _NOT_ON),
            "pure_bf16": ("bf16", _ON_OFF),
            "finetuning_type": ("use_peft", {"lora": "true", "full": "false"}),
            "lora_target": ("lora_target_modules", None),
            "neat_packing": ("packing", {"true": "true"}),
            "val_size": ("validation_fraction", None),
        },
        defaults={k: v for k, v in _TRAINER_DEFAULTS.items() if k != "gradient_checkpointing"},
        defaults_of="the Trainer",
        unknown_defaults=_by_version(
            "LLaMA-Factory",
            "max_seq_length gradient_checkpointing",
            max_seq_length="tokens of a sequence (cutoff_len)",
        ),
        next_token_values={"stage": frozenset({"pt", "sft"})},
        reasons={
            "stage": "a recipe trains next tokens",
            "template": "data.template names a chat template",
            "do_train": "a run trains",
            "mask_history": "a label is every answer of a conversation",
            "train_on_prompt": "data.train_on says what is trained on",
            **_because(
                "a recipe trains unquantized weights",
                "quantization_bit quantization_method double_quantization",
            ),
            **_because(
                "write model.freeze: [vision, projector, text] by hand",
                "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
            ),
        },
    ),
    TrainingProgram(
        name="Axolotl",
        scripts=(r"axolotl train", r"axolotl\.cli\.train"),
        keys=_keys("base_model", "sequence_len micro_batch_size"),
        aliases={
            "flash_attention": ("attn_implementation", {"true": "flash_attention_2"}),
            "sdp_attention": ("attn_implementation", {"true": "sdpa"}),
            "eager_attention": ("attn_implementation", {"true": "eager"}),
            "micro_batch_size": ("per_device_train_batch_size", None),
            "lr_scheduler": ("lr_scheduler_type", None),
            "optimizer": ("optim", None),
            "sample_packing": ("packing", None),
            "adapter": ("use_peft", {"lora": "true", "qlora": "true"}),
            "val_set_size": ("validation_fraction", None),
            "context_parallel_size": ("sequence_parallel_size", None),
            "sequence_parallel_degree": ("sequence_parallel_size", None),
            "wandb_name": ("run_name", None),
            "tokenizer_config": ("tokenizer_name", None),
        },
        unknown_defaults=_by_version(
            "Axolotl",
            _SETTINGS_BY_VERSION,
            per_device_train_batch_size="sequences of a GPU at once (micro_batch_size)",
        ),
        next_token_values={
            "rl": frozenset({"false"}),
            "reward_model": frozenset({"false"}),
            "process_reward_model": frozenset({"false"}),
        },
        reasons={
            "load_in_8bit": "a recipe trains unquantized weights",
            "load_in_4bit": "a recipe trains unquantized weights",
            "train_on_inputs": "data.train_on says what is trained on",
            "pad_to_sequence_len": "data.packing says how sequences are filled",
            "saves_per_epoch": "checkpoint.every_steps counts steps",
            "evals_per_epoch": "see `validation` in the recipe",
            "special_tokens": "the tokenizer's own files have them",
            "chat_template": "data.template names a chat template",
            "val_set_size": "see `validation` in the recipe",
            **_because(
                "transformers finds it by the model's configuration",
                "model_type tokenizer_type processor_type is_llama_derived_model",
            ),
            **_because("data is tokenized before the run", "dataset_prepared_path"),
            "batch_size": "training.global_batch_size says it",
            "wandb_watch": "run/metrics.jsonl has every step",
        },
    ),
    TrainingProgram(
        name="Megatron-SWIFT",
        lora_dropout=0.05,
        scripts=(r"^megatron \w+",),
        aliases={
            **_MEGATRON_ALIASES,
            **dict.fromkeys(
                ("train_type", "tuner_type"), ("use_peft", {"lora": "true", "full": "false"})
            ),
            "model": ("model_name_or_path", None),
            "max_epochs": ("num_train_epochs", None),
            "split_dataset_ratio": ("validation_fraction", None),
        },
        unknown_defaults=_by_version(
            "ms-swift",
            "learning_rate lr_scheduler_type gradient_checkpointing bf16 adam_beta1 "
            "adam_beta2 weight_decay warmup_steps",
            gradient_checkpointing="none, selective or full",
        ),
        defaults={"adam_epsilon": 1e-8, "max_grad_norm": 1.0},
        defaults_of="Megatron-LM",
        next_token_values={
            **_OF_OTHER_TASKS,
            "rlhf_type": frozenset(),
            "task_type": frozenset({"causal_lm"}),
        },
        target="megatron",
        reasons=_MEGATRON_REASONS,
    ),
    TrainingProgram(
        name="ms-swift",
        lora_dropout=0.05,
        scripts=(r"^swift \w+", r"swift/cli/(sft|pt|rlhf)\.py"),
        keys=_keys("train_type model", "tuner_type", "sft_type", "attn_impl model"),
        aliases={
            "model": ("model_name_or_path", None),
            "attn_impl": ("attn_implementation", _ATTENTION),
            "train_type": ("use_peft", {"lora": "true", "full": "false"}),
            "tuner_type": ("use_peft", {"lora": "true", "full": "false"}),
            "sft_type": ("use_peft", {"lora": "true", "full": "false"}),
            "target_modules": ("lora_target_modules", None),
            "split_dataset_ratio": ("validation_fraction", None),
            "torch_dtype": ("mixed_precision", {"bfloat16": "bf16", "float16": "fp16"}),
        },
        unknown_defaults=_by_version(
            "ms-swift",
            "per_device_train_batch_size gradient_accumulation_steps learning_rate "
            "lr_scheduler_type gradient_checkpointing bf16 adam_beta1 adam_beta2 "
            "weight_decay warmup_steps",
        ),
        defaults={"max_grad_norm": 1.0, "seed": 42, "adam_epsilon": 1e-8, "num_train_epochs": 3.0},
        defaults_of="ms-swift",
        next_token_values={
            **_OF_OTHER_TASKS,
            "rlhf_type": frozenset(),
            "task_type": frozenset({"causal_lm"}),
        },
        commands="swift pt, sft or rlhf",
        reasons={
            **_because("it is the assistant's name, not the model's", "model_name model_author"),
            **_because(
                "write model.freeze: [vision, projector, text] by hand",
                "freeze_vit freeze_aligner freeze_llm",
            ),
            "system": "data.template names a chat template",
            "template": "data.template names a chat template",
        },
    ),
    TrainingProgram(
        name="OpenRLHF",
        scripts=(r"openrlhf[./]cli[./]train_\w+",),
        aliases={
            "pretrain": ("model_name_or_path", None),
            "max_len": ("max_seq_length", None),
            "train_batch_size": ("global_batch_size", None),
            "micro_train_batch_size": ("per_device_train_batch_size", None),
            "max_epochs": ("num_train_epochs", None),
            "lr_scheduler": ("lr_scheduler_type", None),
            "lr_warmup_ratio": ("warmup_ratio", None),
            "l2": ("weight_decay", None),
            "max_norm": ("max_grad_norm", None),
            "adam_offload": ("offload_optimizer_device", {"true": "cpu", "": "cpu"}),
            "packing_samples": ("packing", None),
            "ring_attn_size": ("sequence_parallel_size", None),
            "param_dtype": ("mixed_precision", {"bf16": "bf16", "fp16": "fp16"}),
            "wandb_run_name": ("run_name", None),
        },
        unknown_defaults=_by_version(
            "OpenRLHF",
            "global_batch_size per_device_train_batch_size num_train_epochs "
            "learning_rate lr_scheduler_type gradient_checkpointing bf16 zero_stage "
            "adam_beta1 adam_beta2 weight_decay max_grad_norm warmup_steps",
        ),
    ),
    TrainingProgram(
        name="TRL",
        lora_dropout=0.05,
        scripts=(
            r"trl \w+",
            r"(^|/)(sft|dpo|grpo|kto|reward_modeling|gkd)\w*\.py",
            r"trl[./]scripts",
        ),
        keys=_keys(
            "model_name_or_path dataset_name",
            "model_name_or_path dataset_mixer",
            "model_name_or_path dataset_mixture",
            "model_name_or_path assistant_only_loss",
        ),
        aliases={
            "torch_dtype": ("weights_dtype", None),
            "dtype": ("weights_dtype", None),
        },
        defaults=_TRAINER_BASE,
        defaults_of="the Trainer",
        unknown_defaults=_by_version(
            "TRL",
            "learning_rate gradient_checkpointing bf16 max_seq_length",
            learning_rate="the learning rate (2e-05 in SFTConfig of TRL 1)",
            gradient_checkpointing="none or full (full in TRL 1)",
            bf16="bf16, fp16 or fp32 (bf16 in TRL 1)",
        ),
        next_token_values={**_OF_OTHER_TASKS, "loss_type": frozenset({"nll", "chunked_nll"})},
        commands="trl sft, dpo, grpo, kto or reward",
        pair_scripts=(r"^trl dpo$", r"(^|/)dpo\.py$", r"^trl[./]scripts[./]dpo$"),
        reward_scripts=(
            r"^trl reward$",
            r"(^|/)reward(_modeling)?\.py$",
            r"^trl[./]scripts[./]reward$",
        ),
    ),
    TrainingProgram(
        name="transformers' examples without the Trainer",
        scripts=(r"run_\w+_no_trainer\.py",),
        defaults={
            **{k: v for k, v in _TRAINER_DEFAULTS.items() if k != "seed"},
            "max_grad_norm": 0.0,
        },
        defaults_of="the script",
    ),
    TrainingProgram(
        name="the Trainer",
        scripts=(r"run_(clm|mlm|plm|fim|glue|ner|qa|summarization|translation)\w*\.py",),
        defaults=_TRAINER_DEFAULTS,
        defaults_of="the Trainer",
    ),
    TrainingProgram(
        name="TrainingArguments",
        keys=_keys(
            "per_device_train_batch_size",
            "num_train_epochs",
            "output_dir learning_rate",
            "model_name_or_path",
        ),
        file_phrase="arguments of the Hugging Face Trainer",
        typed_keys=_keys(
            "per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "output_dir"
        ),
        defaults=_TRAINER_BASE,
        unknown_defaults=_SUBCLASS,
        defaults_of="the Trainer",
    ),
)
"""Lists the programs, special before general: the first match counts."""

UNKNOWN_SCRIPT = TrainingProgram(name="a script")
_SCRIPT_TASK = re.compile(
    rf"(?:^|[/ ._])({'|'.join(sorted(OTHER_TASKS))})(?:_(?!\w*sft)\w+)?(?:\.py)?$"
)


def other_task(script: str) -> str | None:
    """Return what a script trains in the place of next tokens, as its name says."""
    match = _SCRIPT_TASK.search(script)
    return OTHER_TASKS[match[1]] if match else None


def program_of_script(script: str) -> TrainingProgram | None:
    for program in PROGRAMS:
        if any(re.search(pattern, script) for pattern in program.scripts):
            return program
    return None


def program_of_words(names: frozenset[str]) -> TrainingProgram:
    """Return the program that takes such words on a command line."""
    return next(
        (p for p in PROGRAMS if any(keys <= names for keys in p.typed_keys)), UNKNOWN_SCRIPT
    )
