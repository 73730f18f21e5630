"""`make bench-gpu` on tiny copies and this CPU: runs, measures and compares, so that it works where
a GPU is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tools.bench_gpu.__main__ import main
from tools.bench_gpu.attention_parity import parity
from tools.bench_gpu.low_precision_losses import losses

pytestmark = pytest.mark.launch


@pytest.mark.prove
def test_a_layout_beside_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tools.bench_gpu.gpu_bench.CASE_SECONDS", 1500
    )  # the tests share their cores
    file = tmp_path / "gpu.json"
    assert main(["--gpu", "cpu", "-o", str(file), "llama-1"]) == 0
    assert "all done" in capsys.readouterr().out
    found = json.loads(file.read_text())["layouts"]["llama-1"]
    assert "why" not in found and "why" not in found["trainer"], found
    for figures in (found, found["trainer"]):
        assert all(math.isfinite(v) for v in figures.values() if isinstance(v, float)), found
    assert found["measured_step_seconds"] > 0 and found["trainer"]["step_seconds"] > 0
    assert found["measured_peak_bytes"] > 2**26 and found["trainer"]["peak_bytes"] > 2**26
    # Its four micro-batches of a row are a step's tokens.
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["measured_step_seconds"])


@pytest.mark.prove
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ways_of_attention_differ_by_what_bf16_does(family: str) -> None:
    found = parity(family, "cpu")
    eager = found.pop("eager")
    assert {"sdpa math", "sdpa flash"} <= set(found) and 0 < eager["gradients"] < 0.05
    for name, off in found.items():
        assert (
            "why" in off
            if name == "flash_attention_2"
            else off["gradients"] < 2 * eager["gradients"]
        ), (name, off)


@pytest.mark.prove
def test_losses_in_low_precision_stay_near_those_of_bf16() -> None:
    plain, low = losses("none", "cpu"), losses("fp8_rowwise", "cpu")
    assert "why" not in plain and "why" not in low, (plain, low)
    assert set(plain) == set(low) == {"1", "10"} and plain["10"] < plain["1"]
    for step, loss in plain.items():
        assert 0 < abs(low[step] - loss) < 0.05, (step, loss, low[step])
