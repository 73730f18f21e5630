"""A Hugging Face folder into the engines and out again: many types and layouts in one launch of
roundtrip_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwright.utils.child_processes import free_port

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, int]] = {
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "zero3-dp2": {"data": 2, "zero_stage": 3},
}
TYPES = (
    "llama",
    "gpt2",  # transposed weights, tied
    "gpt_neox",  # fused query, key, value
    "phi3",  # the same, and gate with up
    "mixtral",  # experts a file tensor each, one parameter in the model
    "qwen3_moe",
    "deepseek_v3",  # latent attention, shared experts, a buffer that is saved
    "gpt_oss",  # experts with biases, 3-D in the file
    "bloom",
    "gemma2",
)


def round_trips(cases: list[tuple[str, str]], out: Path) -> dict[str, dict[str, Any]]:
    """cases: (type, layout). "type layout" -> {"same_bytes": bool, "logits": largest difference
    after five steps}."""
    (out / "cases.json").write_text(json.dumps(cases))
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "compiler"))),
        "SHARDWRIGHT_ROUNDTRIP_OUT": str(out),
    }
    program, worker = (
        Path(sys.executable).parent / "deepspeed",
        Path(__file__).with_name("roundtrip_worker.py"),
    )
    launch = [
        str(program),
        "--hostfile",
        "none",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
    ]
    result = subprocess.run(
        [*launch, str(worker)], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert (out / "found.json").exists(), result.stdout[-6000:] + result.stderr[-6000:]
    found: dict[str, dict[str, Any]] = json.loads((out / "found.json").read_text())
    return found
