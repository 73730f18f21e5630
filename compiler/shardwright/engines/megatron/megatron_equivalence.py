"""Check at compile that Megatron-Core computes what the model computes and builds the plan's ranks.

A process of its own (megatron_equivalence_process.py) does it, because it patches torch. Checks
that passed are memoized on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Refusal, refusal
from shardwright.models.graph_builder import (
    PACKAGE,
    cache_folder,
    tracing_source_hash,
)
from shardwright.plan.plan import Plan, plan_to_json
from shardwright.utils.json_values import JsonObject

_TIMEOUT_SECONDS = 600
_HELP = "Write `target: deepspeed`, which runs the model's own modules."


def check_megatron_equivalence(plan: Plan, config: JsonObject) -> None:
    """Raise Refusal, SW2051 to SW2053, where Megatron-Core does not reproduce the model or the
    plan.

    config: the model's full configuration
    """
    place = _memo_file(plan, config)
    if place is not None and place.exists():
        return
    result = _run_check_process({"config": config, "plan": json.loads(plan_to_json(plan))})
    if result:
        raise _refusal(plan, result)
    if place is not None:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh = place.with_name(f".{uuid.uuid4().hex}")
            fresh.touch()
            os.replace(fresh, place)


def _run_check_process(question: dict[str, Any]) -> dict[str, Any]:
    """Return {} where all agrees.

    -P: no file of the current directory is imported in place of a module.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "shardwright.engines.megatron.megatron_equivalence_process",
    ]
    done = subprocess.run(
        command,
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    lines = done.stderr.strip().splitlines() or [f"the check exited with {done.returncode}"]
    # torch puts the rank before each line, Python the exception's class.
    return {
        "failed": re.sub(r"^(\[rank\d+\]: )?([\w.]+Error: )?", "", lines[-1])[:300]
        or lines[-1][:300]
    }


def _refusal(plan: Plan, result: dict[str, Any]) -> Refusal:
    kind = plan.model.model_type
    if "unsupported" in result:
        return refusal(
            "SW2051",
            f"Megatron-Core does not support this {kind!r}: {result['unsupported']}",
            _HELP,
        )
    if "apart" in result:
        return refusal(
            "SW2052",
            f"Megatron-Core computes {kind!r} differently from Hugging Face: on a tiny copy of the "
            f"model, {result['apart']}",
            _HELP,
        )
    if "layout" in result:
        return refusal(
            "SW2053",
            f"Megatron-Core's ranks would differ from the plan's: {result['layout']}",
            "Change the degrees of `parallelism`, or write `target: deepspeed`.",
        )
    return refusal(
        "SW2052",
        f"Megatron-Core cannot build a tiny copy of the {kind!r} model: {result['failed']}",
        _HELP,
    )


def _memo_file(plan: Plan, config: JsonObject) -> Path | None:
    """Return the file that exists where this check passed, named by all that decides it."""
    folder = cache_folder()
    if folder is None:
        return None
    ranks = {(r.pipeline, r.tensor): r.parameter_bytes for r in plan.ranks}
    layout = [
        asdict(plan.strategy),
        [s.layers for s in plan.stages],
        sorted(map(list, ranks.items())),
    ]
    cuts = asdict(plan.tensor_parallel)
    here = Path(__file__).parent
    code = [path.read_text(encoding="utf-8") for path in sorted(here.glob("*.py"))]
    own = [
        tracing_source_hash(PACKAGE),
        code,
    ]  # the tiny copy is made, and run, by other folders' code (models/tiny_config.py)
    parts = [
        config,
        layout,
        cuts,
        plan.nodes,
        plan.gpus_per_node,
        plan.training.precision,
        dict(plan.versions),
        own,
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return folder / "megatron" / hashlib.sha256(text.encode()).hexdigest()
