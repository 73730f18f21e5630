"""Activation bytes per layer: traced from the model's own modules, or the published formula for
other people's.

`assume.kernels: auto` and `hf` take what the model's modules keep (ModelGraph's traced bytes).
`megatron`, `compiled` say that other code ran a model of these shapes, for which arXiv 2205.05198
counts, as it does for a layer that could not be traced, and for `hf` of a GPT-2 (see own_modules).
Shape letters: S sequence length, t tensor degree.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardwright.cost.layer_shapes import kept_products, model_shapes
from shardwright.models.model_graph import Layer, ModelGraph, kept_entry
from shardwright.recipe.literal_types import Checkpointing
from shardwright.utils.memoize import remembered

# Published runs of plain GPTs in PyTorch come as a GPT-2 recipe, and are none: nobody pretrains
# Hugging Face's GPT-2 at those sizes. They are MPT and its like, whose GELU and loss are fused
# (decision 011).
STAND_IN_TYPE = "gpt2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Bytes for one sequence: whole is on every tensor rank (cut by sequence parallelism), divided
    is cut by t."""

    whole: float
    divided: float

    def on_rank(self, tensor: int, *, sequence_parallel: bool) -> float:
        return self.whole / (tensor if sequence_parallel else 1) + self.divided / tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Of one model at one length, precision, checkpointing and kernels; prefix sums over
    graph.layers.

    The head's own entry is 0: it runs and goes back at once, so `head` is working memory, as are
    `recomputed` (what checkpointing drops of a decoder layer, and computes again) and `context`
    (masks, rotary tables). largest: all that the largest decoder layer makes.
    """

    whole: tuple[float, ...]
    divided: tuple[float, ...]
    head: Share
    largest: Share
    recomputed: Share
    context: Share

    def between(self, start: int, stop: int) -> Share:
        return Share(
            whole=self.whole[stop] - self.whole[start],
            divided=self.divided[stop] - self.divided[start],
        )


def own_modules(graph: ModelGraph, kernels: str) -> bool:
    """Whether the recipe's own Hugging Face modules are what ran."""
    return kernels == "auto" or (kernels == "hf" and graph.model_type != STAND_IN_TYPE)


def keeps_products(graph: ModelGraph, kernels: str) -> bool:
    """Whether "selective" is torch's selective checkpointing by operator (arXiv 2410.06511, section
    2.2.3): of each layer its input, fused attention's output and every second product's result are
    kept. That is what PyTorch code other than this project's runtime calls selective; the runtime
    recomputes the attention module."""
    experts = any(p.batch > 1 for kind in model_shapes(graph, 1).kinds for p in kind.products)
    return kernels in ("hf", "compiled") and not experts


@remembered(lambda graph, *how: (graph.identity, *how))
def activations(
    graph: ModelGraph,
    sequence_length: int,
    element_bytes: int,
    checkpointing: Checkpointing,
    kernels: str,
) -> Activations:
    traced = own_modules(graph, kernels)
    by_product = keeps_products(graph, kernels)

    def share(layer: Layer, mode: Checkpointing) -> Share:
        if mode == "selective" and by_product and layer.kind == "decoder":
            return _every_second_product(graph, layer, sequence_length * element_bytes, kernels)
        kept = kept_entry(layer.kept, mode, element_bytes, sequence_length) if traced else None
        if kept is None:
            return _published(graph, layer, sequence_length, element_bytes, mode, kernels)
        return Share(
            whole=kept.whole_bytes(sequence_length), divided=kept.divided_bytes(sequence_length)
        )

    shares = [share(layer, checkpointing) for layer in graph.layers[:-1]]
    decoder = dict.fromkeys(layer for layer in graph.layers if layer.kind == "decoder")
    wholes = [share(layer, "none") for layer in decoder]
    dropped = [
        _dropped(whole, share(layer, checkpointing), checkpointing)
        for whole, layer in zip(wholes, decoder, strict=True)
    ]
    context = kept_entry(graph.context, "none", element_bytes, sequence_length) if traced else None
    return Activations(
        whole=(0, *itertools.accumulate(s.whole for s in shares), sum(s.whole for s in shares)),
        divided=(
            0,
            *itertools.accumulate(s.divided for s in shares),
            sum(s.divided for s in shares),
        ),
        head=share(graph.layers[-1], "none"),
        largest=max(wholes, key=lambda share: share.whole + share.divided),
        recomputed=max(dropped, key=lambda share: share.whole + share.divided),
        context=Share(
            whole=0 if context is None else context.whole_bytes(sequence_length), divided=0
        ),
    )


def _dropped(all_of_it: Share, kept: Share, checkpointing: Checkpointing) -> Share:
    """What is there again while a layer goes back. Under `full` the gradient that comes in is as
    large as what was kept (the layer's input) and takes its place."""
    if checkpointing == "full":
        return all_of_it
    return Share(
        whole=max(0, all_of_it.whole - kept.whole), divided=max(0, all_of_it.divided - kept.divided)
    )


def _published(
    graph: ModelGraph,
    layer: Layer,
    sequence_length: int,
    element_bytes: int,
    mode: str,
    kernels: str,
) -> Share:
    """arXiv 2205.05198: the inputs and outputs of both norms, and the dropout masks, are whole on
    every tensor rank.

    torch.compile's partitioner runs cheap operators again instead of keeping their results: of the
    norms it keeps the inputs, of the feed-forward the products' results. GPTs in PyTorch are
    pretrained without dropout, whatever GPT-2's configuration says.
    """
    size = sequence_length * element_bytes
    if layer.kind != "decoder":
        return Share(whole=layer.activation_elements_per_token * size, divided=0)
    if mode == "full":
        return Share(whole=graph.hidden_size * size, divided=0)
    masks = graph.hidden_size if graph.max_dropout > 0 else 0
    whole = 4 * graph.hidden_size + masks
    attention = layer.attention_activation_elements_per_token
    divided = max(0, layer.activation_elements_per_token - attention - whole)
    if kernels == "hf":
        whole -= masks
    if kernels == "compiled":
        whole, divided = 2 * graph.hidden_size, divided // 2
    if mode == "none":
        scores = (
            layer.attention_matrix_elements_per_token_per_position
            if graph.attention == "eager"
            else 0
        )
        divided += attention + scores * sequence_length
    return Share(whole=whole * size, divided=divided * size)


def _every_second_product(graph: ModelGraph, layer: Layer, size: int, kernels: str) -> Share:
    """See keeps_products. size: bytes of one feature of the sequence. The last product's result is
    whole on every tensor rank; torch.compile drops it, for no backward pass reads it."""
    shapes = model_shapes(graph, 1)
    products = shapes.kinds[shapes.kind_of[graph.layers.index(layer)]].products
    kept = kept_products(products)
    last = products[-1].n if products and len(products) % 2 else 0
    divided = sum(p.n for p in kept) - last
    if graph.attention != "eager":
        divided += graph.attention_heads * graph.head_dim
    whole = graph.hidden_size + (0 if kernels == "compiled" else last)
    return Share(whole=whole * size, divided=divided * size)
