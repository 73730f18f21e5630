"""List the engines, one row each: `target` in a recipe and in plan.json."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

from shardwright.diagnostics import Diagnostic, found, refusal
from shardwright.engines.deepspeed.deepspeed_capabilities import DEEPSPEED
from shardwright.engines.engine_definition import Engine, EngineTraits, Lowering
from shardwright.engines.kernel_traffic import KERNEL_TRAFFIC
from shardwright.engines.megatron.megatron_capabilities import MEGATRON
from shardwright.engines.reference.reference_capabilities import REFERENCE
from shardwright.layout.axes import AXES, Axis
from shardwright.layout.layout import Layout
from shardwright.recipe.literal_types import Fabric
from shardwright.recipe.recipe_types import Recipe

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (DEEPSPEED, REFERENCE, MEGATRON)}
DEFAULT_TARGET = DEEPSPEED.name
AUTO_TARGET = "auto"
"""Chooses the engine whose best plan is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEngine:
    """Describe published runs that `assume.kernels` selects with a target: the traits that differ
    from it.

    family: see engine_family
    """

    title: str
    family: str
    traffic: str | None = None
    zero3_gathers_flat_layers: bool | None = None
    bucketed_zero: bool | None = None
    zero_1_overlaps: bool | None = None
    tensor_parallel_launch_cost: Literal["hidden", "floor", "added"] | None = None
    pipeline_raises_launch_cost: bool | None = None
    fuses_accumulation: bool | None = None
    frees_gradients_after_add: bool | None = None
    balances_stages_by_matmul_flops: bool | None = None
    fabric: Fabric | None = None


def engine_of(plan: Plan) -> Engine:
    """Return the plan's engine. Raises Refusal with SW6001 for an engine that this version
    lacks."""
    engine = ENGINES.get(plan.target)
    if engine is None:
        names = ", ".join(ENGINES)
        why = f"its plan.json has target: {plan.target}, and this version's engines are {names}"
        help = (
            "Compile the recipe again: `shardwright compile RECIPE -o DIR` keeps the folder's "
            "run and checkpoints."
        )
        raise refusal("SW6001", f"not a compiled folder of this version: {why}", help)
    return engine


def engines_for(target: str) -> tuple[Engine, ...]:
    """Return the engine that a recipe names, or those that `auto` chooses from, the default
    first."""
    return (
        tuple(e for e in ENGINES.values() if e.automatic)
        if target == AUTO_TARGET
        else (ENGINES[target],)
    )


def recipe_for_engine(recipe: Recipe, engine: Engine) -> Recipe:
    """Return the recipe for this engine.

    Keys at their default, which only some engines have and which leave each rank its part of the
    model, are left to the search: a recipe for any engine does not name them.
    """
    free: dict[str, Any] = {
        a.name: None for a in AXES if a.values and a.name in engine.axes and _is_default(a, recipe)
    }
    pins = (
        dataclasses.replace(recipe.parallelism, **free)
        if recipe.target != engine.name
        else recipe.parallelism
    )
    return dataclasses.replace(recipe, target=engine.name, parallelism=pins)


def _is_default(axis: Axis, recipe: Recipe) -> bool:
    return (
        not axis.in_every_engine
        and not axis.ranks
        and not axis.is_model_parallel
        and axis.pin(recipe) == axis.default
    )


def package_errors(engine: Engine) -> tuple[Diagnostic, ...]:
    """Return SW1923 for each package that the engine needs and that is missing or untested."""
    from importlib import metadata

    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    errors = []
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
        errors.append(
            found(
                "SW1923",
                "target",
                message,
                f"pip install '{wanted}', or write `target: {DEFAULT_TARGET}`.",
            )
        )
    return tuple(errors)


def lowering_of(target: str) -> Lowering:
    return cast(Lowering, import_module(ENGINES[target].lowering))


PUBLISHED_ENGINES: dict[tuple[str, str], PublishedEngine] = {
    # PyTorch gathers a layer from one flat buffer, and overlaps more of it where torch.compile
    # leaves the host time.
    ("deepspeed", "hf"): PublishedEngine(
        title="PyTorch's FSDP",
        family="PyTorch's FSDP",
        traffic="fsdp",
        zero3_gathers_flat_layers=True,
    ),
    ("deepspeed", "compiled"): PublishedEngine(
        title="PyTorch's FSDP",
        family="PyTorch's FSDP",
        traffic="compiled",
        zero3_gathers_flat_layers=True,
    ),
    # BigScience, MT-NLG, SC'21's ZeRO-3: DeepSpeed of 2021 and 2022 (decision 020).
    ("deepspeed", "megatron"): PublishedEngine(
        title="Megatron-DeepSpeed",
        family="DeepSpeed of any age",
        traffic="megatron",
        bucketed_zero=True,
        tensor_parallel_launch_cost="added",
    ),
    # The ultrascale playbook's runs, on AWS.
    ("megatron", "hf"): PublishedEngine(
        title="nanotron",
        family="Megatron's layouts",
        traffic="nanotron",
        zero_1_overlaps=False,
        tensor_parallel_launch_cost="floor",
        pipeline_raises_launch_cost=True,
        # FP32GradientAccumulator: a hook adds each gradient to a float32 buffer.
        fuses_accumulation=False,
        frees_gradients_after_add=True,
        balances_stages_by_matmul_flops=True,
        fabric="efa",
    ),
}
"""Maps (target, assume.kernels) to how published runs differ from the engine itself."""


def traits_of(target: str, kernels: str, s: Layout) -> EngineTraits:
    """Return the traits of the engine whose runs are estimated.

    An engine's own kernels, without ZeRO on one data rank, mean that engine whatever `target` says.

    kernels: as in `assume`
    """
    alone = KERNEL_TRAFFIC[kernels].engine if s.zero_stage == 0 and s.zero_world_size == 1 else None
    return _traits(alone or target, kernels)


_ENGINE_FAMILIES = {"deepspeed": "DeepSpeed of any age", "megatron": "Megatron's layouts"}


@functools.cache
def _traits(target: str, kernels: str) -> EngineTraits:
    found, own = PUBLISHED_ENGINES.get((target, kernels)), ENGINES[target].traits
    if found is None:
        return own
    changes = {
        f.name: getattr(found, f.name)
        for f in dataclasses.fields(found)
        if f.name not in ("title", "family")
    }
    return dataclasses.replace(
        own, **{name: value for name, value in changes.items() if value is not None}
    )


def engine_title(target: str, kernels: str) -> str:
    """Name the engine whose runs are estimated."""
    found = PUBLISHED_ENGINES.get((target, kernels))
    return found.title if found else ENGINES[target].title


def engine_family(target: str, kernels: str) -> str:
    """Name the family of engines that are predicted alike, whose runs tell of one another."""
    found = PUBLISHED_ENGINES.get((target, kernels))
    return found.family if found else _ENGINE_FAMILIES.get(target, ENGINES[target].title)
