"""Writes engines/deepspeed/ds_config_schemas/VERSION.json from the installed
DeepSpeed.

Its pydantic models and constructors are read; what it reads key by key comes from
deepspeed_untyped_sections.py.
"""

from __future__ import annotations

import enum
import inspect
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import annotated_types
import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.module_inject.autotp_config import AutoTPPresets
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as ds_config
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tools.generate import deepspeed_untyped_sections as loose

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "compiler/shardwright/engines/deepspeed/ds_config_schemas"

MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "hybrid_engine": ds_config.HybridEngineConfig,
    "weight_quantization": WeightQuantConfig,
}
PRIMITIVES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    Path: "string",
    type(None): "null",
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{public(deepspeed.__version__)}.json"
    path.write_text(text(), encoding="utf-8")
    print(path.relative_to(ROOT))


def text() -> str:
    return json.dumps(snapshot(), indent=1, sort_keys=True) + "\n"


def public(version: str) -> str:
    return version.partition("+")[0]


def snapshot() -> dict[str, Any]:
    properties = {
        **loose.TOP,
        **loose.SECTIONS,
        **{name: model(kind) for name, kind in MODELS.items()},
    }
    properties["bfloat16"] = {**properties["bf16"], "deprecated": "bf16"}
    properties["bf16"] = {**properties["bf16"], "type": ["object", "null"]}
    properties["zero_optimization"] = {
        **properties["zero_optimization"],
        "type": ["object", "boolean"],
    }
    leaves = properties["zero_optimization"]["properties"]["leaf_module"]["properties"]
    for leaf in leaves.values():
        leaf["type"].append("string")  # one name in place of a list (leaf_module_config.py)
    properties["timers"] = loose.section({"throughput": model(DeepSpeedThroughputTimerConfig)})
    properties["tensor_parallel"]["properties"]["partition_config"] = loose.PARTITION_CONFIG
    properties["expert_parallel"] = loose.section(
        {
            name: {"type": []}
            for name in AutoEPConfig.__dataclass_fields__
            if not name.startswith("_")
        }
    )
    # Every preset is a function of AutoTPPresets that needs no argument.
    presets = [
        n
        for n in dir(AutoTPPresets)
        if not n.startswith("_") and n != "get_preset" and AutoTPPresets.get_preset(n)
    ]
    properties["tensor_parallel"]["properties"]["preset_model"] |= {
        "enum": presets,
        "any_case": True,
    }
    removed = {**ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {
        f"zero_optimization.{name}": why
        for name, why in ds_config._REMOVED_ZERO_CONFIG_KEYS.items()
    }
    return {
        "deepspeed": public(deepspeed.__version__),
        "torch": public(torch.__version__),
        "schema": loose.section(properties),
        "removed": sorted(removed),
        "optimizers": optimizers(),
        "optimizer_values": loose.OPTIMIZER_VALUES,
        "schedulers": schedulers(),
        "scheduler_values": loose.SCHEDULER_VALUES,
    }


def model(kind: type[BaseModel]) -> dict[str, Any]:
    """Both names of an aliased field are taken (populate_by_name)."""
    properties: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        described = described_field(field)
        properties[field.alias or name] = described
        if field.alias:
            properties[name] = {**described, "same_as": field.alias}
    return {"type": ["object"], "checked": True, "properties": properties}


def described_field(field: FieldInfo) -> dict[str, Any]:
    found = annotation(field.annotation)
    for limit in field.metadata:
        for name, word in (
            ("ge", "minimum"),
            ("gt", "exclusiveMinimum"),
            ("le", "maximum"),
            ("lt", "exclusiveMaximum"),
        ):
            if isinstance(limit, getattr(annotated_types, name.capitalize())):
                found[word] = getattr(limit, name)
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("deprecated"):
        found["deprecated"] = str(extra.get("new_param", ""))
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, bool | int | float | str) and not isinstance(default, enum.Enum):
        found["default"] = (
            int(default) if isinstance(default, int) and not isinstance(default, bool) else default
        )
    if default == "auto":
        found["auto"] = True
    return found


def annotation(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [annotation(argument) for argument in arguments]
        merged: dict[str, Any] = {}
        for part in parts:
            merged |= part
        return {**merged, "type": [name for part in parts for name in part["type"]]}
    if origin is typing.Literal:
        return {"type": ["string"], "enum": list(arguments)}
    if origin in (list, tuple) or hint in (list, tuple):
        return {
            "type": ["array"],
            **({"items": annotation(arguments[0])} if arguments and origin is list else {}),
        }
    if origin is dict or hint is dict:
        return {"type": ["object"]}
    if hint in PRIMITIVES:
        return {"type": [PRIMITIVES[hint]]}
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        kind = "integer" if issubclass(hint, int) else "string"
        return {"type": [kind], "enum": [member.value for member in hint]}
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        return model(hint)
    return {"type": ["python"]}  # torch.dtype, a process group: nothing that a file can hold


def parameters(kind: Any, *added: str) -> dict[str, Any]:
    """What a constructor takes beside the model's parameters, and what of it has no default."""
    taken = list(inspect.signature(kind).parameters.values())[1:]
    return {
        "params": sorted({p.name for p in taken} | set(added)),
        "required": sorted(p.name for p in taken if p.default is inspect.Parameter.empty),
    }


def optimizers() -> dict[str, Any]:
    """name -> its parameters; DeepSpeed's own names in small letters, for they are matched in any
    case (engine.py, _configure_basic_optimizer). `zero`: whether ZeRO takes it without
    zero_allow_untested_optimizer. `forms`: the classes that DeepSpeed builds, for each device of
    the optimizer, and under torch_adam."""
    adam = {
        device: form(kind, *ADAM_WORDS)
        for device, kind in (
            ("gpu", FusedAdam),
            ("cpu", DeepSpeedCPUAdam),
            ("torch", torch.optim.AdamW),
        )
    }
    for taken in adam.values():
        taken["params"] = sorted({*taken["params"]} - {"adamw_mode"})  # given by DeepSpeed itself
    own: dict[str, dict[str, Any]] = {
        "adam": {"forms": adam, "zero": True},
        "adamw": {"forms": adam, "zero": True},
        "adagrad": {
            "forms": {"gpu": form(torch.optim.Adagrad), "cpu": form(DeepSpeedCPUAdagrad)},
            "zero": True,
        },
        "lamb": {"forms": {"gpu": form(FusedLamb)}, "zero": False},
        "lion": {
            "forms": {"gpu": form(FusedLion), "cpu": form(DeepSpeedCPULion)},
            "zero": True,
        },
    }
    own["lamb"]["forms"]["gpu"]["params"].remove("max_grad_norm")
    for entry in own.values():
        names = {n for kind in entry["forms"].values() for n in kind["params"]}
        entry |= {"params": sorted(names), "required": []}
    own |= {
        # Its parameters are taken apart by DeepSpeed and unknown ones dropped: not listed here.
        "muon": {"params": None, "required": [], "zero": True},
        **{
            name: {"params": None, "required": [], "zero": False}
            for name in ("muadam", "muadamw", "musgd")
        },
    }
    kinds = {
        n: k
        for n, k in vars(torch.optim).items()
        if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)
    }
    del kinds["Optimizer"]
    others = {n: {**parameters(k), "zero": False} for n, k in kinds.items() if n.lower() not in own}
    return {**own, **others}


ADAM_WORDS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")


def form(kind: Any, *added: str) -> dict[str, Any]:
    """What one class of an optimizer takes; `refuses`: a parameter that it takes only as false."""
    refused = ["amsgrad"] * ("not support the AMSGrad variant" in inspect.getsource(kind))
    return {
        "class": kind.__name__,
        "params": parameters(kind, *added)["params"],
        "refuses": refused,
    }


def schedulers() -> dict[str, Any]:
    """`own`: DeepSpeed's; the others are torch's, which take only an unwrapped optimizer."""
    own = {
        name: {**parameters(getattr(lr_schedules, name)), "own": True}
        for name in lr_schedules.VALID_LR_SCHEDULES
    }
    kinds = vars(torch.optim.lr_scheduler).items()
    base = torch.optim.lr_scheduler.LRScheduler
    others = {
        n: {**parameters(k), "own": False}
        for n, k in kinds
        if inspect.isclass(k)
        and issubclass(k, base)
        and not n.startswith("_")
        and n != "LRScheduler"
    }
    others["ReduceLROnPlateau"] = {
        **parameters(torch.optim.lr_scheduler.ReduceLROnPlateau),
        "own": False,
    }
    return {**others, **own}


if __name__ == "__main__":
    main()
