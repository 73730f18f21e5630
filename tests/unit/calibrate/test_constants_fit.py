"""Samples that the cost model itself made: the fit finds the constants that it made them with."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.calibrate.calibration_file import (
    device_of,
    fit_constants,
    least,
    line,
    median_figure,
)
from shardwright.cost.collective_seconds import Group, all_reduce_seconds
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.kernel_seconds import product_seconds
from shardwright.layout.gpu_cluster import Cluster, resolve_cluster
from shardwright.recipe.measurements import TimingSample
from tests.unit.models.factory import recipe_of

PRODUCTS = [
    (m, n, k) for m in (128, 1024, 8192) for n, k in ((512, 512), (4096, 4096), (11008, 4096))
]


def cluster(gpu: str = "a100-sxm4-80gb", nodes: int = 1) -> Cluster:
    return resolve_cluster(recipe_of(cluster={"gpu": gpu, "nodes": nodes}).cluster)


def sample(what: str, seconds: float, **sizes: int) -> TimingSample:
    return TimingSample(what=what, sizes=sizes, seconds=median_figure([seconds] * 5))


@pytest.mark.parametrize(("efficiency", "tile"), [(0.6, 5e-6), (0.85, 1e-6)])
def test_products(efficiency: float, tile: float) -> None:
    truth = dataclasses.replace(default_constants(), gemm_efficiency=efficiency, tile_seconds=tile)
    device = device_of(cluster(), "bf16", truth)
    made = [
        sample("product", product_seconds(device, truth, m=m, n=n, k=k), m=m, n=n, k=k)
        for m, n, k in PRODUCTS
    ]
    found = fit_constants(cluster(), "bf16", made)
    assert found["gemm_efficiency"].value == pytest.approx(efficiency, rel=0.03)
    assert found["tile_seconds"].value == pytest.approx(tile, rel=0.25)
    assert found["gemm_efficiency"].n == 5 * len(made) and found["gemm_efficiency"].spread == 0


def links(c: Constants, where: Cluster, ranks: tuple[int, ...]) -> list[TimingSample]:
    inside = where.gpus_per_node
    return [
        sample(
            "all-reduce",
            all_reduce_seconds(where, c, Group(ranks=n, ranks_per_node=min(n, inside)), size),
            bytes=size,
            ranks=n,
            ranks_per_node=inside,
        )
        for n in ranks
        for size in (4096, 1 << 20, 1 << 26)
    ]


def test_links_inside_a_node() -> None:
    truth = dataclasses.replace(
        default_constants(), intra_node_efficiency=0.5, intra_node_hop_seconds=9e-6
    )
    found = fit_constants(cluster(), "bf16", links(truth, cluster(), (2, 4, 8)))
    assert found["intra_node_efficiency"].value == pytest.approx(0.5, rel=0.02)
    assert found["intra_node_hop_seconds"].value == pytest.approx(9e-6, rel=0.02)
    assert "inter_node_efficiency" not in found


def test_what_streams_and_what_updates() -> None:
    hbm = cluster().gpu.hbm_bytes_per_second
    made = [sample("traffic", 3e9 / (0.6 * hbm), bytes=3_000_000_000)]
    made.append(sample("optimizer", 48e9 / (0.6 * hbm), parameters=1_000_000_000))
    found = fit_constants(cluster(), "bf16", made)
    assert found["memory_efficiency"].value == pytest.approx(0.6)
    assert found["optimizer_traffic_bytes"].value == pytest.approx(48)


@pytest.mark.parametrize(("together", "share"), [(10e-3, 1.0), (14e-3, 0.0), (12e-3, 0.5)])
def test_what_hides_behind_computing(together: float, share: float) -> None:
    made = [sample("overlap", together, compute_ns=10_000_000, comm_ns=4_000_000)]
    found = [
        f
        for name, f in fit_constants(cluster(), "bf16", made).items()
        if name.startswith("overlap")
    ]
    assert found and all(f.value == pytest.approx(max(share, 0.01)) for f in found)


def test_nothing_is_said_of_what_was_not_timed() -> None:
    assert fit_constants(cluster(), "bf16", []) == {}


def test_a_line_has_no_negative_part() -> None:
    assert line([(1.0, 1.0, 3.0), (1.0, 2.0, 5.0)]) == pytest.approx((1.0, 2.0))
    a, b = line([(1.0, 1.0, 1.0), (1.0, 2.0, 4.0), (1.0, 3.0, 6.5)])
    assert a == 0 and b > 0
    a, b = line([(1.0, 1.0, 5.0), (1.0, 9.0, 4.0)])
    assert a > 0 and b == 0


def test_the_least() -> None:
    assert least(lambda x: abs(x - 3.0), 1.0, 10.0) == pytest.approx(3.0, rel=0.1)
