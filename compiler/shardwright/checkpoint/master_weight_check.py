"""Whether the masters that a checkpoint is made of are the weights that the model computes with,
and numbers.

DeepSpeed tells where a parameter's master lies. Where it lies elsewhere (an option that rearranges
masters without telling), a checkpoint would hold the right values under wrong names, and only a run
on another layout would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed as dist

from shardwright.diagnostics import refusal
from shardwright.engines.trainer_protocol import OwnedShard

CHUNK_ELEMENTS = 2**24
"""Compared at a time: what is made for it stays small beside the weights."""


def check_master_weights(fragments: Iterable[OwnedShard]) -> bool:
    """Collective. Every master, cast, is the live weight, on every rank, or Refusal on all: SW6210.
    Whether all are finite numbers. fragments: all of this rank; nothing is gathered."""
    looked = [(f, *_compare_bits(f)) for f in fragments if "fp32" in f.states]
    # Read back at the end: until then a GPU is not waited for.
    suspects = [f for f, other_bits, _ in looked if bool(other_bits)]
    other = next(
        ((f.name, count, f.live.numel()) for f in suspects if (count := _count_differing(f))), None
    )
    finite = all(bool(finite) for *_, finite in looked)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (other, finite))
    for rank, (found, _) in enumerate(everyone):
        if found is not None:
            name, count, of = found
            raise refusal(
                "SW6210",
                f"rank {rank} would save other weights than it trains: of {name}, {count:,} of "
                f"{of:,} elements of the optimizer's fp32 master are not those of the live "
                "parameter",
                "Nothing was written; earlier checkpoints are as they were. A key of `extra` that "
                "rearranges the optimizer does this: take `extra` out of the recipe and compile "
                "again. Without one it is a defect: report it with plan.json.",
            )
    return all(finite for _, finite in everyone)


@torch.no_grad()
def _compare_bits(f: OwnedShard) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether any live weight has other bits, whether all are finite), in one pass and without
    waiting."""
    other = torch.zeros((), dtype=torch.bool, device=f.live.device)
    finite = torch.ones_like(other)
    for cast, live in _pieces(f):
        other |= (_bits(cast) != _bits(live)).any()
        if live.numel():
            low, high = torch.aminmax(live)  # NaN where there is one
            finite &= low.isfinite() & high.isfinite()
    return other, finite


@torch.no_grad()
def _count_differing(f: OwnedShard) -> int:
    """Elements of which the live weight is another number: NaN has many forms, and zero has two."""
    return sum(
        int(((cast != live) & ~(cast.isnan() & live.isnan())).sum()) for cast, live in _pieces(f)
    )


def _pieces(f: OwnedShard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of the master, cast, and of the live weight."""
    for master, live in zip(
        f.states["fp32"].split(CHUNK_ELEMENTS), f.live.split(CHUNK_ELEMENTS), strict=True
    ):
        yield master.to(live.dtype).to(live.device), live


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
