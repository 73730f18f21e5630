"""Writing safetensors files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_readable(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """safetensors makes its files for the owner alone; here they get what any new file gets."""
    save_file(tensors, path, {"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
