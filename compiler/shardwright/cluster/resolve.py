"""Stage 3: the recipe's `cluster` section -> Cluster.

The catalogue is data: catalogue.json, each entry with its source.
"""

from __future__ import annotations

import difflib
import functools
import json
from importlib import resources
from typing import TypedDict

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.cluster import Cluster, Gpu
from shardwright.ir.recipe import ClusterSection


class CatalogueEntry(TypedDict):
    memory_gib: float
    cache_mib: float
    compute_units: int
    watts: float | None
    hbm_gbytes_per_second: float
    peak_tflops: dict[str, float]
    intra_node_gbytes_per_second: float
    inter_node_gbits_per_second: float
    sources: dict[str, str]  # of each number


class InlineDefaults(TypedDict):
    """What an inline GPU does not say."""

    cache_mib: float
    compute_units: int
    watts: float
    intra_node_gbytes_per_second: float
    inter_node_gbits_per_second: float
    sources: dict[str, str]


class Catalogue(TypedDict):
    gpus: dict[str, CatalogueEntry]
    inline_gpu: InlineDefaults


@functools.cache
def catalogue() -> Catalogue:
    data: Catalogue = json.loads(resources.files("shardwright.cluster").joinpath("catalogue.json").read_text("utf-8"))
    return data


def resolve_cluster(section: ClusterSection) -> Cluster:
    """One node where the recipe says auto: search/deadline.py decides how many.

    Raises Refusal: SW3001 unknown GPU, SW3002 an inline GPU without peaks.
    """
    diagnostics = list(gpu_errors(section))
    gpus = catalogue()["gpus"]
    links: CatalogueEntry | InlineDefaults = catalogue()["inline_gpu"]
    gpu: Gpu | None = None
    if not isinstance(section.gpu, str):
        gpu = Gpu(
            name="inline",
            memory_gib=section.gpu.memory_gib,
            hbm_bytes_per_second=section.gpu.hbm_gbytes_per_second * 1e9,
            peak_flops={name: value * 1e12 for name, value in section.gpu.peak_tflops.items()},
            cache_bytes=links["cache_mib"] * 2**20,
            compute_units=links["compute_units"],
            watts=catalogue()["inline_gpu"]["watts"],
        )
    elif section.gpu in gpus:
        entry = gpus[section.gpu]
        links = entry
        gpu = Gpu(
            name=section.gpu,
            memory_gib=entry["memory_gib"],
            hbm_bytes_per_second=entry["hbm_gbytes_per_second"] * 1e9,
            peak_flops={name: value * 1e12 for name, value in entry["peak_tflops"].items()},
            cache_bytes=entry["cache_mib"] * 2**20,
            compute_units=entry["compute_units"],
            watts=entry["watts"],
            is_cpu=section.gpu == "cpu",
        )
    if diagnostics or gpu is None:
        raise Refusal(*diagnostics)
    intra = section.intra_node_gbytes_per_second or links["intra_node_gbytes_per_second"]
    inter = section.inter_node_gbits_per_second or links["inter_node_gbits_per_second"]
    cluster = Cluster(
        nodes=section.nodes or 1,
        gpus_per_node=section.gpus_per_node,
        gpu=gpu,
        intra_node_bytes_per_second=intra * 1e9,
        inter_node_bytes_per_second=inter * 1e9 / 8,
        host_memory_bytes=None if section.host_memory_gib is None else section.host_memory_gib * 2**30,
        shared_filesystem=section.shared_filesystem,
        price_per_gpu_hour=section.price_per_gpu_hour,
    )
    cluster.verify()
    return cluster


def gpu_errors(section: ClusterSection) -> tuple[Diagnostic, ...]:
    """SW3001, SW3002: what `check` can say of the cluster already."""
    gpus = catalogue()["gpus"]
    if isinstance(section.gpu, str):
        if section.gpu in gpus:
            return ()
        near = _nearest(section.gpu, tuple(gpus))
        return (
            Diagnostic(
                code="SW3001",
                message=f"gpu {section.gpu!r} is not in the catalogue",
                help=(f"Did you mean `{near[0]}`? " if near else "")
                + f"Known: {', '.join(gpus)}. Any other one can be given inline: "
                "{memory_gib, hbm_gbytes_per_second, peak_tflops: {bf16: ...}}.",
                key=("cluster", "gpu"),
                valid=near,
            ),
        )
    if section.gpu.peak_tflops:
        return ()
    return (
        Diagnostic(
            code="SW3002",
            message="peak_tflops of the inline GPU is empty",
            help="Give the dense peak of each precision, for example peak_tflops: {bf16: 989, fp32: 67}.",
            key=("cluster", "gpu", "peak_tflops"),
        ),
    )


def _nearest(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Entries of the same or a longer chip name ("h100" -> "h100-sxm-80gb"), then close spellings."""
    lowered = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    same_chip = [n for n in names if n.startswith(lowered.split("-")[0])]
    return tuple(dict.fromkeys([*same_chip, *difflib.get_close_matches(lowered, names, n=3, cutoff=0.5)]))[:3]
