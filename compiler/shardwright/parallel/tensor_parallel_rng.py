"""Random numbers under tensor parallelism: whole tensors see one stream, cut tensors one stream a
rank.

Tensor ranks share the seed, so dropout on a tensor that each of them holds whole drops the same
elements everywhere. Between a column-parallel layer and the row-parallel one behind it a rank works
on features of its own; there it draws from a stream that is seeded by one number of the shared
stream and its tensor rank. No state of its own survives the region, so recomputation and resume,
which restore the shared stream, reproduce it without knowing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwright.plan.plan import Plan


class TensorParallelRng:
    """The default generators' switch; one a process, as they are."""

    def __init__(self) -> None:
        self._tensor_rank: int | None = None
        self._shared: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def use(self, tensor_rank: int | None) -> None:
        """None (the default) switches it off: without dropout nothing is random."""
        self._tensor_rank, self._shared = tensor_rank, None

    def enter(self) -> None:
        """A column-parallel layer was passed. A second one (query, key, value) changes nothing. An
        evaluation drops nothing out, and must draw nothing: the steps behind it would draw other
        numbers."""
        if self._tensor_rank is None or self._shared is not None or not torch.is_grad_enabled():
            return
        seed = int(torch.randint(2**62, ()))
        on_gpu = torch.cuda.is_available()
        self._shared = (torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None)
        torch.manual_seed(seed + self._tensor_rank)

    def leave(self) -> None:
        """A row-parallel layer was reached: what comes behind it is whole again."""
        if self._shared is None:
            return
        cpu, gpu = self._shared
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        self._shared = None

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Recomputation starts outside any region and may stop inside one, as soon as it has what
        it needs."""
        before, self._shared = self._shared, None
        try:
            yield
        finally:
            self._shared = before


TENSOR_PARALLEL_RNG = TensorParallelRng()


def seed_dropout(plan: Plan, rank: int) -> None:
    """Data ranks and stages differ; the tensor ranks of one model copy share the seed."""
    at = plan.ranks[rank]
    shards = plan.strategy.shards
    torch.manual_seed(
        plan.training.seed + 1 + at.pipeline * shards + at.data * plan.strategy.context + at.context
    )
