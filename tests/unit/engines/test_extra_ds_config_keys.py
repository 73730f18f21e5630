"""The recipe's `extra`: what it may add to ds_config.json, and what is refused with the recipe's
own key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import location_of
from shardwright.engines.deepspeed.ds_config import (
    EXTRA_KEYS_ALLOWED,
    EXTRA_KEYS_REFUSED,
    KEYS_SET_BY_RECIPE,
    merge_ds_config,
)
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema
from shardwright.recipe.recipe_loader import load_recipe
from tests.launch.extra_keys import cases


def compiled(
    write_recipe: Callable[..., Path], extra: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    files = compile_recipe(load_recipe(write_recipe({**changes, "extra": extra}))).files
    found: dict[str, Any] = json.loads(files["ds_config.json"])
    return found


def test_sections_are_merged_key_by_key(write_recipe: Callable[..., Path]) -> None:
    plain = compiled(write_recipe, {})
    extra: dict[str, Any] = {
        "memory_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": "run/csv", "job_name": "a"},
        "zero_optimization": {"reduce_bucket_size": 1000, "leaf_module": {"classes": []}},
    }
    found = compiled(write_recipe, extra)
    assert found["memory_breakdown"] is True and found["csv_monitor"] == extra["csv_monitor"]
    assert found["zero_optimization"] == {
        **plain["zero_optimization"],
        **extra["zero_optimization"],
    }
    assert {key: found[key] for key in plain if key not in extra} == {
        k: plain[k] for k in plain if k not in extra
    }
    assert merge_ds_config({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}, "d": 4}) == {
        "a": {"b": 1, "c": 3},
        "d": 4,
    }


@pytest.mark.parametrize(
    ("extra", "code", "key", "said"),
    [
        ({"train_batch_size": 4}, "SW1214", ("train_batch_size",), "training.global_batch_size"),
        (
            {"zero_optimization": {"stage": 3}},
            "SW1214",
            ("zero_optimization", "stage"),
            "parallelism.zero_stage",
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 4}},
            "SW1214",
            ("zero_optimization", "zero_hpz_partition_size"),
            "the layout decides",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "SW1214",
            ("zero_optimization", "offload_param", "device"),
            "parallelism.offload",
        ),
        ({"bf16": {"enabled": True}}, "SW1214", ("bf16", "enabled"), "training.precision"),
        ({"optimizer": {}}, "SW1214", ("optimizer",), "training.optimizer"),
        (
            {"fp16": {"loss_scale": 8}},
            "SW1214",
            ("fp16", "loss_scale"),
            "training.precision is fp32",
        ),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "SW1215",
            ("zero_optimization", "round_robin_gradients"),
            "weights under wrong names",
        ),
        ({"comet": {"enabled": True}}, "SW1215", ("comet", "enabled"), "comet is not tested"),
        (
            {"data_efficiency": {"enabled": True}},
            "SW1215",
            ("data_efficiency",),
            "does not account for",
        ),
        (
            {"zero_optimisation": {"stage": 3}},
            "SW1216",
            ("zero_optimisation",),
            "Did you mean `zero_optimization`",
        ),
        (
            {"csv_monitor": {"enable": True}},
            "SW1216",
            ("csv_monitor", "enable"),
            "Did you mean `enabled`",
        ),
        ({"wall_clock_breakdown": "yes"}, "SW1217", ("wall_clock_breakdown",), "true or false"),
        (
            {"zero_optimization": {"reduce_bucket_size": "auto"}},
            "SW1217",
            ("zero_optimization", "reduce_bucket_size"),
            "HF Trainer",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 0}},
            "SW1217",
            ("zero_optimization", "reduce_bucket_size"),
            "Give a number above 0",
        ),
    ],
)
def test_refused_with_code_line_and_the_recipes_key(
    write_recipe: Callable[..., Path],
    extra: dict[str, Any],
    code: str,
    key: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(Refusal) as caught:
        compiled(write_recipe, extra)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.key) == (code, ("extra", *key))
    assert said in diagnostic.message + diagnostic.help
    place = location_of(diagnostic, caught.value.source)
    assert place is not None and place.line > 0


def test_every_wrong_key_at_once(write_recipe: Callable[..., Path]) -> None:
    with pytest.raises(Refusal) as caught:
        compiled(
            write_recipe, {"wal_clock_breakdown": True, "gradient_clipping": 1.0, "dump_state": 3}
        )
    assert sorted(d.code for d in caught.value.diagnostics) == ["SW1214", "SW1216", "SW1217"]


def test_the_tables_name_keys_that_deepspeed_has() -> None:
    for dotted in (*EXTRA_KEYS_ALLOWED, *KEYS_SET_BY_RECIPE):
        schema: Any = ds_config_schema().schema
        for part in dotted.split("."):
            schema = schema["properties"][part]
    assert not set(EXTRA_KEYS_ALLOWED) & set(KEYS_SET_BY_RECIPE)


def test_everything_that_compile_emits_is_decided_or_free(
    write_recipe: Callable[..., Path],
) -> None:
    """A key that the plan writes and that neither table names could be overwritten in silence, or
    not at all."""
    for changes in (
        {},
        {"training.precision": "bf16"},
        {"parallelism": {"tensor": 2, "zero_stage": 3}},
    ):
        for key in compiled(write_recipe, {}, **changes):
            assert key in KEYS_SET_BY_RECIPE or key in EXTRA_KEYS_ALLOWED, key


def test_what_may_stand_there_is_what_make_prove_tries() -> None:
    assert {key for key, _ in cases()} - {""} == set(EXTRA_KEYS_ALLOWED)
    assert not set(EXTRA_KEYS_REFUSED) & (set(EXTRA_KEYS_ALLOWED) | set(KEYS_SET_BY_RECIPE))
