"""The matrix products of each distinct decoder layer, as one tensor rank runs them.

Shape letters: S sequence length, b micro-batch, H hidden size, V vocabulary, t tensor degree. A
product is (M, K) times (K, N); M is b x S tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.layout.tensor_parallel_map import (
    TRANSPOSED_LINEAR_TYPES,
    is_attention_sharded,
    is_feed_forward_sharded,
    split_parameter,
)
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import Layer, ModelGraph, Parameter
from shardwright.models.parameter_name_pattern import name_pattern
from shardwright.utils.memoize import memoize


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """n, k: local widths. batch: local experts (1 elsewhere). in_attention: belongs to the
    attention module."""

    n: int
    k: int
    batch: int
    in_attention: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What tells one kind of decoder layer from another. Elements are per token, kept for backward.

    matmul_flops: forward, per token, of the whole layer; attention_flops: per token and position.
    attention_module_flops: the part of matmul_flops inside the attention module. fused_norms:
    torch's own LayerNorm, one kernel; composed_norms: a weight without a bias, RMSNorm in Python.
    expert_numel: of numel, what expert ranks can share out; experts_per_token: that each token is
    routed to; expert_features: widths of all products of an expert, into and out of each. 0 where
    there are none. gathered_products: linears whose whole output every tensor rank gets,
    gathered_outputs wide together;
        gathered_features: what those move per token forward and backward, the output gathered and
        the input's gradient all-reduced (twice the bytes).
    """

    products: tuple[Product, ...]
    numel: int
    matmul_flops: int
    attention_module_flops: int
    attention_flops: int
    elements: int
    attention_elements: int
    scores: int
    fused_norms: int
    composed_norms: int
    gathered_features: int
    gathered_products: int
    gathered_outputs: int = 0
    expert_numel: int = 0
    experts_per_token: int = 0
    expert_features: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """kinds: distinct decoder layers. kind_of: for each of graph.layers, an index into kinds; -1
    for the ends.

    attention_degree, feed_forward_degree: tensor ranks that share the heads and the inner features;
    1 where a style gathers them and each rank computes all.
    """

    kinds: tuple[LayerShape, ...]
    kind_of: tuple[int, ...]
    numel: tuple[int, ...]  # local parameters, prefix sums over graph.layers (length layers + 1)
    expert_numel: tuple[int, ...]  # of LayerShape, prefix sums
    gathered_products: tuple[int, ...]
    gathered_features: tuple[int, ...]
    modules: tuple[
        int, ...
    ]  # that hold parameters of their own, each expert's matrices alone; prefix sums
    stacked_modules: tuple[int, ...]  # the same where a layer's experts are one module
    decoder_flops: tuple[
        int, int, int
    ]  # of all decoder layers: products, those of the attention modules, scores
    head_flops: int  # per token
    attention_degree: int
    feed_forward_degree: int
    matrices: int  # of the decoder layers: as many parameters are gathered one by one at most
    shared_numel: (
        int  # the tied tensor's local elements, which embedding and head both list (0 if untied)
    )
    head_width: int  # local vocabulary
    flops_source: str  # of the first layer that was not traced, else traced
    positions: (
        bool  # a table of positions is added at the embedding: no rotary kernels in the layers
    )

    def largest_layer(self, expert: int) -> int:
        """Local parameters of the largest decoder layer, where so many expert ranks share out its
        experts."""
        return max(
            (kind.numel - kind.expert_numel + kind.expert_numel // expert for kind in self.kinds),
            default=0,
        )

    def largest_product(self, expert: int) -> int:
        """Of the largest matrix in one."""
        products = (
            (p, max(1, p.batch // expert) if kind.expert_numel else p.batch)
            for kind in self.kinds
            for p in kind.products
        )
        return max((p.n * p.k * batch for p, batch in products), default=0)


@memoize(lambda graph, tensor: (graph.identity, tensor))
def model_shapes(graph: ModelGraph, tensor: int) -> ModelShapes:
    kinds, kind_of, numel = _split_layers(graph, tensor)
    sources = (layer.flops_source for layer in graph.layers)
    decoder = [layer for layer in graph.layers if layer.kind == "decoder"]

    def prefix(value: Callable[[LayerShape], int]) -> tuple[int, ...]:
        return (0, *itertools.accumulate(0 if k < 0 else value(kinds[k]) for k in kind_of))

    mapped = (
        graph.tensor_parallel_kind != ""
    )  # without a map the estimate is of what tensor parallelism usually is
    return ModelShapes(
        kinds=kinds,
        kind_of=kind_of,
        numel=(0, *itertools.accumulate(numel)),
        expert_numel=prefix(lambda kind: kind.expert_numel),
        gathered_products=prefix(lambda kind: kind.gathered_products),
        gathered_features=prefix(lambda kind: kind.gathered_features),
        modules=(0, *itertools.accumulate(_modules(layer) for layer in graph.layers)),
        stacked_modules=(
            0,
            *itertools.accumulate(_modules(layer, stacked=True) for layer in graph.layers),
        ),
        decoder_flops=(
            sum(layer.matmul_flops_per_token for layer in decoder),
            sum(layer.attention_module_flops_per_token for layer in decoder),
            sum(layer.attention_flops_per_token_per_position for layer in decoder),
        ),
        head_flops=sum(
            layer.matmul_flops_per_token for layer in graph.layers if layer.kind != "decoder"
        ),
        attention_degree=tensor if is_attention_sharded(graph) or not mapped else 1,
        feed_forward_degree=tensor if is_feed_forward_sharded(graph) or not mapped else 1,
        matrices=sum(len(kinds[k].products) for k in kind_of if k >= 0),
        shared_numel=_shared_numel(graph, tensor),
        head_width=-(-graph.vocabulary_size // tensor),
        flops_source=next((s for s in sources if s != "traced"), "traced"),
        positions=sum(len(p.shape) == 2 for p in graph.layers[0].parameters) > 1,
    )


def _split_layers(
    graph: ModelGraph, tensor: int
) -> tuple[tuple[LayerShape, ...], tuple[int, ...], tuple[int, ...]]:
    """ModelShapes.kinds and kind_of, and each layer's parameters on one tensor rank."""
    styles = dict(graph.tensor_parallel_styles)
    # Layers that differ in their number alone are split once, if no style and no number of heads is
    # one layer's own.
    alike = all(
        name_pattern(path) == path
        for path, _ in (*graph.tensor_parallel_styles, *graph.tensor_parallel_heads)
    )
    known: dict[tuple[object, ...], tuple[LayerShape | None, int]] = {}
    kinds: dict[LayerShape, int] = {}
    kind_of: list[int] = []
    numel: list[int] = []
    for layer in graph.layers:
        start = len(layer.name)
        parameters = tuple((p.name[start:], p.shape) if alike else p for p in layer.parameters)
        key = (parameters, *(getattr(layer, name) for name in _COUNTS))
        if layer.kind != "decoder" or key not in known:
            known[key] = _split_layer(graph, layer, tensor, styles)
        shape, held = known[key]
        numel.append(held)
        kind_of.append(-1 if shape is None else kinds.setdefault(shape, len(kinds)))
    return tuple(kinds), tuple(kind_of), tuple(numel)


def _modules(layer: Layer, *, stacked: bool = False) -> int:
    """Modules with parameters. Experts whose matrices stand in one tensor are one module. Those of
    the published runs (transformers 4, a loop over experts in Python) were three each: gate, up and
    down."""
    if stacked:
        return len({p.name.rpartition(".")[0] for p in layer.parameters})
    names = {p.name.rpartition(".")[0] for p in layer.parameters if len(p.shape) < 3}
    return len(names) + 3 * max(
        (p.shape[0] for p in layer.parameters if len(p.shape) == 3), default=0
    )


def _shared_numel(graph: ModelGraph, tensor: int) -> int:
    shared = {p.name for p in graph.layers[0].parameters} & {
        p.name for p in graph.layers[-1].parameters
    }
    return sum(
        split_parameter(graph, p, tensor).shard_numel(0)
        for p in graph.layers[-1].parameters
        if p.name in shared
    )


_COUNTS = (
    *(
        "matmul_flops_per_token",
        "attention_module_flops_per_token",
        "attention_flops_per_token_per_position",
    ),
    *("activation_elements_per_token", "attention_activation_elements_per_token"),
    "attention_matrix_elements_per_token_per_position",
)
"""What a LayerShape takes of its layer beside the parameters."""


def _split_layer(
    graph: ModelGraph, layer: Layer, tensor: int, styles: dict[str, str]
) -> tuple[LayerShape | None, int]:
    """None for the embedding and the head; and its parameters on one tensor rank."""
    transposed = graph.model_type in TRANSPOSED_LINEAR_TYPES
    splits = [(p, split_parameter(graph, p, tensor)) for p in layer.parameters]
    shards = [(p, split.shard_shape(0)) for p, split in splits]
    numel = sum(_numel(shape) for _, shape in shards)
    if layer.kind != "decoder":
        return None, numel
    attention = f"{layer.name}.{graph.attention_module}."
    gathered = [
        p.shape
        for p, split in splits
        if split.dimension is not None
        and len(p.shape) == 2
        and styles.get(name_pattern(p.name.rpartition(".")[0])) == "colwise_gather_output"
    ]
    modules = expert_modules(graph)
    experts = [(p, shape) for p, shape in shards if p.name.rpartition(".")[0] in modules]
    shape = LayerShape(
        expert_numel=sum(_numel(shape) for _, shape in experts),
        experts_per_token=_chosen(layer, [p for p, _ in experts]),
        expert_features=sum(shape[-1] + shape[-2] for _, shape in experts if len(shape) == 3),
        products=tuple(
            _product(shape, transposed, p.name.startswith(attention))
            for p, shape in shards
            if len(shape) in (2, 3)
        ),
        numel=numel,
        matmul_flops=layer.matmul_flops_per_token,
        attention_module_flops=layer.attention_module_flops_per_token,
        attention_flops=layer.attention_flops_per_token_per_position,
        elements=layer.activation_elements_per_token,
        attention_elements=layer.attention_activation_elements_per_token,
        scores=layer.attention_matrix_elements_per_token_per_position,
        fused_norms=_norms(layer, graph.hidden_size, with_bias=True),
        composed_norms=_norms(layer, graph.hidden_size, with_bias=False),
        gathered_features=sum(out + 2 * width for out, width in gathered),
        gathered_products=len(gathered),
        gathered_outputs=sum(out for out, _ in gathered),
    )
    return shape, numel


def _chosen(layer: Layer, experts: list[Parameter]) -> int:
    """Experts that a token goes to: what the layer computes beyond its other matrices."""
    if not experts:
        return 0
    names = {p.name for p in experts}
    others = sum(p.numel for p in layer.parameters if len(p.shape) == 2 and p.name not in names)
    stacked = sum(p.numel for p in experts if len(p.shape) == 3)
    count = experts[0].shape[0]
    return max(1, min(count, round((layer.matmul_flops_per_token / 2 - others) * count / stacked)))


def saved_products(products: tuple[Product, ...]) -> tuple[Product, ...]:
    """The first, the third and so on: those whose results torchtitan's selective checkpointing
    keeps (arXiv 2410.06511, section 2.2.3; its policy counts matrix products in the order of the
    forward pass)."""
    return products[::2]


def recomputed_products(products: tuple[Product, ...]) -> tuple[Product, ...]:
    """The others."""
    return products[1::2]


def _product(shape: tuple[int, ...], transposed: bool, in_attention: bool) -> Product:
    out, into = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    return Product(
        n=out, k=into, batch=shape[0] if len(shape) == 3 else 1, in_attention=in_attention
    )


def _norms(layer: Layer, hidden: int, *, with_bias: bool) -> int:
    """Norms over the hidden size: modules whose every parameter is one vector of it."""
    modules: dict[str, list[tuple[int, ...]]] = {}
    for parameter in layer.parameters:
        modules.setdefault(parameter.name.rpartition(".")[0], []).append(parameter.shape)
    sizes = [len(shapes) for shapes in modules.values() if set(shapes) == {(hidden,)}]
    return sum(1 for size in sizes if (size > 1) == with_bias)


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
