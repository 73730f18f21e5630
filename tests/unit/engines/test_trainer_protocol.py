"""Every engine of the table that trains has what training asks for, with the arguments that it is
asked with."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from shardwright.engines.engine_table import ENGINES
from shardwright.engines.trainer_protocol import EngineRuntime

ASKED = [
    name
    for name, _ in inspect.getmembers(EngineRuntime, inspect.isfunction)
    if not name.startswith("_")
]


RUNTIMES = [engine.runtime for engine in ENGINES.values()]


@pytest.mark.parametrize("path", RUNTIMES)
def test_the_runtime(path: str) -> None:
    assert len(ASKED) == 4
    module = import_module(path)
    for asked in ASKED:
        _, *wanted = inspect.signature(getattr(EngineRuntime, asked)).parameters.values()
        assert list(inspect.signature(getattr(module, asked)).parameters.values()) == wanted
