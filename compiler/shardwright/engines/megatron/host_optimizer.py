"""Build Megatron-Core's optimizer, also the one whose masters and moments are in host memory.

Its HybridDeviceOptimizer (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py) copies each
parameter's shard to the host and updates it there with torch's AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


class _HostOptimizerWithoutStates(HybridDeviceOptimizer):
    """Hold the parameter groups alone.

    DistributedOptimizer takes from it the defaults for the optimizer of the shards. Megatron-Core
    copies all parameters of every rank to the host for it, which may be more than the shards of
    all states.
    """

    def _init_sub_optimizers(self) -> None:
        pass


def build_optimizer(
    config: OptimizerConfig, chunks: list[Any], config_overrides: dict[Any, Any]
) -> Any:
    """Return Megatron's optimizer of the model chunks."""
    if config.optimizer_cpu_offload:
        # Given to the constructor, megatron-core 0.16.1 compares Transformer Engine's version, for
        # a setting of its FusedAdam, and raises a TypeError where it is not installed.
        config.use_precision_aware_optimizer = True
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    kept = megatron_optimizer.HybridDeviceOptimizer
    megatron_optimizer.HybridDeviceOptimizer = _HostOptimizerWithoutStates
    try:
        # Shards of fp32 weights are views of them, which torch's optimizers refuse as non-leaf
        # tensors where autograd records them.
        with torch.set_grad_enabled(not config.optimizer_cpu_offload):
            return get_megatron_optimizer(
                config, chunks, config_overrides=config_overrides, use_gloo_process_groups=False
            )
    finally:
        megatron_optimizer.HybridDeviceOptimizer = kept


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update: those in host memory, or the one on the GPU."""
    return list(getattr(optimizer, "sub_optimizers", [optimizer]))


def host_master(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the host's copy of a parameter's shard; the parameter where there is none."""
    copies: dict[torch.Tensor, torch.Tensor] = getattr(optimizer, "param_to_inner_param", {})
    return copies.get(parameter, parameter)


def copy_host_masters(optimizer: Any) -> None:
    """Copy the host's masters to the shards of the weights that the model computes with."""
    for parameter, master in getattr(optimizer, "param_to_inner_param", {}).items():
        parameter.data.copy_(master.data)
