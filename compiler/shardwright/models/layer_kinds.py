"""Which layers a shallow copy of a model keeps: one of every kind, in their order, and what the
configuration says of each kept layer.

A configuration describes its layers one by one in lists as long as the model is deep, in lists of
layer numbers, and in `per_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.models.parameter_name_pattern import name_pattern

LAYERS = 4
MOST_KINDS = 12
"""Some lists have a value of its own for each layer."""

DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_blocks",
    "num_decoder_layers",
)
# A kind of layer that comes once in so many layers, where no list says which.
_PERIODS = (
    "attn_layer_period",
    "expert_layer_period",
    "layer_group_size",
    "n_layers_per_attn_res_block",
    "global_attn_every_n_layers",
    "interleave_moe_layer_step",
    "rescale_every",
    "decoder_sparse_step",
    "moe_layer_interval",
)
# Counted from one end of the stack.
_COUNTS = (
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "num_kv_shared_layers",
)
_PER_LAYER = "per_layer_config"


def representative_layers(document: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the original layers that stand in the copy, repeated where there are fewer kinds
    than LAYERS."""
    layers = next((document[n] for n in DEPTHS if isinstance(document.get(n), int)), 0)
    kinds = list({_kind(document, i, layers): i for i in reversed(range(layers))}.values())[::-1][
        :MOST_KINDS
    ] or [0]
    periods = [
        document[n] + 1
        for n in _PERIODS
        if isinstance(document.get(n), int) and document[n] < MOST_KINDS
    ]
    depth = max(LAYERS, len(kinds), *periods)
    return tuple(kinds[i % len(kinds)] for i in range(depth))


def truncate_layers(document: Mapping[str, Any], kept: tuple[int, ...]) -> dict[str, Any]:
    """The attributes that speak of layers, for the kept ones only."""
    layers = next((document[n] for n in DEPTHS if isinstance(document.get(n), int)), 0)
    out: dict[str, Any] = {}
    for name, value in document.items():
        if name in DEPTHS and isinstance(value, int):
            out[name] = len(kept)
        elif name in _COUNTS and isinstance(value, int):
            out[name] = min(value, 1)
        elif _is_list_of_layers(name, value, layers):
            out[name] = [value[i] for i in kept]
        elif _is_list_of_numbers(name, value, layers):
            out[name] = [place for place, i in enumerate(kept) if i in value]
        elif name == _PER_LAYER and isinstance(value, dict):
            by_number = {int(layer): sizes for layer, sizes in value.items()}
            out[name] = {str(place): by_number[i] for place, i in enumerate(kept) if i in by_number}
    if (
        "attention_types" in out.keys() | document.keys() and "attention_layers" in out
    ):  # gpt_neo says it twice
        out["attention_types"] = [[[kind], 1] for kind in out["attention_layers"]]
    return out


def has_every_layer_kind(model: nn.Module, copy: nn.Module) -> bool:
    """Whether each kind of layer of `model` stands in `copy`, too: by the classes of its modules
    and the names of its parameters, whatever the configuration calls it."""
    theirs = _kinds_by_list(copy)
    return all(
        kinds <= theirs.get(path, frozenset()) for path, kinds in _kinds_by_list(model).items()
    )


def _kinds_by_list(model: nn.Module) -> dict[str, frozenset[object]]:
    """Of each list of layers that stands in no other one, the kinds of its members."""
    lists = {
        path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    outermost = {
        p: m for p, m in lists.items() if not any(p.startswith(f"{other}.") for other in lists)
    }
    return {
        path: frozenset(
            (
                frozenset(type(module) for module in layer.modules()),
                frozenset(name_pattern(name) for name, _ in layer.named_parameters()),
            )
            for layer in layers
        )
        for path, layers in outermost.items()
    }


def _kind(document: Mapping[str, Any], layer: int, layers: int) -> str:
    said: list[Any] = []
    for name, value in document.items():
        if _is_list_of_layers(name, value, layers):
            said.append(value[layer])
        elif _is_list_of_numbers(name, value, layers):
            said.append(layer in value)
        elif name == _PER_LAYER and isinstance(value, dict):
            said.append([sizes for number, sizes in value.items() if int(number) == layer])
    return repr(said)


def _is_list_of_layers(name: str, value: Any, layers: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == layers > 0
        and not _is_list_of_numbers(name, value, layers)
    )


def _is_list_of_numbers(name: str, value: Any, layers: int) -> bool:
    """Layer numbers, ascending: `mlp_only_layers`, `full_attn_idxs`. A list of zeros and ones is
    one value a layer."""
    named = "layer" in name or name.endswith(("_idxs", "_indices"))
    return (
        named
        and isinstance(value, list | tuple)
        and all(type(n) is int and 0 <= n < layers for n in value)
        and list(value) == sorted(set(value))
    )
