"""Stage 3: catalogue, inline GPUs, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.cost.chip_rates import attention_rate, low_precision_gain
from shardwright.cost.cost_constants import default_constants
from shardwright.cost.peak_memory import usable_bytes
from shardwright.diagnostics import Refusal
from shardwright.layout.gpu_cluster import Gpu, catalogue, resolve_cluster
from shardwright.recipe.recipe_types import AttentionRates, InlineGpu
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of


@pytest.mark.parametrize("name", catalogue()["gpus"])
def test_every_catalogue_entry_resolves_and_names_its_source(name: str) -> None:
    cluster = resolve_cluster(recipe_of(cluster={"gpu": name}).cluster)
    entry = catalogue()["gpus"][name]
    assert set(entry["sources"]) == set(entry) - {"sources"}  # each number says where it is from
    assert cluster.capacity_bytes == entry["memory_gib"] * 2**30
    assert cluster.gpu.is_cpu == (name == "cpu")
    assert cluster.gpu.peak_flops["fp32"] > 0
    # What a name says is what it is: "h100-sxm-80gb" has 80 GiB.
    if name.endswith("gb"):
        assert entry["memory_gib"] == int(
            name.rsplit("-", 1)[1].removeprefix("nvl").removesuffix("gb")
        )


@pytest.mark.parametrize("name", catalogue()["gpus"])
def test_peaks_of_the_catalogue_are_dense(name: str) -> None:
    """fp8 at most twice half precision with the same accumulation, fp4 at most three times fp8
    (Blackwell Ultra): a sparse figure of a data sheet is twice too high."""
    peaks = catalogue()["gpus"][name]["peak_tflops"]
    half = peaks.get("bf16", peaks["fp16"])
    fp16_accumulation = 2 if name.startswith(("rtx4", "rtx5")) else 1
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * half * fp16_accumulation, rel=0.02)
    if "fp4" in peaks:
        assert peaks["fp4"] / peaks["fp8"] * (1 + 1e-3) >= 2 and peaks["fp4"] <= 3.1 * peaks["fp8"]


def test_what_ecc_takes_is_not_planned_with() -> None:
    """A board of 288 GB shows 268.5 GiB of it."""
    recipe = recipe_of(cluster={"gpu": "b300-sxm-288gb"})
    whole = recipe_of(cluster={"gpu": "mi355x-288gb"})
    seen, everything = (
        usable_bytes(problem_of(each, graph_of(SMALL_LLAMA)), default_constants())
        for each in (recipe, whole)
    )
    assert seen < 268.5 * 2**30 < everything < 288 * 2**30


def test_units_and_overrides() -> None:
    cluster = resolve_cluster(
        recipe_of(
            cluster={
                "nodes": 3,
                "gpu": "a100-sxm4-80gb",
                "inter_node_gbits_per_second": 100.0,
                "host_memory_gib": 2.0,
            }
        ).cluster
    )
    assert (cluster.world_size, cluster.capacity_bytes) == (24, 80 * 2**30)
    assert cluster.intra_node_bytes_per_second == 300e9
    assert cluster.inter_node_bytes_per_second == 12.5e9
    assert cluster.host_memory_bytes == 2 * 2**30
    assert cluster.gpu.peak_flops["bf16"] == 312e12


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "given", "domain"),
    [
        (2, 4, None, 8),  # GB200 NVL72, as much of it as there is
        (18, 4, None, 72),
        (64, 4, None, 64),  # four racks, as many nodes of each
        (20, 4, None, 40),
        (19, 4, None, 4),
        (64, 8, None, 64),
        (2, 100, None, 100),
        (64, 4, 36, 32),
        (64, 4, 4, 4),
        (64, 4, 2, 2),
        (2, 4, 576, 8),
    ],
)
def test_nvlink_domains_have_as_many_nodes_each(
    nodes: int, gpus_per_node: int, given: int | None, domain: int
) -> None:
    size = {"nodes": nodes, "gpus_per_node": gpus_per_node, "nvlink_domain_gpus": given}
    cluster = resolve_cluster(recipe_of(cluster={"gpu": "gb200-nvl-186gb", **size}).cluster)
    assert cluster.nvlink_domain_gpus == domain
    assert cluster.nvlink_domains * domain == cluster.world_size


def test_an_nvlink_domain_is_a_node_where_the_catalogue_names_none() -> None:
    cluster = resolve_cluster(recipe_of(cluster={"nodes": 4}).cluster)
    assert (cluster.nvlink_domain_gpus, cluster.nvlink_domains) == (8, 4)


def test_inline_gpu_takes_the_named_fallback_links() -> None:
    gpu = InlineGpu(memory_gib=94, hbm_gbytes_per_second=2400, peak_tflops={"bf16": 800})
    cluster = resolve_cluster(recipe_of(cluster={"gpu": gpu}).cluster)
    assert cluster.gpu.name == "inline"
    assert cluster.gpu.hbm_bytes_per_second == 2.4e12
    fallback = catalogue()["inline_gpu"]
    assert cluster.intra_node_bytes_per_second == fallback["intra_node_gbytes_per_second"] * 1e9
    assert cluster.gpu.watts == fallback["watts"] and set(fallback["sources"]) == set(fallback) - {
        "sources"
    }


def test_what_an_inline_gpu_leaves_out_is_no_h100s() -> None:
    """No power limit, no cache, and as many compute units as its peaks tell."""

    def resolved(**given: Any) -> Gpu:
        gpu = InlineGpu(**{"memory_gib": 96, "hbm_gbytes_per_second": 4000, **given})
        return resolve_cluster(recipe_of(cluster={"gpu": gpu}).cluster).gpu

    h20 = {"bf16": 148.0, "fp32": 44.0}
    bare = resolved(peak_tflops=h20)
    assert (bare.watts, bare.cache_bytes, bare.attention_flops) == (None, 0, None)
    assert bare.compute_units == 86  # 78 in fact
    assert resolved(peak_tflops={"fp16": 819.2}).compute_units == 100
    assert resolved(peak_tflops={"bf16": 0.05}).compute_units == 1
    whole = resolved(
        peak_tflops=h20,
        watts=400.0,
        compute_units=78,
        cache_mib=60.0,
        attention=AttentionRates(forward_tflops=100.0, backward_tflops=90.0),
    )
    assert (whole.watts, whole.compute_units, whole.cache_bytes) == (400.0, 78, 60 * 2**20)
    assert whole.attention_flops == (100e12, 90e12)


def test_an_inline_gpu_with_a_listed_chip_has_its_measured_rates() -> None:
    """An H100 of 500 W with slower memory: the chip's peak and compute units, its own board."""

    def resolved(**given: Any) -> Gpu:
        h100 = {"memory_gib": 94, "hbm_gbytes_per_second": 2400, "peak_tflops": {"bf16": 989}}
        gpu = InlineGpu(**{**h100, "watts": 500.0, "compute_units": 132, **given})
        return resolve_cluster(recipe_of(cluster={"gpu": gpu}).cluster).gpu

    own, listed = resolved(), resolve_cluster(recipe_of().cluster).gpu
    assert (listed.name, listed.chip) == ("h100-sxm-80gb", "h100")
    assert (own.name, own.chip) == ("inline", "h100")
    assert own.best_product_flops == listed.best_product_flops and own.watts == 500
    for library in ("torch", "best", "flash"):
        rates = [attention_rate(gpu, library).shares(128, 8192) for gpu in (own, listed)]
        assert rates[0] == pytest.approx(rates[1], rel=0.001)
    assert low_precision_gain(own, "fp8_rowwise") == low_precision_gain(listed, "fp8_rowwise") > 1
    others: tuple[dict[str, Any], ...] = (
        {"compute_units": 120},
        {"compute_units": None},
        {"peak_tflops": {"bf16": 800}},
    )
    for other in (resolved(**keys) for keys in others):
        assert (other.chip, other.best_product_flops) == ("", None)
        assert low_precision_gain(other, "fp8_rowwise") == 1.0


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100", "h100-sxm-80gb"), ("A100-SXM4-80GB", "a100-sxm4-80gb"), ("h20", "h200")],
)
def test_unknown_gpu_suggests(name: str, near: str) -> None:
    with pytest.raises(Refusal) as caught:
        resolve_cluster(recipe_of(cluster={"gpu": name}).cluster)
    (found,) = caught.value.diagnostics
    assert (found.code, found.key) == ("SW3001", ("cluster", "gpu"))
    assert any(v.startswith(near) for v in found.valid)


def test_an_inline_gpu_without_peaks() -> None:
    empty = InlineGpu(memory_gib=1, hbm_gbytes_per_second=1, peak_tflops={})
    with pytest.raises(Refusal) as caught:
        resolve_cluster(recipe_of(cluster={"gpu": empty}).cluster)
    assert [d.code for d in caught.value.diagnostics] == ["SW3002"]


def test_auto_is_one_node_until_the_search_decides() -> None:
    assert resolve_cluster(recipe_of(cluster={"nodes": None}).cluster).nodes == 1
