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
from shardwright.models.model_graph import (
    Layer,
    ModelGraph,
    Parameter,
    name_pattern,
    saved_activations_entry,
)
from shardwright.recipe.literal_types import Checkpointing
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


# Activation bytes per layer: traced from the model's own modules, or the published formula for
# other people's.
#
# `assume.kernels: auto` and `hf` take what the model's modules keep (ModelGraph's traced bytes).
# `megatron`, `compiled` say that other code ran a model of these shapes, for which arXiv 2205.05198
# counts, as it does for a layer that could not be traced, and for `hf` of a GPT-2 (see
# runs_hf_modules). Shape letters: S sequence length, t tensor degree.


# Published runs of plain GPTs in PyTorch come as a GPT-2 recipe, and are none: nobody pretrains
# Hugging Face's GPT-2 at those sizes. They are MPT and its like, whose GELU and loss are fused
# (decision 011).
PUBLISHED_GPT_TYPE = "gpt2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Bytes for one sequence: whole is on every tensor rank (cut by sequence parallelism), divided
    is cut by t."""

    replicated: float
    sharded: float

    def on_rank(self, tensor: int, *, sequence_parallel: bool) -> float:
        return self.replicated / (tensor if sequence_parallel else 1) + self.sharded / tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Of one model at one length, precision, checkpointing and kernels; prefix sums over
    graph.layers.

    The head's own entry is 0: it runs and goes back at once, so `head` is working memory, as are
    `recomputed` (what checkpointing drops of a decoder layer, and computes again) and `context`
    (masks, rotary tables). largest: all that the largest decoder layer makes.
    """

    replicated: tuple[float, ...]
    sharded: tuple[float, ...]
    head: ActivationBytes
    largest: ActivationBytes
    recomputed: ActivationBytes
    context: ActivationBytes

    def between(self, start: int, stop: int) -> ActivationBytes:
        return ActivationBytes(
            replicated=self.replicated[stop] - self.replicated[start],
            sharded=self.sharded[stop] - self.sharded[start],
        )


def runs_hf_modules(graph: ModelGraph, kernels: str) -> bool:
    """Whether the recipe's own Hugging Face modules are what ran."""
    return kernels == "auto" or (kernels == "hf" and graph.model_type != PUBLISHED_GPT_TYPE)


def uses_selective_op(graph: ModelGraph, kernels: str) -> bool:
    """Whether "selective" is torch's selective checkpointing by operator (arXiv 2410.06511, section
    2.2.3): of each layer its input, fused attention's output and every second product's result are
    kept. That is what PyTorch code other than this project's runtime calls selective; the runtime
    recomputes the attention module."""
    experts = any(p.batch > 1 for kind in model_shapes(graph, 1).kinds for p in kind.products)
    return kernels in ("hf", "compiled") and not experts


@memoize(lambda graph, *how: (graph.identity, *how))
def activations(
    graph: ModelGraph,
    sequence_length: int,
    element_bytes: int,
    checkpointing: Checkpointing,
    kernels: str,
) -> SavedActivations:
    traced = runs_hf_modules(graph, kernels)
    by_product = uses_selective_op(graph, kernels)

    def share(layer: Layer, mode: Checkpointing) -> ActivationBytes:
        if mode == "selective" and by_product and layer.kind == "decoder":
            return _selective_op_bytes(graph, layer, sequence_length * element_bytes, kernels)
        kept = (
            saved_activations_entry(layer.kept, mode, element_bytes, sequence_length)
            if traced
            else None
        )
        if kept is None:
            return _published(graph, layer, sequence_length, element_bytes, mode, kernels)
        return ActivationBytes(
            replicated=kept.unsharded_bytes(sequence_length),
            sharded=kept.sharded_bytes(sequence_length),
        )

    shares = [share(layer, checkpointing) for layer in graph.layers[:-1]]
    decoder = dict.fromkeys(layer for layer in graph.layers if layer.kind == "decoder")
    wholes = [share(layer, "none") for layer in decoder]
    dropped = [
        _dropped(replicated, share(layer, checkpointing), checkpointing)
        for replicated, layer in zip(wholes, decoder, strict=True)
    ]
    context = (
        saved_activations_entry(graph.context, "none", element_bytes, sequence_length)
        if traced
        else None
    )
    return SavedActivations(
        replicated=(
            0,
            *itertools.accumulate(s.replicated for s in shares),
            sum(s.replicated for s in shares),
        ),
        sharded=(
            0,
            *itertools.accumulate(s.sharded for s in shares),
            sum(s.sharded for s in shares),
        ),
        head=share(graph.layers[-1], "none"),
        largest=max(wholes, key=lambda share: share.replicated + share.sharded),
        recomputed=max(dropped, key=lambda share: share.replicated + share.sharded),
        context=ActivationBytes(
            replicated=0 if context is None else context.unsharded_bytes(sequence_length), sharded=0
        ),
    )


def _dropped(
    all_of_it: ActivationBytes, kept: ActivationBytes, checkpointing: Checkpointing
) -> ActivationBytes:
    """What is there again while a layer goes back. Under `full` the gradient that comes in is as
    large as what was kept (the layer's input) and takes its place."""
    if checkpointing == "full":
        return all_of_it
    return ActivationBytes(
        replicated=max(0, all_of_it.replicated - kept.replicated),
        sharded=max(0, all_of_it.sharded - kept.sharded),
    )


def _published(
    graph: ModelGraph,
    layer: Layer,
    sequence_length: int,
    element_bytes: int,
    mode: str,
    kernels: str,
) -> ActivationBytes:
    """arXiv 2205.05198: the inputs and outputs of both norms, and the dropout masks, are whole on
    every tensor rank.

    torch.compile's partitioner runs cheap operators again instead of keeping their results: of the
    norms it keeps the inputs, of the feed-forward the products' results. GPTs in PyTorch are
    pretrained without dropout, whatever GPT-2's configuration says.
    """
    size = sequence_length * element_bytes
    if layer.kind != "decoder":
        return ActivationBytes(replicated=layer.activation_elements_per_token * size, sharded=0)
    if mode == "full":
        return ActivationBytes(replicated=graph.hidden_size * size, sharded=0)
    masks = graph.hidden_size if graph.max_dropout > 0 else 0
    replicated = 4 * graph.hidden_size + masks
    attention = layer.attention_activation_elements_per_token
    sharded = max(0, layer.activation_elements_per_token - attention - replicated)
    if kernels == "hf":
        replicated -= masks
    if kernels == "compiled":
        replicated, sharded = 2 * graph.hidden_size, sharded // 2
    if mode == "none":
        scores = (
            layer.attention_matrix_elements_per_token_per_position
            if graph.attention == "eager"
            else 0
        )
        sharded += attention + scores * sequence_length
    return ActivationBytes(replicated=replicated * size, sharded=sharded * size)


def _selective_op_bytes(
    graph: ModelGraph, layer: Layer, size: int, kernels: str
) -> ActivationBytes:
    """See uses_selective_op. size: bytes of one feature of the sequence. The last product's result
    is whole on every tensor rank; torch.compile drops it, for no backward pass reads it."""
    shapes = model_shapes(graph, 1)
    products = shapes.kinds[shapes.kind_of[graph.layers.index(layer)]].products
    kept = saved_products(products)
    last = products[-1].n if products and len(products) % 2 else 0
    sharded = sum(p.n for p in kept) - last
    if graph.attention != "eager":
        sharded += graph.attention_heads * graph.head_dim
    replicated = graph.hidden_size + (0 if kernels == "compiled" else last)
    return ActivationBytes(replicated=replicated * size, sharded=sharded * size)


def recompute_stops_early(graph: ModelGraph, kernels: str) -> bool:
    """Whether recomputation ends before the last product of what it repeats, because no backward
    pass reads that result: torch's non-reentrant checkpoint
    (torch.utils.checkpoint.set_checkpoint_early_stop; this project's runtime uses it), unless a
    dropout after the product keeps its mask. Megatron's own checkpoint repeats all."""
    return kernels in ("hf", "compiled") or (kernels == "auto" and graph.max_dropout == 0)
