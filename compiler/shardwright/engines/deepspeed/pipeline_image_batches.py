"""What the stages of a model that sees look up.

Every pipeline rank has the batch of its data rank. A micro-batch's number crosses with the hidden
states, and each stage finds its ids and where its pictures stand by it.
"""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from shardwright.models.model_skeleton import Batch, Skeleton, State
from shardwright.parallel.dummy_images import DummyImage, inputs_on_device
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.torch_dtypes import DTYPES
from shardwright.plan.plan import Plan


class PipelineImageBatches:
    """batches: those whose numbers cross now, on every stage the same."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.batches: list[MicroBatch] = []
        self._blank = DummyImage(model)
        self._device = torch.device(get_accelerator().current_device_name())
        self._dtype = DTYPES[plan.training.precision]
        self._current: MicroBatch | None = None
        self._shown: tuple[MicroBatch, Batch] | None = None

    def batch(self, number: torch.Tensor) -> Batch:
        """What every piece is shown of the micro-batch. number: (1,)."""
        self._current = micro_batch = self.batches[int(number.item())]
        if self._shown is None or self._shown[0] is not micro_batch:
            integers = {
                n: v for n, v in (micro_batch.beside or {}).items() if not v.is_floating_point()
            }
            moved = inputs_on_device(
                {"input_ids": micro_batch.input_ids, **integers}, self._device, self._dtype
            )
            assert moved is not None
            self._shown = micro_batch, moved
        return self._shown[1]

    def embed(self, skeleton: Skeleton, state: State) -> State:
        """The embedding's piece: state holds the ids in the place of hidden states."""
        micro_batch = self._current
        assert micro_batch is not None
        beside = inputs_on_device(micro_batch.beside, self._device, self._dtype)
        with self._blank.shown(
            inputs_on_device(micro_batch.blank, self._device, self._dtype)
        ) as picture:
            return skeleton.embed(state.hidden, None, {**(beside or {}), **picture})
