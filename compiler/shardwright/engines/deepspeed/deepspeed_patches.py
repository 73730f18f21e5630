"""Patch defects of the tested DeepSpeed versions; each patch names the defect's place."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

_norm_of_tensors = bf16_optimizer.get_global_norm_of_tensors


def _norm_of_possibly_no_tensors(
    input_tensors: list[torch.Tensor], **keywords: Any
) -> torch.Tensor:
    """A rank may own no tensor that counts: a tied head's stage, on the tensor ranks that do not
    count the norm's replicated weights. DeepSpeed stacks an empty list there (runtime/utils.py,
    get_global_norm_of_tensors)."""
    tensors = list(input_tensors) or [
        torch.zeros(1, device=get_accelerator().current_device_name())
    ]
    norm: torch.Tensor = _norm_of_tensors(input_tensors=tensors, **keywords)
    return norm


def _keep_gradients(self: Any) -> None:
    """DeepSpeed clears half-precision gradients when the gradient of the module's output arrives
    (runtime/engine.py, _backward_prologue, in a hook). A chunked loss stands behind that output and
    computes with the head's weight: its gradient is there by then, and would be lost."""


_add_to_single_precision = bf16_optimizer.BF16_Optimizer.update_hp_grads


def _add_and_clear(self: Any, clear_lp_grads: bool = True) -> None:
    """They are cleared as soon as they are added to the fp32 ones instead, after each stage's
    backward pass."""
    _add_to_single_precision(self, clear_lp_grads=True)


_reduce_tied_gradients = PipelineEngine._exec_reduce_tied_grads


def _reduce_tied_where_they_are(self: Any) -> None:
    """ZeRO-1 that accumulates half-precision gradients in fp32 (bf16 with an offloaded optimizer,
    fp16 where the recipe asks for it) keeps them in `grad_accum`. DeepSpeed sums `grad` over the
    stages of a tied weight, which is empty by then (runtime/pipe/engine.py,
    _exec_reduce_tied_grads): each stage would train its own copy."""
    if not getattr(self.optimizer, "use_grad_accum_attribute", False):
        _reduce_tied_gradients(self)
        return
    for weight, group in self.module.get_tied_weights_and_groups():
        if weight.grad_accum is not None:
            dist.all_reduce(weight.grad_accum, group=group)


def _norm_with_experts(
    non_expert_norm: torch.Tensor,
    mpu: Any,
    expert_tensors: dict[str, list[torch.Tensor]],
    norm_type: float = 2,
) -> float:
    """bf16's optimizer sums the squares of experts over the stages only where a rank has any, and
    over tensor ranks never (runtime/utils.py, get_norm_with_moe_layers). Here as of all other
    parameters, and over the expert ranks."""
    squares = torch.zeros(1, device=get_accelerator().current_device_name())
    for tensor in (tensor for tensors in expert_tensors.values() for tensor in tensors):
        squares += tensor.detach().float().square().sum()
    for group in (mpu.get_model_parallel_group(), groups._get_max_expert_parallel_group()):
        dist.all_reduce(squares, group=group)
    norm = float((float(non_expert_norm) ** 2 + squares).sqrt())
    return norm if math.isfinite(norm) else -1.0


_plain_gradients_for_norm = bf16_optimizer.BF16_Optimizer.get_grads_for_norm


def _gradients_for_norm(self: Any, for_clipping: bool = False) -> Any:
    """It counts an expert's parameters on every tensor rank, also those that all of them hold
    whole; here it counts them as it does all others."""
    found = _plain_gradients_for_norm(self, for_clipping)
    if for_clipping or not self.has_moe_layers:
        return found
    first = bwc_tensor_model_parallel_rank(mpu=self.mpu) == 0
    experts = [
        self.fp32_groups_gradients[number][place]
        for number, group in enumerate(self.optimizer.param_groups)
        for place, parameter in enumerate(self.bf16_groups[number])
        if group.get("moe") and self.fp32_groups_has_gradients[number][place]
        if first or is_model_parallel_parameter(parameter)
    ]
    return found[0], {"experts": experts}


_counts_every_rank = DeepSpeedZeroOptimizer_Stage3._grad_norm_counts_every_rank


def _experts_count_by_tensor_rank(self: Any, params: list[Any], process_group: Any) -> bool:
    """ZeRO-3 takes the ranks of an expert group for tensor ranks too, as those of its own AutoEP
    are; here each tensor rank has a part of every expert, marked as any other parameter's
    (zero/stage3.py)."""
    if self._autoep_expert_parallel_group(params) is not None:
        return False
    return bool(_counts_every_rank(self, params, process_group))


_invalidate_trace = PartitionedParameterCoordinator._invalidate_trace
_params_to_release = vars(PartitionedParameterCoordinator)[
    "_PartitionedParameterCoordinator__params_to_release"
]


def _forget_trace(self: Any) -> None:
    """ZeRO-3 remembers by step which parameters a submodule releases, also when the trace that
    said so is replaced (zero/partitioned_param_coordinator.py, __params_to_release). After passes
    without a backward one, as a reference's scores are computed, it would release each parameter
    after the forward pass, and gather each alone for the backward one."""
    _invalidate_trace(self)
    cached = (cell.cell_contents for cell in _params_to_release.__closure__)  # by instrument_w_nvtx
    next(each for each in cached if hasattr(each, "cache_clear")).cache_clear()


def patch_deepspeed() -> None:
    """Install the patches, each in its place in DeepSpeed."""
    PartitionedParameterCoordinator._invalidate_trace = _forget_trace
    DeepSpeedZeroOptimizer_Stage3._grad_norm_counts_every_rank = _experts_count_by_tensor_rank
    bf16_optimizer.get_norm_with_moe_layers = _norm_with_experts
    bf16_optimizer.BF16_Optimizer.get_grads_for_norm = _gradients_for_norm
    for engine in (PipelineEngine, DualPipeVEngine):  # each has a map of its own
        engine._INSTRUCTION_MAP[ReduceTiedGrads] = _reduce_tied_where_they_are
    bf16_optimizer.get_global_norm_of_tensors = _norm_of_possibly_no_tensors
    bf16_optimizer.BF16_Optimizer.backward_prologue = _keep_gradients
    bf16_optimizer.BF16_Optimizer.update_hp_grads = _add_and_clear
