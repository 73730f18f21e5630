"""Describe a model for the compiler: layers, parameters, FLOPs, saved activations, pipeline split.

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

# Names of modules and parameters.


def name_pattern(path: str) -> str:
    """Replace each number in a dotted path by `*`: "model.layers.3.mlp" -> "model.layers.*.mlp"."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


# Tensor-parallel styles by the dimension that they split: transformers' own names and ours.


FUSED_QKV = "fused_qkv_colwise"
"""Query, key and value concatenated: three blocks, the last two as wide as the key/value heads."""

GROUPED_QKV = "grouped_qkv_colwise"
"""Query, key and value fused per key/value head, so that splitting between key/value heads is
enough."""

MULTI_QUERY = "multi_query_colwise"
"""Fused query heads and a single key/value head, which every tensor rank needs."""

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
"""Styles with unsharded input and output: a dimension that does not divide leaves the layer
unsharded."""

# How a Hugging Face model is split into pipeline layers; measured by running it.


LayerRange = tuple[int, int]
"""First and last index of consecutive decoder layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """Describe how hidden states enter and leave the decoder layers of a model.

    stack: dotted path of the ModuleList whose children run once each, in order.
    hidden_position, hidden_keyword: the argument of a decoder layer that is the hidden states; one
        of the two.
    output_length: length of the tuple that a layer returns, hidden states first; 0 where it returns
        them alone.
    payload: paths of layer arguments computed by the embedding stage and sent across stages ("2" is
        the third positional argument, "position_embeddings.0" an item of a keyword's tuple).
    carried: places in a layer's output tuple that a later layer takes as an argument, and so cross
        stages.
    together: ranges of decoder layers that share parameters or state, and so stay on one stage.
    untrained: names or patterns (`*` for numbers) of parameters without a gradient; no optimizer
        may change them, by weight decay either.
    loss: the loss the model computes from labels: "next_token" (labels = inputs), "given" (labels
        already shifted), "pooled" (of a reward model, which reads one token's score), "other".
    causal: whether no logit depends on a later token.
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
        """Count the pipeline layers (embedding, decoder layers, head) in each block that no stage
        boundary may split."""
        sizes, at = [1], 0
        for first, last in self.together:
            sizes += [1] * (first - at) + [last - first + 1]
            at = last + 1
        return (*sizes, *[1] * (decoder_layers - at), 1)


def merge_overlapping_ranges(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Merge ranges that have a layer in common; return them in order."""
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
    """Find the ranges of decoder layers that share a parameter.

    names: for each parameter, every name that it has in the whole model.
    """
    prefix = stack + "."
    layers = [
        [int(n[len(prefix) :].split(".")[0]) for n in group if n.startswith(prefix)]
        for group in names
    ]
    return merge_overlapping_ranges((min(group), max(group)) for group in layers if group)


def boundaries_in_layers(boundaries: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Convert stage boundaries counted in blocks to boundaries counted in layers."""
    starts = (0, *itertools.accumulate(blocks))
    return tuple(starts[b] for b in boundaries)


# The vision encoder of a vision-language model: what each of its layers computes and saves.


ModelPart = Literal["vision", "projector", "text"]
"""Part of a vision-language model: vision encoder, projector to the decoder's width, or decoder
with embedding and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """FLOPs or bytes for one image (or tile) of n patches: per_image + per_patch n + per_pair
    n^2."""

    per_image: int = 0
    per_patch: int = 0
    per_pair: int = 0

    def of(self, patches: int) -> int:
        return self.per_image + (self.per_patch + self.per_pair * patches) * patches


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedVisionActivations:
    """Bytes that a vision encoder layer saves for its backward pass.

    checkpointing, element_bytes: as in SavedActivations.
    """

    checkpointing: Checkpointing
    element_bytes: int
    bytes: ImageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayer:
    """Describe one block of a vision encoder, or (name "") everything around the blocks, the
    projector included.

    widths: (out, in) of its largest matrix; (0, 0) where it has none.
    """

    name: str  # "model.visual.blocks.0"
    widths: tuple[int, int]
    forward: ImageCost
    backward: ImageCost
    kept: tuple[SavedVisionActivations, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEncoder:
    """Describe a vision encoder and its projector.

    patch: side of a patch (pixels).
    patches: patches of every image or tile; 0 where they depend on the image's size.
    patches_per_token: patches that become one token of the sequence.
    layers: in running order, the one around the blocks last; () where `untraced` says why they
        could not be run.
    tower: paths of the encoder's modules and single parameters.
    projector: paths of the projector's; a parameter under both is the projector's, one under
        neither is the decoder's.
    untraced: why the encoder could not be traced, else "".
    tiles: largest number of tiles of one image, the unsplit image included.
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
        """Return the patches of an image, or of a tile, with this number of pixels."""
        return self.patches or max(1, pixels // self.patch**2)

    def part(self, parameter: str) -> ModelPart:
        if lies_under(parameter, self.projector):
            return "projector"
        return "vision" if lies_under(parameter, self.tower) else "text"


def lies_under(name: str, paths: tuple[str, ...]) -> bool:
    """Return whether a module or parameter is one of these paths or inside one."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Describe one tensor of the Hugging Face state dict by its own name and unsplit shape."""

    name: str  # "model.layers.0.self_attn.q_proj.weight"
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def config_sha256(config: JsonObject) -> str:
    """Hash a configuration (sha256, hex) independently of the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """Bytes that one layer saves for backward, for a sequence of S tokens: per_token S + per_pair
    S^2.

    checkpointing: none | selective (the attention module saves only its inputs) | full (only the
        layer's input).
    element_bytes: bytes of the compute precision. Norms and softmax save fp32 copies, so 2 and 4
        differ by more than 2.
    from_length: smallest S this holds for, up to the next entry of its kind: beyond a sliding
        window a mask is saved.
    unsharded_*: bytes held by every tensor rank (block inputs, norms, residuals).
    sharded_*: bytes split over tensor ranks (made inside a block with matrices, or wider than the
        hidden states).
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
    """Return the entry that holds at this length, or None where the layer could not be traced."""
    kind = (checkpointing, element_bytes)
    fitting = [
        k
        for k in entries
        if (k.checkpointing, k.element_bytes) == kind and k.from_length <= sequence_length
    ]
    return max(fitting, key=lambda k: k.from_length, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Describe one pipeline layer: the embedding, a decoder layer, or the head (final norm and
    output embedding).

    parameters: its parameters; a tied head lists the shared parameter too (`ModelGraph.tied` names
        it).
    flops_source: "traced" (its modules ran on fake tensors) or "counted: REASON" (from parameter
        shapes, routed experts and the configured heads).
    matmul_flops_per_token: forward; multiply and add count as two, an embedding lookup as zero.
    attention_flops_per_token_per_position: forward QK^T and AV matmuls; times S gives FLOPs per
        token of full S x S attention.
    attention_module_flops_per_token: part of matmul_flops_per_token inside the attention module
        (projections).
    backward_flops_per_token, backward_flops_per_token_per_position: the same in backward, where
        fused attention recomputes its scores.
    kept: traced bytes saved for backward; () where the layer could not be traced.
    activation_elements_per_token: elements saved without checkpointing under flash-like attention
        (formula of arXiv 2205.05198).
    attention_activation_elements_per_token: the part of them inside the attention module,
        recomputed under "selective".
    attention_matrix_elements_per_token_per_position: score elements saved by eager attention (times
        S per token).
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
    """Describe a model, counted exactly.

    config: the complete Hugging Face config as plain JSON (`to_dict()`); config_hash is its sha256
        (hex).
    layers: embedding, decoder layers in order, head.
    tied: groups of parameter names that are one tensor, the canonical name first.
    cut: how hidden states enter and leave the decoder layers.
    attention_module: name of the attention module inside a decoder layer ("self_attn", "attn").
    tensor_parallel_kind: sharded | fallback (layout/parameter_sharding.py), or "" where
        tensor_parallel_reason says why neither is possible.
    tensor_parallel_styles: (path pattern of a module or parameter, tensor-parallel style).
    tensor_parallel_heads: (path or pattern of a module that is split by heads, its number of
        heads).
    max_dropout: largest dropout probability of its modules.
    attention: attention implementation that runs (sdpa, eager, ...).
    packing: why packed documents would attend to each other with this attention; "" where they are
        verified not to.
    context: bytes of the arguments handed to all decoder layers (masks, rotary tables), once per
        sequence and stage.
    context_parallel_reason, expert_parallel_reason: why sequences, or experts, cannot be split over
        ranks; "" where a tiny copy verifies it.
    vision: the vision encoder of a vision-language model, held by the embedding's layer with its
        projector.
    modules_run_per_image: modules that run once for each image.
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

    def __hash__(self) -> int:
        """Hash the fields that tell most graphs apart: caches look graphs up thousands of times."""
        return hash((self.config_hash, self.attention, self.tensor_parallel_kind, self.task))

    @property
    def identity(self) -> tuple[str, str, str, str, int]:
        """Return a key for memoization: all other fields follow from these."""
        # The processor sets the tiles, not the configuration.
        tiles = 1 if self.vision is None else self.vision.tiles
        return self.config_hash, self.attention, self.tensor_parallel_kind, self.task, tiles

    @property
    def task_traits(self) -> TaskTraits:
        """Return the task's traits."""
        return TASK_TRAITS[self.task]

    @property
    def features(self) -> int:
        """Return the width of a contrastive embedding (its text projection's output), 0 for other
        models."""
        if not self.task_traits.compares_pairs:
            return 0
        return next(
            (p.shape[0] for p in reversed(self.layers[-1].parameters) if len(p.shape) == 2),
            self.hidden_size,
        )

    @property
    def output_width(self) -> int:
        """Return the width of the head's output: the vocabulary, or a reward model's one score."""
        return 1 if self.task_traits.scores_sequences else self.vocabulary_size

    @property
    def decoder_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers) - 2

    @property
    def total_parameters(self) -> int:
        """Count distinct parameters: a tied tensor counts once."""
        return sum({p.name: p.numel for layer in self.layers for p in layer.parameters}.values())

    def verify(self) -> None:
        """Raise ValueError where the graph contradicts itself: a bug of the compiler, not of the
        recipe."""
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
