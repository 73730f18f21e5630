"""Build the process groups that DeepSpeed leaves to us: for hpZ (arXiv 2306.10209) and expert
ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from deepspeed import comm as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import nn

from shardwright.parallel.expert_parallel import ExpertSharder
from shardwright.parallel.learning_rate import decay_groups
from shardwright.parallel.parameter_names import named_parameters, set_padding
from shardwright.plan.plan import Plan


def hpz_group(plan: Plan) -> dist.ProcessGroup | None:
    """Build the groups of ranks that share a secondary weight copy, and return this rank's.
    Collective.

    None without hpZ. DeepSpeed's own groups (utils/groups.py, _create_zero_param_parallel_group)
    are consecutive ranks of the world, which under tensor parallelism hold other shards. It also
    makes them at most once a process. Its readers look at the module's variable, so the group is
    stored there.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    size = plan.strategy.hpz_partition_size
    if size == 1:
        return None
    sharing: dict[tuple[int, int], list[int]] = {}
    for rank in plan.ranks:
        sharing.setdefault((rank.tensor, rank.data // size), []).append(rank.rank)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, _ = own_group(sharing.values())
    return groups._ZERO_PARAM_INTRA_PARALLEL_GROUP


def own_group(members: Iterable[list[int]]) -> tuple[dist.ProcessGroup, list[int]]:
    """Build every group, as each rank must, and return this rank's with its ranks. Collective."""
    made = [(dist.new_group(ranks), ranks) for ranks in members]
    return next(each for each in made if dist.get_rank() in each[1])


def drop_hpz_copies(module: nn.Module) -> None:
    """Drop secondary weight copies after weights were loaded, so that the next gather remakes them.

    DeepSpeed drops those of trained weights only (zero/stage3.py, invalidate_secondary_tensor). A
    frozen weight's copy would stay stale.
    """
    for parameter in module.parameters():
        if hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = None


# Expert ranks under DeepSpeed: groups of its data ranks, and the marks that it reads.
#
# To its engine the model has one expert layer, a marker without parameters; the sharded parameters
# have the marks of DeepSpeed's own experts. Their gradients are summed over the ranks that hold the
# same experts, and divided by all data ranks.


def build_expert_sharder(plan: Plan, model: nn.Module) -> ExpertSharder:
    """Build the expert groups and return what shards this rank's experts. Collective."""
    for made in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    ):
        made.clear()  # an earlier engine of this process may have left some
    if plan.strategy.expert == 1:
        return ExpertSharder(model)
    name = _group_name(plan)
    together: dict[tuple[int, ...], list[int]] = {}
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in plan.ranks:
        place = rank.data * plan.strategy.context + rank.context
        together.setdefault((rank.pipeline, rank.tensor, place // plan.strategy.expert), []).append(
            rank.rank
        )
        alike.setdefault((rank.pipeline, rank.tensor, plan.expert_rank_of(rank)), []).append(
            rank.rank
        )
    groups._EXPERT_PARALLEL_GROUP[name], groups._EXPERT_PARALLEL_GROUP_RANKS[name] = own_group(
        together.values()
    )
    groups._EXPERT_DATA_PARALLEL_GROUP[name], groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = (
        own_group(alike.values())
    )
    return ExpertSharder(
        model, plan.experts, groups._EXPERT_PARALLEL_GROUP[name], partial(_mark_expert, name)
    )


def _group_name(plan: Plan) -> str:
    return (
        f"ep_size_{plan.strategy.expert}"  # DeepSpeed reads the number out of it (utils/groups.py)
    )


def _mark_expert(name: str, parameter: nn.Parameter) -> None:
    """Set the marks that DeepSpeed reads on an expert's parameter.

    ZeRO-3 reads the partition group before it partitions anything (zero/partition_parameters.py).
    """
    marks = {
        "allreduce": False,
        "group_name": name,
        "ds_zero_placement_family": "autoep_expert",
        "ds_zero_partition_group_name": name,
        "ds_zero_partition_process_group": groups._EXPERT_DATA_PARALLEL_GROUP[name],
    }
    for mark, value in marks.items():
        setattr(parameter, mark, value)


class _ExpertLayerMarker(AutoEPMoELayer):
    """Make an engine look for experts among its parameters.

    Of the kinds that DeepSpeed knows, ZeRO-3 accepts this one.
    """

    def __init__(self, experts: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = experts

    def set_deepspeed_parallelism(self, *_: object, **__: object) -> None:
        """Do nothing: the groups exist already."""


Named = list[tuple[str, nn.Parameter]]


def parameter_groups(plan: Plan, module: nn.Module) -> list[dict[str, object]]:
    """Return the optimizer's parameter groups: Muon's matrices, decaying or not, experts in groups
    of their own."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    by_name = named_parameters(plan, module) if plan.muon else {}
    matrices = {p for name, p in by_name.items() if plan.muon_matrices(name) is not None}
    experts = [(name, p) for name, p in named if is_moe_param(p)]
    dense = [(name, p) for name, p in named if not is_moe_param(p)]
    if plan.strategy.pipeline > 1:
        padding = nn.Module()
        module.add_module("padding", padding)
        dense += _padding(plan, padding, "dense", dense, matrices)
    # DeepSpeed requires expert parameters in the groups of a model with an expert layer: a model
    # whose experts are all frozen, on every stage, stays dense to it.
    names = (p.name for module in plan.tensor_parallel.modules for p in module.parameters)
    trains_experts = any(
        plan.is_expert_parameter(name) and not plan.model.is_frozen(name) for name in names
    )
    if plan.strategy.expert == 1 or not trains_experts:
        return _groups(plan, dense, matrices)
    name = _group_name(plan)
    module.add_module("expert_marker", _ExpertLayerMarker(len(plan.experts)))
    if plan.strategy.pipeline > 1:
        pads = _padding(plan, padding, "experts", experts, matrices)
        for _, parameter in pads:
            _mark_expert(name, parameter)
        experts += pads
    return [
        *_groups(plan, dense, matrices),
        *({**group, "moe": True, "name": name} for group in _groups(plan, experts, matrices)),
    ]


def _groups(plan: Plan, named: Named, matrices: set[nn.Parameter]) -> list[dict[str, object]]:
    optimizer = plan.optimizer
    rest = decay_groups(((n, p) for n, p in named if p not in matrices), optimizer.weight_decay)
    own = [p for _, p in named if p in matrices]
    if not own:
        return rest
    scale = (optimizer.adamw_lr or optimizer.lr) / optimizer.lr
    return [
        {"params": own, "weight_decay": optimizer.weight_decay, "use_muon": True},
        *({**group, "lr_scale": scale} for group in rest),
    ]


def _padding(
    plan: Plan, holder: nn.Module, kind: str, named: Named, matrices: set[nn.Parameter]
) -> Named:
    """Return dummy parameters for the groups in which this stage has none, and add those of Muon's
    to `matrices`.

    ZeRO's norm is summed over pipeline stages group by group, so every rank needs the same groups.
    """
    here = {(p in matrices, len(p.shape) >= 2) for _, p in named}
    kinds = [(False, True), (False, False), *([(True, True)] if plan.muon else [])]
    for is_matrix, decays in kinds:
        if (is_matrix, decays) not in here:
            shape = (1, 1) if decays else (1,)
            parameter = nn.Parameter(torch.zeros(shape))
            set_padding(parameter)
            holder.register_parameter(f"{kind}_{len(shape)}{'_muon' * is_matrix}", parameter)
            if is_matrix:
                matrices.add(parameter)
    return [(name, p) for name, p in holder.named_parameters() if name.startswith(kind)]
