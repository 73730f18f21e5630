"""Activation bytes per layer: traced from the model's own modules, or the published formula for
other people's.

`assume.kernels: auto` and `hf` take what the model's modules keep (ModelGraph's traced bytes).
`megatron`, `compiled` say that other code ran a model of these shapes, for which arXiv 2205.05198
counts, as it does for a layer that could not be traced, and for `hf` of a GPT-2 (see
runs_hf_modules). Shape letters: S sequence length, t tensor degree.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardwright.cost.layer_shapes import model_shapes, saved_products
from shardwright.models.model_graph import Layer, ModelGraph, saved_activations_entry
from shardwright.recipe.literal_types import Checkpointing
from shardwright.utils.memoize import memoize

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
