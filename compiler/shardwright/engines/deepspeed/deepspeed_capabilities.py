"""DeepSpeed's row of the table."""

from __future__ import annotations

from shardwright.engines.deepspeed.deepspeed_file_names import ACCELERATE, AUTOTP_FILE, DS_CONFIG
from shardwright.engines.deepspeed.deepspeed_rules import RULES
from shardwright.engines.deepspeed.ds_config_extra import sbatch_option_errors
from shardwright.engines.engine_definition import Engine, EngineTraits

DEEPSPEED = Engine(
    name="deepspeed",
    title="DeepSpeed",
    runtime="shardwright.engines.deepspeed.deepspeed_runtime",
    lowering="shardwright.engines.deepspeed.deepspeed_files",
    program="deepspeed",
    packages={"deepspeed": ">=0.19.8,<0.20"},
    artifacts=(DS_CONFIG, AUTOTP_FILE, f"{ACCELERATE}/"),
    inputs=(DS_CONFIG,),
    traits=EngineTraits(
        selective_recomputes_projections=True,
        fuses_accumulation=False,
        tensor_parallel_launch_cost="floor",
        bidirectional_p2p=False,
        # pipe/engine.py, _exec_backward_pass; pipe/schedule.py, TrainSchedule.num_pipe_buffers
        saved_stage_outputs=2,
        bucketed_zero=False,
        bucketed_pipeline=True,
        traffic="deepspeed",
        # overlap_comm is written from stage 2 on (engines/deepspeed/ds_config_zero.py)
        zero_1_overlaps=False,
        zero3_gathers_flat_layers=False,
        chunked_loss=True,
        hpz=True,
    ),
    rules=RULES,
    sbatch_option_errors=sbatch_option_errors,
    axes=frozenset({"context", "expert"}),
    compiles_layers=True,
    is_vision_language=True,
    islands=True,
    measures_noise_scale=True,
    compares=True,
)
