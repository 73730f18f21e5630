"""Resolve the recipe's `cluster` section with gpu_catalogue.json, whose entries name their
sources."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import NotRequired, TypedDict

from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.layout.device_kinds import CPU, GPU, DeviceKind
from shardwright.recipe.literal_types import Fabric
from shardwright.recipe.recipe_types import AttentionRates, ClusterSection, InlineGpu

# The resolved cluster.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Describe a GPU.

    name: catalogue name, or "inline"
    chip: the catalogue's chip, whose measured rates the GPU has; "" where it has none of them
    visible_memory_gib: what the driver shows of memory_gib; None: all of it
    peak_flops: dense FLOP/s by precision
    watts: the board's power limit; None where peak_flops are sustained
    cache_bytes: last-level cache
    compute_units: streaming multiprocessors (NVIDIA) or compute units (AMD)
    best_product_flops: the fastest dense half-precision product that was measured; None without one
    attention_flops: measured FLOP/s of fused causal attention on long sequences, half the scores
        counted, forward and backward; None without a recipe's own
    """

    name: str
    memory_gib: float
    hbm_bytes_per_second: float
    peak_flops: Mapping[str, float]
    watts: float | None
    cache_bytes: float
    compute_units: int
    chip: str = ""
    is_cpu: bool = False
    best_product_flops: float | None = None
    attention_flops: tuple[float, float] | None = None
    visible_memory_gib: float | None = None

    @property
    def kind(self) -> DeviceKind:
        """Return the kind of device, with the traits that stages ask for."""
        return CPU if self.is_cpu else GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Describe the machines; bandwidths are per GPU, in one direction.

    nvlink_gpus: GPUs that NVLink can join, of one node or of several
    fabric_is_given: the recipe names the fabric
    """

    nodes: int
    gpus_per_node: int
    nvlink_gpus: int
    gpu: Gpu
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    host_memory_bytes: float | None
    shared_filesystem: bool
    price_per_gpu_hour: float | None
    fabric: Fabric = "infiniband"
    fabric_is_given: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nvlink_domain_gpus(self) -> int:
        """Return the GPUs of each NVLink domain; ranks fill domains and their nodes in order."""
        return _nvlink_domain_gpus(self.nodes, self.gpus_per_node, self.nvlink_gpus)

    @property
    def nvlink_domains(self) -> int:
        return self.world_size // self.nvlink_domain_gpus

    @property
    def scale_up_gpus(self) -> int:
        """Return the GPUs of a node, or of an NVLink domain of several nodes."""
        return max(self.gpus_per_node, self.nvlink_domain_gpus)

    @property
    def capacity_bytes(self) -> int:
        return int(self.gpu.memory_gib * 2**30)

    def verify(self) -> None:
        if self.world_size < 1 or self.capacity_bytes <= 0:
            raise ValueError("a cluster needs at least one GPU with memory")


@functools.cache
def _nvlink_domain_gpus(nodes: int, gpus_per_node: int, nvlink_gpus: int) -> int:
    """Return the most GPUs of a domain with which each domain has as many nodes.

    256 GPUs in racks of 72 are 4 domains of 64. Slurm's topology/block places such segments.
    """
    if nvlink_gpus <= gpus_per_node:
        return nvlink_gpus
    most = min(nodes, nvlink_gpus // gpus_per_node)
    return gpus_per_node * next(n for n in range(most, 0, -1) if nodes % n == 0)


class InlineGpuDefaults(TypedDict):
    """Hold defaults for an inline GPU.

    visible_memory_gib: what the driver shows where that is less than the board's name says
    nvlink_domain_gpus: GPUs that NVLink joins beyond a node
    sources: the source of each number
    """

    cache_mib: float
    watts: float | None
    intra_node_gbytes_per_second: float
    inter_node_gbits_per_second: float
    fabric: Fabric
    best_product_tflops: float | None
    visible_memory_gib: NotRequired[float]
    nvlink_domain_gpus: NotRequired[int]
    sources: dict[str, str]


class CatalogueGpu(InlineGpuDefaults):
    memory_gib: float
    compute_units: int
    hbm_gbytes_per_second: float
    peak_tflops: dict[str, float]


class Catalogue(TypedDict):
    gpus: dict[str, CatalogueGpu]
    inline_gpu: InlineGpuDefaults


@functools.cache
def catalogue() -> Catalogue:
    data: Catalogue = json.loads(
        resources.files("shardwright.layout").joinpath("gpu_catalogue.json").read_text("utf-8")
    )
    return data


def gpus_named(words: str) -> tuple[str, ...]:
    """Return the catalogue's GPUs that a short name may mean, the one with the most memory first:
    "h100", "A100 40GB", "RTX 4090".

    Each word after the chip may be the beginning of a word of the GPU's name.
    """
    gpus = catalogue()["gpus"]
    if words in gpus:
        return (words,)
    parts = _normalized(words).split("-")
    found = [
        name
        for name in gpus
        for chip, *of_name in (name.split("-"),)
        for count in range(1, len(parts) + 1)
        if chip == "".join(parts[:count])
        and all(any(part.startswith(word) for part in of_name) for word in parts[count:])
    ]
    return tuple(sorted(without_pcie_boards(found), key=lambda name: -gpus[name]["memory_gib"]))


def without_pcie_boards(names: list[str]) -> list[str]:
    """Return the SXM boards of a chip, or all where there are none: "h100" is no PCIe board."""
    return [name for name in names if not {"pcie", "nvl"} & {*name.split("-")}] or names


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")


def resolve_cluster(section: ClusterSection) -> Cluster:
    """Resolve the cluster; `nodes: auto` gives one node, which search/cluster_sizing.py scales.

    Raises Refusal with SW3001 (unknown GPU) or SW3002 (inline GPU without peaks).
    """
    if errors := gpu_errors(section):
        raise Refusal(*errors)
    chip: CatalogueGpu
    attention: AttentionRates | None = None
    if isinstance(section.gpu, str):
        name = listed = section.gpu
        chip = catalogue()["gpus"][name]
    else:
        name, listed, attention = "inline", _board_of_same_chip(section.gpu), section.gpu.attention
        chip = _inline_chip(section.gpu, listed)
    gpu = Gpu(
        name=name,
        chip=listed.partition("-")[0],
        memory_gib=chip["memory_gib"],
        hbm_bytes_per_second=chip["hbm_gbytes_per_second"] * 1e9,
        peak_flops={precision: tflops * 1e12 for precision, tflops in chip["peak_tflops"].items()},
        cache_bytes=chip["cache_mib"] * 2**20,
        compute_units=chip["compute_units"],
        watts=chip["watts"],
        is_cpu=name == "cpu",
        best_product_flops=None
        if chip["best_product_tflops"] is None
        else chip["best_product_tflops"] * 1e12,
        visible_memory_gib=chip.get("visible_memory_gib"),
        attention_flops=None
        if attention is None
        else (attention.forward_tflops * 1e12, attention.backward_tflops * 1e12),
    )
    intra = section.intra_node_gbytes_per_second or chip["intra_node_gbytes_per_second"]
    inter = section.inter_node_gbits_per_second or chip["inter_node_gbits_per_second"]
    cluster = Cluster(
        nodes=section.nodes or 1,
        gpus_per_node=section.gpus_per_node,
        nvlink_gpus=section.nvlink_domain_gpus
        or max(section.gpus_per_node, chip.get("nvlink_domain_gpus", 1)),
        gpu=gpu,
        intra_node_bytes_per_second=intra * 1e9,
        inter_node_bytes_per_second=inter * 1e9 / 8,
        host_memory_bytes=None
        if section.host_memory_gib is None
        else section.host_memory_gib * 2**30,
        shared_filesystem=section.shared_filesystem,
        price_per_gpu_hour=section.price_per_gpu_hour,
        fabric=section.fabric or chip["fabric"],
        fabric_is_given=section.fabric is not None,
    )
    cluster.verify()
    return cluster


SAME_PEAK = 0.005
"""Share by which data sheets and recipes round a peak."""


def _board_of_same_chip(gpu: InlineGpu) -> str:
    """Return the catalogue's board with the chip of an inline GPU: its half-precision peak and as
    many compute units; "" without one.

    Memory, its bandwidth and watts are a board's: an H200 has an H100's chip.
    """
    for name, board in catalogue()["gpus"].items():
        peaks = [(gpu.peak_tflops.get(p), board["peak_tflops"].get(p)) for p in ("bf16", "fp16")]
        if gpu.compute_units == board["compute_units"] and any(
            own and listed and abs(own / listed - 1) <= SAME_PEAK for own, listed in peaks
        ):
            return name
    return ""


UNIT_FP32_TFLOPS = 0.512  # 128 lanes, two FLOPs each, at 2 GHz: Hopper, Blackwell and CDNA 3
HALF_OVER_FP32_PEAK = 16  # of an A100's and an MI355X's tensor cores over its vector units


def _inline_chip(gpu: InlineGpu, listed: str) -> CatalogueGpu:
    """Return an inline GPU with what the recipe leaves out.

    Its compute units follow from its peaks. Without watts no power limit is modelled, and without
    a cache none is counted on.

    listed: a board with the same chip, whose fastest product was measured; "" without one
    """
    chip = catalogue()["inline_gpu"]
    if listed:
        measured = catalogue()["gpus"][listed]["best_product_tflops"]
        chip = {**chip, "best_product_tflops": measured}
    fp32 = gpu.peak_tflops.get("fp32")
    if fp32 is None:
        peaks = [gpu.peak_tflops[half] for half in ("bf16", "fp16") if half in gpu.peak_tflops]
        fp32 = max(peaks or gpu.peak_tflops.values()) / HALF_OVER_FP32_PEAK
    return {
        **chip,
        "memory_gib": gpu.memory_gib,
        "hbm_gbytes_per_second": gpu.hbm_gbytes_per_second,
        "peak_tflops": dict(gpu.peak_tflops),
        "watts": gpu.watts,
        "cache_mib": chip["cache_mib"] if gpu.cache_mib is None else gpu.cache_mib,
        "compute_units": gpu.compute_units or max(1, round(fp32 / UNIT_FP32_TFLOPS)),
    }


def gpu_errors(section: ClusterSection) -> tuple[Diagnostic, ...]:
    """Return the SW3001 and SW3002 errors of the cluster."""
    gpus = catalogue()["gpus"]
    if isinstance(section.gpu, str):
        if section.gpu in gpus:
            return ()
        names = tuple(gpus)
        lowered = _normalized(section.gpu)
        same_chip = [n for n in names if n.startswith(lowered.split("-")[0])]
        near = tuple(
            dict.fromkeys([*same_chip, *difflib.get_close_matches(lowered, names, n=3, cutoff=0.5)])
        )[:3]
        help = f"Did you mean `{near[0]}`? " if near else ""
        help += f"Use one of {', '.join(gpus)}, or describe the GPU inline: "
        help += "{memory_gib, hbm_gbytes_per_second, peak_tflops: {bf16: ...}}."
        return (
            found(
                "SW3001", "cluster.gpu", f"gpu {section.gpu!r} is not in the catalogue", help, near
            ),
        )
    if section.gpu.peak_tflops:
        return ()
    help = "Give the dense peak of each precision, for example peak_tflops: {bf16: 989, fp32: 67}."
    return (
        found("SW3002", "cluster.gpu.peak_tflops", "peak_tflops of the inline GPU is empty", help),
    )
