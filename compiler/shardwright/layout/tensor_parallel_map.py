"""Map modules to tensor-parallel styles, with every parameter's shard sizes.

Styles shard dimensions of Hugging Face's own layout. A weight ends in (out, in); experts' 3-D
weights have the expert first. colwise shards the last but one dimension, rowwise the last.
transformers' Conv1D (GPT-2) holds (in, out). A column bias is sharded with its output dimension. A
row bias is replicated, and added once after the all-reduce.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.layout.parameter_sharding import (
    ModuleSharding,
    ParameterSharding,
    TensorParallelMap,
    padded_shard_sizes,
    shard_sizes,
)
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import (
    COLUMN_STYLES,
    FUSED_QKV,
    GROUPED_QKV,
    MULTI_QUERY,
    ROW_STYLES,
    STYLES_THAT_MAY_STAY_UNSHARDED,
    VOCABULARY_STYLES,
    ModelGraph,
    Parameter,
    name_pattern,
)

# Model types whose linears are Conv1D, weight (in, out). All others have nn.Linear, (out, in).
TRANSPOSED_LINEAR_TYPES = ("gpt2", "gpt-sw3", "openai-gpt")


def tensor_parallel_map(
    graph: ModelGraph, degree: int, *, padded: bool = False
) -> TensorParallelMap:
    """Build the map of every module that owns parameters, in model order, then of those that a
    style names.

    A tied head has no parameters of its own: its tensor is listed under the embedding. Vocabulary
    shards may be uneven. A linear whose whole output is gathered stays unsharded where it does not
    divide; any other dimension must divide.

    padded: pad the vocabulary to a multiple of the ranks, as Megatron does

    Raises Refusal with SW3103, SW3104, SW3105 or SW3126.
    """
    errors = divisibility_errors(graph, degree)
    if errors:
        raise Refusal(errors[0])
    styles = dict(graph.tensor_parallel_styles) if degree > 1 else {}
    modules: dict[str, list[Parameter]] = {}
    seen: set[str] = set()
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.name not in seen:
                seen.add(parameter.name)
                modules.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    splits: list[ModuleSharding] = []
    for module, parameters in modules.items():
        cut = tuple(split_parameter(graph, p, degree, padded=padded) for p in parameters)
        splits.append(
            ModuleSharding(module=module, style=_module_style(styles, module, cut), parameters=cut)
        )
    splits += _containers(styles, modules)
    splits = _with_local_heads(splits)
    # A tied table or head has its tensor in another module's list.
    listed = {s.module for s in splits}
    owned = {p.name for m in splits for p in m.parameters}
    splits += [
        ModuleSharding(module=name, style=style, parameters=())
        for name, style in styles.items()
        if style in VOCABULARY_STYLES and name not in listed and name not in owned
    ]
    result = TensorParallelMap(
        degree=degree,
        kind=graph.tensor_parallel_kind if degree > 1 else "none",
        modules=tuple(splits),
        vocabulary_sizes=_vocabulary(graph.vocabulary_size, degree, padded)
        if "vocabulary_head" in styles.values()
        else (),
        sharded_fraction=_sharded_fraction(graph, splits),
    )
    result.verify()
    return result


def with_unsplit_experts(graph: ModelGraph, tensor_map: TensorParallelMap) -> TensorParallelMap:
    """Return the map with unsharded experts on each tensor rank."""
    experts = expert_modules(graph)
    modules = [
        replace(
            m,
            style="replicated",
            parameters=tuple(
                (ParameterSharding(name=p.name, shape=p.shape, dimension=None, blocks=(), sizes=()))
                for p in m.parameters
            ),
        )
        if m.module in experts
        else m
        for m in tensor_map.modules
    ]
    return replace(
        tensor_map, modules=tuple(modules), sharded_fraction=_sharded_fraction(graph, modules)
    )


def _sharded_fraction(graph: ModelGraph, splits: list[ModuleSharding]) -> float:
    decoder = {
        p.name for layer in graph.layers if layer.kind == "decoder" for p in layer.parameters
    }
    matrices = [p for m in splits for p in m.parameters if p.name in decoder and len(p.shape) >= 2]
    total = sum(math.prod(p.shape) for p in matrices)
    return sum(math.prod(p.shape) for p in matrices if p.dimension is not None) / max(1, total)


def _module_style(
    styles: dict[str, str], module: str, parameters: tuple[ParameterSharding, ...]
) -> str:
    """Return what the module communicates; a linear that stays unsharded at this degree is
    replicated."""
    style = styles.get(name_pattern(module), "replicated")
    if (
        style in STYLES_THAT_MAY_STAY_UNSHARDED
        and style != "mla_kv_a_proj"
        and all(p.dimension is None for p in parameters)
    ):
        return "replicated"
    if style == "replicated" and any(p.dimension is not None for p in parameters):
        return "local_params"  # only some of its parameters are sharded
    return {FUSED_QKV: "packed_colwise", GROUPED_QKV: "colwise"}.get(style, style)


def _containers(
    styles: dict[str, str], modules: dict[str, list[Parameter]]
) -> list[ModuleSharding]:
    """Return modules without parameters that communicate: attention with head counts, an
    experts' list."""
    without_communication = (
        *COLUMN_STYLES,
        *ROW_STYLES,
        *VOCABULARY_STYLES,
        "local_params",
        "replicated",
    )
    with_communication = {p: s for p, s in styles.items() if s not in without_communication}
    paths = dict.fromkeys(
        ".".join(module.split(".")[:length])
        for module in modules
        for length in range(1, module.count(".") + 2)
    )
    found: list[ModuleSharding] = []
    for path in paths:
        for pattern, style in with_communication.items():
            parent, _, leaf = pattern.rpartition(".")
            if path not in modules and name_pattern(path) == pattern:
                found.append(ModuleSharding(module=path, style=style, parameters=()))
            elif style == "moe_identity_expert" and name_pattern(path) == parent:
                found.append(ModuleSharding(module=f"{path}.{leaf}", style=style, parameters=()))
    return found


def _with_local_heads(splits: list[ModuleSharding]) -> list[ModuleSharding]:
    """Mark attention modules whose key/value heads are copied: fewer of their query heads share
    each."""
    allows_replicas = dict.fromkeys(
        s.module.rpartition(".")[0]
        for s in splits
        if any(p.copies > 1 for p in s.parameters if len(p.shape) > 1)
    )
    listed = {s.module: s for s in splits}
    attention = [path for path in allows_replicas if any(m.startswith(path + ".") for m in listed)]
    for path in attention:
        split = listed.get(path, ModuleSharding(module=path, style="local_heads", parameters=()))
        listed[path] = replace(split, style="local_heads")
    return list(listed.values())


def _vocabulary(total: int, degree: int, padded: bool) -> tuple[int, ...]:
    return (padded_shard_sizes if padded else shard_sizes)(total, degree)


def split_parameter(
    graph: ModelGraph, parameter: Parameter, degree: int, *, padded: bool = False
) -> ParameterSharding:
    """Return how one parameter is sharded over `degree` ranks, near-evenly where it does not
    divide.

    padded: as tensor_parallel_map takes it
    """
    _, units = _tables(graph)
    style = _style(graph, parameter)
    dimension = _dimension(graph, parameter, style) if degree > 1 else None
    unsharded = ParameterSharding(
        name=parameter.name, shape=parameter.shape, dimension=None, blocks=(), sizes=()
    )
    if dimension is None:
        return unsharded
    full = parameter.shape[dimension]
    if style in STYLES_THAT_MAY_STAY_UNSHARDED and full % degree:
        return unsharded
    blocks = _blocks(graph, style, full)
    heads = _heads_of(units, parameter.name) or degree
    copies = degree // heads if style == "colwise" and degree > heads and degree % heads == 0 else 1
    as_padded = padded and style in VOCABULARY_STYLES
    parts = [_vocabulary(block, degree // copies, as_padded) for block in blocks]
    sizes = tuple(
        sum(parts[b][rank // copies] for b in range(len(blocks))) for rank in range(degree)
    )
    return ParameterSharding(
        name=parameter.name,
        shape=parameter.shape,
        dimension=dimension,
        blocks=blocks,
        sizes=sizes,
        copies=copies,
    )


@functools.lru_cache(maxsize=64)
def _tables(graph: ModelGraph) -> tuple[dict[str, str], dict[str, int]]:
    return dict(graph.tensor_parallel_styles), dict(graph.tensor_parallel_heads)


def _heads_of(units: dict[str, int], name: str) -> int | None:
    """Return the head count of a parameter or of its module, with or without the layer's number."""
    module = name.rpartition(".")[0]
    return next(
        (
            units[path]
            for path in (name, name_pattern(name), module, name_pattern(module))
            if path in units
        ),
        None,
    )


def _blocks(graph: ModelGraph, style: str, full: int) -> tuple[int, ...]:
    if style == FUSED_QKV:
        unit = full // (graph.attention_heads + 2 * graph.key_value_heads)
        return (
            graph.attention_heads * unit,
            graph.key_value_heads * unit,
            graph.key_value_heads * unit,
        )
    return (full // 2, full // 2) if style.startswith("packed") else (full,)


def weight_orientation(graph: ModelGraph, parameter: Parameter, degree: int) -> ParameterSharding:
    """Return how a parameter is sharded, in the orientation (out, in)."""
    split = split_parameter(graph, parameter, degree)
    is_linear = len(parameter.shape) == 2 and _style(graph, parameter) not in VOCABULARY_STYLES
    if graph.model_type not in TRANSPOSED_LINEAR_TYPES or not is_linear:
        return split
    dimension = None if split.dimension is None else 1 - split.dimension
    return replace(split, shape=split.shape[::-1], dimension=dimension)


def fused_blocks(graph: ModelGraph, parameter: Parameter) -> tuple[int, ...] | None:
    """Return the output features of each matrix that a weight joins; () where it is one matrix.

    None where the matrices alternate by heads or by features, or their features are not the output
    dimension's.
    """
    style = _style(graph, parameter)
    if style in (GROUPED_QKV, MULTI_QUERY):
        return None
    if style != FUSED_QKV and not style.startswith("packed"):
        return ()
    dimension = _dimension(graph, parameter, style)
    transposed = graph.model_type in TRANSPOSED_LINEAR_TYPES
    outputs = len(parameter.shape) - (1 if transposed else 2)
    return None if dimension != outputs else _blocks(graph, style, parameter.shape[outputs])


def _style(graph: ModelGraph, parameter: Parameter) -> str:
    styles, _ = _tables(graph)
    module = parameter.name.rpartition(".")[0]
    return styles.get(name_pattern(parameter.name)) or styles.get(
        name_pattern(module), "replicated"
    )


def _dimension(graph: ModelGraph, parameter: Parameter, style: str) -> int | None:
    """Return the dimension that the style shards; None where every rank holds the parameter
    unsharded."""
    dimensions = len(parameter.shape)
    if style in VOCABULARY_STYLES:
        return 0
    transposed = graph.model_type in TRANSPOSED_LINEAR_TYPES and dimensions == 2
    if style in COLUMN_STYLES:
        return 0 if dimensions == 1 else dimensions - (1 if transposed else 2)
    if style in ROW_STYLES and dimensions > 1:
        return dimensions - (2 if transposed else 1)
    return None


def is_attention_sharded(graph: ModelGraph) -> bool:
    """Return whether each tensor rank computes only its share of the attention heads."""
    return any(
        graph.attention_module in p.split(".")
        for p, s in graph.tensor_parallel_styles
        if s == "rowwise"
    ) or any(s == "local_heads" for _, s in graph.tensor_parallel_styles)


def is_feed_forward_sharded(graph: ModelGraph) -> bool:
    """Return whether each tensor rank holds only its share of the feed-forward's inner features."""
    return any(
        s == "moe_tp_experts" or (s == "rowwise" and graph.attention_module not in p.split("."))
        for p, s in graph.tensor_parallel_styles
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisibilityConstraint:
    """Require a count that the tensor degree divides; with allows_replicas, or a multiple of it."""

    code: str
    name: str
    count: int
    allows_replicas: bool = False

    def allows(self, degree: int) -> bool:
        return self.count % degree == 0 or (self.allows_replicas and degree % self.count == 0)


def divisibility_errors(graph: ModelGraph, degree: int) -> tuple[Diagnostic, ...]:
    """Return why the model's dimensions forbid this degree, one error a code, with the valid
    degrees.

    Codes: SW3103 heads, SW3104 key/value heads, SW3105 feed-forward, SW3126 experts.
    """
    counts = _counts(graph)
    errors: dict[str, Diagnostic] = {}
    for c in counts:
        if not c.allows(degree) and c.code not in errors:
            message = f"tensor {degree} does not divide the model's {c.count} {c.name}"
            valid = [d for d in range(1, 4 * degree) if all(c.allows(d) for c in counts)]
            errors[c.code] = found(
                c.code,
                "parallelism.tensor",
                message,
                _HELP[c.code],
                tuple(str(d) for d in sorted(sorted(valid, key=lambda d: abs(d - degree))[:3])),
            )
    return tuple(errors[code] for code in sorted(errors))


_HELP = {
    "SW3103": "Choose a degree that gives each tensor rank the same number of attention heads.",
    "SW3104": (
        "Choose a degree that divides the key/value heads, or a multiple of them: ranks then share "
        "copies of a head."
    ),
    "SW3105": "Choose a degree that splits the feed-forward matrices evenly.",
    "SW3126": "Choose a degree that splits every expert evenly.",
}


@functools.lru_cache(maxsize=64)
def _counts(graph: ModelGraph) -> tuple[DivisibilityConstraint, ...]:
    styles, units = _tables(graph)
    found: list[DivisibilityConstraint] = []
    if is_attention_sharded(graph) and (not units or MULTI_QUERY in styles.values()):
        found.append(
            DivisibilityConstraint(
                code="SW3103", name="attention heads", count=graph.attention_heads
            )
        )
    for path, heads in units.items():
        if heads >= graph.attention_heads:
            found.append(DivisibilityConstraint(code="SW3103", name="attention heads", count=heads))
        else:
            allows_replicas = styles.get(name_pattern(path)) == "colwise"
            found.append(
                DivisibilityConstraint(
                    code="SW3104",
                    name="key/value heads",
                    count=heads,
                    allows_replicas=allows_replicas,
                )
            )
    for parameter in (
        p for layer in graph.layers for p in layer.parameters if layer.kind == "decoder"
    ):
        module = name_pattern(parameter.name.rpartition(".")[0])
        style = styles.get(name_pattern(parameter.name)) or styles.get(module, "replicated")
        dimension = _dimension(graph, parameter, style)
        if (
            dimension is None
            or style in STYLES_THAT_MAY_STAY_UNSHARDED
            or _heads_of(units, parameter.name)
        ):
            continue
        size = _blocks(graph, style, parameter.shape[dimension])[0]
        if style == FUSED_QKV:
            found.append(
                DivisibilityConstraint(
                    code="SW3104", name="key/value heads", count=graph.key_value_heads
                )
            )
        elif len(parameter.shape) == 3:
            found.append(
                DivisibilityConstraint(code="SW3126", name="features of an expert", count=size)
            )
        elif graph.attention_module in module.split("."):
            found.append(
                DivisibilityConstraint(code="SW3103", name="features of the attention", count=size)
            )
        else:
            found.append(
                DivisibilityConstraint(
                    code="SW3105", name="features of the feed-forward", count=size
                )
            )
    return tuple(dict.fromkeys(found))
