"""The layouts that `target: megatron` is compared over with one plain process: each axis alone,
pairs, and all at once on eight ranks."""

from __future__ import annotations

from typing import Any

from tests.parity.harness import Case


def case(model: str = "llama", **fields: Any) -> Case:
    return Case(model=model, target="megatron", **fields)


def cut(tensor: int = 2, **fields: Any) -> dict[str, Any]:
    """Tensor ranks that share out the sequence too."""
    return {"tensor": tensor, "sequence_parallel": True, **fields}


def overlapped(model: str, **fields: Any) -> Case:
    """Two expert ranks, whose exchange overlaps with another micro-batch's computation."""
    return case(model, expert=2, expert_overlap=True, precision="bf16", **fields)


WHOLE = {"expert_tensor": 1}
HOST = {"offload": "optimizer"}
VIRTUAL = {"pipeline": 2, "virtual_stages": 2}
LLAMA: dict[str, Case] = {
    "one": case(zero_stage=0),
    "tp2": case(tensor=2),
    "tp2-sequence": case(**cut()),
    "pp2": case(pipeline=2),
    "pp4": case(pipeline=4, accumulation=4),
    "dp2": case(data=2),
    "dp2-zero0": case(data=2, zero_stage=0),
    "cp2": case(context=2),
    "cp4": case(context=4),
    "vpp2-pp2": case("llama-deep", **VIRTUAL),
    "vpp2-pp4": case("llama-deep", pipeline=4, virtual_stages=2, accumulation=4),
    "clipping0-dp2": case(data=2, clipping=0.0),
    "full-tp2": case(tensor=2, checkpointing="full"),
    "selective-pp2-tp2": case(pipeline=2, tensor=2, checkpointing="selective"),
    "partial-pp2": case(pipeline=2, checkpointing={"full": 1}),
    "modules-pp2": case(pipeline=2, checkpointing=["core_attn", "layernorm", "mlp"]),
    "modules-tp2-sequence": case(checkpointing=["layernorm", "mlp"], **cut()),
    "bf16-tp2": case(tensor=2, precision="bf16"),
    "bf16-dp2": case(data=2, precision="bf16"),
    "bf16-cp2": case(context=2, precision="bf16"),
    "bf16-sums-dp2": case(data=2, precision="bf16", accumulation_dtype="bf16", accumulation=3),
    "pp2-tp2-sequence": case(pipeline=2, **cut()),
    "tp2-sequence-dp2": case(data=2, **cut()),
    "cp2-pp2": case(context=2, pipeline=2),
    "cp2-tp2-sequence": case(context=2, **cut()),
    "cp2-dp2": case(context=2, data=2),
    "cp2-full": case(context=2, checkpointing="full"),
    "vpp2-pp2-tp2-sequence": case("llama-deep", **VIRTUAL, **cut()),
    "vpp2-pp2-cp2": case("llama-deep", **VIRTUAL, context=2),
    "vpp2-pp2-dp2-partial": case("llama-deep", **VIRTUAL, data=2, checkpointing={"full": 2}),
    "tied-pp2": case("llama-tied", pipeline=2),
    "tied-tp2": case("llama-tied", tensor=2),
    "tied-cp2": case("llama-tied", context=2),
    "tied-pp2-dp2": case("llama-tied", pipeline=2, data=2),
    "padding-one": case("llama-padding"),
    "padding-pp2-tp2-sequence": case("llama-padding", pipeline=2, **cut()),
    "padding-tp2-dp2": case("llama-padding", tensor=2, data=2),
    "padding-cp2": case("llama-padding", context=2),
    "tied-padding-pp2-tp2-sequence": case("llama-tied-padding", pipeline=2, **cut()),
    "tied-padding-tp2": case("llama-tied-padding", tensor=2),
    "rope-tp2": case("llama-rope", tensor=2),
    "rope-pp2-cp2": case("llama-rope", pipeline=2, context=2),
    "offload-one": case(**HOST),
    "offload-dp2": case(data=2, **HOST),
    "bf16-offload-dp2": case(data=2, precision="bf16", **HOST),
    "offload-pp2-tp2-dp2": case(pipeline=2, data=2, **cut(), **HOST),
    "offload-tied-padding-pp2": case("llama-tied-padding", pipeline=2, **HOST),
    "offload-vpp2-pp2-cp2": case("llama-deep", **VIRTUAL, context=2, **HOST),
    "all-llama": case("llama-deep", **VIRTUAL, context=2, **cut()),
    "all-rope": case("llama-rope", pipeline=2, data=2, **cut()),
}
OTHERS: dict[str, Case] = {
    "qwen3": case("qwen3"),
    "qwen3-tp2-sequence": case("qwen3", **cut()),
    "qwen3-cp2": case("qwen3", context=2),
    "qwen3-pp2-dp2": case("qwen3", pipeline=2, data=2),
    "qwen3-all": case("qwen3", pipeline=2, data=2, **cut()),
    "gpt2-tp2": case("gpt2-plain", tensor=2),
    "gpt2-pp2": case("gpt2-plain", pipeline=2),
    "gpt2-cp2": case("gpt2-plain", context=2),
    "gpt2-dp2": case("gpt2-plain", data=2),
    "gpt2-pp2-tp2": case("gpt2-plain", pipeline=2, tensor=2, zero_stage=0),
    "gpt2-pp2-cp2": case("gpt2-plain", pipeline=2, context=2),
}
EXPERTS: dict[str, Case] = {
    "mixtral-dp2": case("mixtral", data=2),
    "mixtral-pp2": case("mixtral", pipeline=2),
    "mixtral-tp2-sequence": case("mixtral", **cut()),
    "mixtral-etp1": case("mixtral", **cut(), **WHOLE),
    "mixtral-ep2": case("mixtral", data=2, expert=2),
    "mixtral-ep2-zero0": case("mixtral", data=2, expert=2, zero_stage=0),
    "mixtral-ep2-bf16": case("mixtral", data=2, expert=2, precision="bf16"),
    "mixtral-ep2-cp2": case("mixtral", context=2, expert=2),
    "mixtral-ep2-tp2": case("mixtral", data=2, expert=2, **cut()),
    "mixtral-ep2-tp2-etp1": case("mixtral", expert=2, **cut(), **WHOLE),
    "mixtral-ep2-dp4": case("mixtral", data=4, expert=2),
    "mixtral-ep2-pp2": case("mixtral", data=2, expert=2, pipeline=2),
    "mixtral-all": case("mixtral-deep", **VIRTUAL, data=2, expert=2, **cut(), **WHOLE),
    "mixtral-offload-ep2-dp4": case("mixtral", data=4, expert=2, **HOST),
    "mixtral-ep2-modules": case("mixtral", data=2, expert=2, checkpointing=["layernorm", "moe"]),
    "qwen3-moe-dp2": case("qwen3_moe", data=2),
    "qwen3-moe-pp2": case("qwen3_moe", pipeline=2),
    "qwen3-moe-tp2-sequence": case("qwen3_moe", **cut()),
    "qwen3-moe-ep2": case("qwen3_moe", data=2, expert=2),
    "qwen3-moe-ep2-cp2": case("qwen3_moe", context=2, expert=2),
    "gpt-oss-dp2": case("gpt_oss", data=2),
    "gpt-oss-cp2": case("gpt_oss", context=2),
    "gpt-oss-tp2-ep2": case("gpt_oss", expert=2, **cut(), **WHOLE),
}
DEEPSEEK: dict[str, Case] = {
    "deepseek": case("deepseek_v3"),
    "deepseek-dp2": case("deepseek_v3", data=2),
    "deepseek-pp2": case("deepseek_v3", pipeline=2),
    "deepseek-cp2": case("deepseek_v3", context=2),
    "deepseek-ep2": case("deepseek_v3", data=2, expert=2),
    "deepseek-tp2-sequence": case("deepseek_v3", **cut()),
    "deepseek-ep2-pp2": case("deepseek_v3", data=2, expert=2, pipeline=2),
    "deepseek-ep4-etp1": case("deepseek_v3", data=2, expert=4, **cut(), **WHOLE),
    "deepseek-offload-ep2-cp2": case("deepseek_v3", context=2, expert=2, **HOST),
    "deepseek-modules": case(
        "deepseek_v3",
        pipeline=2,
        checkpointing=["layernorm", "mla_up_proj", "mlp", "shared_experts"],
    ),
    "deepseek-all": case("deepseek_v3", pipeline=2, context=2, expert=2, **cut()),
}
OVERLAPPED: dict[str, Case] = {
    "overlap-ep2": overlapped("mixtral", data=2, accumulation=3),
    "overlap-ep2-one": overlapped("mixtral", data=2, accumulation=1),
    "overlap-ep2-zero0": overlapped("mixtral", data=2, zero_stage=0, accumulation=2),
    "overlap-ep2-cp2": overlapped("mixtral", context=2, accumulation=3),
    "overlap-ep2-dp4": overlapped("mixtral", data=4, accumulation=3),
    "overlap-ep2-tp2": overlapped("mixtral", data=2, accumulation=3, **cut()),
    "overlap-ep2-tp2-etp1": overlapped("mixtral", accumulation=3, **cut(), **WHOLE),
    "overlap-ep2-vpp2-pp2": overlapped("mixtral-deep", **VIRTUAL, data=2, accumulation=4),
    "overlap-ep2-vpp2-pp2-two": overlapped("mixtral-deep", **VIRTUAL, data=2, accumulation=2),
    "overlap-ep2-vpp4-pp2": overlapped(
        "mixtral-deep", pipeline=2, virtual_stages=4, data=2, accumulation=6
    ),
    "overlap-dense-first": overlapped("dense-first", data=2, accumulation=3),
    "overlap-deepseek": overlapped("deepseek_v3", data=2, accumulation=3),
    "overlap-deepseek-vpp2-pp2": overlapped("deepseek_v3", **VIRTUAL, data=2, accumulation=6),
    "overlap-deepseek-modules": overlapped(
        "deepseek_v3",
        data=2,
        accumulation=3,
        checkpointing=["layernorm", "mla_up_proj", "mlp", "shared_experts"],
    ),
    "overlap-all": overlapped("mixtral-deep", **VIRTUAL, accumulation=4, data=2, **cut(), **WHOLE),
}
GROUPS: dict[str, dict[str, Case]] = {
    "llama": LLAMA,
    "others": OTHERS,
    "experts": EXPERTS,
    "deepseek": DEEPSEEK,
    "overlap": OVERLAPPED,
}
CASES: dict[str, Case] = {name: found for group in GROUPS.values() for name, found in group.items()}
SAMPLE: dict[str, Case] = {
    name: CASES[name]
    for name in (
        "tp2",
        "cp2-pp2",
        "bf16-dp2",
        "vpp2-pp2-tp2-sequence",
        "padding-pp2-tp2-sequence",
        "offload-dp2",
        "mixtral-ep2-tp2",
        "gpt-oss-tp2-ep2",
        "deepseek-ep2-pp2",
        "overlap-ep2",
    )
}
"""What is run without `make prove`, in one launch."""

MUON: dict[str, Case] = {
    "muon-one": case(zero_stage=0),
    "muon-tp2-sequence": case(zero_stage=0, **cut()),
    "muon-dp2": case(data=2, zero_stage=0),
    "muon-tied-pp2": case("llama-tied", pipeline=2, zero_stage=0),
    "muon-cp2": case(context=2, zero_stage=0),
    "muon-gpt2-tp2": case("gpt2-plain-wide", tensor=2, zero_stage=0),
    "muon-phi3-pp2": case("phi3", pipeline=2, zero_stage=0),
    "muon-deepseek-ep2-tp2": case("deepseek_v3", expert=2, data=2, zero_stage=0, **cut()),
    "muon-qwen3-moe-tp2": case("qwen3_moe-wide", zero_stage=0, **cut()),
    "muon-qwen3-moe-ep2-tp2": case("qwen3_moe-wide", expert=2, zero_stage=0, **cut(), **WHOLE),
    "muon-qwen3-moe-ep2-dp2": case("qwen3_moe-wide", expert=2, data=2, zero_stage=0),
    "muon-bf16-tp2": case(zero_stage=0, precision="bf16", **cut()),
}
"""Those that train by Muon; they need emerging-optimizers."""
