"""Under the `deepspeed` launcher: the bytes that a step hands to collectives, counted by wrapping torch's, beside the
planner's count of them. SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

COUNTED: Counter[tuple[str, frozenset[int]]] = Counter()
"""(what, the group's ranks) -> bytes of this rank's buffers, of floating point numbers alone."""


def _count(what: str, place: int) -> None:
    """place: of the argument that is the larger buffer of the call."""
    plain: Callable[..., Any] = getattr(dist, what)

    def counted(*args: Any, **kwargs: Any) -> Any:
        tensor = args[place] if len(args) > place else next(v for v in kwargs.values() if torch.is_tensor(v))
        if tensor.is_floating_point():
            group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
            ranks = frozenset(dist.get_process_group_ranks(group or dist.group.WORLD))
            COUNTED[what, ranks] += tensor.numel() * tensor.element_size()
        return plain(*args, **kwargs)

    setattr(dist, what, counted)


_PLACES = {
    "all_to_all_single": 1,
    "all_reduce": 0,
    "reduce": 0,
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 0,
    "send": 0,
}
for _what, _place in _PLACES.items():
    _count(_what, _place)  # before DeepSpeed takes hold of them

from shardwright.compile import read_problem  # noqa: E402
from shardwright.cost.traffic import step_traffic  # noqa: E402
from shardwright.data.dataset import open_dataset  # noqa: E402
from shardwright.engines.deepspeed.trainer import build_trainer  # noqa: E402
from shardwright.modules.batches import Batches  # noqa: E402
from shardwright.plan.plan import Plan  # noqa: E402
from shardwright.recipe.load import load_recipe  # noqa: E402
from shardwright.search.settle import as_planned  # noqa: E402
from tests.parity.cases_worker import compiled, main  # noqa: E402
from tests.parity.harness import Case  # noqa: E402


def measure(case: Case, folder: Path) -> dict[str, float]:
    """Of the second step: what was counted less what was planned, and what was planned."""
    plan = compiled(case, folder)
    trainer = build_trainer(plan, folder)
    batches, here = Batches(plan, open_dataset(plan, folder)), plan.ranks[dist.get_rank()]
    trainer.step(batches.micro_batches(1, here.data), 1e-3)
    COUNTED.clear()
    trainer.step(batches.micro_batches(2, here.data), 1e-3)
    counted = by_purpose(plan)
    problem = read_problem(load_recipe(folder / "recipe.yaml"))
    layout, _ = as_planned(problem, plan.strategy, plan.boundaries)
    planned = step_traffic(layout, here.pipeline)
    wanted = {
        "rows": planned.rows,
        "trades": planned.trades,
        "activations": planned.activations,
        "sent": planned.sent,
        "reduced": planned.reduced + planned.of_experts[0],
        "gathered": planned.gathered + planned.of_experts[1],
    }
    return {f"{key} off": abs(counted[key] - value) for key, value in wanted.items()} | wanted


def by_purpose(plan: Plan) -> Counter[str]:
    """By the group that a collective runs over: groups of one rank move nothing, and some engines call them."""
    here = plan.ranks[dist.get_rank()]
    tensor, data, context = (
        frozenset(r.rank for r in plan.ranks if all(getattr(r, k) == getattr(here, k) for k in alike))
        for alike in (("pipeline", "data", "context"), ("pipeline", "tensor"), ("pipeline", "tensor", "data"))
    )
    found: Counter[str] = Counter()
    for (what, ranks), size in COUNTED.items():
        if what == "send":
            found["sent"] += size
        elif len(ranks) == 1 or not ranks <= data | tensor:
            continue
        elif what == "all_to_all_single":
            found["trades" if ranks == context and plan.strategy.context > 1 else "rows"] += size
        elif ranks == tensor and len(tensor) > 1:
            found["activations"] += size if what == "all_reduce" else 0
        elif what == "all_gather_into_tensor":
            found["gathered"] += size
        else:
            found["reduced"] += size
    return found


if __name__ == "__main__":
    main(measure)
