"""The reference engine's row of the table."""

from __future__ import annotations

from shardwright.engines.engine_definition import Engine, Traits
from shardwright.engines.reference.reference_rules import RULES

REFERENCE = Engine(
    name="reference",
    title="plain PyTorch",
    runtime="shardwright.engines.reference.reference_runtime",
    lowering="shardwright.engines.reference.reference_files",
    program="python",
    reads_hosts=False,
    traits=Traits(
        selective_repeats_projections=True,
        fuses_accumulation=False,
        tensor_host="floor",
        duplex_sends=False,
        kept_outputs=0,
        bucketed_zero=False,
        bucketed_pipeline=False,
        traffic="deepspeed",
        zero_1_overlaps=False,
        gathers_layers=False,
        chunked_loss=True,
        hpz=False,
    ),
    rules=RULES,  # SW1921 refuses `extra`
    sees=True,
    automatic=False,
)
