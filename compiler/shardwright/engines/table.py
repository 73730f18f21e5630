"""The engines, a row each: `target` in a recipe and in plan.json."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from shardwright.diagnostics import refusal
from shardwright.engines.deepspeed.engine import DEEPSPEED
from shardwright.engines.engine import Engine, Lowering, Traits
from shardwright.engines.kernels import FSDP, KERNELS
from shardwright.engines.megatron.engine import MEGATRON
from shardwright.engines.reference.engine import REFERENCE
from shardwright.layout.strategy import Strategy
from shardwright.plan.plan import Plan

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (DEEPSPEED, REFERENCE, MEGATRON)}
DEFAULT = DEEPSPEED.name

_PUBLISHED = {FSDP: "PyTorch's FSDP"}


def engine_of(plan: Plan) -> Engine:
    """Raises Refusal: SW6001 for a plan.json that was edited, or that a version with other engines wrote."""
    engine = ENGINES.get(plan.target or DEFAULT)
    if engine is None or engine.runtime is None:
        names = ", ".join(row.name for row in ENGINES.values() if row.runtime)
        why = f"its plan.json says target: {plan.target}, and the engines that can run here are {names}"
        help = "Compile the recipe again: `shardwright compile RECIPE -o DIR` keeps the folder's run and checkpoints."
        raise refusal("SW6001", f"not a compiled folder of this version: {why}", help)
    return engine


def runner_of(target: str) -> Engine:
    """The engine itself; the default one where its runs are estimated, not started."""
    return ENGINES[target] if ENGINES[target].runtime else ENGINES[DEFAULT]


def lowering_of(target: str) -> Lowering:
    return cast(Lowering, import_module(runner_of(target).lowering))


def traits_of(target: str, kernels: str, s: Strategy) -> Traits:
    """kernels: as `assume` says. An engine's own, without ZeRO on one data rank, are that engine whatever `target`
    says: nothing that another would be there for is left."""
    alone = KERNELS[kernels].engine if s.zero_stage == 0 and s.shards == 1 else None
    return ENGINES[alone or target].traits


def title_of(name: str) -> str:
    """Of an engine, or of what else published runs were made with."""
    return ENGINES[name].title if name in ENGINES else _PUBLISHED.get(name, name)
