"""DeepSpeed's row of the table."""

from __future__ import annotations

from shardwright.engines.deepspeed.deepspeed_file_names import ACCELERATE, AUTOTP_FILE, DS_CONFIG
from shardwright.engines.deepspeed.deepspeed_rules import RULES
from shardwright.engines.deepspeed.ds_config_extra import check_extra
from shardwright.engines.engine_definition import Engine, Traits

DEEPSPEED = Engine(
    name="deepspeed",
    title="DeepSpeed",
    runtime="shardwright.engines.deepspeed.deepspeed_runtime",
    lowering="shardwright.engines.deepspeed.deepspeed_files",
    program="deepspeed",
    packages={"deepspeed": ">=0.19.8,<0.20"},
    artifacts=(DS_CONFIG, AUTOTP_FILE, f"{ACCELERATE}/"),
    inputs=(DS_CONFIG,),
    traits=Traits(
        selective_repeats_projections=True,
        fuses_accumulation=False,
        tensor_host="floor",
        duplex_sends=False,
        # pipe/engine.py, _exec_backward_pass; pipe/schedule.py, TrainSchedule.num_pipe_buffers
        kept_outputs=2,
        bucketed_zero=False,
        bucketed_pipeline=True,
        traffic="deepspeed",
        # overlap_comm is written from stage 2 on (engines/deepspeed/ds_config_zero.py)
        zero_1_overlaps=False,
        gathers_layers=False,
        chunked_loss=True,
        hpz=True,
    ),
    rules=RULES,
    check_extra=check_extra,
    axes=frozenset({"context", "expert"}),
    compiles_layers=True,
    sees=True,
    islands=True,
    measures_noise=True,
    compares=True,
)
