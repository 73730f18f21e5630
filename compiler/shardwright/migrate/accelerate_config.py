"""Read Accelerate's configuration: the file that `accelerate config` writes.

Its DeepSpeed, FSDP, MEGATRON_LM and parallelism_config sections become options of the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.migrate.recipe_draft import Setting
from shardwright.migrate.run_files import FileContent, RunFiles, text_of

ACCELERATE_KEYS = frozenset(
    {"distributed_type", "compute_environment", "deepspeed_config", "megatron_lm_config"}
    | {"parallelism_config", "downcast_bf16", "main_training_function"}
)
_SECTIONS = frozenset(
    {"deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config"}
    | {"fp8_config", "dynamo_config"}
)
# A key -> the option's name on the command line, where it is another one.
_NAMES = {"deepspeed_hostfile": "hostfile"}
NESTED = "Accelerate reads no section inside deepspeed_config: the run did not have it"


def add_accelerate_config(file: FileContent, run: RunFiles) -> None:
    """Add the file's keys to the options; what the command gives counts more."""
    run.files.append(file.path)
    for key, value in file.tree.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            for name, below in value.items():
                if isinstance(below, Mapping | list):
                    why = NESTED if key == "deepspeed_config" else "a recipe has no such key"
                    run.left.append(("parallelism", f"{key}.{name}", below, why))
                else:
                    _add(run, name, below)
        elif isinstance(value, Mapping | list):
            if value:
                why = "an option of the launcher that a recipe does not have"
                run.left.append(("launch", key, value, why))
        else:
            _add(run, key, value)


def _add(run: RunFiles, name: str, value: object) -> None:
    text = "" if value is None else text_of(value if isinstance(value, bool) else str(value))
    option = _NAMES.get(name, name)
    if text:
        run.options.setdefault(
            option, Setting(written=name, values=(text,), owner="Accelerate's file")
        )
