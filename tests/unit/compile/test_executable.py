"""search/runnable_recipes.py both ways: what it allows compiles, what it does not is refused with
its code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.runnable_recipes import SUPPORTED_VALUES, check_runnable
from tests.unit.models.factory import problem_of

# A value beyond the table for each row, as a user would write it; keys of the small recipe to go
# with it.
NO_MORE_RECOMPUTE: dict[str, list[dict[str, Any]]] = {
    "assume.kernels": [{"assume": {"kernels": "compiled"}}],
    "assume.mfu": [{"assume": {"mfu": 0.4}}],
    "assume.ignore_memory": [{"assume": {"ignore_memory": True}}],
    "assume.expert_imbalance": [{"assume": {"expert_imbalance": 1.0}}],
    "model.transformer_engine": [{"model.transformer_engine": "on"}],
    "parallelism.expert": [{"parallelism.expert": 2, "target": "reference"}],
    "parallelism.context": [{"parallelism.context": 2, "target": "reference"}],
    "parallelism.expert_tensor": [{"parallelism.expert_tensor": 1}],
    "parallelism.virtual_stages": [{"parallelism.virtual_stages": 2}],
    "parallelism.sequence_parallel": [{"parallelism.sequence_parallel": True}],
    "parallelism.expert_dispatcher": [{"parallelism.expert_dispatcher": "deepep"}],
    "parallelism.expert_overlap": [{"parallelism.expert_overlap": True}],
}
WITHIN: list[dict[str, Any]] = [
    {"target": "deepspeed"},
    {"data": {"kind": "text", "path": "corpus.txt", "tokenizer": "byte"}},
    {"data": {"kind": "text", "path": "python-stdlib", "tokenizer": "byte"}},
    {"data": {"kind": "tokens", "path": "tokens.npy"}},
    {"data": {"kind": "jsonl", "path": "corpus.txt", "tokenizer": "byte"}},
    {"data": {"kind": "parquet", "path": "corpus.txt", "tokenizer": "byte"}},
    {
        "data": {
            "kind": "chat",
            "path": "corpus.txt",
            "tokenizer": "byte",
            "template": "{{ messages }}",
        }
    },
    {"data": {"kind": "megatron", "path": "corpus"}},
    {
        "data": {
            "mixture": [
                {"kind": "synthetic", "weight": 1},
                {"kind": "tokens", "path": "tokens.npy", "weight": 2},
            ]
        }
    },
    {"validation": {"fraction": 0.1, "every_steps": 5}},
    {"validation": {"kind": "tokens", "path": "tokens.npy"}},
    {
        "training.steps": None,
        "training.epochs": 1,
        "data": {"kind": "tokens", "path": "tokens.npy"},
    },
    {"model.loss": "full"},
    {"model.loss": "chunked"},
    {"model.attention": "sdpa"},
    {"model.attention": "eager"},
    {"training.low_precision": "fp8_rowwise"},
    {"training.low_precision": "fp8_tensorwise", "training.low_precision_keep": ["*.o_proj"]},
    {"launch": {"launcher": "local"}},
    {"launch": {"launcher": "pdsh"}},
    {"launch": {"launcher": "no_ssh"}},
    {"launch": {"launcher": "openmpi"}},
    {"launch": {"launcher": "slurm"}},
    {"launch": {"slurm": {"account": "a", "requeue": True}}},
    {"launch": {"kubernetes": {"image": "i", "volume_claim": "v", "directory": "/shared/run"}}},
    {"launch": {"setup_script": "corpus.txt"}},
    {"parallelism.offload": "none"},
    {"parallelism.offload": "auto"},
    *(
        {
            "parallelism": {
                "tensor": 2,
                "pipeline": 1,
                "data": 2,
                "offload": name,
                "zero_stage": stage,
            }
        }
        for name, stage in (("optimizer", 2), ("optimizer", 3), ("parameters", 3))
    ),
]


@pytest.fixture
def recipe_of(write_recipe: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Recipe]]:
    import numpy as np

    for name in ("corpus.txt", "corpus.idx", "corpus.bin"):
        (tmp_path / name).write_text("text")
    np.save(tmp_path / "tokens.npy", np.zeros((8, 32), dtype=np.int32))
    yield lambda changes: load_recipe(write_recipe(changes))


def test_every_row_has_a_counterexample() -> None:
    assert {".".join(map(str, limit.key)) for limit in SUPPORTED_VALUES} == set(NO_MORE_RECOMPUTE)


@pytest.mark.parametrize(
    ("key", "changes"), [(key, c) for key, rows in NO_MORE_RECOMPUTE.items() for c in rows], ids=str
)
def test_beyond_the_table_is_refused(
    recipe_of: Callable[..., Recipe], key: str, changes: dict[str, Any]
) -> None:
    recipe = recipe_of(changes)
    limit = next(limit for limit in SUPPORTED_VALUES if ".".join(map(str, limit.key)) == key)
    found = [d for d in check_runnable(recipe) if d.key == limit.key]
    assert [d.code for d in found] == [limit.code]
    assert found[0].help and key in found[0].message
    with pytest.raises(Refusal) as caught:
        compile_recipe(recipe)
    assert limit.code in [d.code for d in caught.value.diagnostics]
    told_again = [
        d for d in caught.value.diagnostics if d.code.startswith("SW3") and d.key == limit.key
    ]
    assert told_again == []


@pytest.mark.parametrize("changes", WITHIN, ids=json.dumps)
def test_within_the_table_compiles(
    recipe_of: Callable[..., Recipe], changes: dict[str, Any]
) -> None:
    recipe = recipe_of(changes)
    assert check_runnable(recipe) == ()
    assert compile_recipe(recipe).plan.strategy.world_size == 4


def test_the_search_proposes_only_what_runs(recipe_of: Callable[..., Recipe]) -> None:
    """With every key left open, no ranked layout has a value that the table refuses when it is
    pinned."""
    from shardwright.models.graph_builder import build_model_graph
    from shardwright.search.layout_search import search

    recipe = recipe_of({"parallelism": {}})
    ranked = search(problem_of(recipe, build_model_graph(recipe.model))).ranked
    assert ranked
    allowed = {
        limit.key[1]: limit.allowed for limit in SUPPORTED_VALUES if limit.key[0] == "parallelism"
    }
    for estimate in ranked:
        for key, values in allowed.items():
            assert getattr(estimate.strategy, str(key)) in values


def test_text_needs_a_tokenizer_and_data_is_needed(recipe_of: Callable[..., Recipe]) -> None:
    assert [d.code for d in check_runnable(recipe_of({"data": None}))] == ["SW1910"]
