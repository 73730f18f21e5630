"""What a module communicates, by style: its forward is wrapped on the instance, its class stays as
it is.

The parameters are cut before (split.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.parallel.attention_head_shards import shard_attention_heads
from shardwright.parallel.tensor_parallel_collectives import (
    all_reduce_gradient,
    copy_to_tensor_region,
    gather_from_tensor_region,
    mark_sharded_features,
    reduce_from_tensor_region,
    slice_for_rank,
)
from shardwright.parallel.vocabulary_embedding import shard_embedding_lookup


def wrap_forward(
    model: nn.Module,
    path: str,
    style: str,
    held: dict[str, ParameterSharding],
    group: dist.ProcessGroup,
) -> None:
    """held: the module's own parameters. Raises RuntimeError for a style that nobody lowers."""
    module = model.get_submodule(path)
    rank, degree = dist.get_rank(group), dist.get_world_size(group)

    enter, leave = (
        partial(copy_to_tensor_region, group=group),
        partial(reduce_from_tensor_region, group=group),
    )

    def gather(y: torch.Tensor) -> torch.Tensor:
        return gather_from_tensor_region(y, held["weight"].sizes, group)

    match style:
        case "colwise" | "packed_colwise":
            _wrap_inputs_and_output(module, enter=enter, leave=mark_sharded_features)
        case "vocabulary_head":
            _wrap_inputs_and_output(module, enter=enter)
        case "colwise_gather_output":
            _wrap_inputs_and_output(module, enter=enter, leave=gather)
        case "multi_query_colwise":
            own = _rank_query_slices(model, path, held["weight"].shape[0], rank, degree)
            _wrap_inputs_and_output(
                module,
                enter=enter,
                leave=lambda y: mark_sharded_features(slice_for_rank(gather(y), own, group)),
            )
        case "embedding_colwise":
            _wrap_inputs_and_output(module, leave=gather)
        case "rowwise":
            _add_bias_once(module, leave)
        case "rowwise_split_input":
            _wrap_inputs_and_output(
                module, enter=lambda x: slice_for_rank(x, held["weight"].pieces(rank), group)
            )
            _add_bias_once(module, leave)
        case "moe_tp_experts" | "all_reduce":
            _divide_replicated_parameters(module, held, group)
            _wrap_inputs_and_output(module, enter=enter, leave=leave)
        case "moe_identity_expert":
            _wrap_inputs_and_output(module, enter=lambda x: x / degree)
        case "mla_kv_a_proj":
            rotary = _rotary_width(model, path)
            if held["weight"].dimension is None:
                _wrap_inputs_and_output(
                    module, leave=lambda y: _copy_rotary_to_region(y, rotary, group)
                )
            else:
                _wrap_inputs_and_output(
                    module,
                    enter=enter,
                    leave=lambda y: _copy_rotary_to_region(gather(y), rotary, group),
                )
        case "replicated_with_grad_allreduce":
            for parameter in module.parameters():
                all_reduce_gradient(parameter, group)
        case "local_heads":
            shard_attention_heads(model, module, rank, degree)
        case "vocabulary_embedding":
            shard_embedding_lookup(module, held["weight"], group)
        case "packed_rowwise" | "local_params" | "replicated":
            pass  # the parameters' own cuts are all there is
        case unknown:
            raise RuntimeError(f"{path}: no lowering for the tensor-parallel style {unknown!r}")


def _wrap_inputs_and_output(
    module: nn.Module,
    *,
    enter: Callable[[torch.Tensor], torch.Tensor] | None = None,
    leave: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """`enter` on each floating tensor among the arguments, `leave` on the output (of a tuple, its
    first entry)."""
    inner = module.forward

    def entered(x: Any) -> Any:
        return enter(x) if enter and isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*map(entered, args), **{name: entered(x) for name, x in kwargs.items()})
        if leave is None:
            return output
        return (leave(output[0]), *output[1:]) if isinstance(output, tuple) else leave(output)

    module.forward = forward


def _add_bias_once(module: nn.Module, leave: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The module's own forward without its bias; the bias behind the all-reduce."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        bias = module._parameters.get("bias")
        if bias is None:
            return leave(inner(*args, **kwargs))
        module._parameters["bias"] = None
        try:
            share = inner(*args, **kwargs)
        finally:
            module._parameters["bias"] = bias
        return leave(share) + bias

    module.forward = forward


def _divide_replicated_parameters(
    module: nn.Module, held: dict[str, ParameterSharding], group: dist.ProcessGroup
) -> None:
    """A whole parameter inside a partial sum (an expert's output bias): each rank adds its share of
    it."""
    whole = [leaf for leaf, split in held.items() if split.dimension is None]
    if not whole:
        return
    inner, degree = module.forward, dist.get_world_size(group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {leaf: module._parameters[leaf] for leaf in whole}
        for leaf, parameter in parameters.items():
            share: Any = copy_to_tensor_region(parameter, group) / degree  # type: ignore[arg-type]
            module._parameters[leaf] = share
        try:
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    module.forward = forward


def _rank_query_slices(
    model: nn.Module, path: str, features: int, rank: int, degree: int
) -> tuple[tuple[int, int], ...]:
    """Fused query heads and one key/value head: the rank's own query heads, and the whole key and
    value."""
    attention: Any = model.get_submodule(path.rpartition(".")[0])
    queries = features - 2 * attention.head_dim
    return ((queries // degree * rank, queries // degree), (queries, 2 * attention.head_dim))


def _rotary_width(model: nn.Module, path: str) -> int:
    """Of multi-head latent attention: the last features of this projection go to every head, past
    kv_b_proj."""
    parent: Any = model.get_submodule(path.rpartition(".")[0])
    config: Any = model.config
    return int(
        getattr(parent, "qk_rope_head_dim", None) or config.get_text_config().qk_rope_head_dim
    )


def _copy_rotary_to_region(y: torch.Tensor, rotary: int, group: dist.ProcessGroup) -> torch.Tensor:
    latent, rope = y.split([y.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([latent, copy_to_tensor_region(rope, group)], dim=-1)
