"""What a compiled folder's train.py starts on every rank: main().

Compiled folders outlive versions of this package, so the name of this module stays.
"""

from __future__ import annotations

from shardwright.train.training_worker import main

__all__ = ["main"]
