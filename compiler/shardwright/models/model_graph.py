"""Stage 2's output: what the model is, counted exactly.

Shape letters: S sequence length, H hidden size, F feed-forward size, V vocabulary, L layers.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from shardwright.models.pipeline_split import PipelineSplit
from shardwright.models.vision_encoder_cost import VisionEncoder
from shardwright.recipe.literal_types import IMAGE_TASKS, Checkpointing, TaskName
from shardwright.utils.json_types import JsonObject


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
    def is_vision_language(self) -> bool:
        """Whether its rows hold pictures."""
        return self.task in IMAGE_TASKS

    @property
    def contrastive(self) -> bool:
        """Whether its rows are pairs of a picture and a caption, and the loss compares all of a
        batch."""
        return self.task == "contrastive"

    @property
    def features(self) -> int:
        """Width of what is compared of a pair: what the text side's last matrix gives. 0 of other
        models."""
        if not self.contrastive:
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
