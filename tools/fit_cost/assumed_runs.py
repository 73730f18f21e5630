"""List the runs that others published, as records that `assume.kernels` hands to the cost model.

`make fit-cost` writes them to engines/assumed_runs.json. Each says how a run differs from the
recipe's own one: in its kernels (fields of KernelProfile), and in its engine (fields of
EngineTraits), by the target that the recipe of a row has.
"""

from __future__ import annotations

from shardwright.engines.run_profiles import AssumedEngine, AssumedRuns

# torch's kernels, one an operator. These runs have no dropout.
_HF = {"dropout": 0, "selective_by_operator": True, "attention": "flash"}
# GPTs in PyTorch that are pretrained without dropout, whatever GPT-2's configuration says. They ran
# MPT and similar models, whose GELU and loss are fused (decision 011). A row's recipe is a GPT-2
# for want of the real model.
_MPT = {
    "traces_activations": False,
    "loss_family": "hf",
    "attention": "flash1",
    "composed_activation": 0,
}
# Bias, dropout and residual in one kernel, bias and activation in another (arXiv 2104.04473,
# section 4.2). It pads the vocabulary to a multiple of 128 x t, and gives each stage as many
# decoder layers. Its own checkpoint repeats all of a layer. Without ZeRO on one data rank,
# Megatron-LM itself is what ran.
_MEGATRON = {
    "composed_activation": 0,
    "attention": "best",
    "eager_rms_norm": 2,
    "dropout": 0.5,
    "rotary": 2,
    "feed_forward": 1.0,
    "family": "megatron",
    "loss_family": "megatron",
    "traces_activations": False,
    "stops_recompute_early": False,
    "vocabulary_multiple": 128,
    "equal_layers_per_stage": True,
    "engine_without_zero": "megatron",
}
# Each chain of elementwise operators is one kernel, the norm with the residual before it. The loss
# beside compiled layers is torch's own (torchtitan).
_COMPILED = {
    "composed_activation": 0,
    "attention": "flash",
    "eager_rms_norm": 2,
    "residual": 2,
    "dropout": 0,
    "rotary": 2,
    "feed_forward": 0.75,
    "family": "compiled",
    "loss_family": "compiled",
    "traces_activations": False,
    "recomputes_elementwise": True,
    "selective_by_operator": True,
}

# Mixtures under FSDP (NeMo AutoModel, Megatron FSDP): Transformer Engine's layers, DeepEP, and a
# loss in half precision (fp32_upcast: false, or FusedLinearCrossEntropy in its benchmarks).
_FSDP_EXPERTS = {
    "eager_rms_norm": 2,
    "rotary": 2,
    "feed_forward": 1.0,
    "attention": "best",
    "fuses_attention_sinks": True,
    "uses_deepep": True,
    "loss_family": "hf",
}
_EXPERT_TYPES = ("deepseek_v3", "qwen3_moe", "gpt_oss")

# torchtitan and llm-foundry. PyTorch gathers a layer from one flat buffer, and overlaps more of it
# where torch.compile leaves the host time.
_FSDP: AssumedEngine = {
    "title": "PyTorch's FSDP",
    "family": "PyTorch's FSDP",
    "traits": {"traffic": "fsdp", "zero3_gathers_flat_layers": True},
}
_COMPILED_FSDP: AssumedEngine = {
    **_FSDP,
    "traits": {"traffic": "compiled", "zero3_gathers_flat_layers": True},
}
# BigScience, MT-NLG, SC'21's ZeRO-3: DeepSpeed of 2021 and 2022 (decision 020).
_MEGATRON_DEEPSPEED: AssumedEngine = {
    "title": "Megatron-DeepSpeed",
    "family": "DeepSpeed of any age",
    "traits": {
        "traffic": "megatron",
        "bucketed_zero": True,
        "tensor_parallel_launch_cost": "added",
    },
}
# The ultrascale playbook's runs, on AWS. FP32GradientAccumulator: a hook adds each gradient to a
# float32 buffer. build_model cuts the stages by products. Its norms are Triton's. Around
# flash-attn's rotary embedding it copies queries, keys, values and the output, about as much as the
# eager one moves (its Llama's model file).
_NANOTRON: AssumedEngine = {
    "title": "nanotron",
    "family": "Megatron's layouts",
    "traits": {
        "traffic": "nanotron",
        "zero_1_overlaps": False,
        "tensor_parallel_launch_cost": "floor",
        "pipeline_raises_launch_cost": True,
        "fuses_accumulation": False,
        "frees_gradients_after_add": True,
        "balances_stages_by_matmul_flops": True,
        "fabric": "efa",
    },
    "kernels": {"eager_rms_norm": 2},
}

ASSUMED_RUNS: AssumedRuns = {
    "kernels": {"hf": _HF, "megatron": _MEGATRON, "compiled": _COMPILED},
    "model_kernels": {
        "hf": {"gpt2": _MPT, **dict.fromkeys(_EXPERT_TYPES, _FSDP_EXPERTS)},
        "compiled": dict.fromkeys(_EXPERT_TYPES, _FSDP_EXPERTS),
    },
    "engines": {
        "deepspeed": {"hf": _FSDP, "megatron": _MEGATRON_DEEPSPEED, "compiled": _COMPILED_FSDP},
        "megatron": {"hf": _NANOTRON},
    },
    "families": {"deepspeed": "DeepSpeed of any age", "megatron": "Megatron's layouts"},
}
