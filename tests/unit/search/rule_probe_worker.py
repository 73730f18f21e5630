"""What the installed DeepSpeed really does with layouts that the rules forbid. One process, one
rank; prints JSON.

name -> the type and text of what it raised, or what it did instead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.schedule import DualPipeVSchedule
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled


def config(stage: int, **more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    return {"train_batch_size": 1, "optimizer": adam, "zero_optimization": {"stage": stage}, **more}


def engine(ds_config: dict[str, Any], module: nn.Module | None = None) -> Any:
    module = module or nn.Linear(4, 4)
    found, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=ds_config
    )
    return found


def pipeline(stage: int) -> Any:
    return engine(
        config(stage),
        PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss),
    )


def offloaded(**settings: Any) -> str:
    """The optimizer that answers for a configuration which asks for offload."""
    ds_config = config(settings.pop("stage"), **settings)
    ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    optimizer = engine(ds_config).optimizer
    return f"{type(optimizer).__name__} cpu_offload={getattr(optimizer, 'cpu_offload', None)}"


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
PROBES: dict[str, Callable[[], Any]] = {
    "pipeline with ZeRO-2": lambda: type(pipeline(2)).__name__,
    "pipeline with ZeRO-3": lambda: type(pipeline(3)).__name__,
    "pipeline with ZeRO-1": lambda: type(pipeline(1)).__name__,
    "DualPipeV, 3 micro-batches on 2 ranks": lambda: len(list(DualPipeVSchedule(3, 2, 0).steps())),
    "DualPipeV, 4 micro-batches on 2 ranks": lambda: (
        len(list(DualPipeVSchedule(4, 2, 0).steps())) > 0
    ),
    "bf16 without ZeRO, fp32 accumulation": lambda: (
        type(engine(config(0, **BF16)).optimizer).__name__
    ),
    "offload with bf16 ZeRO-1": lambda: offloaded(stage=1, **BF16),
    "offload with ZeRO-2": lambda: offloaded(stage=2),
    "offload_param with ZeRO-2": lambda: (
        type(
            engine(
                {
                    **config(2),
                    "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
                }
            ).optimizer
        ).__name__
    ),
    "fp16 on a CPU": lambda: torch.float16 in get_accelerator().supported_dtypes(),
}


def outcome(probe: Callable[[], Any]) -> str:
    try:
        return str(probe())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    results = {name: outcome(probe) for name, probe in PROBES.items()}
    sys.stdout.flush()
    with open(os.environ["SHARDWRIGHT_PROBES_OUT"], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
