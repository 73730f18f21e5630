"""View the live DeepSpeed engine's parameters as shards by name, under ZeRO 0 to 3 and offload.

A shard is what this rank owns of one parameter: a range of the flattened tensor-parallel shard,
with views of its fp32 master and Adam's moments. Copying into a view restores the optimizer.
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
from shardwright.engines.deepspeed.weight_shards import OwnedElements, WeightOptimizer
from shardwright.engines.trainer_protocol import OwnedShard, ParameterShard
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.parallel.lora_adapters import unique_parameters
from shardwright.parallel.low_precision_linears import low_precision_weights
from shardwright.parallel.parameter_names import is_padding, named_buffers, named_parameters
from shardwright.plan.plan import Plan

MOMENTS = OPTIMIZERS["adamw"].moments
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def base_optimizer(engine: Any) -> Any:
    """Return torch's (or DeepSpeed's CPU) Adam, which holds the moments."""
    optimizer = engine.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _masters(engine: Any) -> list[torch.Tensor]:
    """Return the fp32 tensors that the base optimizer updates.

    They are flat partitions, or at ZeRO-0 the parameters themselves.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(optimizer.fp32_partitioned_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return list(optimizer.single_partition_of_fp32_groups)
    if isinstance(optimizer, BF16_Optimizer):
        return list(optimizer.fp32_groups_flat_partition)
    return [p for group in optimizer.param_groups for p in group["params"]]


def _moments(engine: Any, master: torch.Tensor) -> dict[str, Any]:
    """Return Adam's state, created here where the first update has not made it yet."""
    base = base_optimizer(engine)
    state: dict[str, Any] = base.state[master]
    if not state:
        state["step"] = (
            torch.tensor(0.0) if isinstance(base, torch.optim.AdamW | torch.optim.Adam) else 0
        )
        for moment in _moment_names(base, master):
            state[moment] = torch.zeros_like(master, requires_grad=False)
    return state


def _moment_names(base: Any, master: torch.Tensor) -> tuple[str, ...]:
    """Return the names of a master's states that are like it; this project's optimizers tell."""
    return base.moment_names(master) if hasattr(base, "moment_names") else MOMENTS


def bind_optimizer(plan: Plan, engine: Any, transposed: frozenset[str]) -> None:
    """Tell an optimizer that needs more than elements which weights its masters hold.
    Collective."""
    base = base_optimizer(engine)
    if not isinstance(base, WeightOptimizer):
        return
    masters = _masters(engine)
    held: dict[str, OwnedElements] = {}
    for name, parameter in named_parameters(plan, engine.module).items():
        if not parameter.requires_grad or not base.takes(name):
            continue
        place = _shard_address(engine, parameter)
        number = _master_number(engine, parameter)
        master = parameter if number is None else masters[number]
        address = (0, 0, 0) if place is None else place[1:]
        held[name] = OwnedElements(master, *address, _shard_shape(parameter))
    base.bind(plan, _groups_of_masters(engine, masters), held, transposed)


def _groups_of_masters(
    engine: Any, masters: list[torch.Tensor]
) -> dict[torch.Tensor, dict[str, Any]]:
    optimizer, groups = engine.optimizer, engine.optimizer.param_groups
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        numbers = [optimizer.sub_group_to_group_id[at] for at in range(len(masters))]
    elif isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        numbers = list(range(len(masters)))
    else:
        numbers = [at for at, group in enumerate(groups) for _ in group["params"]]
    return {master: groups[at] for master, at in zip(masters, numbers, strict=True)}


def _master_number(engine: Any, parameter: Any) -> int | None:
    """Return the master that holds a parameter on some data rank; None: the parameter itself."""
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return int(optimizer.grad_position[optimizer.get_param_id(parameter)][0])
    if isinstance(optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer):
        groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        return next(
            at for at, group in enumerate(groups) if any(each is parameter for each in group)
        )
    return None


def optimizer_step(engine: Any) -> int:
    """Return the number of updates so far."""
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
    """Return the state of fp16's loss scaler; None where the optimizer has no scaler."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return (
        None
        if scaler is None
        else {key: float(getattr(scaler, key)) for key in _SCALER if hasattr(scaler, key)}
    )


def set_loss_scale(engine: Any, saved: dict[str, float]) -> None:
    """Restore a dynamic loss scale; one that the recipe fixes stays."""
    scaler = engine.optimizer.loss_scaler
    for attribute, value in saved.items() if scaler.dynamic else ():
        setattr(scaler, attribute, type(getattr(scaler, attribute))(value))


def parameter_shards(module: nn.Module) -> dict[str, ParameterShard]:
    """Return this rank's shard of each parameter, by Hugging Face name."""
    held, in_low_precision = {}, low_precision_weights(module)
    for name, p in unique_parameters(
        (name, p) for name, p in module.named_parameters() if not is_padding(p)
    ).items():
        # ds_tensor is ZeRO-3's own partition of the parameter.
        resident = getattr(p, "ds_tensor", p).numel() * p.element_size()
        held[name] = ParameterShard(
            shape=_shard_shape(p),
            resident_bytes=resident,
            is_trained=p.requires_grad,
            in_low_precision=id(p) in in_low_precision,
        )
    return held


def optimizer_shards(plan: Plan, engine: Any) -> Iterator[OwnedShard]:
    """Yield the shard of every parameter, trained or not, and of every persistent buffer."""
    masters = _masters(engine)
    for name, parameter in named_parameters(plan, engine.module).items():
        if not parameter.requires_grad:
            partitioned = hasattr(parameter, "ds_tensor")
            start, numel = 0, parameter.numel()
            if partitioned:
                start, numel = _zero3_partition_range(engine.optimizer, parameter)
            value = _model_values(parameter, start, max(0, numel))
            yield OwnedShard(
                name=name,
                shard_shape=_shard_shape(parameter),
                start=start,
                states={"value": value},
                live=value,
                partitioned=partitioned,
                copied=getattr(parameter, "ds_pipe_replicated", False),
            )
            continue
        place = _shard_address(engine, parameter)
        if place is None:  # another data rank owns all of it
            continue
        group, begin, start, numel = place
        master = parameter if group is None else masters[group]
        flats = {"fp32": master.data} | {
            moment: _moments(engine, master)[moment]
            for moment in _moment_names(base_optimizer(engine), master)
        }
        states = {state: flat.view(-1).narrow(0, begin, numel) for state, flat in flats.items()}
        yield OwnedShard(
            name=name,
            shard_shape=_shard_shape(parameter),
            start=start,
            states=states | _element_states(engine, name),
            live=_model_values(parameter, start, numel),
            partitioned=group is not None,
            copied=getattr(parameter, "ds_pipe_replicated", False),
        )
    base = base_optimizer(engine)
    if isinstance(base, WeightOptimizer):
        yield from base.state_shards(plan, _copied_names(plan, engine))

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


def _element_states(engine: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the states of this rank's elements that a weight has beside those of its master."""
    base = base_optimizer(engine)
    return base.element_states(name) if isinstance(base, WeightOptimizer) else {}


def _copied_names(plan: Plan, engine: Any) -> frozenset[str]:
    """Return the parameters that an earlier stage saves."""
    named = named_parameters(plan, engine.module).items()
    return frozenset(name for name, p in named if getattr(p, "ds_pipe_replicated", False))


def _shard_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(
        getattr(parameter, "ds_shape", parameter.shape)
    )  # ds_shape: what ZeRO-3 partitions


def _shard_address(engine: Any, parameter: Any) -> tuple[int | None, int, int, int] | None:
    """Return (master, start in it, start in the shard, elements); master None: the parameter
    itself.

    None where another data rank owns all of the parameter.
    """
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
    """Return (start, elements) of this data rank's partition; the last partition is padded."""
    size = parameter.ds_tensor.ds_numel
    start = size * optimizer._get_param_partition_rank(parameter)
    return start, min(size, parameter.ds_numel - start)


def _model_values(parameter: Any, start: int, numel: int) -> torch.Tensor:
    """Return `numel` elements of the weights from `start`; at ZeRO-3 the partition begins there."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.data.view(-1).narrow(0, 0, numel)  # type: ignore[no-any-return]
    return parameter.data.view(-1).narrow(0, start, numel)  # type: ignore[no-any-return]


def copy_masters_to_model(engine: Any) -> None:
    """Copy the restored fp32 masters to the weights that the model computes with. Collective."""
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
