"""Shardwright: a configuration compiler for DeepSpeed.

open_session, Session and StepResult are for training loops of one's own (docs/python-api.md). They
are looked up when they are asked for: `import shardwright` needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.engines.trainer_protocol import StepResult as StepResult
    from shardwright.train.training_session import Session as Session
    from shardwright.train.training_session import open_session as open_session

__version__ = "0.1.0"

_PUBLIC = {
    "open_session": "shardwright.train.training_session",
    "Session": "shardwright.train.training_session",
    "StepResult": "shardwright.engines.trainer_protocol",
}
"""Public name -> the module that has it. The modules may move; the names stay."""


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'shardwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
