"""The engines, a row each: `target` in a recipe and in plan.json."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from shardwright.diagnostics import Diagnostic, found, refusal
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
    if engine is None:
        names = ", ".join(ENGINES)
        why = f"its plan.json says target: {plan.target}, and the engines that can run here are {names}"
        help = "Compile the recipe again: `shardwright compile RECIPE -o DIR` keeps the folder's run and checkpoints."
        raise refusal("SW6001", f"not a compiled folder of this version: {why}", help)
    return engine


def package_errors(engine: Engine) -> tuple[Diagnostic, ...]:
    """SW1923 for each package that a compile for it needs and that is missing, or was not tested."""
    from importlib import metadata

    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    told = []
    for name, tested in engine.packages.items():
        try:
            version = Version(metadata.version(name)).base_version
        except metadata.PackageNotFoundError:
            version = ""
        if version and SpecifierSet(tested).contains(version):
            continue
        have = f"{name} {version} was not tested" if version else f"{name} is not installed"
        wanted = f"shardwright[{engine.extra}]" if engine.extra else "shardwright"
        message = f"target: {engine.name} runs on {name} {tested}: {have}"
        told.append(found("SW1923", "target", message, f"pip install '{wanted}', or write `target: {DEFAULT}`."))
    return tuple(told)


def lowering_of(target: str) -> Lowering:
    return cast(Lowering, import_module(ENGINES[target].lowering))


def traits_of(target: str, kernels: str, s: Strategy) -> Traits:
    """kernels: as `assume` says. An engine's own, without ZeRO on one data rank, are that engine whatever `target`
    says: nothing that another would be there for is left."""
    alone = KERNELS[kernels].engine if s.zero_stage == 0 and s.shards == 1 else None
    return ENGINES[alone or target].traits


def title_of(name: str) -> str:
    """Of an engine, or of what else published runs were made with."""
    return ENGINES[name].title if name in ENGINES else _PUBLISHED.get(name, name)
