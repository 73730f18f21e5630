"""Compile each decoder layer's forward pass, and checkpoint its activations.

With `model.kernels: compile` a layer is one graph (fullgraph) of fixed shapes, inside its
recomputation. Layers that differ only in their weights share it. A graph break is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.models.mixture_of_experts import SEQUENCE_LENGTHS
from shardwright.parallel.tensor_parallel_collectives import TENSOR_PARALLEL_RNG
from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import LayerCheckpointing, PartialCheckpointing


def compile_layers(model: nn.Module, plan: Plan, layers: Collection[str] | None = None) -> None:
    """Compile decoder layers; call before apply_activation_checkpointing, which saves a graph's
    inputs.

    layers: paths of the layers to compile; None: all
    """
    if plan.model.kernels != "compile":
        return
    decoders = (name for s in plan.stages for name in s.layers if name not in ("embedding", "head"))
    for name in decoders:
        if layers is None or name in layers:
            layer = model.get_submodule(name)
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)


# Activation checkpointing in every engine: torch's non-reentrant checkpoint on module instances.
# Re-entrant checkpointing loses the gradient where no input requires one (the embedding stage), and
# drops the keyword arguments with which Hugging Face layers call their attention.


def recompute_forward(module: nn.Module) -> None:
    """Make `module` save only its inputs for the backward pass."""
    # ZeRO-3 releases parameters between forward and recomputation, so a metadata check would fail.
    module.forward = partial(
        checkpoint,
        module.forward,
        use_reentrant=False,
        determinism_check="none",
        # The contexts of a micro-batch's forward pass, and of its recomputation.
        context_fn=lambda: (nullcontext(), _recomputing(SEQUENCE_LENGTHS.recomputing())),
    )


@contextmanager
def _recomputing(row_lengths: AbstractContextManager[None]) -> Iterator[None]:
    with TENSOR_PARALLEL_RNG.recomputing(), row_lengths:
        yield


def checkpoint_layers(
    decoder_layers: Iterable[nn.Module], choice: LayerCheckpointing, attention_module: str
) -> None:
    """Checkpoint the attention module (selective) or the whole decoder layer (full)."""
    for layer in decoder_layers:
        if choice == "full":
            recompute_forward(layer)
        elif choice == "selective":
            recompute_forward(layer.get_submodule(attention_module))


def apply_activation_checkpointing(
    model: nn.Module, plan: Plan, layers: Collection[str] | None = None
) -> None:
    """Checkpoint the plan's decoder layers, and under `full` and `{full: N}` the vision encoder's
    blocks.

    The blocks belong to the embedding.

    layers: paths of the layers to consider; None: all
    """
    chosen = [name for name in checkpointed_layers(plan) if layers is None or name in layers]
    checkpoint_layers(
        map(model.get_submodule, chosen), plan.strategy.checkpointing, plan.model.attention_module
    )
    if plan.strategy.checkpointing == "full" and (layers is None or "embedding" in layers):
        checkpoint_layers(map(model.get_submodule, plan.model.vision_encoder_blocks), "full", "")


def checkpointed_layers(plan: Plan) -> tuple[str, ...]:
    """Return the paths of the checkpointed decoder layers of every stage, its first ones.

    The first layers run backward last, and recompute in the memory that later layers have freed.
    The last layers would recompute while all activations are saved. This holds under 1F1B, too: the
    micro-batch that runs backward frees its last layers first.
    """
    choice = plan.strategy.activation_checkpointing
    if choice == "none":
        return ()
    decoders = (
        [name for name in stage.layers if name not in ("embedding", "head")]
        for stage in plan.stages
    )
    most = choice.full if isinstance(choice, PartialCheckpointing) else None
    return tuple(name for names in decoders for name in names[:most])
