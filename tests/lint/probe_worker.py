"""Runs every probe in one process, on one CPU rank: what the installed DeepSpeed makes of a
ds_config.

stdin: a JSON list of {"code", "config" or "text", "at", "world_size", "pipeline", "embedding"};
stdout: a JSON list of {"error", "logs", "facts"}. `at` says how far to go: config (DeepSpeedConfig
alone), engine (deepspeed.initialize), step (six optimizer steps).
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}
os.environ["MASTER_PORT"] = sys.argv[1]
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Muon compiles its kernels when it is imported

import deepspeed
import torch
from deepspeed.comm import comm
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.utils import groups, logger
from torch.testing._internal.distributed.fake_pg import FakeStore

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
LOGS: list[str] = []


class _Record(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOGS.append(record.getMessage())


class _Ranks:
    """What DeepSpeedConfig asks an mpu for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


def probe(case: dict[str, Any]) -> dict[str, Any]:
    LOGS.clear()
    facts: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _PLACES[case["at"]](case, facts)
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "logs": list(LOGS), "facts": facts}


def _file(case: dict[str, Any], facts: dict[str, Any]) -> None:
    """By the path, as DeepSpeed reads it itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        kind = case.get("file", "text")
        if kind == "folder":
            path.mkdir()
        elif kind != "none":
            path.write_bytes(case["text"].encode("latin-1" if kind == "latin-1" else "utf-8"))
        DeepSpeedConfig(str(path))


def _trainer_file(case: dict[str, Any], facts: dict[str, Any]) -> None:
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        path.write_text(case["text"])
        HfDeepSpeedConfig(str(path))


def _filled(case: dict[str, Any], facts: dict[str, Any]) -> None:
    """What the Trainer and then Accelerate fill in, as Trainer and accelerator.prepare call
    them."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = SimpleNamespace(
        **dict.fromkeys(("world_size", "per_device_train_batch_size"), 1),
        gradient_accumulation_steps=case.get("accumulation", 1),
        **dict.fromkeys(("learning_rate", "adam_epsilon", "weight_decay", "max_grad_norm"), 0.5),
        **dict.fromkeys(("save_on_each_node", "fp16", "fp16_full_eval", "bf16_full_eval"), False),
        adam_beta1=0.9,
        adam_beta2=0.95,
        bf16=True,
        get_warmup_steps=lambda steps: 10,
    )
    auto = copy.deepcopy(case["config"])
    hf = HfTrainerDeepSpeedConfig(auto)
    hf.trainer_config_process(args)
    facts["trainer_bf16"] = hf.is_true("bf16.enabled")
    hf.mismatches.clear()  # these arguments are not the file's user's
    hf.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 100)
    plugin = DeepSpeedPlugin(hf_ds_config=hf)
    kept = {
        "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    }
    # accelerator.py gives these as soon as one of them is "auto".
    names = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    plugin.deepspeed_config_process(
        must_match=False, **kept, **{f"zero_optimization.{name}": 1 for name in names}
    )
    if "accumulation" in case:
        DeepSpeedConfig(plugin.deepspeed_config)
    facts["left"] = [
        path for path, value in _leaves(plugin.deepspeed_config, "") if value == "auto"
    ]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}".lstrip("."))
    else:
        yield path, value


def _config(case: dict[str, Any], facts: dict[str, Any]) -> None:
    config = copy.deepcopy(case["config"])
    ranks = case.get("world_size")
    read = DeepSpeedConfig(
        config, mpu=_Ranks(ranks) if ranks and "sequence_parallel_size" not in config else None
    )
    facts |= {
        "stage": int(read.zero_optimization_stage),
        "fp16": read.float16_config.enabled,
        "bf16": read.bfloat16_config.enabled,
        "optimizer": read.optimizer_name,
        "learning_rate": (read.optimizer_params or {}).get("lr"),
        "scheduler": read.scheduler_name,
        "dump_state": read.dump_state,
        "autotp_size": read.tensor_parallel_config.autotp_size,
        "routing": [
            read.data_efficiency_enabled,
            read.data_efficiency_config["data_routing"]["enabled"],
            # The engine's own answer, which is all that it asks later.
            DeepSpeedEngine.random_ltd_enabled(SimpleNamespace(_config=read)),
        ],
        "clipping": read.gradient_clipping,
    }


def _world(count: int) -> None:
    """As the last rank of a world that does not exist."""
    if torch.distributed.get_backend() != "fake":
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group(
            "fake", rank=count - 1, world_size=count, store=FakeStore()
        )
        comm.cdb = None
        deepspeed.init_distributed(
            dist_backend="fake", dist_init_required=False, auto_mpi_discovery=False
        )


def _groups(case: dict[str, Any], facts: dict[str, Any]) -> None:
    """The groups that the engine makes, and the data ranks that the configuration counts."""
    _world(case["world_size"])
    config = copy.deepcopy(case["config"])
    read = DeepSpeedConfig(config)
    facts["data"] = read.world_size
    if read.zero_config.zero_hpz_partition_size > 1:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._create_zero_param_parallel_group(read.zero_config.zero_hpz_partition_size)
        facts["copied"] = torch.distributed.get_process_group_ranks(
            groups._get_zero_param_intra_parallel_group()
        )
    if read.tensor_parallel_config.autotp_size > 1:
        groups._TENSOR_MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
        groups._init_tp_mesh_device(
            tensor_model_parallel_size=read.tensor_parallel_config.autotp_size
        )
        facts["tensor"] = torch.distributed.get_process_group_ranks(
            groups.get_tensor_model_parallel_group()
        )


def _mesh(case: dict[str, Any], facts: dict[str, Any]) -> None:
    """The mesh that initialize makes and that DeepSpeedConfig asks."""
    from torch.distributed.device_mesh import init_device_mesh

    _world(case["world_size"])
    config = case["config"]
    shape = (config["data_parallel_size"], config["sequence_parallel_size"])
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "sequence_parallel"))
    facts["data"] = torch.distributed.get_world_size(mesh.get_group(mesh_dim="data_parallel"))


def _checkpoint(case: dict[str, Any], facts: dict[str, Any]) -> None:
    checkpointing.configure(None, deepspeed_config=copy.deepcopy(case["config"]))


def _partition_config(case: dict[str, Any], facts: dict[str, Any]) -> None:
    facts["found"] = (
        TPTrainingConfig(**case["config"]["tensor_parallel"]).get_partition_config_object()
        is not None
    )


def _engine(case: dict[str, Any], facts: dict[str, Any]) -> Any:
    config = copy.deepcopy(case["config"])
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # the last engine's, of the whole process
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
    name = str(config.get("optimizer", {}).get("type", "")).lower()
    if name in ("adam", "adamw", "muon") and not case.get("deepspeeds_adam"):
        # Otherwise an extension is compiled: a minute.
        config["optimizer"].setdefault("params", {})["torch_adam"] = True
    torch.manual_seed(0)
    module: Any
    if case.get("pipeline"):
        layers = [torch.nn.Embedding(16, 8)] * bool(case.get("embedding")) + [
            torch.nn.Linear(8, 8) for _ in range(2)
        ]
        module = PipelineModule(
            layers, num_stages=1, loss_fn=lambda out, label: (out - label).pow(2).mean()
        )
    else:
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    parameters = list(module.parameters())
    client = None if "optimizer" in config else torch.optim.AdamW(parameters, lr=1e-3)
    if client is not None:
        config["zero_force_ds_cpu_optimizer"] = False
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=module, optimizer=client, model_parameters=parameters, config=config
    )
    facts |= {
        "stage": int(engine.zero_optimization_stage()),
        "wrapper": type(optimizer).__name__,
        "basic": type(engine.basic_optimizer).__name__ if optimizer is not None else None,
        "learning_rate": engine.get_lr()[0] if optimizer is not None else None,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
        "warmup_type": getattr(scheduler, "warmup_type", None),
        "peak": max(getattr(scheduler, "max_lrs", [0.0])),
        "scaled": str(parameters[0].dtype)
        if getattr(optimizer, "torch_autocast_gradscaler", None) is not None
        else "",
        "accumulates": str(engine.get_data_types()[1]),
        "dynamic_scale": engine.dynamic_loss_scale(),
        "checkpointing": checkpointing.is_configured(),
        "parameters": sorted({str(p.device) for p in module.parameters()}),
        "pipeline_stages": module.num_stages if case.get("pipeline") else None,
        "offloads": bool(
            getattr(optimizer, "cpu_offload", False)
            or getattr(optimizer, "offload_optimizer", False)
        ),
        "swaps": getattr(optimizer, "swap_optimizer", False),
        "hpz": getattr(optimizer, "zero_hpz_partition_size", None),
        "super": type(optimizer).__name__.startswith("SuperOffload"),
        "decoupled": isinstance(engine.basic_optimizer, torch.optim.AdamW)
        if optimizer is not None
        else None,
    }
    if case.get("save"):
        with tempfile.TemporaryDirectory() as folder:
            facts["saved"] = engine.save_16bit_model(folder)
    return engine


def _step(case: dict[str, Any], facts: dict[str, Any]) -> None:
    engine = _engine(case, facts)
    size = engine.train_micro_batch_size_per_gpu()
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    if case.get("pipeline"):
        ids = (
            torch.randint(0, 16, (size, 4))
            if case.get("embedding")
            else torch.randn(size, 8, dtype=dtype)
        )
        label = (
            torch.randn(size, 4, 8) if case.get("embedding") else torch.randn(size, 8, dtype=dtype)
        )
        engine.train_batch(iter([(ids, label)] * 8))
        return
    facts["losses"] = _losses(engine, size, dtype)
    if "precision" in case:
        config = {k: v for k, v in case["config"].items() if k != case["precision"]}
        facts["plain"] = _losses(_engine({**case, "config": config}, {}), size, torch.float32)


def _losses(engine: Any, size: int, dtype: torch.dtype) -> list[float]:
    torch.manual_seed(1)
    rows = torch.randn(size, 8).to(dtype)
    losses: list[float] = []
    for _ in range(6):
        loss = engine(rows).float().pow(2).mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


_PLACES = {
    "file": _file,
    "trainer_file": _trainer_file,
    "filled": _filled,
    "config": _config,
    "groups": _groups,
    "mesh": _mesh,
    "checkpoint": _checkpoint,
    "partition_config": _partition_config,
    "engine": _engine,
    "step": _step,
}

if __name__ == "__main__":
    logger.setLevel(logging.WARNING)
    logger.addHandler(_Record())
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    cases = json.load(sys.stdin)
    print(json.dumps([probe(case) for case in cases]))
