"""Single kernels and collectives: limits that physics gives, and what quantisation and alignment
cost."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from shardwright.cost.chip_rates import AttentionRate, attention_rate, low_precision_gain
from shardwright.cost.collective_seconds import (
    all_reduce_seconds,
    all_to_all_seconds,
    bytes_per_second,
    deduplicated_all_to_all_seconds,
    gather_seconds,
    group_of,
    ring_start_seconds,
    send_seconds,
)
from shardwright.cost.cost_constants import default_constants
from shardwright.cost.kernel_seconds import (
    Device,
    board_speed,
    device_of,
    eager_attention_seconds,
    fused_attention_seconds,
    head_norm_seconds,
    linear_cast_seconds,
    product_seconds,
    sustained_share,
    traffic_seconds,
)
from shardwright.cost.layer_times import layer_seconds
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.recipe.literal_types import LowPrecision
from tests.unit.cost.test_estimate import BASE
from tests.unit.models.factory import LLAMA_8B, graph_of, recipe_of

C = default_constants()
A100 = Device(
    flops_per_second=312e12,
    sustained_share=1.0,
    bytes_per_second=2.039e12,
    cache_bytes=40 * 2**20,
    compute_units=108,
    element_bytes=2,
    attention=AttentionRate(share=(0.6, 0.5), half_dim=(20, 20), half_length=(300, 1000)),
    unaligned_flops=None,
)


def rate(m: int, n: int, k: int) -> float:
    """Share of the dense peak."""
    return 2 * m * n * k / product_seconds(A100, C, m=m, n=n, k=k) / A100.flops_per_second


def test_a_large_product_comes_near_its_efficiency() -> None:
    assert 0.9 * C.gemm_efficiency < rate(16384, 8192, 8192) <= C.gemm_efficiency


def test_split_matrices_lose_rate() -> None:
    """A tensor degree of 8 cuts the width: fewer tiles a wave, and the same start."""
    assert rate(2048, 8192 // 8, 8192) < rate(2048, 8192, 8192)
    assert rate(128, 1024, 1024) < 0.5 * rate(8192, 8192, 8192)


def test_a_wave_more_costs_a_wave() -> None:
    """108 tiles of 128 x 128 are one wave, 109 two."""
    one, two = (product_seconds(A100, C, m=128 * tiles, n=128, k=8192) for tiles in (108, 109))
    assert two > 1.2 * one


def test_odd_widths_lose_rate() -> None:
    """Rows that begin inside a cache line: the more, the less of them is in the cache. Loads of
    less than 16 bytes: always."""
    lost = [rate(m, 7168, 1800) / rate(m, 7168, 1792) for m in (2048, 16384, 65536)]
    assert 0.95 < lost[0] < 1.05 and lost[0] > lost[1] > lost[2]
    assert lost[1] < 0.95 and lost[2] < 0.85
    assert rate(2048, 7168, 1796) < 0.95 * rate(2048, 7168, 1792)
    slow, fast = (
        eager_attention_seconds(A100, C, heads=12, head_dim=size, length=2048, passes=0)
        for size in (150, 152)
    )
    assert slow > 3 * fast


def test_a_thin_product_runs_at_memory_bandwidth() -> None:
    """One token against a matrix: its bytes over the bandwidth."""
    read = 8192 * 8192 * 2 / (A100.bytes_per_second * C.memory_efficiency)
    assert product_seconds(A100, C, m=1, n=8192, k=8192) == pytest.approx(read, rel=0.02)
    assert traffic_seconds(A100, C, 8192 * 8192 * 2) == pytest.approx(read)


def test_fused_attention_is_slower_with_small_heads_and_short_rows() -> None:
    def rates(head_dim: int, length: int) -> tuple[float, float]:
        flops = 4.0 * head_dim * length**2
        forward, backward = fused_attention_seconds(
            A100, C, flops=flops, head_dim=head_dim, length=length
        )
        return flops / 2 / forward, 2.5 * flops / 2 / backward

    long = rates(128, 1 << 20)
    whole = C.fused_attention_efficiency * 312e12
    assert long == pytest.approx((0.6 * whole, 0.5 * whole), rel=0.01)
    for fewer in (rates(64, 1 << 20), rates(128, 1024)):
        assert all(a < b for a, b in zip(fewer, long, strict=True))
    assert rates(128, 1000)[1] == pytest.approx(0.25 * whole, rel=0.01)


GPUS = {
    name: resolve_cluster(recipe_of(cluster={"gpu": name}).cluster).gpu
    for name in (
        "a100-sxm4-80gb",
        "gb200-nvl-186gb",
        "gh200-96gb",
        "h100-pcie-80gb",
        "h100-sxm-80gb",
        "h200-sxm-141gb",
        "l40s-48gb",
    )
}


@pytest.mark.parametrize(
    ("row", "library", "forward", "backward"),
    [
        ("gqa-128 8192 flash", "flash", 336.5, 282.5),
        ("gqa-128 131072 flash", "flash", 334.6, 325.6),
        ("mha-64 32768 flash", "flash", 307.9, 277.9),
        ("gqa-128 2048 cudnn", "torch", 558.1, 399.4),
        ("gqa-128 32768 cudnn", "torch", 594.9, 529.9),
        ("mha-64 131072 cudnn", "best", 458.1, 421.0),
    ],
)
def test_attention_of_a_hopper_is_what_was_measured(
    row: str, library: Literal["torch", "best", "flash"], forward: float, backward: float
) -> None:
    """TFLOP/s of benchmarks/gpu.json, which the curves hold within a tenth."""
    heads, length, _ = row.split()
    dim = int(heads.partition("-")[2])
    found = attention_rate(GPUS["h200-sxm-141gb"], library).shares(dim, int(length))
    assert [share * 989.4 for share in found] == pytest.approx([forward, backward], rel=0.1)


def test_a_chip_that_is_not_listed_lies_between_an_a100_and_an_h100() -> None:
    """Take FlashAttention-2's rates: 195 and 175 TFLOP/s at a peak of 312, 342 and 322 at 989."""

    def rates(peak: float) -> tuple[float, ...]:
        gpu = dataclasses.replace(
            GPUS["l40s-48gb"], name="inline", peak_flops={"bf16": peak * 1e12}
        )
        return tuple(share * peak for share in attention_rate(gpu, "best").share)

    assert rates(312) == pytest.approx((195, 175)) and rates(989) == pytest.approx((342, 322))
    assert rates(100) == pytest.approx((62.5, 56.1), rel=1e-3)
    assert 195 < rates(500)[0] < 342 < rates(2250)[0] < 342 * 2250 / 989
    assert attention_rate(GPUS["a100-sxm4-80gb"], "best") == attention_rate(
        GPUS["a100-sxm4-80gb"], "flash"
    )


def test_casts_cost_the_least_in_fused_kernels() -> None:
    device = device_of(GPUS["h200-sxm-141gb"], 989.4e12, 2, C)

    def seconds(low_precision: LowPrecision, family: str) -> float:
        return sum(
            linear_cast_seconds(
                device, C, low_precision=low_precision, family=family, m=16384, n=4096, k=4096
            )
        )

    engine, compiled = seconds("fp8_tensorwise", "megatron"), seconds("fp8_tensorwise", "compiled")
    # Transformer Engine casts the three operands once, torchao each for two products.
    assert compiled == pytest.approx(2 * engine)
    assert compiled < seconds("fp8_rowwise", "compiled") < seconds("fp8_rowwise", "hf")
    assert seconds("fp8_tensorwise", "hf") == seconds("fp8_rowwise", "hf")
    assert seconds("mxfp8", "hf") == engine


def test_low_precision_is_faster_where_the_chip_has_it() -> None:
    assert low_precision_gain(GPUS["h100-sxm-80gb"], "fp8_rowwise") > 1.5
    assert low_precision_gain(GPUS["h100-sxm-80gb"], "nvfp4") == 1.0
    assert low_precision_gain(GPUS["a100-sxm4-80gb"], "fp8_rowwise") == 1.0
    assert low_precision_gain(GPUS["h100-sxm-80gb"], "none") == 1.0


def test_an_odd_vocabulary_takes_an_older_chips_kernels() -> None:
    """GPT-2's head on Hopper: 125 TFLOP/s, whatever the size."""
    hopper = dataclasses.replace(A100, flops_per_second=989e12, unaligned_flops=125e12)
    odd, even = (product_seconds(hopper, C, m=8192, n=n, k=1280) for n in (50257, 50264))
    assert odd > 3 * even
    assert 2 * 8192 * 50257 * 1280 / odd == pytest.approx(125e12, rel=0.1)


def test_norms_of_heads_are_bound_by_multiprocessors() -> None:
    slower = dataclasses.replace(A100, bytes_per_second=1e12)
    assert head_norm_seconds(slower, C, 1e9) == traffic_seconds(slower, C, 1e9)
    faster = dataclasses.replace(A100, bytes_per_second=8e12)
    assert head_norm_seconds(faster, C, 1e9) == pytest.approx(
        1e9 / (108 * C.head_norm_unit_bytes_per_second)
    )


def test_norms_of_hidden_states_reach_the_memorys_rate() -> None:
    """Twice the bound of heads' norms speeds a Qwen3's layers up, and no Llama's."""

    def forward(model_type: str, unit_bytes: float) -> float:
        config = {**LLAMA_8B, "model_type": model_type, "head_dim": 128}
        recipe = recipe_of(config, training={"sequence_length": 4096})
        c = dataclasses.replace(C, head_norm_unit_bytes_per_second=unit_bytes)
        layout = dataclasses.replace(BASE, micro_batch_size=4)
        return layer_seconds(recipe, graph_of(config), GPUS["h200-sxm-141gb"], layout, c).forward[2]

    bound = C.head_norm_unit_bytes_per_second
    assert forward("llama", bound) == forward("llama", 2 * bound)
    assert forward("qwen3", bound) > forward("qwen3", 2 * bound) > forward("llama", bound)


def test_a_board_goes_with_its_peak_and_its_power() -> None:
    """An H100 PCIe has 350 W and 114 units, a GB200 a higher peak than a B200. More power than the
    measured board's lifts a bound."""
    names = ("h200-sxm-141gb", "gh200-96gb", "h100-pcie-80gb", "gb200-nvl-186gb")
    listed, more, less, faster = (board_speed(GPUS[name], C) for name in names)
    assert (listed, more) == (1.0, 1.0) and 0.6 < less < 0.75
    assert faster == pytest.approx(2500 / 2250)
    half = dataclasses.replace(GPUS["h100-sxm-80gb"], watts=350.0)
    assert board_speed(half, C) == pytest.approx(0.5 ** (1 / 3))
    found, full = (
        device_of(gpu, 989.4e12, 2, C).attention.shares(128, 8192)
        for gpu in (half, GPUS["h100-sxm-80gb"])
    )
    assert found == pytest.approx([0.5 ** (1 / 3) * share for share in full])


def test_a_power_limit_takes_the_cube_root() -> None:
    full = C.watts_per_tflops * 1000
    assert sustained_share(C, 1000e12, None) == sustained_share(C, 1000e12, full) == 1.0
    assert sustained_share(C, 1000e12, 2 * full) == 1.0
    assert sustained_share(C, 1000e12, full / 8) == pytest.approx(0.5)


def test_faster_devices_are_never_slower() -> None:
    for change in ({"flops_per_second": 600e12}, {"bytes_per_second": 4e12}):
        faster = dataclasses.replace(A100, **change)  # type: ignore[arg-type]
        for m, n, k in ((1, 4096, 4096), (2048, 1792, 14336), (16384, 4096, 4096)):
            assert product_seconds(faster, C, m=m, n=n, k=k) <= product_seconds(
                A100, C, m=m, n=n, k=k
            )


CLUSTER = resolve_cluster(
    recipe_of(cluster={"nodes": 16, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"}).cluster
)


def test_groups_lie_over_nodes() -> None:
    assert not group_of(CLUSTER, 8, 1).spans_nodes
    assert group_of(CLUSTER, 16, 1).ranks_per_node == 8
    assert group_of(CLUSTER, 16, 8).ranks_per_node == 1  # data ranks of a tensor degree of 8
    assert group_of(CLUSTER, 4, 2).ranks_per_node == 4


def test_nodes_of_an_nvlink_domain_are_one_node() -> None:
    """Sixteen hosts of 4 in domains of 32 cost as two nodes of 32."""
    hosts, nodes = (
        resolve_cluster(recipe_of(cluster={"gpu": "b200-sxm-180gb", **size}).cluster)
        for size in (
            {"nodes": 16, "gpus_per_node": 4, "nvlink_domain_gpus": 32},
            {"nodes": 2, "gpus_per_node": 32},
        )
    )
    inside, across = group_of(hosts, 32, 1), group_of(hosts, 2, 32)
    assert not inside.spans_nodes and across.spans_nodes
    rate = hosts.intra_node_bytes_per_second * C.intra_node_efficiency
    assert bytes_per_second(hosts, C, inside, 1e9) == rate
    assert send_seconds(hosts, C, 31, 1e9) < send_seconds(hosts, C, 32, 1e9)
    for ranks, stride in ((4, 1), (8, 4), (32, 1), (64, 1), (8, 8), (2, 32)):
        groups = [group_of(each, ranks, stride) for each in (hosts, nodes)]
        assert groups[0] == groups[1]
        for seconds in (all_reduce_seconds, gather_seconds, all_to_all_seconds):
            costs = [
                seconds(each, C, group, 1e8)
                for each, group in zip((hosts, nodes), groups, strict=True)
            ]
            assert costs[0] == costs[1]


def test_a_node_may_have_several_nvlink_domains() -> None:
    """Pairs of NVLink bridges: beyond a pair the links between nodes are counted on."""
    pairs = resolve_cluster(recipe_of(cluster={"nodes": 2, "nvlink_domain_gpus": 2}).cluster)
    assert not group_of(pairs, 2, 1).spans_nodes and group_of(pairs, 4, 1).spans_nodes
    assert (pairs.nvlink_domains, pairs.scale_up_gpus) == (8, 8)


def test_a_token_crosses_to_each_node_once() -> None:
    """Eight experts a token over four nodes: DeepEP sends 4 (1 - (3/4)^8) copies of it, of which a
    quarter stays; plain all-to-all sends eight."""
    group, token_bytes = group_of(CLUSTER, 32, 1), 1e8
    found = deduplicated_all_to_all_seconds(CLUSTER, C, group, 8 * token_bytes, 8)
    across = 4 * (1 - 0.75**8) * 0.75 * token_bytes / 25e9 / C.deepep_inter_node_efficiency
    assert found == pytest.approx(across, rel=0.01)
    plain = all_to_all_seconds(CLUSTER, C, group, 8 * token_bytes, 3, C.expert_alltoall_efficiency)
    assert plain > 2 * found
    assert deduplicated_all_to_all_seconds(CLUSTER, C, group_of(CLUSTER, 1, 1), 1e9, 8) == 0
    # One expert a token is sent once by both.
    one = deduplicated_all_to_all_seconds(CLUSTER, C, group, token_bytes, 1)
    assert one == pytest.approx(
        24 / 32 * token_bytes / 25e9 / C.deepep_inter_node_efficiency, rel=0.01
    )


def test_members_of_a_node_bring_their_adapters() -> None:
    """25 GB/s an adapter: eight at once outdo one, and never the node's own links."""
    alone, together = (
        bytes_per_second(CLUSTER, C, group_of(CLUSTER, 16, stride), 1e9) for stride in (8, 1)
    )
    inside = bytes_per_second(CLUSTER, C, group_of(CLUSTER, 8, 1), 1e9)
    assert alone == pytest.approx(25e9 * C.inter_node_efficiency)
    assert together == pytest.approx(min(8 * alone, inside))


def test_collectives_grow_with_ranks_and_bytes() -> None:
    groups = [group_of(CLUSTER, ranks, 1) for ranks in (2, 8, 16, 128)]
    seconds = [all_reduce_seconds(CLUSTER, C, group, 1e9) for group in groups]
    assert seconds == sorted(seconds)
    starts = [ring_start_seconds(C, group) for group in groups]
    assert starts == sorted(starts) and ring_start_seconds(C, group_of(CLUSTER, 1, 1)) == 0
    assert gather_seconds(CLUSTER, C, groups[0], 2e9) > gather_seconds(CLUSTER, C, groups[0], 1e9)
    assert send_seconds(CLUSTER, C, 8, 1e8) > send_seconds(CLUSTER, C, 1, 1e8)
