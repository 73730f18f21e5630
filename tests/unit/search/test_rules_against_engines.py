"""The rules about DeepSpeed hold for the DeepSpeed that is installed. When one of these changes, so
may the rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.utils.child_processes import free_port

WORKER = Path(__file__).with_name("rule_probe_worker.py")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("probes") / "found.json"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "SHARDWRIGHT_PROBES_OUT": str(out)}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(WORKER)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found: dict[str, str] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("code", "probe", "answer"),
    [
        ("SW3108", "pipeline with ZeRO-2", "AssertionError"),
        ("SW3108", "pipeline with ZeRO-3", "AssertionError"),
        ("SW3109", "DualPipeV, 3 micro-batches on 2 ranks", "ValueError"),
        ("SW3114", "bf16 without ZeRO, fp32 accumulation", "NotImplementedError"),
        (
            "SW3111",
            "offload_param with ZeRO-2",
            "DeepSpeedZeroOptimizer",
        ),  # at stage 2 nothing is said, nothing done
    ],
)
def test_what_a_rule_forbids(probed: dict[str, str], code: str, probe: str, answer: str) -> None:
    assert probed[probe].startswith(answer), (code, probed[probe])


def test_fp16_runs_on_cpus_that_have_it(probed: dict[str, str]) -> None:
    """DeepSpeed asks the CPU that it runs on. SW3119 refuses fp16 on all of them: a compile does
    not see the hosts."""
    has_fp16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert probed["fp16 on a CPU"].startswith(str(has_fp16))


@pytest.mark.parametrize(
    ("probe", "answer"),
    [
        ("pipeline with ZeRO-1", "PipelineEngine"),
        ("DualPipeV, 4 micro-batches on 2 ranks", "True"),
        ("offload with bf16 ZeRO-1", "DeepSpeedZeroOptimizer cpu_offload=True"),
        ("offload with ZeRO-2", "DeepSpeedZeroOptimizer cpu_offload=True"),
    ],
)
def test_what_the_rules_allow(probed: dict[str, str], probe: str, answer: str) -> None:
    assert probed[probe] == answer
