"""What a compiled folder's train.py starts on every rank: main().

Folders outlive versions of this package, so this name stays where it is.
"""

from __future__ import annotations

from shardwright.train.training_worker import main

__all__ = ["main"]
