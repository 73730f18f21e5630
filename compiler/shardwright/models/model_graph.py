"""Stage 2's output: what the model is, counted exactly.

Shape letters: S sequence length, H hidden size, F feed-forward size, V vocabulary, L layers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardwright.models.tasks.task_traits import TASK_TRAITS, TaskTraits
from shardwright.recipe.literal_types import Checkpointing, TaskName
from shardwright.utils.json_values import JsonObject

# Dotted names of modules and parameters.


def name_pattern(path: str) -> str:
    """ "model.layers.3.mlp.up_proj" -> "model.layers.*.mlp.up_proj": the same for all layers of a
    kind."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


# The names of the tensor-parallel styles, by what they cut. transformers' own, and ours.


FUSED_QKV = "fused_qkv_colwise"
"""Query, key and value, one behind the other: three blocks, the last two as wide as the key/value
heads."""

GROUPED_QKV = "grouped_qkv_colwise"
"""Fused by key/value head: each with its query heads. Cut plainly, between key/value heads."""

MULTI_QUERY = "multi_query_colwise"
"""Fused query heads and a single key/value head, which every rank needs."""

COLUMN_STYLES = (
    "colwise",
    "packed_colwise",
    FUSED_QKV,
    GROUPED_QKV,
    MULTI_QUERY,
    "colwise_gather_output",
    "mla_kv_a_proj",
)
ROW_STYLES = ("rowwise", "packed_rowwise", "rowwise_split_input", "embedding_colwise")
VOCABULARY_STYLES = ("vocabulary_embedding", "vocabulary_head")
STYLES_THAT_MAY_STAY_UNSHARDED = (
    MULTI_QUERY,
    "colwise_gather_output",
    "mla_kv_a_proj",
    "rowwise_split_input",
    "embedding_colwise",
)
"""Whole in, whole out: where their dimension does not divide they stay plain layers."""

# Where a Hugging Face model can be cut into pipeline pieces: found by running it, never written by
# hand.


LayerRange = tuple[int, int]
"""First and last number of neighbouring decoder layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """stack: dotted path of the ModuleList whose children run once each, in order.

    hidden_position, hidden_keyword: which argument of a decoder layer is the hidden states; one of
    the two. output_length: 0 where a layer returns the hidden states alone, else the length of the
    tuple that starts with them. payload: paths of the decoder layers' arguments that the
    embedding's side computes and that cross stages with the
        hidden states: "2" is the third positional one, "position_embeddings.0" lies inside a
        keyword's tuple.
    carried: places in a layer's output tuple that come back as a later layer's argument, and so
    cross stages too. together: decoder layers that share parameters or state, and so stay on one
    stage. untrained: parameters that the logits have no gradient for, with * for numbers: constant
    tables, towers that text
        does not pass, a router's correction; by their own names the blocks of a tower behind the
        one that its model takes. An optimizer must leave them alone, weight decay included.
    loss: what the model computes itself from labels: "next_token" (labels = inputs, as the trainer
    does), "given" (it
        expects labels that are shifted already) or "other". The trainer's is next-token
        cross-entropy in any case.
    causal: whether no logit sees a later token.
    """

    stack: str
    hidden_position: int | None
    hidden_keyword: str | None
    output_length: int
    payload: tuple[str, ...] = ()
    carried: tuple[int, ...] = ()
    together: tuple[LayerRange, ...] = ()
    untrained: tuple[str, ...] = ()
    loss: str = "next_token"
    causal: bool = True

    def blocks(self, decoder_layers: int) -> tuple[int, ...]:
        """Numbers of pipeline layers (embedding, decoder layers, head) that no stage boundary may
        part, in order."""
        sizes, at = [1], 0
        for first, last in self.together:
            sizes += [1] * (first - at) + [last - first + 1]
            at = last + 1
        return (*sizes, *[1] * (decoder_layers - at), 1)


def merge_overlapping_ranges(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Ranges that have a layer in common are one; in order."""
    out: list[LayerRange] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        elif first < last:
            out.append((first, last))
    return tuple(out)


def layers_that_share_parameters(
    names: Iterable[tuple[str, ...]], stack: str
) -> tuple[LayerRange, ...]:
    """Decoder layers that share a parameter. names: per parameter, every name that it has in the
    whole model."""
    prefix = stack + "."
    layers = [
        [int(n[len(prefix) :].split(".")[0]) for n in group if n.startswith(prefix)]
        for group in names
    ]
    return merge_overlapping_ranges((min(group), max(group)) for group in layers if group)


def boundaries_in_layers(boundaries: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Stage boundaries counted in blocks -> counted in layers."""
    starts = (0, *itertools.accumulate(blocks))
    return tuple(starts[b] for b in boundaries)


# The tower of a model that sees, as parts of the piece that holds the embedding: what each
# computes and keeps.


ModelPart = Literal["vision", "projector", "text"]
"""Of a model that sees: the tower; what brings its features to the decoder's width; the decoder
with its embedding and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """FLOPs, or bytes, of one picture (or tile) of n patches: per_image + per_patch n + per_pair
    n^2."""

    per_image: int = 0
    per_patch: int = 0
    per_pair: int = 0

    def of(self, patches: int) -> int:
        return self.per_image + (self.per_patch + self.per_pair * patches) * patches


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedVisionActivations:
    """Bytes that a layer of the tower keeps for its backward pass; checkpointing and element_bytes
    as in model_graph.Kept."""

    checkpointing: Checkpointing
    element_bytes: int
    bytes: ImageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayer:
    """A layer of its own kind, `vision`: one block of a tower; or, with name "", all that stands
    around the blocks, the projector included.

    widths: (out, in) of its widest matrix; (0, 0) where it has none.
    """

    name: str  # "model.visual.blocks.0"
    widths: tuple[int, int]
    forward: ImageCost
    backward: ImageCost
    kept: tuple[SavedVisionActivations, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEncoder:
    """patch: pixels of a patch's side. patches: of every picture, or tile of one, whatever its
    size; 0 where its size decides. tiles: that a picture is cut into at the most, the whole one
    among them. patches_per_token: that become one token of a row.

    layers: in the order in which they run, the one around them last; () where untraced says why
    they could not be run. tower, projector: paths of modules and of single parameters; what lies
    under both is the projector's, what lies
        under neither is the text part.
    """

    patch: int
    patches: int
    patches_per_token: float
    layers: tuple[VisionLayer, ...]
    tower: tuple[str, ...]
    projector: tuple[str, ...]
    untraced: str = ""
    tiles: int = 1

    def patches_per_image(self, pixels: int) -> int:
        """Of a picture with so many pixels, or of a tile."""
        return self.patches or max(1, pixels // self.patch**2)

    def part(self, parameter: str) -> ModelPart:
        if _lies_under(parameter, self.projector):
            return "projector"
        return "vision" if _lies_under(parameter, self.tower) else "text"


def _lies_under(name: str, paths: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor of the Hugging Face state dict, by its own name and unsplit shape."""

    name: str  # "model.layers.0.self_attn.q_proj.weight"
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def config_sha256(config: JsonObject) -> str:
    """sha256 (hex), whatever the order of the keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Bytes that one layer keeps for backward, per sequence of S tokens: per_token S + per_pair
    S^2.

    checkpointing: none | selective (the attention module keeps its inputs alone) | full (the
    layer's input alone). element_bytes: of the compute precision; norms and softmax keep float32
    copies, so 2 and 4 differ by more than 2. from_length: holds for S from here on, up to the next
    entry of its kind: beyond a sliding window there is a mask. whole, divided: held by every tensor
    rank, and cut over them (what a block that holds matrices makes for itself,
        and anything wider than the hidden states; block inputs, norms and residuals are whole).
    """

    checkpointing: Checkpointing
    element_bytes: int
    from_length: int
    unsharded_bytes_per_token: int
    unsharded_bytes_per_token_pair: int
    sharded_bytes_per_token: int
    sharded_bytes_per_token_pair: int

    def unsharded_bytes(self, sequence_length: int) -> int:
        return (
            self.unsharded_bytes_per_token + self.unsharded_bytes_per_token_pair * sequence_length
        ) * sequence_length

    def sharded_bytes(self, sequence_length: int) -> int:
        return (
            self.sharded_bytes_per_token + self.sharded_bytes_per_token_pair * sequence_length
        ) * sequence_length


def saved_activations_entry(
    entries: tuple[SavedActivations, ...],
    checkpointing: Checkpointing,
    element_bytes: int,
    sequence_length: int,
) -> SavedActivations | None:
    """The entry that holds at this length; None where there is none: the layer could not be
    traced."""
    kind = (checkpointing, element_bytes)
    fitting = [
        k
        for k in entries
        if (k.checkpointing, k.element_bytes) == kind and k.from_length <= sequence_length
    ]
    return max(fitting, key=lambda k: k.from_length, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One pipeline layer: the embedding, a decoder layer, or the head (final norm and output
    embedding).

    parameters: those that live here; a tied head lists the shared parameter too (`ModelGraph.tied`
    names it). flops_source: traced (the layer's own modules ran on fake tensors) | counted: REASON
    (they refuse to: from the
        parameters' shapes, the experts that a token is routed to, and attention over the configured
        heads).
    matmul_flops_per_token: forward, multiply and add counted as two, embedding lookup as zero.
    attention_flops_per_token_per_position: forward, the QK^T and AV matmuls: times S gives FLOPs
    per token
        (full S x S attention).
    attention_module_flops_per_token: the part of matmul_flops_per_token inside the attention module
    (projections). backward_flops_per_token, backward_flops_per_token_per_position: the same of the
    backward pass; a fused attention
        computes its scores a second time there.
    kept: bytes kept for backward, as traced: () where the layer refuses. What follows is the
    published formula instead
        (arXiv 2205.05198), also for kernels that are not Hugging Face's.
    activation_elements_per_token: kept for backward with checkpointing "none", flash-like
    attention. attention_activation_elements_per_token: the part of it inside the attention module
    ("selective" recomputes it). attention_matrix_elements_per_token_per_position: score elements
    kept by eager attention (times S per token).
    """

    name: str  # "embedding", "model.layers.0", "head"
    kind: str  # embedding | decoder | head
    parameters: tuple[Parameter, ...]
    flops_source: str
    matmul_flops_per_token: int
    attention_flops_per_token_per_position: int
    attention_module_flops_per_token: int
    backward_flops_per_token: int
    backward_flops_per_token_per_position: int
    kept: tuple[SavedActivations, ...]
    activation_elements_per_token: int
    attention_activation_elements_per_token: int
    attention_matrix_elements_per_token_per_position: int

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


NOT_TESTED = "its graph is of a version that did not try"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """config: the complete HF config as plain JSON (`to_dict()`), hashed by `config_hash` (sha256
    hex).

    layers: embedding, decoder layers in order, head. tied: groups of parameter names that are one
    tensor, the canonical (first) name first. cut: the decoder stack and how hidden states enter and
    leave its layers. attention_module: name of the attention module inside a decoder layer
    ("self_attn", "attn"). tensor_parallel_kind: sharded | fallback (layout/parameter_sharding.py),
    or "" where tensor_parallel_reason says why neither is. tensor_parallel_styles: path pattern of
    a module or a parameter (with
    * for every number) -> tensor-parallel style. tensor_parallel_heads: path or pattern of a module
    that is cut by heads -> its number of heads. max_dropout: the largest dropout probability in the
    config. attention: the attention implementation that will run (sdpa, eager...). packing: why
    documents that share a row would see each other with this attention; "" where they are proved
    apart. context: bytes of what the model hands to its decoder layers (masks, rotary tables), once
    per sequence and stage. vision: of a model that sees its tower, which the embedding's layer
    holds with its projector. context_parallel_reason, expert_parallel_reason: why context ranks
    cannot share its rows, or expert ranks its experts; "" where a tiny
        copy of it shows that they can.
    modules_run_per_image: modules of a tower that run as often as there are pictures.
    """

    model_type: str
    architecture: str  # "LlamaForCausalLM"
    config: JsonObject
    config_hash: str
    hidden_size: int
    feed_forward_size: int
    vocabulary_size: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    max_positions: int | None
    layers: tuple[Layer, ...]
    tied: tuple[tuple[str, ...], ...]
    cut: PipelineSplit
    attention_module: str
    tensor_parallel_kind: str
    tensor_parallel_reason: str
    tensor_parallel_styles: tuple[tuple[str, str], ...]
    tensor_parallel_heads: tuple[tuple[str, int], ...]
    max_dropout: float
    attention: str
    packing: str
    context: tuple[SavedActivations, ...]
    context_parallel_reason: str = NOT_TESTED
    expert_parallel_reason: str = NOT_TESTED
    task: TaskName = "causal-lm"
    vision: VisionEncoder | None = None
    modules_run_per_image: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[str, str, str, str, int]:
        """Tells it from other graphs: all the rest follows from these."""
        tiles = (
            1 if self.vision is None else self.vision.tiles
        )  # told by the processor, not by the configuration
        return self.config_hash, self.attention, self.tensor_parallel_kind, self.task, tiles

    @property
    def task_traits(self) -> TaskTraits:
        """The task's row of the table."""
        return TASK_TRAITS[self.task]

    @property
    def features(self) -> int:
        """Width of what is compared of a pair: what the text side's last matrix gives. 0 of other
        models."""
        if not self.task_traits.compares_pairs:
            return 0
        return next(
            (p.shape[0] for p in reversed(self.layers[-1].parameters) if len(p.shape) == 2),
            self.hidden_size,
        )

    @property
    def decoder_layers(self) -> int:
        return len(self.layers) - 2  # all but the embedding and the head; see verify

    @property
    def total_parameters(self) -> int:
        """Distinct parameters: a tied tensor counts once."""
        return sum({p.name: p.numel for layer in self.layers for p in layer.parameters}.values())

    def verify(self) -> None:
        """Raises ValueError where the graph contradicts itself (a bug of ours, not the user's)."""
        kinds = [layer.kind for layer in self.layers]
        if (
            len(kinds) < 3
            or kinds[0] != "embedding"
            or kinds[-1] != "head"
            or set(kinds[1:-1]) != {"decoder"}
        ):
            raise ValueError(f"layers must be embedding, decoder..., head, not {kinds}")
        names = {p.name for layer in self.layers for p in layer.parameters}
        for group in self.tied:
            if group[0] not in names:
                raise ValueError(f"tied group {group} names no parameter of any layer")
