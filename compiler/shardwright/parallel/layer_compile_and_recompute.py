"""`model.kernels: compile`: torch.compile of each decoder layer's forward pass, below a
recomputation of it.

A layer is one graph (fullgraph) of fixed shapes: every micro-batch has the same. Layers that differ
in nothing but their weights share it. A graph break is an error, not a slow run.
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
from shardwright.recipe.literal_types import Checkpointing, PartialCheckpointing


def compile_layers(model: nn.Module, plan: Plan, layers: Collection[str] | None = None) -> None:
    """layers: only these of the decoder layers, by their paths; None: all. Before
    apply_activation_checkpointing, which keeps the inputs of a whole graph."""
    if plan.model.kernels != "compile":
        return
    decoders = (name for s in plan.stages for name in s.layers if name not in ("embedding", "head"))
    for name in decoders:
        if layers is None or name in layers:
            layer = model.get_submodule(name)
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)


# Activation checkpointing, the same under both engines: torch's non-reentrant checkpoint on module
# instances.
#
# Re-entrant checkpointing loses the gradient where no input asks for one (the embedding stage) and
# drops keyword arguments, which is how Hugging Face layers call their attention.


def recompute_forward(module: nn.Module) -> None:
    """Makes `module` keep only its inputs for backward."""
    # ZeRO-3 releases parameters between forward and recomputation, so their shapes differ then: no
    # metadata check.
    module.forward = partial(
        checkpoint,
        module.forward,
        use_reentrant=False,
        determinism_check="none",
        context_fn=_contexts,
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Called in the forward pass, whose micro-batch the recomputation belongs to."""
    return nullcontext(), _recomputing(SEQUENCE_LENGTHS.recomputing())


@contextmanager
def _recomputing(row_lengths: AbstractContextManager[None]) -> Iterator[None]:
    with TENSOR_PARALLEL_RNG.recomputing(), row_lengths:
        yield


def checkpoint_layers(
    decoder_layers: Iterable[nn.Module], choice: Checkpointing, attention_module: str
) -> None:
    """selective: the attention module; full: the whole decoder layer."""
    for layer in decoder_layers:
        if choice == "full":
            recompute_forward(layer)
        elif choice == "selective":
            recompute_forward(layer.get_submodule(attention_module))


def apply_activation_checkpointing(
    model: nn.Module, plan: Plan, layers: Collection[str] | None = None
) -> None:
    """To the decoder layers that the plan checkpoints, and under `full` and `{full: N}` to the
    blocks of a tower, which stand in the embedding's piece. layers: to these of them, by their
    paths; None: to all."""
    chosen = [name for name in checkpointed_layers(plan) if layers is None or name in layers]
    checkpoint_layers(
        map(model.get_submodule, chosen), plan.strategy.checkpointing, plan.model.attention_module
    )
    if plan.strategy.checkpointing == "full" and (layers is None or "embedding" in layers):
        checkpoint_layers(map(model.get_submodule, plan.model.vision_encoder_blocks), "full", "")


def checkpointed_layers(plan: Plan) -> tuple[str, ...]:
    """Paths of decoder layers, of every stage. Where a stage checkpoints some, they are the first
    ones: they go backward last, and what they make again takes the room that the layers behind them
    have left. The last ones would make it beside all that is kept. Under 1F1B, too: whatever other
    micro-batches keep meanwhile, the one that goes backward gives up its last layers first."""
    choice = plan.strategy.activation_checkpointing
    if choice == "none":
        return ()
    decoders = (
        [name for name in stage.layers if name not in ("embedding", "head")]
        for stage in plan.stages
    )
    most = choice.full if isinstance(choice, PartialCheckpointing) else None
    return tuple(name for names in decoders for name in names[:most])
