"""Restore the fp32 masters' full precision from the stored weights at a new start.

An engine copies its masters from parameters that are rounded to the compute dtype. Where the stored
weights have more bits, the masters get them back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.engines.trainer_protocol import OwnedShard
from shardwright.parallel.weight_loader import ShardReader

CHUNK_ELEMENTS = 2**24
"""Limits the elements copied at a time, so that the temporary memory stays small beside the
weights."""


@torch.no_grad()
def fill_fp32_masters(fragments: Iterable[OwnedShard], shards: ShardReader) -> None:
    """Copy the stored values into every fp32 master whose model weight is their rounding.

    Elsewhere the master stays as the engine made it, as with an option of `extra` that rearranges
    masters; a checkpoint is then refused (SW6210).
    """
    name, shard = "", torch.empty(0)
    for f in fragments:
        master = f.states.get("fp32")
        if (
            master is None
            or f.live.dtype == torch.float32
            or not shards.loses_bits(f.name, f.live.dtype)
        ):
            continue
        if f.name != name:  # an engine may hold several shards of a parameter
            name, shard = f.name, shards.read(f.name).reshape(-1)
        stored = shard.narrow(0, f.start, master.numel())
        pieces = list(zip(master.split(CHUNK_ELEMENTS), stored.split(CHUNK_ELEMENTS), strict=True))
        rounds = (
            torch.equal(own.to(f.live.dtype), new.to(own.device).to(f.live.dtype))
            for own, new in pieces
        )
        if all(rounds):
            for own, new in pieces:
                own.copy_(new)
