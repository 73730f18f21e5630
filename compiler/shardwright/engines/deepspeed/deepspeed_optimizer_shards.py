"""The live engine's parameters as fragments by name: one view over ZeRO 0 to 3, bf16's optimizer
and offload.

A fragment is what this rank owns of one parameter: a range of its flattened tensor-parallel shard,
with views of the fp32 master weights and of Adam's moments. Everything here is a view: copying into
one restores the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from shardwright.engines.deepspeed.deepspeed_groups import drop_hpz_copies
from shardwright.engines.trainer_protocol import OwnedShard, ParameterShard
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.parallel.lora_adapters import unique_parameters
from shardwright.parallel.parameter_names import is_padding, named_buffers, named_parameters
from shardwright.plan.plan import Plan

MOMENTS = OPTIMIZERS["adamw"].moments
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def base_optimizer(engine: Any) -> Any:
    """torch's (or DeepSpeed's CPU) Adam, which keeps the moments."""
    optimizer = engine.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _masters(engine: Any) -> list[torch.Tensor]:
    """The fp32 tensors that the base optimizer updates: flat partitions, or at ZeRO-0 the
    parameters themselves."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(optimizer.single_partition_of_fp32_groups)
    if isinstance(optimizer, BF16_Optimizer):
        return list(optimizer.fp32_groups_flat_partition)
    return [p for group in optimizer.param_groups for p in group["params"]]


def _moments(engine: Any, master: torch.Tensor) -> dict[str, Any]:
    """Adam makes its state in its first update; a run that resumes, or saves before it, needs it
    earlier."""
    base = base_optimizer(engine)
    state: dict[str, Any] = base.state[master]
    if not state:
        state["step"] = (
            torch.tensor(0.0) if isinstance(base, torch.optim.AdamW | torch.optim.Adam) else 0
        )
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(master, requires_grad=False)
    return state


def optimizer_step(engine: Any) -> int:
    """Updates made so far."""
    steps = [int(_moments(engine, master)["step"]) for master in _masters(engine)]
    return max(steps, default=0)


def set_optimizer_step(engine: Any, step: int) -> None:
    for master in _masters(engine):
        state = _moments(engine, master)
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(step)
        else:
            state["step"] = step


def loss_scale(engine: Any) -> dict[str, float] | None:
    """Of fp16. None where the optimizer has no scaler."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return (
        None
        if scaler is None
        else {key: float(getattr(scaler, key)) for key in _SCALER if hasattr(scaler, key)}
    )


def set_loss_scale(engine: Any, saved: dict[str, float]) -> None:
    """A loss scale that the recipe fixes stays."""
    scaler = engine.optimizer.loss_scaler
    for attribute, value in saved.items() if scaler.dynamic else ():
        setattr(scaler, attribute, type(getattr(scaler, attribute))(value))


def parameter_shards(module: nn.Module) -> dict[str, ParameterShard]:
    held = {}
    for name, p in unique_parameters(
        (name, p) for name, p in module.named_parameters() if not is_padding(p)
    ).items():
        # ds_tensor is ZeRO-3's own partition of the parameter.
        resident = getattr(p, "ds_tensor", p).numel() * p.element_size()
        held[name] = ParameterShard(
            shape=_shard_shape(p), resident_bytes=resident, is_trained=p.requires_grad
        )
    return held


def optimizer_shards(plan: Plan, engine: Any) -> Iterator[OwnedShard]:
    """Of every parameter of this rank, trained or not, and of every persistent buffer."""
    masters = _masters(engine)
    for name, parameter in named_parameters(plan, engine.module).items():
        if not parameter.requires_grad:
            yield _untrained_shard(engine, name, parameter)
            continue
        place = _shard_address(engine, parameter)
        if place is None:  # another data rank owns all of it
            continue
        group, begin, start, numel = place
        master = parameter if group is None else masters[group]
        flats = {"fp32": master.data} | {
            moment: _moments(engine, master)[moment] for moment in MOMENTS
        }
        yield OwnedShard(
            name=name,
            shard_shape=_shard_shape(parameter),
            start=start,
            states={state: flat.view(-1).narrow(0, begin, numel) for state, flat in flats.items()},
            live=_model_values(parameter, start, numel),
            partitioned=group is not None,
            copied=getattr(parameter, "ds_pipe_replicated", False),
        )

    for name, buffer in named_buffers(engine.module).items():
        value, shape = buffer.detach().view(-1), tuple(buffer.shape)
        yield OwnedShard(
            name=name,
            shard_shape=shape,
            start=0,
            states={"value": value},
            live=value,
            partitioned=False,
        )


def _shard_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(
        getattr(parameter, "ds_shape", parameter.shape)
    )  # ds_shape: what ZeRO-3 partitions


def _shard_address(engine: Any, parameter: Any) -> tuple[int | None, int, int, int] | None:
    """(master, place in it, place in the shard, elements); master None: the parameter is its
    own."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        group, begin, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start, numel = _zero3_partition_range(optimizer, parameter)
        return (group, begin, start, numel) if numel > 0 else None
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        held, shard = mapping.hp_fragment_address, mapping.lp_fragment_address
        return mapping.param_group_index, held.start, shard.start, shard.numel
    return None, 0, 0, parameter.numel()


def _zero3_partition_range(optimizer: Any, parameter: Any) -> tuple[int, int]:
    """Elements of the parameter that are this data rank's; the last partition is padded."""
    size = parameter.ds_tensor.ds_numel
    start = size * optimizer._get_param_partition_rank(parameter)
    return start, min(size, parameter.ds_numel - start)


def _model_values(parameter: Any, start: int, numel: int) -> torch.Tensor:
    """At ZeRO-3 a rank has its own partition, which begins at `start`."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.data.view(-1).narrow(0, 0, numel)  # type: ignore[no-any-return]
    return parameter.data.view(-1).narrow(0, start, numel)  # type: ignore[no-any-return]


def _untrained_shard(engine: Any, name: str, parameter: Any) -> OwnedShard:
    """A parameter that is not trained, in the type that the model computes with."""
    partitioned = hasattr(parameter, "ds_tensor")
    start, numel = (
        _zero3_partition_range(engine.optimizer, parameter)
        if partitioned
        else (0, parameter.numel())
    )
    value = _model_values(parameter, start, max(0, numel))
    return OwnedShard(
        name=name,
        shard_shape=_shard_shape(parameter),
        start=start,
        states={"value": value},
        live=value,
        partitioned=partitioned,
        copied=getattr(parameter, "ds_pipe_replicated", False),
    )


def copy_masters_to_model(engine: Any) -> None:
    """Collective. The weights that the model computes with, from the fp32 masters that were
    restored."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        optimizer.update_lp_params()
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        # As DeepSpeed's own loading does (zero/stage3.py, _load_universal_checkpoint).
        optimizer.checkpoint_event_prologue()
        for group, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            flat = optimizer.fp16_partitioned_groups_flat[group]
            if master.numel() > 0:
                flat.data.copy_(master.data)
            parts = optimizer.unflatten(flat, optimizer.fp16_partitioned_groups[group])
            for part, values in zip(optimizer.fp16_partitioned_groups[group], parts, strict=True):
                part.data = values.data
        optimizer.checkpoint_event_epilogue()
        drop_hpz_copies(engine.module)
