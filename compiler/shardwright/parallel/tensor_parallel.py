"""Apply the plan's tensor-parallel map: shard each module's parameters in place and wrap its
forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardwright.layout.parameter_sharding import ModuleSharding, ParameterSharding
from shardwright.models.hf_config import HEAD_ATTRIBUTES, head_counts
from shardwright.parallel.tensor_parallel_collectives import (
    all_reduce_gradient,
    all_reduce_gradient_of_copies,
    copy_to_tensor_region,
    gather_from_tensor_region,
    mark_sharded_features,
    reduce_from_tensor_region,
    slice_for_rank,
)

# Attention modules with head counts as attributes, which become the rank's share.

# The heads' dimension of arguments with a value for every head. ALiBi joins batch and heads in
# dimension 0.
HEAD_ARGUMENTS: dict[str, int] = {"alibi": 0, "position_bias": 0, "attention_mask": 1}


def shard_attention_heads(model: nn.Module, module: nn.Module, rank: int, degree: int) -> None:
    """Set the head counts to the rank's share, and slice arguments with a value for every head."""
    config: Any = model.config
    heads, key_value_heads = head_counts(module, config.get_text_config())
    own, own_key_value = heads // degree, max(1, key_value_heads // degree)
    counts = {"heads": own, "key_value_heads": own_key_value, "groups": own // own_key_value}
    for name, kind in HEAD_ATTRIBUTES.items():
        if isinstance(value := getattr(module, name, None), int):
            setattr(module, name, value // degree if kind == "width" else counts[kind])
    inner, names = module.forward, tuple(inspect.signature(module.forward).parameters)

    def own_heads(name: str, x: Any) -> Any:
        dimension = HEAD_ARGUMENTS.get(name)
        if dimension is None or not isinstance(x, torch.Tensor) or x.ndim <= dimension:
            return x
        count = x.shape[dimension]
        if name == "attention_mask" and (x.ndim != 4 or count != heads or heads == 1):
            return x  # one mask for all heads
        if count % heads:
            return x
        split = x.unflatten(dimension, (count // heads, heads))
        return split.narrow(dimension + 1, rank * own, own).flatten(dimension, dimension + 1)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cut = [own_heads(name, x) for name, x in zip(names, args, strict=False)]
        return inner(
            *cut, *args[len(cut) :], **{name: own_heads(name, x) for name, x in kwargs.items()}
        )

    if HEAD_ARGUMENTS.keys() & set(names):
        module.forward = forward


# The input embedding, sharded by vocabulary, and the head's logits.


def shard_embedding_lookup(
    module: nn.Module, table: ParameterSharding, group: dist.ProcessGroup
) -> None:
    """Look up the ids of the rank's vocabulary shard with the embedding's own forward, and sum over
    ranks.

    padding_idx keeps its meaning (no gradient for that row) on the rank that holds it.
    """
    ((first, held),) = table.shard_ranges(dist.get_rank(group))
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        local = padding - first if first <= padding < first + held else None
        setattr(module, "padding_idx", local)  # noqa: B010
    for name, parameter in module.named_parameters():
        if name != "weight":  # a norm after the lookup gets one rank's tokens only
            all_reduce_gradient(parameter, group)
    inner = module.forward

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        elsewhere = (ids < first) | (ids >= first + held)
        own = inner((ids - first).masked_fill(elsewhere, 0), *args, **kwargs)
        return reduce_from_tensor_region(own.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)

    module.forward = forward


# Communication by style: the forward is wrapped on the instance, after its parameters are sharded.


def wrap_forward(
    model: nn.Module,
    path: str,
    style: str,
    held: dict[str, ParameterSharding],
    group: dist.ProcessGroup,
) -> None:
    """Wrap a module's forward with its style's communication.

    held: the module's own parameters

    Raises RuntimeError for a style without an implementation.
    """
    module = model.get_submodule(path)
    parent: Any = model.get_submodule(path.rpartition(".")[0])
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
            # The rank's fused query heads, and the one key/value head, which stays unsharded.
            width = 2 * parent.head_dim
            queries = held["weight"].shape[0] - width
            own = ((queries // degree * rank, queries // degree), (queries, width))
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
                module, enter=lambda x: slice_for_rank(x, held["weight"].shard_ranges(rank), group)
            )
            _add_bias_once(module, leave)
        case "moe_tp_experts" | "all_reduce":
            _divide_replicated_parameters(module, held, group)
            _wrap_inputs_and_output(module, enter=enter, leave=leave)
        case "moe_identity_expert":
            _wrap_inputs_and_output(module, enter=lambda x: x / degree)
        case "mla_kv_a_proj":
            # The last features are rotary, and go to every head without kv_b_proj.
            config: Any = model.config
            rotary = getattr(parent, "qk_rope_head_dim", None)
            rotary = int(rotary or config.get_text_config().qk_rope_head_dim)
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
            pass  # sharded parameters suffice
        case unknown:
            raise RuntimeError(f"{path}: unknown tensor-parallel style {unknown!r}")


def _wrap_inputs_and_output(
    module: nn.Module,
    *,
    enter: Callable[[torch.Tensor], torch.Tensor] | None = None,
    leave: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Apply `enter` to each floating tensor among the arguments, and `leave` to the output.

    A tuple's first entry is the output.
    """
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
    """Run the module's forward without its bias, and add the bias after the all-reduce."""
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
    """Divide a replicated parameter inside a partial sum (an expert's output bias) by the ranks."""
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


def _copy_rotary_to_region(y: torch.Tensor, rotary: int, group: dist.ProcessGroup) -> torch.Tensor:
    latent, rope = y.split([y.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([latent, copy_to_tensor_region(rope, group)], dim=-1)


class TensorSplitter:
    """Apply the map's modules, one by one, to an unsharded Hugging Face model."""

    def __init__(
        self,
        model: nn.Module,
        modules: tuple[ModuleSharding, ...],
        transposed: frozenset[str],
        group: dist.ProcessGroup,
    ) -> None:
        """Prepare the split.

        transposed: names of weights that are stored transposed to the map's
            (model_loading.conv1d_to_linear)
        """
        self.model, self.transposed, self.group = model, transposed, group
        self._rank = dist.get_rank(group)
        self._listed = {split.module for split in modules}
        # Keyed by tensor, because a tied one has several names.
        self._planned = {
            id(model.get_parameter(p.name)): p for split in modules for p in split.parameters
        }
        self._owners: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(path)
        self._cut_already: set[int] = set()

    def split(self, split: ModuleSharding) -> None:
        """Shard a module. Raises RuntimeError where the result differs from the plan."""
        module = self.model.get_submodule(split.module)
        held = self._held(module)
        tensors = [p for p in module.parameters(recurse=False) if id(p) in self._planned]
        for parameter in tensors:
            self._cut(parameter, self._planned[id(parameter)])
        wrap_forward(self.model, split.module, split.style, held, self.group)
        for path in dict.fromkeys(p for tensor in tensors for p in self._owners[id(tensor)]):
            other = self.model.get_submodule(path)
            if path not in self._listed and type(other) is type(
                module
            ):  # a tied module with the same sharded tensor
                wrap_forward(self.model, path, split.style, self._held(other), self.group)
        for planned in split.parameters:
            self._check(self.model.get_parameter(planned.name), planned)

    def _held(self, module: nn.Module) -> dict[str, ParameterSharding]:
        """Return the sharding of the module's own parameters, by leaf name."""
        own = module.named_parameters(recurse=False)
        return {leaf: self._planned[id(p)] for leaf, p in own if id(p) in self._planned}

    def _cut(self, parameter: nn.Parameter, planned: ParameterSharding) -> None:
        if planned.dimension is None or id(parameter) in self._cut_already:
            return
        self._cut_already.add(id(parameter))
        dimension = 1 - planned.dimension if planned.name in self.transposed else planned.dimension
        parts = [
            parameter.data.narrow(dimension, start, length)
            for start, length in planned.shard_ranges(self._rank)
        ]
        parameter.data = torch.cat(parts, dim=dimension).contiguous()
        # DeepSpeed reads Megatron's mark: the gradient norm counts marked parameters on every rank,
        # and others on the first. Copies of a shard count once.
        setattr(parameter, "tensor_model_parallel", self._rank % planned.copies == 0)  # noqa: B010
        if planned.copies > 1:
            all_reduce_gradient_of_copies(parameter, planned.copies, self.group)

    def _check(self, parameter: nn.Parameter, planned: ParameterSharding) -> None:
        shape, got = planned.shard_shape(self._rank), tuple(parameter.shape)
        if got != (shape[::-1] if planned.name in self.transposed else shape):
            raise RuntimeError(
                f"{planned.name} is {got} on tensor rank {self._rank}, the plan says {shape}"
            )
        counted = planned.dimension is not None and self._rank % planned.copies == 0
        if bool(getattr(parameter, "tensor_model_parallel", False)) != counted:
            raise RuntimeError(f"the gradient norm would count {planned.name} wrongly")
