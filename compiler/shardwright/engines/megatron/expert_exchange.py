"""Choose how Megatron-Core exchanges tokens between expert ranks: its token dispatcher, and
whether the exchange overlaps with another micro-batch's computation.

DeepEP was not run here: its rules are read from its code (v1.2.1 and the branch main). Line numbers
are of megatron-core 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.diagnostics import Diagnostic, found, refusal
from shardwright.layout.layout import Candidate, Layout, Rule, rule
from shardwright.models.expert_modules import expert_modules, experts_per_layer
from shardwright.utils.installation import DEEPEP_MODULE, missing_deepep

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

_DISPATCHER = "parallelism.expert_dispatcher"
_OVERLAP = "parallelism.expert_overlap"
DEEPEP_GPUS = (
    *("h100-sxm-", "h800-sxm-", "h20-sxm-", "h200-sxm-", "gh200-"),
    *("b200-", "b300-", "gb200-", "gb300-", "inline"),
)
"""Lists the catalogue's GPUs with Hopper's instructions and NVLink between the GPUs of a node
(its README; deep_ep.utils.check_nvlink_connections). Of a recipe's own GPU, the ranks tell."""
DEEPEP_CAPABILITY = (9, 0)
DEEPEP_GROUPS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Lists the sizes of a group that DeepEP has settings for (Buffer.get_dispatch_config)."""
DEEPEP_NODE_RANKS = 8
"""Ranks that DeepEP takes for one node's, in rank order (NUM_MAX_NVL_PEERS)."""
_PLAIN = "Use expert_dispatcher: alltoall"


def exchange_settings(s: Layout) -> dict[str, Any]:
    """Return the arguments of TransformerConfig; {} where every one is the model's or a default."""
    flex = {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "deepep",
        # DeepEP sends probabilities in fp32 alone (megatron/core/transformer/moe/
        # token_dispatcher.py:1173).
        "moe_router_dtype": "fp32",
    }
    overlap = {"overlap_moe_expert_parallel_comm": True}
    return (flex if s.expert_dispatcher == "deepep" else {}) | (overlap if s.expert_overlap else {})


class CudaConnections(NamedTuple):
    """Hold a value of CUDA_DEVICE_MAX_CONNECTIONS, and the reason."""

    number: int
    why: str


def cuda_connections(s: Layout) -> CudaConnections | None:
    """Return the connections that the layout's overlap needs; None where CUDA's default does.

    Tensor and context ranks want one. The overlap of the exchange wants its streams to start
    independently: 32, of the two that Megatron-LM's validate_args names
    (megatron/training/arguments.py).
    """
    if s.expert_overlap:
        return CudaConnections(32, "two streams start independently of each other")
    if s.tensor > 1 or s.context > 1:
        return CudaConnections(1, "a collective is launched before what hides it")
    return None


def has_expert_ranks(x: Candidate) -> Diagnostic | None:
    """Expert ranks exchange tokens, and expert_dispatcher and expert_overlap choose how. With
    `expert: 1` there is no exchange."""
    s = x.strategy
    if s.expert > 1 or not (s.expert_overlap or s.expert_dispatcher == "deepep"):
        return None
    key, text, off = (
        (_OVERLAP, "expert_overlap true", "false")
        if s.expert_overlap
        else (_DISPATCHER, "expert_dispatcher deepep", "alltoall")
    )
    return found(
        "SW3163",
        key,
        f"{text} needs expert ranks, which exchange tokens, but expert is 1",
        f"Use expert: 2 or more, or write `{key.partition('.')[2]}: {off}`.",
        (off,),
    )


def deepep_gpu(x: Candidate) -> Diagnostic | None:
    """DeepEP's kernels need NVIDIA GPUs with Hopper's instructions, and NVLink between all GPUs of
    a node."""
    gpu = x.cluster.gpu.name
    if x.strategy.expert_dispatcher != "deepep" or gpu.startswith(DEEPEP_GPUS):
        return None
    return found(
        "SW3170",
        _DISPATCHER,
        f"expert_dispatcher deepep does not run on {gpu}: DeepEP's kernels need NVIDIA GPUs from "
        "Hopper on, with NVLink between all GPUs of a node",
        f"{_PLAIN}, or GPUs such as h100-sxm-80gb and b200-sxm-180gb.",
        ("alltoall",),
    )


def deepep_groups(x: Candidate) -> Diagnostic | None:
    """DeepEP has kernels for some sizes of a group only, and adds up outputs of experts in bf16
    only. Ranks of a group must share a node: all of them, or each 8 of a larger group."""
    s, per_node = x.strategy, x.cluster.gpus_per_node
    if s.expert_dispatcher != "deepep" or s.expert == 1:
        return None
    ranks = s.expert * s.expert_tensor_ranks
    together = min(ranks, DEEPEP_NODE_RANKS)
    sizes: tuple[int, ...] = ()
    help = f"{_PLAIN}."
    if x.recipe.training.precision != "bf16":
        why = f"in {x.recipe.training.precision}: DeepEP sums the experts' outputs only in bf16"
        help = f"{_PLAIN}, or precision: bf16."
    elif ranks not in DEEPEP_GROUPS:
        sizes = tuple(n // s.expert_tensor_ranks for n in DEEPEP_GROUPS)
        why = (
            f"over {ranks} ranks (expert {s.expert} x expert_tensor {s.expert_tensor_ranks}): "
            f"DeepEP supports {', '.join(map(str, DEEPEP_GROUPS[:-1]))} or {DEEPEP_GROUPS[-1]}"
        )
    elif per_node % together:
        why = (
            f"over {ranks} ranks on nodes of {per_node} GPUs: DeepEP needs every {together} "
            "consecutive ranks on one node"
        )
    else:
        return None
    return found("SW3174", _DISPATCHER, f"expert_dispatcher deepep does not run {why}", help, sizes)


def overlap_obstacle(x: Candidate) -> Diagnostic | None:
    """Megatron-Core's overlapped schedule fails or computes something else in fp32, with whole
    layers or `moe` recomputed, in a pipeline without virtual stages, with a last layer that has no
    experts, and with one expert a rank under the alltoall dispatcher
    (TransformerConfig.__post_init__:1852; megatron/core/models/gpt/fine_grained_callables.py)."""
    s, modules = x.strategy, expert_modules(x.graph)
    if not s.expert_overlap or s.expert == 1 or not modules:
        return None
    last = [layer for layer in x.graph.layers if layer.kind == "decoder"][-1]
    has_experts = any(p.name.rpartition(".")[0] in modules for p in last.parameters)
    held_alone = experts_per_layer(x.graph) == s.expert and s.expert_tensor_ranks == 1
    if x.recipe.training.precision == "fp32":
        why, fix = "in fp32", "precision: bf16"
    elif s.checkpointing == "full":
        why = "where whole layers are recomputed"
        fix = "activation_checkpointing: none, selective or a list of modules without moe"
    elif "moe" in s.recompute_modules:
        why = "where moe is recomputed: the overlapped schedule calls its parts one by one"
        fix = "activation_checkpointing without moe (moe_act, layernorm and core_attn run)"
    elif s.pipeline > 1 and s.virtual_stages == 1:
        why, fix = f"in a pipeline of {s.pipeline} without virtual stages", "virtual_stages: 2"
    elif not has_experts:
        why = (
            "where the last layer has no experts: the overlapped schedule then skips the final norm"
        )
        fix = ""
    elif held_alone and s.expert_dispatcher == "alltoall":
        why = (
            "where a rank holds one expert: the overlapped schedule frees tokens that the expert's "
            "weight gradients need"
        )
        fix = f"an expert degree below {s.expert}"
    else:
        return None
    return found(
        "SW3175",
        _OVERLAP,
        f"expert_overlap does not run {why}",
        f"Use {f'{fix}, or ' * bool(fix)}expert_overlap: false.",
        ("false",),
    )


RULES: dict[str, Rule] = {
    "SW3163": rule(has_expert_ranks, "expert", "expert_dispatcher", "expert_overlap"),
    "SW3170": rule(deepep_gpu, "expert_dispatcher"),
    "SW3174": rule(deepep_groups, "expert_dispatcher", "expert", "expert_tensor", "tensor"),
    "SW3175": rule(
        overlap_obstacle,
        "expert_overlap",
        "expert_dispatcher",
        "expert",
        "expert_tensor",
        "tensor",
        "pipeline",
        "virtual_stages",
        "activation_checkpointing",
    ),
}


def check_deepep(plan: Plan) -> None:
    """Raise Refusal, SW6016, where a rank cannot run the plan's DeepEP. Collective."""
    if plan.strategy.expert_dispatcher != "deepep":
        return
    from torch import distributed as dist

    reasons = [""] * plan.strategy.world_size
    dist.all_gather_object(reasons, _deepep_absent())
    rank = next((rank for rank, why in enumerate(reasons) if why), None)
    if rank is not None:
        raise refusal(
            "SW6016",
            f"expert_dispatcher is deepep, but rank {rank} cannot run DeepEP: {reasons[rank]}",
            "Install DeepEP on every host, or compile again with expert_dispatcher: alltoall.",
        )


def _deepep_absent() -> str:
    """Return why this rank cannot run DeepEP; "" where it can."""
    import torch
    from megatron.core.transformer.moe import fused_a2a

    if missing_deepep() is not None or not fused_a2a.HAVE_DEEP_EP:
        return f"{DEEPEP_MODULE} cannot be imported"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is not None or capability < DEEPEP_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} is not an NVIDIA GPU of compute capability 9.0 or higher"
    return ""
