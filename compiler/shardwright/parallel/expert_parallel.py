"""Modules of experts, cut in place to those of this rank; their class and their forward stay as
they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import distributed as dist
from torch import nn

from shardwright.layout.parameter_sharding import ModuleSharding, ParameterSharding
from shardwright.models.mixture_of_experts import call_positionally, number_of_experts
from shardwright.parallel.expert_dispatch import dispatch_tokens
from shardwright.plan.plan import Plan, PlanRank


class ExpertSharder:
    """The experts of one model, cut as its layers are built. Before any of them has run: a
    gradient's accumulator keeps the shape that it was made with."""

    def __init__(
        self,
        model: nn.Module,
        paths: Iterable[str] = (),
        group: dist.ProcessGroup | None = None,
        mark: Callable[[nn.Parameter], None] = lambda parameter: None,
    ) -> None:
        """paths: of modules of experts, which the group's ranks share out, in its order. mark: what
        an engine needs to know of a parameter that was cut."""
        self.model, self.paths, self.group, self.mark = model, tuple(paths), group, mark
        self._experts: dict[str, int] = {}

    def inside(self, layer: str) -> list[str]:
        """Paths of the modules of experts in a layer."""
        return [path for path in self.paths if path.startswith(layer + ".")]

    def cut(self, layer: str) -> None:
        """Their parameters, which have all experts until then, to this rank's."""
        for path in self.inside(layer):
            assert self.group is not None
            module = self.model.get_submodule(path)
            self._experts[path] = cut_experts(
                module, dist.get_rank(self.group), dist.get_world_size(self.group)
            )
            for parameter in module.parameters(recurse=False):
                self.mark(parameter)

    def dispatch(self, layer: str) -> None:
        """Their forward and backward passes are collective from here on, around whatever cut an
        expert further."""
        for path in self.inside(layer):
            assert self.group is not None
            module: Any = self.model.get_submodule(path)
            module.forward = call_positionally(
                dispatch_tokens(module.forward, self._experts[path], self.group)
            )


def local_expert_range(
    plan: Plan, rank: PlanRank, parameter: str, experts: int
) -> tuple[int, int] | None:
    """The first of a rank's experts and their number; None of a parameter that is not cut by
    experts."""
    ranks = plan.expert_shard_count(parameter)
    return None if ranks == 1 else (plan.expert_rank_of(rank) * experts // ranks, experts // ranks)


def splits_of_local_experts(plan: Plan) -> tuple[ModuleSharding, ...]:
    """How tensor ranks cut what an expert rank has: the plan's map with the shapes of its own
    experts."""
    return tuple(
        replace(
            module,
            parameters=tuple(_of_own_experts(p, plan.strategy.expert) for p in module.parameters),
        )
        if module.module in plan.experts
        else module
        for module in plan.tensor_parallel.modules
    )


def _of_own_experts(split: ParameterSharding, ranks: int) -> ParameterSharding:
    return replace(split, shape=(split.shape[0] // ranks, *split.shape[1:]))


def cut_experts(module: Any, rank: int, ranks: int) -> int:
    """Returns how many it had. What has no memory yet gets none."""
    experts = number_of_experts(module)
    if not experts or experts % ranks:
        raise RuntimeError(
            f"{type(module).__name__}: {experts} experts do not divide over {ranks} ranks"
        )
    local = experts // ranks
    for parameter in module.parameters(recurse=False):
        part = parameter.data.narrow(0, rank * local, local)
        parameter.data = part if part.stride(0) == 0 else part.clone()
    module.num_experts = local
    return experts
