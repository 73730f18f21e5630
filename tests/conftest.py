"""What every test may use: a small recipe to vary, and the --update-golden switch."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest_plugins = ["tools.prove.pytest_results", "tests.missing_packages"]

# A shell without job control starts what runs in the background with SIGINT ignored, and children
# inherit that: the commands that tests interrupt would go on.
signal.signal(signal.SIGINT, signal.default_int_handler)
# With torch and transformers imported, a full collection looks at a million objects that stay: by
# Python's own thresholds an eighth of the tests' time.
gc.set_threshold(100_000, 50, 100)
# Two workers on two cores, tiny tensors: threads would only wait for each other. Read when torch is
# imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

SMALL_RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "small",
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        "weights": "random",
    },
    "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "cpu"},
    "training": {
        "sequence_length": 32,
        "global_batch_size": 8,
        "steps": 10,
        "precision": "fp32",
    },
    "data": {"kind": "synthetic"},
    "parallelism": {
        "tensor": 2,
        "pipeline": 2,
        "data": 1,
        "schedule": "1f1b",
        "micro_batch_size": 2,
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files anew")


@pytest.fixture(scope="session", autouse=True)
def model_graph_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests trace with their own code: an empty cache of theirs, for the commands that they
    start too. One for all workers of pytest-xdist, whose temporary folders lie side by side: none
    traces what another has."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_CACHE", str(folder / "graphs"))
        yield


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def small_recipe() -> dict[str, Any]:
    """A document to change: Llama of 4 layers, pipeline 2 x tensor 2 on four CPU ranks."""
    return copy.deepcopy(SMALL_RECIPE)


@pytest.fixture
def write_recipe(tmp_path: Path, small_recipe: dict[str, Any]) -> Callable[..., Path]:
    """write_recipe({"training.steps": 3}) -> path of the small recipe with these keys set (None
    removes one)."""

    def write(changes: dict[str, Any] | None = None, name: str = "recipe.json") -> Path:
        document = copy.deepcopy(small_recipe)
        for dotted, value in (changes or {}).items():
            *parents, key = dotted.split(".")
            place = document
            for parent in parents:
                place = place.setdefault(parent, {})
            if value is None:
                place.pop(key, None)
            else:
                place[key] = value
        path = tmp_path / name
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    return write
