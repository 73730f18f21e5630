"""The loss of a step is the sum over the predicted tokens of the whole global batch / their number:
data ranks as threads, each with documents of other lengths, and an engine that averages as
DeepSpeed's do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.data.dataset import Dataset
from shardwright.data.sequences import EpochSampler, Indices, SequenceBatch
from shardwright.engines.deepspeed import deepspeed_trainers as engine
from shardwright.models.tasks.task_traits import TaskTraits
from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.micro_batches import MicroBatch, TrainingBatches, ValidationBatches
from shardwright.recipe.objectives import PLAIN_OBJECTIVE
from tests.unit.parallel.test_micro_batches import plan

RANKS, MICRO, ACCUMULATION, VOCABULARY, LENGTH = 2, 2, 2, 7, 6
ROWS = RANKS * MICRO * ACCUMULATION
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH))
TRAINED = (
    np.arange(LENGTH) >= np.arange(1, ROWS + 1)[:, None] % LENGTH
)  # another number of labels in each row


class Chat:
    """Rows of which a part is trained on."""

    def __len__(self) -> int:
        return ROWS

    def read(self, indices: Indices) -> SequenceBatch:
        return SequenceBatch(tokens=TOKENS[indices], loss_mask=TRAINED[indices])


class Meeting:
    """all_reduce between threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=30)
        self.given: dict[int, torch.Tensor] = {}

    def all_reduce(self, x: torch.Tensor, group: object) -> None:
        assert group == "data"
        self.given[threading.get_ident()] = x.clone()
        self.barrier.wait()
        total = torch.stack(list(self.given.values())).sum(dim=0)
        self.barrier.wait()
        x.copy_(total)


class Table(nn.Embedding):
    """The model, and DeepSpeed's pipeline module."""

    def begin(self, micro_batches: list[MicroBatch]) -> None:
        pass


class Engine:
    """Averages losses over micro-batches and data ranks."""

    def __init__(self, meeting: Meeting, table: nn.Embedding, trainer: Any) -> None:
        self.meeting, self.module, self.trainer = meeting, table, trainer
        self.optimizer = SimpleNamespace(param_groups=[{}])

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.module(input_ids))

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    def eval(self) -> None:
        self.module.eval()

    def train(self) -> None:
        self.module.train()

    def get_global_grad_norm(self) -> float:
        return 0.0

    def train_batch(self, data_iter: Any) -> torch.Tensor:
        losses = [self.trainer.loss_fn(self.module(ids), labels) for ids, labels in data_iter]
        mean = torch.stack(losses).mean().detach()
        self.meeting.all_reduce(mean, "data")
        return mean / RANKS

    def eval_batch(self, data_iter: Any, num_micro_batches: int) -> torch.Tensor:
        return self.train_batch([next(data_iter) for _ in range(num_micro_batches)])


def of_all_ranks(
    kind: type[Any], run: Callable[[Any, int], Any], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    meeting, table = Meeting(), Table(VOCABULARY, VOCABULARY)
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("deepspeed.comm.all_reduce", meeting.all_reduce)

    def one(rank: int) -> Any:
        trainer = object.__new__(kind)
        model = SimpleNamespace(attention="sdpa", task_traits=TaskTraits())
        trainer.plan = SimpleNamespace(
            strategy=SimpleNamespace(data=RANKS, context=1, zero_world_size=RANKS, zero_stage=1),
            training=SimpleNamespace(precision="fp32", objective=PLAIN_OBJECTIVE),
            model=model,
        )
        trainer._blank = None
        monkeypatch.setattr(trainer, "context_shard", lambda batch: batch, raising=False)
        trainer.device = torch.device("cpu")
        trainer.grid = SimpleNamespace(get_data_parallel_group=lambda: "data")
        trainer.loss_fn = CausalLoss()
        trainer.engine = Engine(meeting, table, trainer)
        return run(trainer, rank)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def wanted() -> tuple[float, int]:
    """Of one process over all rows."""
    table = nn.Embedding(VOCABULARY, VOCABULARY)
    nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
    ids = torch.from_numpy(TOKENS)
    labels = torch.where(torch.from_numpy(TRAINED), ids, -100)[:, 1:]
    count = int((labels != -100).sum())
    total = F.cross_entropy(
        table(ids)[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
    )
    return float(total.detach()) / count, count


KINDS = [engine.DataParallelTrainer, engine.PipelineTrainer]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_counted_over_the_global_batch(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = EpochSampler(ROWS, ROWS, 0, shuffle=False)
    data = Dataset(train=Chat(), order=order, parts=(ROWS,), validation=None, steps=1)
    settings: Any = plan(data=RANKS, micro=MICRO, accumulation=ACCUMULATION)
    shares = [TrainingBatches(settings, data).micro_batches(1, rank) for rank in range(RANKS)]
    assert len({sum(m.predicted for m in share) for share in shares}) == RANKS, (
        "the ranks' counts differ"
    )
    found = of_all_ranks(kind, lambda trainer, rank: trainer.step(shares[rank], 1e-3), monkeypatch)
    assert [result.loss for result in found] == pytest.approx([wanted()[0]] * RANKS, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_labels_too(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = plan(data=RANKS, micro=MICRO, accumulation=ACCUMULATION)
    shares = [ValidationBatches(settings, Chat(), rank) for rank in range(RANKS)]
    found = of_all_ranks(kind, lambda trainer, rank: trainer.evaluate(shares[rank]), monkeypatch)
    loss, count = wanted()
    assert [n for _, n in found] == [count] * RANKS
    assert [mean for mean, _ in found] == pytest.approx([loss] * RANKS, rel=1e-6)
