"""`make bench-gpu` where there is no GPU: its layouts, the names of GPUs, and how a piece goes
on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Source
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_loader import recipe_from_document
from shardwright.search.layout_search import estimate_pinned_layout
from tests.unit.models.factory import graph_of
from tools.bench_gpu import gpu_bench as bench_module
from tools.bench_gpu.__main__ import FILE
from tools.bench_gpu.gpu_bench import bench, summary
from tools.bench_gpu.gpu_bench_cases import FAMILIES, LAYOUTS, gpu_called, recipe
from tools.bench_gpu.low_precision_losses import FORMATS


def test_there_are_enough_of_them() -> None:
    assert (
        len(LAYOUTS) >= 12
        and {layout.family for layout in LAYOUTS.values()} == set(FAMILIES)
        and len(FAMILIES) == 3
    )
    keys = {
        key for each in LAYOUTS.values() for key in (*each.model, *each.training, *each.parallelism)
    }
    assert {
        "loss",
        "attention",
        "kernels",
        "precision",
        "activation_checkpointing",
        "offload",
    } <= keys
    assert len({each.micro for each in LAYOUTS.values()}) > 3


def predicted(name: str) -> Estimate:
    document = recipe(LAYOUTS[name], "h200-sxm-141gb")
    made = recipe_from_document(document, "/", Source(file="bench"))
    problem = Problem(
        recipe=made,
        graph=graph_of(document["model"]["config"]),
        cluster=resolve_cluster(made.cluster),
    )
    return estimate_pinned_layout(problem)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_runs_on_a_card_of_today(name: str) -> None:
    found = predicted(name)
    assert found.feasible, found.diagnostics
    assert found.memory.peak_bytes > 8 * 2**30 and found.time.step_seconds < 15


@pytest.mark.parametrize(
    "name", ["llama-4-fp8", "llama-4-fp8-compile", "llama-4-fp8-rowwise-compile"]
)
def test_casts_to_fp8_take_what_they_took(name: str) -> None:
    measured = json.loads(FILE.read_text())["layouts"][name]
    found = predicted(name)
    assert found.time.step_seconds == pytest.approx(measured["measured_step_seconds"], rel=0.07)
    assert found.memory.peak_bytes == pytest.approx(measured["measured_peak_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L40", "l40-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm4-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H20", "h20-sxm-96gb"),
        ("NVIDIA H800", "h800-sxm-80gb"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm-288gb"),
        ("NVIDIA GB300", "gb300-nvl-288gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-96gb"),
        ("NVIDIA GeForce RTX 5090", "rtx5090-32gb"),
        ("AMD Instinct MI355X", "mi355x-288gb"),
    ],
)
def test_a_gpu_has_its_name_in_the_catalogue(device: str, name: str) -> None:
    assert gpu_called(device) == name


def test_a_gpu_that_is_not_in_the_catalogue_is_asked_for() -> None:
    with pytest.raises(ValueError, match="name it with --gpu"):
        gpu_called("NVIDIA T4")


def test_a_piece_goes_on_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    figures: dict[str, Any] = {"measured_step_seconds": 1.0, "step_error": -0.1, "peak_error": 0.2}
    figures |= {
        "measured_peak_bytes": 2**30,
        "tokens_per_second": 30.0,
        "trainer": {"tokens_per_second": 20.0},
    }

    def case(layout: object, gpu: str, say: object) -> dict[str, Any]:
        ran.append(next(name for name, each in LAYOUTS.items() if each is layout))
        return figures if len(ran) < 3 else {"why": "it broke"}

    monkeypatch.setattr(bench_module, "case", case)
    monkeypatch.setattr(bench_module, "kernels", lambda: {"products": {}})
    monkeypatch.setattr(bench_module, "losses", lambda low_precision, gpu: {"1": 5.0})
    monkeypatch.setattr(bench_module, "attention", lambda family, gpu: {"eager": {"loss": 0.0}})
    file, said = tmp_path / "gpu.json", list[str]()
    first = list(LAYOUTS)[:3]
    assert (
        bench(file, "h200-sxm-141gb", "NVIDIA H200", 600, said.append, first) == [] and ran == first
    )
    assert "1.50 x the Trainer" in said[0] and "it broke" in said[2]
    assert summary(file) == {
        "layouts": 3,
        "ran": 2,
        "mean_step_error": pytest.approx(0.1),
        "mean_peak_error": pytest.approx(0.2),
        "median_over_trainer": 1.5,
    }
    # No time left: nothing begins, and what is left is named.
    assert (
        bench(file, "h200-sxm-141gb", "NVIDIA H200", -1, said.append) == list(LAYOUTS)[3:]
        and ran == first
    )
    assert bench(file, "h200-sxm-141gb", "NVIDIA H200", 600, said.append) == []
    assert ran == list(LAYOUTS) and set(json.loads(file.read_text())["attention"]) == set(FAMILIES)
    assert set(json.loads(file.read_text())["losses"]) == set(FORMATS)
    # Another card, another file; and another recipe is run anew.
    bench(file, "h100-sxm-80gb", "NVIDIA H100 80GB HBM3", 600, said.append, first[:1])
    assert list(json.loads(file.read_text())["layouts"]) == first[:1]
    monkeypatch.setitem(LAYOUTS, first[0], LAYOUTS[first[1]])
    assert len(ran) == len(LAYOUTS) + 1
    bench(file, "h100-sxm-80gb", "NVIDIA H100 80GB HBM3", 600, said.append, first[:1])
    assert len(ran) == len(LAYOUTS) + 2
