"""Count the matrix products and activations of each distinct decoder layer on one tensor rank.

S: sequence length, b: micro-batch, H: hidden size, V: vocabulary, t: tensor degree. A product is
(M, K) times (K, N), where M is b x S tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardwright.engines.run_profiles import KernelProfile
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
from shardwright.models.model_graph import SavedActivations as SavedActivationsEntry
from shardwright.recipe.literal_types import (
    LayerCheckpointing,
    RecomputedModules,
    RecomputeModule,
)
from shardwright.utils.memoize import memoize


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Describe one matrix product.

    n, k: local widths
    batch: local experts (1 elsewhere)
    in_attention: belongs to the attention module
    module: the module of recompute_modules that contains it; "" where none does
    name: its path within the layer
    """

    n: int
    k: int
    batch: int
    in_attention: bool
    name: str
    module: RecomputeModule | Literal[""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Describe one kind of decoder layer; elements are per token and saved for the backward pass.

    numel: local parameters
    matmul_flops: forward, per token, of the whole layer
    attention_module_flops: the attention module's part of matmul_flops
    attention_flops: per token and position
    fused_norms: torch's own LayerNorm, one kernel
    composed_norms: a weight without a bias, RMSNorm in Python
    head_norm_features: of norms inside the attention module, of queries and keys by head or of
        latents
    gathered_products: linears whose whole output every tensor rank gathers
    gathered_outputs: their total width
    gathered_features: what they move per token forward and backward: the output gathered and the
        input's gradient all-reduced (twice the bytes)
    expert_numel: the part of numel that expert ranks can shard; 0 without experts
    experts_per_token: experts that each token is routed to
    expert_features: widths of all products of an expert, inputs and outputs
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
    head_norm_features: int
    gathered_features: int
    gathered_products: int
    gathered_outputs: int = 0
    expert_numel: int = 0
    experts_per_token: int = 0
    expert_features: int = 0

    def activated_expert_features(self, hidden_size: int) -> int:
        """Return the local width of the experts' activated features, over a token's experts."""
        last = [p for p in self.products if p.batch > 1][-1:]
        return sum(p.n + p.k - hidden_size for p in last) * self.experts_per_token

    def inner_features(self, module: RecomputeModule, hidden_size: int) -> int:
        """Return the local width of all that a feed-forward module computes inside."""
        return sum(p.n + p.k - hidden_size for p in self.products if p.module == module)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """Hold the decoder layers' shapes; tuples over layers are prefix sums (length layers + 1).

    kinds: distinct decoder layers
    kind_of: for each of graph.layers an index into kinds; -1 for embedding and head
    numel: local parameters, prefix sums
    expert_numel: LayerShape's, prefix sums
    modules: modules with parameters of their own, prefix sums; a layer's stacked experts are one
    decoder_flops: all decoder layers' products, those of the attention modules, scores
    head_flops: per token
    attention_degree, feed_forward_degree: tensor ranks that share the heads and the inner features;
        1 where a style gathers them and each rank computes all
    matrices: matrices of the decoder layers, an upper bound of the parameters gathered one by one
    shared_numel: the tied tensor's local elements, which embedding and head both list (0 if untied)
    head_width: local width of the head's output, mostly the vocabulary
    flops_source: of the first layer that was not traced, else traced
    positions: a table of positions is added at the embedding, so layers have no rotary kernels
    """

    kinds: tuple[LayerShape, ...]
    kind_of: tuple[int, ...]
    numel: tuple[int, ...]
    expert_numel: tuple[int, ...]
    gathered_products: tuple[int, ...]
    gathered_features: tuple[int, ...]
    modules: tuple[int, ...]
    decoder_flops: tuple[int, int, int]
    head_flops: int
    attention_degree: int
    feed_forward_degree: int
    matrices: int
    shared_numel: int
    head_width: int
    flops_source: str
    positions: bool

    def largest_layer(self, expert: int) -> int:
        """Return the local parameters of the largest decoder layer with this many expert ranks."""
        return max(
            (kind.numel - kind.expert_numel + kind.expert_numel // expert for kind in self.kinds),
            default=0,
        )

    def largest_product(self, expert: int) -> int:
        """Return the elements of the largest matrix with this many expert ranks."""
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
    )  # without a map, estimate the usual tensor parallelism
    return ModelShapes(
        kinds=kinds,
        kind_of=kind_of,
        numel=(0, *itertools.accumulate(numel)),
        expert_numel=prefix(lambda kind: kind.expert_numel),
        gathered_products=prefix(lambda kind: kind.gathered_products),
        gathered_features=prefix(lambda kind: kind.gathered_features),
        modules=(
            0,
            *itertools.accumulate(
                len({p.name.rpartition(".")[0] for p in layer.parameters}) for layer in graph.layers
            ),
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
        head_width=-(-graph.output_width // tensor),
        flops_source=next((s for s in sources if s != "traced"), "traced"),
        positions=sum(len(p.shape) == 2 for p in graph.layers[0].parameters) > 1,
    )


def _split_layers(
    graph: ModelGraph, tensor: int
) -> tuple[tuple[LayerShape, ...], tuple[int, ...], tuple[int, ...]]:
    """Return ModelShapes.kinds, kind_of and each layer's parameters on one tensor rank."""
    styles = dict(graph.tensor_parallel_styles)
    # Layers that differ in their number alone are split once, unless styles or head counts name
    # single layers.
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
"""Names the fields that a LayerShape copies from its layer."""


def _split_layer(
    graph: ModelGraph, layer: Layer, tensor: int, styles: dict[str, str]
) -> tuple[LayerShape | None, int]:
    """Return the shape (None for embedding and head) and the parameters on one tensor rank."""
    transposed = graph.model_type in TRANSPOSED_LINEAR_TYPES
    splits = [(p, split_parameter(graph, p, tensor)) for p in layer.parameters]
    shards = [(p, split.shard_shape(0)) for p, split in splits]
    numel = sum(math.prod(shape) for _, shape in shards)
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
        expert_numel=sum(math.prod(shape) for _, shape in experts),
        experts_per_token=_experts_per_token(layer, [p for p, _ in experts]),
        expert_features=sum(shape[-1] + shape[-2] for _, shape in experts if len(shape) == 3),
        products=tuple(
            _product(
                shape,
                transposed,
                p.name.startswith(attention),
                _recompute_module(
                    layer, p, p.name.startswith(attention), has_experts=bool(experts)
                ),
                p.name[len(layer.name) + 1 :].removesuffix(".weight"),
            )
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
        head_norm_features=_head_norm_features(graph, layer, attention),
        gathered_features=sum(out + 2 * width for out, width in gathered),
        gathered_products=len(gathered),
        gathered_outputs=sum(out for out, _ in gathered),
    )
    return shape, numel


def _experts_per_token(layer: Layer, experts: list[Parameter]) -> int:
    """Return the experts of a token: the layer's expert FLOPs over those of one expert."""
    if not experts:
        return 0
    names = {p.name for p in experts}
    others = sum(p.numel for p in layer.parameters if len(p.shape) == 2 and p.name not in names)
    stacked = sum(p.numel for p in experts if len(p.shape) == 3)
    count = experts[0].shape[0]
    return max(1, min(count, round((layer.matmul_flops_per_token / 2 - others) * count / stacked)))


def saved_products(products: tuple[Product, ...]) -> tuple[Product, ...]:
    """Return the first, third, ... product: torchtitan's selective checkpointing saves their
    results.

    Its policy counts matrix products in the order of the forward pass (arXiv 2410.06511, 2.2.3).
    """
    return products[::2]


def recomputed_products(products: tuple[Product, ...]) -> tuple[Product, ...]:
    """Return the second, fourth, ... product."""
    return products[1::2]


def _product(
    shape: tuple[int, ...],
    transposed: bool,
    in_attention: bool,
    module: RecomputeModule | Literal[""],
    name: str,
) -> Product:
    out, into = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    return Product(
        n=out,
        k=into,
        batch=shape[0] if len(shape) == 3 else 1,
        in_attention=in_attention,
        module=module,
        name=name,
    )


_QUERY_UP, _KEY_VALUE_UP, _KEY_VALUE_DOWN = (
    ("q_b_proj", "q_proj"),
    "kv_b_proj",
    "kv_a_proj_with_mqa",
)
"""Names latent attention's projections, as Hugging Face does (arXiv 2405.04434, 2.1)."""


def _linear(parameter: Parameter) -> str:
    return parameter.name.rpartition(".")[0].rpartition(".")[2]


def has_latent_attention(layer: Layer) -> bool:
    """Return whether the layer projects keys and values up from a latent."""
    return any(_linear(p) == _KEY_VALUE_UP for p in layer.parameters)


def _recompute_module(
    layer: Layer, parameter: Parameter, in_attention: bool, *, has_experts: bool
) -> RecomputeModule | Literal[""]:
    """Return the module of Megatron-Core's recompute_modules that a matrix belongs to."""
    if in_attention:
        is_up = _linear(parameter) in (*_QUERY_UP, _KEY_VALUE_UP) and has_latent_attention(layer)
        return "mla_up_proj" if is_up else ""
    if not has_experts:
        return "mlp"
    return "shared_experts" if ".shared_expert" in parameter.name else "moe"


def _norms(layer: Layer, hidden: int, *, with_bias: bool) -> int:
    """Count norms over the hidden size: modules whose every parameter is one vector of it."""
    modules: dict[str, list[tuple[int, ...]]] = {}
    for parameter in layer.parameters:
        modules.setdefault(parameter.name.rpartition(".")[0], []).append(parameter.shape)
    sizes = [len(shapes) for shapes in modules.values() if set(shapes) == {(hidden,)}]
    return sum(1 for size in sizes if (size > 1) == with_bias)


def _head_norm_features(graph: ModelGraph, layer: Layer, attention: str) -> int:
    """Return the features per token of norms inside the attention module, but those of the hidden
    size.

    A weight of the head dimension is shared by all query heads, or by all key heads.
    """
    features = 0
    for parameter in layer.parameters:
        if not parameter.name.startswith(attention) or len(parameter.shape) != 1:
            continue
        module = parameter.name.removeprefix(attention).rpartition(".")[0]
        if "norm" not in module.lower() or parameter.shape == (graph.hidden_size,):
            continue
        heads = graph.key_value_heads if module.startswith("k") else graph.attention_heads
        by_head = parameter.shape == (graph.head_dim,)
        features += parameter.numel * (heads if by_head else 1)
    return features


# Saved activation bytes by layer: the traced bytes of the model's modules, or arXiv 2205.05198's
# formula where other code of the same shapes runs, and for layers that could not be traced.


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """Count the bytes of one sequence.

    replicated: on every tensor rank, unless sequence parallelism shards them
    sharded: sharded over tensor ranks
    """

    replicated: float
    sharded: float

    def on_rank(self, tensor: int, *, sequence_parallel: bool) -> float:
        return self.replicated / (tensor if sequence_parallel else 1) + self.sharded / tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Hold saved activations of one model, length, precision, checkpointing and kernels, as prefix
    sums.

    The head's entry in the prefix sums is 0: it runs forward and backward at once, so `head` is
    working memory.

    replicated, sharded: ActivationBytes, prefix sums over graph.layers
    largest: all activations of the largest decoder layer
    recomputed: what checkpointing drops of a decoder layer and recomputes, which is working memory
    context: masks and rotary tables, which are working memory
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


def uses_selective_op(graph: ModelGraph, kernels: KernelProfile) -> bool:
    """Return whether "selective" means torch's selective checkpointing by operator.

    It saves each layer's input, fused attention's output and every second product's result (arXiv
    2410.06511, 2.2.3). This project's runtime recomputes the attention module instead.
    """
    experts = any(p.batch > 1 for kind in model_shapes(graph, 1).kinds for p in kind.products)
    return kernels.selective_by_operator and not experts


@memoize(lambda graph, *how, **norms: (graph.identity, *how, *norms.values()))
def activations(
    graph: ModelGraph,
    sequence_length: int,
    element_bytes: int,
    checkpointing: LayerCheckpointing,
    kernels: KernelProfile,
    *,
    norms_are_fused: bool = False,
    linear_input_bytes: float | None = None,
) -> SavedActivations:
    """Return what the layers save for the backward pass.

    norms_are_fused: linears contain the norms before them, where they can (see dropped_by_modules)
    linear_input_bytes: of an element of linear layers' saved inputs, where that is a format of its
        own (training.low_precision)
    """
    by_product = uses_selective_op(graph, kernels)

    def share(layer: Layer, mode: LayerCheckpointing) -> ActivationBytes:
        saved = share_in_precision(layer, mode)
        if linear_input_bytes is None or layer.kind != "decoder" or mode == "full":
            return saved
        change = _low_precision_change(graph, layer, element_bytes, linear_input_bytes, mode)
        return ActivationBytes(
            replicated=saved.replicated + change.replicated * sequence_length,
            sharded=max(0.0, saved.sharded + change.sharded * sequence_length),
        )

    def share_in_precision(layer: Layer, mode: LayerCheckpointing) -> ActivationBytes:
        if isinstance(mode, tuple):
            saved_all = share_in_precision(layer, "none")
            if layer.kind != "decoder":
                return saved_all
            dropped = dropped_by_modules(
                graph,
                layer,
                mode,
                ModuleSizes(
                    length=sequence_length,
                    element_bytes=element_bytes,
                    feed_forward_bytes=share_in_precision(layer, "selective").sharded,
                    score_bytes=_score_bytes(graph, layer, sequence_length, element_bytes, kernels),
                    norms_are_fused=norms_are_fused,
                ),
            )
            return ActivationBytes(
                replicated=max(
                    graph.hidden_size * sequence_length * element_bytes,
                    saved_all.replicated - dropped.replicated,
                ),
                sharded=max(0.0, saved_all.sharded - dropped.sharded),
            )
        if mode == "selective" and by_product and layer.kind == "decoder":
            return _selective_op_bytes(graph, layer, sequence_length * element_bytes, kernels)
        saved = (
            saved_activations_entry(layer.kept, mode, element_bytes, sequence_length)
            if kernels.traces_activations
            else None
        )
        if saved is None:
            return _formula_bytes(graph, layer, sequence_length, element_bytes, mode, kernels)
        sharded = float(saved.sharded_bytes(sequence_length))
        if mode == "none" and kernels.fuses_attention_sinks:
            sharded -= _score_bytes(graph, layer, sequence_length, element_bytes, kernels)
        return ActivationBytes(
            replicated=saved.unsharded_bytes(sequence_length), sharded=max(0.0, sharded)
        )

    shares = [share(layer, checkpointing) for layer in graph.layers[:-1]]
    decoder = dict.fromkeys(layer for layer in graph.layers if layer.kind == "decoder")
    wholes = [share(layer, "none") for layer in decoder]
    dropped = wholes
    if checkpointing != "full":  # there the incoming gradient replaces the saved input
        saved_shares = [share(layer, checkpointing) for layer in decoder]
        dropped = [
            ActivationBytes(
                replicated=max(0, full.replicated - saved.replicated),
                sharded=max(0, full.sharded - saved.sharded),
            )
            for full, saved in zip(wholes, saved_shares, strict=True)
        ]
    context = (
        saved_activations_entry(graph.context, "none", element_bytes, sequence_length)
        if kernels.traces_activations
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSizes:
    """Hold what dropped_by_modules needs of a layer beside its shapes.

    length: tokens of a sequence
    feed_forward_bytes: saved inside the feed-forward network or the mixture, sharded over tensor
        ranks
    score_bytes: saved S x S scores, which fused attention does not save
    norms_are_fused: a linear of Transformer Engine contains the norm before it, which saves the
        norm's result all the same; only norms before a mixture or latent attention stand alone
    """

    length: int
    element_bytes: int
    feed_forward_bytes: float
    score_bytes: float
    norms_are_fused: bool


def dropped_by_modules(
    graph: ModelGraph, layer: Layer, modules: RecomputedModules, sizes: ModuleSizes
) -> ActivationBytes:
    """Return the bytes of a sequence that Megatron-Core's recompute_modules do not save.

    layernorm, moe_act and mla_up_proj discard their outputs, which their consumers would save
    (CheckpointWithoutOutput, megatron/core/tensor_parallel/random.py). The other modules are
    checkpointed whole: their inputs stay saved, what lies inside does not. Core attention's output
    is its consumer's input; inside of it are the scores, or fused attention's log-sum-exp in
    float32.
    """
    kind = _whole_shape(graph, layer)
    hidden, has_experts = graph.hidden_size, kind.experts_per_token > 0
    features_bytes = sizes.length * sizes.element_bytes
    norms = 2
    if sizes.norms_are_fused:
        norms = has_experts + has_latent_attention(layer)
    latent = sum(p.n for p in kind.products if p.module == "mla_up_proj")
    for p in layer.parameters:
        if latent and _linear(p) == _KEY_VALUE_DOWN:
            # The keys' rotary part is one for all heads, and copied to each.
            rank = max(x.shape[1] for x in layer.parameters if _linear(x) == _KEY_VALUE_UP)
            latent += graph.attention_heads * (p.shape[0] - rank)
    within_mixture = 0.0 if "moe" in modules else float(features_bytes)
    sharded = {
        "core_attn": sizes.score_bytes + 4.0 * graph.attention_heads * sizes.length,
        "mla_up_proj": latent * features_bytes,
        "mlp": 0.0 if has_experts else sizes.feed_forward_bytes,
        "moe": sizes.feed_forward_bytes if has_experts else 0.0,
        "moe_act": within_mixture * kind.activated_expert_features(hidden),
        "shared_experts": within_mixture * kind.inner_features("shared_experts", hidden),
    }
    return ActivationBytes(
        replicated=norms * hidden * features_bytes if "layernorm" in modules else 0.0,
        sharded=sum(sharded.get(module, 0.0) for module in modules),
    )


def _whole_shape(graph: ModelGraph, layer: Layer) -> LayerShape:
    """Return the shape of a decoder layer that no tensor ranks share."""
    shapes = model_shapes(graph, 1)
    return shapes.kinds[shapes.kind_of[graph.layers.index(layer)]]


def _low_precision_change(
    graph: ModelGraph,
    layer: Layer,
    element_bytes: int,
    input_bytes: float,
    mode: LayerCheckpointing,
) -> ActivationBytes:
    """Return by how many bytes a token's saved activations change where linear layers save their
    inputs in a format of their own.

    A norm's or an activation's output has no reader but the linear, so only the cast copy stays.
    Attention saves its own output in half precision as well, unless it is recomputed. A router
    reads the norm's output before a mixture in half precision. (Transformer Engine's
    LayerNormLinear and GroupedLinear.)
    """
    kind = _whole_shape(graph, layer)
    products = kind.products
    attention = [p for p in products if p.in_attention]
    dense = [p for p in products if p.module == "mlp" and p.batch == 1]
    shared = [p for p in products if p.module == "shared_experts"]
    experts = [p for p in products if p.batch > 1]
    fewer = input_bytes - element_bytes
    replicated = fewer * graph.hidden_size * (bool(attention) + bool(dense))
    sharded = fewer * sum(group[-1].k for group in (dense, shared) if group)
    if attention:
        latents = {p.k for p in attention[:-1]} - {graph.hidden_size}
        recomputed = mode == "selective" or (isinstance(mode, tuple) and "core_attn" in mode)
        sharded += fewer * sum(latents)
        sharded += (fewer if recomputed else input_bytes) * attention[-1].k
    if experts:
        sharded += fewer * kind.experts_per_token * (experts[0].k + experts[-1].k)
    return ActivationBytes(replicated=replicated, sharded=sharded)


def _score_bytes(
    graph: ModelGraph, layer: Layer, length: int, element_bytes: int, kernels: KernelProfile
) -> float:
    """Return the saved bytes of a layer's S x S scores of a sequence."""
    traced = [
        saved_activations_entry(layer.kept, mode, element_bytes, length)
        for mode in ("none", "selective")
        if kernels.traces_activations
    ]
    match traced:
        case [SavedActivationsEntry() as every, SavedActivationsEntry() as without]:
            pairs = every.sharded_bytes_per_token_pair - without.sharded_bytes_per_token_pair
            return float(max(0, pairs)) * length**2
    scores = layer.attention_matrix_elements_per_token_per_position
    return float(scores * (graph.attention == "eager")) * length**2 * element_bytes


def recomputed_product_flops(kind: LayerShape, modules: RecomputedModules, tensor: int) -> int:
    """Count the FLOPs of a token in the products of these modules, over all tensor ranks.

    kind: on one of `tensor` ranks
    """
    inside = kind.matmul_flops - kind.attention_module_flops
    feed_forward = "moe" if kind.experts_per_token else "mlp"
    others = ("mla_up_proj",) if feed_forward in modules else ("mla_up_proj", "shared_experts")
    single = sum(
        2 * p.n * p.k * tensor for p in kind.products if p.module in modules and p.module in others
    )
    return single + (inside if feed_forward in modules else 0)


def _formula_bytes(
    graph: ModelGraph,
    layer: Layer,
    sequence_length: int,
    element_bytes: int,
    mode: str,
    kernels: KernelProfile,
) -> ActivationBytes:
    """Return arXiv 2205.05198's activation bytes.

    The inputs and outputs of both norms and the dropout masks are replicated on every tensor rank.
    torch.compile's partitioner recomputes cheap operators: it saves the norms' inputs, and the
    results of the feed-forward's products.
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
    if not kernels.dropout:
        replicated -= masks
    if kernels.recomputes_elementwise:
        replicated, sharded = 2 * graph.hidden_size, sharded // 2
    if mode == "none":
        scores = (
            layer.attention_matrix_elements_per_token_per_position
            if graph.attention == "eager" and not kernels.fuses_attention_sinks
            else 0
        )
        sharded += attention + scores * sequence_length
    return ActivationBytes(replicated=replicated * size, sharded=sharded * size)


def _selective_op_bytes(
    graph: ModelGraph, layer: Layer, size: int, kernels: KernelProfile
) -> ActivationBytes:
    """Return the bytes that selective checkpointing by operator saves (see uses_selective_op).

    The last product's result is replicated on every tensor rank. torch.compile drops it, because no
    backward pass reads it.

    size: bytes of one feature of the sequence
    """
    products = _whole_shape(graph, layer).products
    saved = saved_products(products)
    last = products[-1].n if products and len(products) % 2 else 0
    sharded = sum(p.n for p in saved) - last
    if graph.attention != "eager" or kernels.fuses_attention_sinks:
        sharded += graph.attention_heads * graph.head_dim
    replicated = graph.hidden_size + (0 if kernels.recomputes_elementwise else last)
    return ActivationBytes(replicated=replicated * size, sharded=sharded * size)


def recompute_stops_early(graph: ModelGraph, kernels: KernelProfile) -> bool:
    """Return whether recomputation skips the last product, whose result no backward pass reads.

    torch's non-reentrant checkpoint does, and this project's runtime uses it
    (torch.utils.checkpoint.set_checkpoint_early_stop), unless a dropout after the product keeps its
    mask.
    """
    return kernels.stops_recompute_early and not (kernels.dropout and graph.max_dropout > 0)
