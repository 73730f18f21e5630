"""target: megatron trains as one plain Hugging Face process does, in every layout that it runs;
many in one launch."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.figures import worst_of_ranks
from tests.megatron.cases import CASES, GROUPS, SAMPLE
from tests.parity.harness import BF16_RELATIVE, LOSS_ABSOLUTE, NORM_RELATIVE, WEIGHT_ABSOLUTE, Case

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
    ),
]


def launched(cases: dict[str, Case], out: Path) -> dict[str, dict[str, float]]:
    """Case -> its worst figures over its ranks."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [
                str(Path(__file__).resolve().parents[2]),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        ),
        "SHARDWRIGHT_CASES_OUT": str(out),
        "SHARDWRIGHT_CASES": json.dumps(
            {name: dataclasses.asdict(case) for name, case in cases.items()}
        ),
    }
    script = Path(__file__).with_name("worker.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=1800
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (
        json.loads(text)
        for file in out.glob("rank-*.jsonl")
        for text in file.read_text().splitlines()
    ):
        name = line.pop("case")
        assert "error" not in line, f"{name}: {line['error']}"
        found.setdefault(name, []).append(line)
    assert set(found) == set(cases) and done.returncode == 0, (
        done.stdout[-3000:] + done.stderr[-3000:]
    )
    return {name: worst_of_ranks(ranks, cases[name].world) for name, ranks in found.items()}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return launched(SAMPLE, tmp_path_factory.mktemp("megatron"))


def check(case: Case, found: dict[str, float]) -> None:
    half = case.precision == "bf16"
    assert found["loss"] <= (BF16_RELATIVE if half else LOSS_ABSOLUTE), found
    assert found["norm"] <= (BF16_RELATIVE if half else NORM_RELATIVE), found
    assert found["packed"] <= LOSS_ABSOLUTE, found
    assert found["weights"] <= WEIGHT_ABSOLUTE, found


@pytest.mark.parametrize("name", SAMPLE)
def test_trains_as_one_plain_process(name: str, figures: dict[str, dict[str, float]]) -> None:
    check(SAMPLE[name], figures[name])


@pytest.mark.prove
@pytest.mark.parametrize("group", GROUPS)
def test_every_layout(group: str, tmp_path: Path, proved: Callable[..., None]) -> None:
    found = launched(GROUPS[group], tmp_path)
    for name, case in GROUPS[group].items():
        check(case, found[name])
        proved("megatron-parity", name, {**dataclasses.asdict(case), **found[name]})


def test_the_table_has_each_axis_alone_in_pairs_and_all_at_once() -> None:
    assert len(CASES) >= 40 and {case.model for case in CASES.values()} >= set(MODELS)
    assert sum(case.world == 8 for case in CASES.values()) >= 5


MODELS = (
    "llama",
    "llama-tied",
    "llama-rope",
    "qwen3",
    "gpt2-plain",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
)
