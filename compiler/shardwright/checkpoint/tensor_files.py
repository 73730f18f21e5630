"""Writing safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from shardwright.atomic import umask


def save_readable(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """safetensors makes its files for the owner alone; here they get what any new file gets."""
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o666 & ~umask())
