"""The reference engine's row of the table."""

from __future__ import annotations

from shardwright.engines.engine_definition import Engine, EngineTraits
from shardwright.engines.reference.reference_rules import RULES

REFERENCE = Engine(
    name="reference",
    title="plain PyTorch",
    runtime="shardwright.engines.reference.reference_runtime",
    lowering="shardwright.engines.reference.reference_files",
    program="python",
    reads_hosts=False,
    traits=EngineTraits(
        selective_recomputes_projections=True,
        fuses_accumulation=False,
        tensor_parallel_launch_cost="floor",
        bidirectional_p2p=False,
        saved_stage_outputs=0,
        bucketed_zero=False,
        bucketed_pipeline=False,
        traffic="deepspeed",
        zero_1_overlaps=False,
        zero3_gathers_flat_layers=False,
        chunked_loss=True,
        hpz=False,
    ),
    rules=RULES,  # SW1921 refuses `extra`
    is_vision_language=True,
    automatic=False,
)
