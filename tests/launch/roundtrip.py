"""A Hugging Face folder into the engines and out again: many types and layouts in one launch of
roundtrip_worker.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.worker_launch import launch_worker

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
    result = launch_worker(
        Path(__file__).with_name("roundtrip_worker.py"),
        2,
        seconds=1800,
        SHARDWRIGHT_ROUNDTRIP_OUT=str(out),
    )
    assert (out / "found.json").exists(), result.stdout[-6000:] + result.stderr[-6000:]
    found: dict[str, dict[str, Any]] = json.loads((out / "found.json").read_text())
    return found
