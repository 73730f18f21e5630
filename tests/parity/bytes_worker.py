"""Under the `deepspeed` launcher: the bytes that a step hands to collectives, counted by wrapping
torch's, beside the planner's count of them. SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of
cases_worker.py."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import distributed as dist

SCALARS = 8
"""Calls of so few numbers are not in the planner's count: losses, norms, overflows, and the single
elements that pad a stage's groups of parameters."""
A_TOKEN = 2
"""Nor are calls of so many numbers a token over tensor ranks: the cross-entropy's maxima and
sums."""


class Call(NamedTuple):
    """numel, size: elements and bytes of this rank's larger buffer."""

    what: str
    ranks: frozenset[int]
    dimensions: int
    numel: int
    size: int


MUON = "muon"
INSIDE_MUON: list[bool] = []
"""Holds an entry while Muon's matrices are gathered and shared out."""
CALLS: list[Call] = []
"""Those on floating point numbers."""


def _count(what: str, place: int) -> None:
    """place: of the argument that is the larger buffer of the call."""
    plain: Callable[..., Any] = getattr(dist, what)

    def counted(*args: Any, **kwargs: Any) -> Any:
        given = (
            args[place]
            if len(args) > place
            else next(v for v in kwargs.values() if not isinstance(v, str))
        )
        tensors = given if isinstance(given, list) else [given]
        group = kwargs.get("group") or next(
            (a for a in args if isinstance(a, dist.ProcessGroup)), None
        )
        _add(what, tensors, frozenset(dist.get_process_group_ranks(group or dist.group.WORLD)))
        return plain(*args, **kwargs)

    setattr(dist, what, counted)


def _add(what: str, tensors: list[torch.Tensor], ranks: frozenset[int]) -> None:
    what = MUON if INSIDE_MUON else what
    numel = sum(tensor.numel() for tensor in tensors)
    if tensors[0].is_floating_point():
        CALLS.append(Call(what, ranks, tensors[0].dim(), numel, numel * tensors[0].element_size()))


def _count_sends() -> None:
    """Those that DualPipeV hands over together."""
    plain = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        for each in operations:
            if each.op is dist.isend:
                _add("send", [each.tensor], frozenset())
        return plain(operations)

    patch.object(dist, "batch_isend_irecv", counted).start()


_PLACES = {
    "all_to_all_single": 1,
    "all_reduce": 0,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "all_gather": 0,
    "all_gather_into_tensor": 0,
    "broadcast": 0,
    "send": 0,
}
for _what, _place in _PLACES.items():
    _count(_what, _place)  # before DeepSpeed takes hold of them
_count_sends()

from shardwright.compile.recipe_compiler import read_problem
from shardwright.cost import communication_bytes
from shardwright.cost.communication_bytes import step_traffic
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed import ds_config
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.deepspeed.muon_optimizer import MuonAdamW
from shardwright.engines.trainer_protocol import Trainer
from shardwright.layout.zero_settings import LIVE_NUMEL, PREFETCH_NUMEL
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_resolution import price_planned_layout
from tests.parity.cases_worker import compiled, main
from tests.parity.harness import Case, recipe
from tests.parity.muon import OPTIMIZER
from tests.parity.preference import PreferenceCase
from tests.parity.preference_worker import Run

plain_update = MuonAdamW._update_shared


def _update_shared(self: MuonAdamW, *arguments: Any) -> None:
    INSIDE_MUON.append(True)
    try:
        plain_update(self, *arguments)
    finally:
        INSIDE_MUON.pop()


patch.object(MuonAdamW, "_update_shared", _update_shared).start()
KTO = "kto"
"""Cases of this name run forward once more than they run backward."""
LIVE = "live-"
"""Cases of this name go on with a number of elements: LIVE_NUMEL for a model of that size, nothing
fetched ahead."""


def measure(case: Case, folder: Path) -> dict[str, float]:
    """Of the second step: what was counted less what was planned, and what was planned."""
    live = int(folder.name.partition(LIVE)[2] or LIVE_NUMEL)
    with (
        patch.object(communication_bytes, "LIVE_NUMEL", live),
        patch.object(ds_config, "LIVE_NUMEL", live),
        patch.object(ds_config, "PREFETCH_NUMEL", PREFETCH_NUMEL if live == LIVE_NUMEL else 0),
    ):
        return _measure(case, folder)


def _measure(case: Case, folder: Path) -> dict[str, float]:
    by_muon = folder.name.startswith(MUON)
    trainer: Trainer
    if folder.name.startswith(KTO):
        own = PreferenceCase(**dataclasses.asdict(case), objective={"name": "kto"})
        run = Run(own, folder)
        plan, data, trainer = run.plan, run.data, run.trainer
    else:
        training = recipe(case, folder)["training"]
        changes = {"training": {**training, "optimizer": OPTIMIZER}} if by_muon else {}
        plan = compiled(case, folder, **changes)
        data, trainer = open_dataset(plan, folder), build_trainer(plan, folder)
    batches, here = TrainingBatches(plan, data), plan.ranks[dist.get_rank()]
    trainer.step(batches.micro_batches(1, here.data), 1e-3)
    CALLS.clear()
    trainer.step(batches.micro_batches(2, here.data), 1e-3)
    counted = by_purpose(plan, list(CALLS))
    with CONTEXT_PARALLEL.aside():
        problem = read_problem(load_recipe(folder / "recipe.yaml"))
    layout, _ = price_planned_layout(problem, plan.strategy, plan.boundaries)
    planned = dataclasses.asdict(step_traffic(layout, here.pipeline))
    assert set(counted) <= set(planned), counted
    off = {f"{key} off": abs(counted[key] - value) for key, value in planned.items()}
    return off | planned | {f"{key} counted": counted[key] for key in planned}


def by_purpose(plan: Plan, calls: list[Call]) -> Counter[str]:
    """By what a collective is and the group that it runs over: groups of one rank move nothing, and
    some engines call them. Rows, which routers share out unevenly, are the mean over the ranks that
    hold the same layers; of parameters, whose vocabulary tensor ranks may share unevenly, the
    fullest rank's count."""
    here = plan.ranks[dist.get_rank()]
    tensor, data = (
        frozenset(
            r.rank for r in plan.ranks if all(getattr(r, k) == getattr(here, k) for k in alike)
        )
        for alike in (("pipeline", "data", "context"), ("pipeline", "tensor"))
    )
    tokens = plan.strategy.micro_batch_size * plan.training.sequence_length // plan.strategy.context
    found: Counter[str] = Counter()
    for what, ranks, dimensions, numel, size in calls:
        if what == MUON:
            found["muon_matrices"] += size
        elif what == "send":
            found["pipeline_send"] += size
        elif len(ranks) == 1 or numel <= SCALARS:
            continue
        elif what == "all_to_all_single":
            found["expert_all_to_all" if dimensions == 2 else "context_all_to_all"] += size
        elif ranks == tensor and what == "all_reduce":
            found["tensor_all_reduce"] += size if numel > A_TOKEN * tokens else 0
        elif ranks == tensor:
            found["tensor_all_gather"] += size
        elif not ranks <= data:
            found["tied_all_reduce"] += size
        elif what.startswith("all_gather"):
            found["parameter_all_gather"] += size
        else:
            found["gradient_reduce"] += size
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    found["expert_all_to_all"] = sum(everyone[rank]["expert_all_to_all"] for rank in data) // len(
        data
    )
    for key in ("gradient_reduce", "parameter_all_gather", "tied_all_reduce"):
        found[key] = max(everyone[rank][key] for rank in tensor)
    return found


if __name__ == "__main__":
    main(measure)
