"""The model's configuration, a compiled folder's or a checkpoint's own copy. No deepspeed: `export`
reads it too."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from shardwright.diagnostics import refusal
from shardwright.models.config_special_floats import decode_special_floats
from shardwright.models.remote_code_import import register
from shardwright.plan.plan import Plan


def load_config(plan: Plan, folder: Path) -> PretrainedConfig:
    """Runs the model's own code where it has some: who runs a compiled folder trusts what is in it,
    and the commands that take a stranger's folder ask first (trust.py). Raises Refusal: SW6008."""
    if plan.model.remote_code is not None:
        _register_own_code(plan, (folder / plan.model.config_file).parent)
    document = decode_special_floats(
        json.loads((folder / plan.model.config_file).read_text(encoding="utf-8"))
    )
    model_type = document.pop("model_type")
    document.pop("auto_map", None)
    return AutoConfig.for_model(model_type, **document)


def _register_own_code(plan: Plan, folder: Path) -> None:
    assert plan.model.remote_code is not None
    try:
        register(folder, plan.model.remote_code)
    except Exception as error:  # whatever the files raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise refusal(
            "SW6008",
            f"the model's own code in {str(folder)!r} cannot be used: {why}",
            "Compile the recipe again; what is in model/ is not to be edited.",
        ) from None
