"""What a rank holds, trains and freezes, compared with the plan before the first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.diagnostics import refusal
from shardwright.engines.trainer_protocol import ParameterShard
from shardwright.parallel.lora_adapters import planned_adapters
from shardwright.plan.plan import Plan
from shardwright.utils.json_types import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedParameter:
    """shape: of the rank's part, before ZeRO flattens it."""

    shape: tuple[int, ...]
    is_trained: bool


def planned_parameters(
    plan: Plan, rank: int, transposed: frozenset[str]
) -> dict[str, PlannedParameter]:
    """Return what the plan puts on `rank`, by Hugging Face name, of tied parameters by the first
    one.

    transposed: weights that are held the other way round than Hugging Face has them, by name.
    """
    at = plan.ranks[rank]
    layers = {
        name for stage in plan.stages if stage.pipeline_rank == at.pipeline for name in stage.layers
    }
    outside = {"embedding": plan.model.embedding_modules, "head": plan.model.head_modules}
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    paths = {path for layer in layers for path in outside.get(layer, (layer,))}
    found: dict[str, PlannedParameter] = {}
    for parameter in (p for module in plan.tensor_parallel.modules for p in module.parameters):
        name, shape = parameter.name, parameter.shard_shape(at.tensor)
        parts = name.split(".")
        if not any(".".join(parts[:n]) in paths for n in range(1, len(parts) + 1)):
            continue
        if (cut := plan.expert_shard_count(name)) > 1:
            shape = (shape[0] // cut, *shape[1:])
        shape = shape[::-1] if name in transposed else shape or (1,)
        is_trained = plan.lora is None and not plan.model.is_frozen(name)
        found[first.get(name, name)] = PlannedParameter(shape=shape, is_trained=is_trained)
    adapters = planned_adapters(plan, transposed)
    return found | {
        name: PlannedParameter(shape=shape, is_trained=True) for name, shape in adapters.items()
    }


def check_parameters(
    plan: Plan, rank: int, held: Mapping[str, ParameterShard], transposed: frozenset[str]
) -> None:
    """Raises Refusal: SW6259 with the first parameters of this rank that are not as planned."""
    planned = planned_parameters(plan, rank, transposed)
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    live = {
        first.get(name, name): PlannedParameter(shape=p.shape or (1,), is_trained=p.is_trained)
        for name, p in held.items()
    }
    differences = [
        f"{name}: {_parameter_text(live.get(name))}, planned {_parameter_text(planned.get(name))}"
        for name in dict.fromkeys((*planned, *live))
        if live.get(name) != planned.get(name)
    ]
    if differences:
        raise refusal(
            "SW6259",
            (
                f"rank {rank}: {len(differences)} of {len(planned)} planned parameters differ in "
                "the model: "
            )
            + "; ".join(differences[:3]),
            "Nothing was trained. Compile again with the packages that are installed on the hosts "
            "of the run; where"
            " the message stays, report the model type and the recipe.",
        )


def _parameter_text(p: PlannedParameter | None) -> str:
    if p is None:
        return "absent"
    return f"{'trained' if p.is_trained else 'frozen'} {'x'.join(map(str, p.shape))}"


def parameter_counts(held: Mapping[str, ParameterShard]) -> dict[str, JsonValue]:
    """Return tensors and elements that this rank trains and that it leaves frozen, before ZeRO cuts
    them."""
    counts: dict[str, JsonValue] = {}
    for kind, is_trained in (("trained", True), ("frozen", False)):
        shapes = [p.shape for p in held.values() if p.is_trained == is_trained]
        counts[kind] = {
            "tensors": len(shapes),
            "elements": sum(math.prod(shape) for shape in shapes),
        }
    return counts
