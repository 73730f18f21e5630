"""Published rows -> what the cost model takes, in process: hundreds of estimates in a fraction of a
second.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.cost.chip_rates import library_flops
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.peak_memory import RankMemoryModel, framework_bytes
from shardwright.cost.prediction_errors import error_json_fields
from shardwright.cost.priced_layout import PricedLayout
from shardwright.layout.gpu_cluster import Cluster, resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.accumulation_dtype_choice import estimate_with_accumulation_dtype
from shardwright.search.layout_resolution import estimate_checked_layout, resolve_layout
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.utils.memoize import memoize
from tools.bench_gpu import gpu_bench_cases
from tools.fit_cost import score, score_engines, score_moe

ROWS = Path(__file__).with_name("rows.json")
ENGINE_ROWS = Path(__file__).with_name("engines.json")
MOE_ROWS = Path(__file__).with_name("moe.json")
UNFITTED_ROWS = Path(__file__).with_name("h100.json")
OWN_ROWS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.json"
# A row's project, from the start of its `source`.
PROJECTS = {
    "llm-foundry": "MPT (llm-foundry)",
    "BigScience": "BigScience",
    "BLOOM": "BigScience",
    "Megatron SC": "NVIDIA's papers",
    "Megatron-Bridge": "Megatron-Bridge",
    "Megatron-MoE": "Megatron-MoE-ModelZoo",
    "Megatron-LM DeepSeek": "Megatron-MoE-ModelZoo",
    "Korthikanti": "NVIDIA's papers",
    "MT-NLG": "NVIDIA's papers",
    "torchtitan": "torchtitan",
    "DeepCompile": "DeepCompile's benchmark",
    "Bekman": "S. Bekman's H200 runs",
    "chenyaofo": "chenyaofo's A800 runs",
    "DeepSpeed on Azure": "DeepSpeed on Azure",
    "InternLM": "InternEvo",
    "Nanotron": "nanotron",
    "SimuMax": "SimuMax",
    "make bench-gpu": "this project's H200",
    "ms-swift": "ms-swift",
    "XTuner": "XTuner",
    "FlagPerf": "FlagPerf",
    "NeMo AutoModel": "NeMo AutoModel",
    "Primus": "AMD Primus",
}

# Generations of GPUs among the rows.
HARDWARE = ("V100", "A100", "H100")

# How the notes of a row start whose peak_mem_GB was left in GiB. Korthikanti's figure 1: the
# activations that its notes tell are those of the paper's equations (arXiv 2205.05198, table 2)
# over 2^30, to the last digit.
IN_GIB = "GiB;"

H100_OF_500_WATTS = {
    "memory_gib": 94,
    "hbm_gbytes_per_second": 2400,
    "peak_tflops": {"bf16": 989.4, "fp16": 989.4},
    "watts": 500,
    "compute_units": 132,
    "cache_mib": 50,
}
"""Describes torchtitan's GPUs, H100 with HBM2e: the scorer guesses one peak for their power."""

FLASH_ATTENTION_3 = "flash_attention_3"
"""Marks rows whose steps are too fast for FlashAttention-2: a recipe has no word for it."""

Row = dict[str, Any]

_GRAPHS: dict[str, ModelGraph] = {}
"""By what a recipe says of its model: the rows are of a few models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    row: Row
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    strategy: Layout

    @property
    def problem(self) -> Problem:
        return Problem(recipe=self.recipe, graph=self.graph, cluster=self.cluster)

    def constants(self, c: Constants) -> Constants:
        """Return the constants of this run."""
        return dataclasses.replace(c, hook_seconds=c.hook_seconds * hooks_per_module(self.graph))

    @property
    def project(self) -> str:
        return project_of(self.row)


@memoize(lambda graph: graph.identity)
def hooks_per_module(graph: ModelGraph) -> float:
    """Return how many times as many of ZeRO-3's hooks the published runs had.

    Their transformers 4 looped over experts in Python: each had three modules (gate, up and down),
    where a layer's stacked experts now are one.
    """
    stacked = looped = 0
    for layer in graph.layers:
        experts = [p for p in layer.parameters if len(p.shape) == 3]
        others = {p.name.rpartition(".")[0] for p in layer.parameters if len(p.shape) < 3}
        stacked += len(others | {p.name.rpartition(".")[0] for p in experts})
        looped += len(others) + 3 * max((p.shape[0] for p in experts), default=0)
    return looped / stacked


def project_of(row: Row) -> str:
    return next(name for start, name in PROJECTS.items() if row["source"].startswith(start))


def is_megatron(row: Row) -> bool:
    """Megatron-LM's own runs: the scorer's recipe says `target: deepspeed` where they use nothing
    beyond it."""
    return bool(row["source"].startswith(("Megatron SC", "Korthikanti")))


def hardware_of(case: Case) -> str:
    """One of HARDWARE."""
    gpu: str = case.row["hardware"]["gpu"]
    return gpu.partition("-")[0]


def load_cases(path: Path = ROWS) -> list[Case]:
    """Every row that the scorer uses, through the recipe that the scorer makes of it."""
    return [case_of(row) for row in score.rows(path) if score.usable(row)]


def load_engine_cases(path: Path = ENGINE_ROWS) -> list[Case]:
    """Runs of other engines, and DeepSpeed's own, through that scorer's recipes."""
    return [case_of(row) for row in score.rows(path)]


def load_moe_cases(path: Path = MOE_ROWS) -> list[Case]:
    """Runs with experts, context ranks, low precision and new GPUs."""
    return [case_of(row) for row in score.rows(path) if score_moe.is_usable(row)]


def load_own_cases(path: Path = OWN_ROWS) -> list[Case]:
    """This project's own runs on one GPU (`make bench-gpu`).

    Those in low precision are left out: torchao's constants come from the same card, so their
    errors would say nothing of another one.
    """
    document = json.loads(path.read_text("utf-8"))
    cases = []
    for name, found in document["layouts"].items():
        if "measured_step_seconds" not in found:
            continue
        asked = gpu_bench_cases.recipe(gpu_bench_cases.LAYOUTS[name], document["machine"]["gpu"])
        training = asked["training"]
        if "low_precision" in training:
            continue
        measured = {
            "iteration_time_s": found["measured_step_seconds"],
            "peak_mem_GB": found["measured_peak_bytes"] / 1e9,
            "oom": False,
        }
        row = {
            "id": f"own-{name}",
            "source": "make bench-gpu",
            "engine": "DeepSpeed",
            "family": "dense",
            "asked": asked,
            "model": {"seq_len": training["sequence_length"]},
            "hardware": {"gpu": document["machine"]["gpu"], "nodes": 1, "n_gpus": 1},
            "parallel": {"global_batch": training["global_batch_size"], "offload": None},
            "measured": measured,
            "notes": "",
            "price": {"kernels": None},
        }
        cases.append(case_of(row))
    return cases


def is_moe_row(row: Row) -> bool:
    """Of moe.json."""
    return "dispatcher" in row


def is_engine_row(row: Row) -> bool:
    """Of engines.json, whose rows say how they are to be asked."""
    return "price" in row


def in_gigabytes(row: Row) -> Row:
    """The row with its memory in 10^9 bytes, which is what the scorer takes it for."""
    held = row["measured"]["peak_mem_GB"]
    if not held or not row["notes"].startswith(IN_GIB):
        return row
    return {**row, "measured": {**row["measured"], "peak_mem_GB": held * 2**30 / 1e9}}


def recipe_of(row: Row) -> dict[str, Any]:
    """The recipe that asks for the row's layout."""
    if "asked" in row:
        asked: dict[str, Any] = row["asked"]
        return asked
    if is_moe_row(row):
        return score_moe.recipe(row)
    document: dict[str, Any] = (
        score_engines.recipe(row) if is_engine_row(row) else score.recipe(row)
    )
    if document["model"].get("attention") == FLASH_ATTENTION_3:
        document["model"]["attention"] = "sdpa"
    if row["hardware"]["gpu"] == "H100-96GB-HBM2e-500W":
        document["cluster"]["gpu"] = H100_OF_500_WATTS
    return document


def case_of(row: Row) -> Case:
    row = in_gigabytes(row)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        document = recipe_of(row)
        file.write_text(json.dumps(document))
        recipe = load_recipe(file, [])
    name = repr(recipe.model)
    if name not in _GRAPHS:
        _GRAPHS[name] = build_model_graph(recipe.model)
    cluster = resolve_cluster(recipe.cluster)
    if is_engine_row(row) and row["price"].get("attention") == FLASH_ATTENTION_3:
        gpu = dataclasses.replace(cluster.gpu, attention_flops=library_flops(cluster.gpu, "flash3"))
        cluster = dataclasses.replace(cluster, gpu=gpu)
    problem = Problem(recipe=recipe, graph=_GRAPHS[name], cluster=cluster)
    (strategy,) = candidate_layouts(problem)
    if is_moe_row(row):  # as `estimate` answers
        problem, _ = estimate_with_accumulation_dtype(problem)
    return Case(
        row=row,
        recipe=problem.recipe,
        graph=problem.graph,
        cluster=problem.cluster,
        strategy=strategy,
    )


def estimate(case: Case, constants: Constants) -> Estimate:
    return estimate_checked_layout(case.problem, case.strategy, (), case.constants(constants))


def resolved_layout(case: Case) -> PricedLayout:
    """Return the layout as the package's constants resolve it."""
    return resolve_layout(case.problem, case.strategy, case.constants(default_constants()))[0]


def as_scored(found: Estimate) -> dict[str, Any]:
    """The part of `estimate --json` that the scorer reads."""
    told = error_json_fields(found.error)
    return {
        part: dataclasses.asdict(getattr(found, part)) | told[part] for part in ("time", "memory")
    }


# What of a layout's memory is alive: what decides whether it fits, and what some sources print.


def live_bytes(layout: PricedLayout) -> int:
    """The fullest rank's, without what the allocator keeps beside it."""
    ranks = RankMemoryModel(layout)
    return max(ranks.peak_bytes(blocks, 0) for blocks in layout.ranks)


def allocated_bytes(layout: PricedLayout) -> float:
    """torch.cuda.max_memory_allocated() of the first pipeline rank: no context, nothing that the
    allocator keeps."""
    return RankMemoryModel(layout).peak_bytes(layout.ranks[0], 0) - framework_bytes(layout)
