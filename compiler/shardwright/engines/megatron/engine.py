"""Megatron-LM's row of the table: of its published runs."""

from __future__ import annotations

from shardwright.engines.engine import Engine, Traits

MEGATRON = Engine(
    name="megatron",
    title="Megatron-LM",
    runtime=None,
    traits=Traits(
        selective_repeats_projections=False,  # arXiv 2205.05198
        fuses_accumulation=True,
        drains_launches=False,
        duplex_sends=True,
        kept_outputs=0,
        bucketed_zero=False,
        chunked_loss=False,
        hpz=False,
    ),
    axes=frozenset({"virtual_stages", "sequence_parallel"}),
)
