"""The committed snapshot is what the installed DeepSpeed has, and the check of documents against
it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.diagnostics import Refusal
from shardwright.engines.deepspeed.ds_config import validated_ds_config
from shardwright.engines.deepspeed.ds_config_schema import (
    NEWEST,
    ds_config_schema,
    schema_mismatches,
)
from shardwright.lint.ds_config_document import parse_ds_config
from shardwright.lint.ds_config_linter import diagnostic, fixed, lint, linted_ds_config
from shardwright.utils.json_values import JsonObject
from tools.generate import deepspeed_untyped_sections as loose

SITE = Path(deepspeed.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


def test_snapshot_is_of_the_installed_version() -> None:
    """`make generated` writes it anew."""
    program = (
        "import sys; from tools.generate.deepspeed_config_snapshot import text; "
        "sys.stdout.write('=====' + text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    path = ROOT / f"compiler/shardwright/engines/deepspeed/ds_config_schemas/{NEWEST}.json"
    assert done.stdout.partition("=====")[2] == path.read_text(encoding="utf-8")


def constants(*files: str) -> set[str]:
    """Every text that is assigned to a name in capitals."""
    found: set[str] = set()
    for file in files:
        found |= set(
            re.findall(
                r"^[A-Z_0-9]+ = ['\"]([a-z_0-9]+)['\"]", (SITE / file).read_text(), re.MULTILINE
            )
        )
    return found


@pytest.mark.parametrize(
    ("section", "files"),
    [
        ("activation_checkpointing", ["runtime/activation_checkpointing/config.py"]),
        ("flops_profiler", ["profiling/constants.py"]),
        ("aio", ["runtime/swap_tensor/constants.py"]),
        ("autotuning", ["autotuning/constants.py"]),
        ("data_types", ["runtime/constants.py"]),
        ("torch_autocast", ["runtime/constants.py"]),
        ("data_efficiency", ["runtime/data_pipeline/constants.py"]),
        ("checkpoint", ["runtime/constants.py", "runtime/model_checkpointing/constants.py"]),
    ],
)
def test_loose_sections_have_the_keys_of_the_source(section: str, files: list[str]) -> None:
    def keys(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", {}))
        return found.union(*(keys(below) for below in schema.get("properties", {}).values()))

    named = constants(*files)
    assert keys(loose.SECTIONS[section]) - named - {"enabled"} == set()
    if len(files) == 1 and section not in (
        "data_types",
        "torch_autocast",
        "data_efficiency",
        "autotuning",
    ):
        assert named - keys(loose.SECTIONS[section]) - {section} == set()


def test_top_level_keys_are_those_that_the_source_reads() -> None:
    """Each key of ours is read there, and each scalar that config.py reads is one of ours."""
    source = (SITE / "runtime/config.py").read_text() + (SITE / "__init__.py").read_text()
    named = constants("runtime/constants.py") | set(re.findall(r'"([a-z_]+)"', source))
    named |= constants("datastates/config.py") | {"datastates_ckpt"}
    assert loose.TOP.keys() - named == set()
    runtime = (SITE / "runtime/constants.py").read_text()
    scalars = re.findall(r"get_scalar_param\(param_dict,\s+([A-Z_]+),", source)
    values = {
        name: re.findall(rf"^{name} = ['\"](\w+)['\"]", runtime, re.MULTILINE) for name in scalars
    }
    assert {value for found in values.values() for value in found} <= loose.TOP.keys()


def test_lowering_refuses_what_deepspeed_would_not_take() -> None:
    good: JsonObject = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    assert validated_ds_config(good) is good
    for wrong in (
        {"train_batch_sise": 8},
        {"train_batch_size": "8"},
        {"zero_optimization": {"stage": 4}},
    ):
        with pytest.raises(ValueError, match="ds_config: "):
            validated_ds_config(wrong)


KEYS = sorted(
    {
        *loose.TOP,
        *loose.SECTIONS,
        "zero_optimization",
        "fp16",
        "bf16",
        "stage",
        "params",
        "type",
        "enabled",
        "x",
    }
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["auto", "cpu", "nvme", "5e8", "true", "AdamW", "WarmupLR"]),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(KEYS), below, max_size=4)
    ),
    max_leaves=12,
)


@given(
    document=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    world=st.none() | st.integers(1, 64),
)
def test_no_document_is_too_odd(document: dict[str, Any], world: int | None) -> None:
    """Whatever stands in a file, lint says something of it or nothing, and --fix ends."""
    import json

    schema_mismatches(document, ds_config_schema())
    try:
        read = parse_ds_config("ds_config.json", json.dumps(document, indent=1))
    except Refusal:
        return
    for audience in (None, "deepspeed", "trainer"):
        found = lint(read, linted_ds_config(read, audience, world))
        assert all(diagnostic(read, finding).location for finding in found)
    fixed(read, None, world)
