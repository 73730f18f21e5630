"""Threads of other people's trouble that docs/troubleshooting.md answers, and what shows that the
answer holds."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.cli.main import main as shardwright
from tests.conftest import SMALL_RECIPE
from tests.pages.samples import killed_rank

Try = Callable[[Path], str]


@dataclass(frozen=True)
class Thread:
    """One row of the page. says: a code or words of the answer, on the page and in what `tried`
    returns."""

    threads: tuple[str, ...]
    says: str
    tried: Try


def linted(config: dict[str, Any], *flags: str) -> Try:
    def tried(folder: Path) -> str:
        (folder / "ds_config.json").write_text(json.dumps(config))
        return printed("lint", folder / "ds_config.json", *flags)

    return tried


def estimated(parallelism: dict[str, Any], **cluster: object) -> Try:
    def tried(folder: Path) -> str:
        return printed("estimate", recipe(folder / "recipe.json", parallelism, **cluster))

    return tried


def resumed_on_more(folder: Path) -> str:
    layout = {"tensor": 1, "pipeline": 1, "zero_stage": 3, "micro_batch_size": 1}
    few = recipe(folder / "few.json", {**layout, "data": 2}, gpus_per_node=2)
    many = recipe(folder / "many.json", {**layout, "data": 4}, gpus_per_node=4)
    return printed("diff", few, many)


def recipe(path: Path, parallelism: dict[str, Any], **cluster: object) -> Path:
    document = {
        **SMALL_RECIPE,
        "cluster": {**SMALL_RECIPE["cluster"], **cluster},
        "parallelism": parallelism,
    }
    path.write_text(json.dumps(document))
    return path


def printed(*arguments: object) -> str:
    """Standard output and error of a command, whatever its exit code."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        shardwright([str(argument) for argument in arguments])
    return out.getvalue()


IN_STAGES = {"tensor": 1, "pipeline": 2, "data": 2, "schedule": "1f1b", "micro_batch_size": 1}
THREADS = (
    Thread(
        ("DeepSpeed#6914",),
        "SW4202",
        linted(
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            "--world-size",
            "16",
        ),
    ),
    Thread(
        ("DeepSpeed#1629", "DeepSpeed#3589"), "SW3108", estimated({**IN_STAGES, "zero_stage": 2})
    ),
    Thread(
        ("DeepSpeed#3866",),
        "SW3127",
        estimated({**IN_STAGES, "zero_stage": 1, "offload": "optimizer"}),
    ),
    Thread(
        ("DeepSpeed#1809",),
        "SW4112",
        linted({"train_batch_size": 8, "zero_optimisation": {"stage": 2}}),
    ),
    Thread(
        ("accelerate#1644", "DeepSpeed#1270"),
        "SW4119",
        linted({"train_batch_size": 8, "gradient_clipping": "auto"}, "--for", "deepspeed"),
    ),
    Thread(
        ("DeepSpeed#3895", "DeepSpeed#688"),
        "SW4603",
        linted({"train_batch_size": 8, "pipeline": {"activation_checkpoint_interval": 1}}),
    ),
    Thread(
        ("DeepSpeed#6889", "DeepSpeed#7019", "DeepSpeed#2928"),
        "SW3120",
        estimated(
            {"tensor": 1, "pipeline": 1, "data": 4, "zero_stage": 3},
            nodes=2,
            gpus_per_node=2,
            gpu="a100-sxm4-80gb",
            inter_node_gbits_per_second=50,
        ),
    ),
    Thread(("DeepSpeed#4239",), "killed (signal 9)", killed_rank),
    Thread(("DeepSpeed#3810",), "yes, converted", resumed_on_more),
)
