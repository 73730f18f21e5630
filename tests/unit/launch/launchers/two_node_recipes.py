"""What the tests of the launch files compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

TWO_NODES: dict[str, Any] = {
    "cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "a100-sxm4-80gb"},
    "training.precision": "bf16",
}
KUBERNETES = {"image": "ghcr.io/me/train:1", "volume_claim": "data", "directory": "/shared/run"}

Compile = Callable[..., Path]
