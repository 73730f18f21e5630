"""target: megatron trains as one plain Hugging Face process does, in every layout that it runs; many in one launch."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.figures import worst_of_ranks
from tests.parity.harness import BF16_RELATIVE, LOSS_ABSOLUTE, NORM_RELATIVE, Case

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"),
]


def case(model: str = "llama", **fields: Any) -> Case:
    return Case(model=model, target="megatron", **fields)


CASES: dict[str, Case] = {
    "one": case(zero_stage=0),
    "tp2": case(tensor=2),
    "tp2-sequence": case(tensor=2, sequence_parallel=True),
    "pp2": case(pipeline=2),
    "dp2": case(data=2),
    "dp2-zero0": case(data=2, zero_stage=0),
    "clipping0-dp2": case(data=2, clipping=0.0),
    "tied-pp2": case("llama-tied", pipeline=2),
    "tied-tp2": case("llama-tied", tensor=2),
    "full-tp2": case(tensor=2, checkpointing="full"),
    "partial-pp2": case(pipeline=2, checkpointing={"full": 1}),
    "bf16-tp2": case(tensor=2, precision="bf16"),
    "bf16-dp2": case(data=2, precision="bf16"),
    "pp2-tp2-sequence": case(pipeline=2, tensor=2, sequence_parallel=True),
    "tp2-sequence-dp2": case(tensor=2, sequence_parallel=True, data=2),
    "tied-pp2-dp2": case("llama-tied", pipeline=2, data=2),
    "pp4": case(pipeline=4, accumulation=4),
    "vpp2-pp2": case("llama-deep", pipeline=2, virtual_stages=2),
    "vpp2-pp2-tp2-sequence": case("llama-deep", pipeline=2, virtual_stages=2, tensor=2, sequence_parallel=True),
    "vpp2-pp4": case("llama-deep", pipeline=4, virtual_stages=2, accumulation=4),
    "vpp2-pp2-dp2-partial": case("llama-deep", pipeline=2, virtual_stages=2, data=2, checkpointing={"full": 2}),
    "gpt2-pp2-tp2": case("gpt2-plain", pipeline=2, tensor=2, zero_stage=0),
    "gpt2-dp2": case("gpt2-plain", data=2),
    "mixtral-dp2": case("mixtral", data=2),
    "deepseek-pp2": case("deepseek_v3", pipeline=2),
    "deepseek-tp2-sequence": case("deepseek_v3", tensor=2, sequence_parallel=True),
    "gpt-oss-dp2": case("gpt_oss", data=2),
    "mixtral-tp2-sequence": case("mixtral", tensor=2, sequence_parallel=True),
}


def launched(cases: dict[str, Case], out: Path) -> dict[str, dict[str, float]]:
    """Case -> its worst figures over its ranks."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "SHARDWRIGHT_CASES_OUT": str(out),
        "SHARDWRIGHT_CASES": json.dumps({name: dataclasses.asdict(case) for name, case in cases.items()}),
    }
    script = Path(__file__).with_name("worker.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=1800)
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (json.loads(text) for file in out.glob("rank-*.jsonl") for text in file.read_text().splitlines()):
        name = line.pop("case")
        assert "error" not in line, f"{name}: {line['error']}"
        found.setdefault(name, []).append(line)
    assert set(found) == set(cases) and done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {name: worst_of_ranks(ranks, cases[name].world) for name, ranks in found.items()}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return launched(CASES, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_plain_process(name: str, figures: dict[str, dict[str, float]]) -> None:
    half = CASES[name].precision == "bf16"
    assert figures[name]["loss"] <= (BF16_RELATIVE if half else LOSS_ABSOLUTE), figures[name]
    assert figures[name]["packed"] <= LOSS_ABSOLUTE, figures[name]
    assert figures[name]["norm"] <= (BF16_RELATIVE if half else NORM_RELATIVE), figures[name]
