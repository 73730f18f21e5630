"""An alias of shardwright.worker, for folders that version 0.1.0 compiled."""

from shardwright.worker import main as main
