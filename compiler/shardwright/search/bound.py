"""What a layout takes at least, before its layers are placed: no search prices what can be no answer."""

from __future__ import annotations

import itertools

from shardwright.cost.layout import lay_out
from shardwright.cost.passes import Passes, passes
from shardwright.cost.replaced import constants_of, run_factor
from shardwright.cost.timing import once_a_step_seconds
from shardwright.layout.axes import Value
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import Strategy
from shardwright.partition.placing import place_parts

WORTH_PRICING = 1.1
"""Times the best layout's weighed time; what takes longer for certain is counted, not priced."""
FEW = 500
"""Layouts, so many of which are priced in about a second: all of them, for what a complete list is worth."""

SAME: tuple[str, ...] = (
    "tensor",
    "context",
    "expert",
    "expert_tensor",
    "micro_batch_size",
    "activation_checkpointing",
    "schedule",
    "virtual_stages",
)
SAME += ("sequence_parallel", "loss", "offload")
"""Of the work of a micro-batch over all layers. Of the other degrees it knows no more than whether there are several
ranks."""


def _work(found: Passes) -> list[float]:
    """Of one micro-batch, forward and backward: prefix sums over the layers."""
    sums = (found.forward_compute, found.backward_compute, found.forward_comm, found.backward_comm)
    return [sum(each) for each in zip(*sums, strict=True)]


class Bound:
    """Of one problem's layouts; what several of them share is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._constants = constants_of(problem.recipe)
        self._work: dict[tuple[Value, ...], float] = {}
        self._once: dict[tuple[Value, ...], float] = {}

    def least_seconds(self, s: Strategy) -> float:
        """Of a step: all micro-batches over ranks that share the layers in the best of all shares; of a pipeline also a
        mean rank's gradients and update. Recomputing only a part of the layers may take less.

        Under 1F1B rank r begins when the ranks before it have passed a micro-batch on, and ends as long before they do:
        the step T is at least m w_r + (w_0 + ... + w_(r-1)), w_r being its own share of the work W. With all of these
        equal, which is the best that any shares make of it, T = W / (1 - (1 - 1/m)^p).
        """
        m, p = s.gradient_accumulation_steps, s.pipeline
        key: tuple[Value, ...] = (*(getattr(s, name) for name in SAME), p > 1, s.shards > 1)
        if s.interleaves:
            key += (p, m, s.data)
        if key not in self._work:
            found = passes(lay_out(self._problem, s, self._constants))
            self._work[key] = self._interleaved(s, found) if s.interleaves else _work(found)[-1]
        least = self._work[key]
        if not s.interleaves:
            least *= 1 / (1 - (1 - 1 / m) ** p) if s.schedule == "1f1b" else m / p
        if p > 1 and s.offload == "none":
            least += self._once_a_step(s)
        return least * run_factor(self._problem.recipe, self._problem.graph, s)

    def _interleaved(self, s: Strategy, found: Passes) -> float:
        """Its parts are placed already: rank r works on m micro-batches, after the first parts of the ranks before it
        went forward, and before they go backward."""
        m, p, work = s.gradient_accumulation_steps, s.pipeline, _work(found)
        bounds = place_parts(self._problem.recipe, self._problem.graph, s.parts)
        more = 2 * found.send_seconds + found.per_rank_seconds / s.virtual_stages
        parts = [work[stop] - work[start] + more for start, stop in itertools.pairwise(bounds)]
        before = itertools.accumulate(parts[:p], initial=0.0)
        return max(m * sum(parts[rank::p]) + ahead for rank, ahead in zip(range(p), before, strict=False))

    def _once_a_step(self, s: Strategy) -> float:
        key = (s.tensor, s.pipeline, s.context, s.expert, s.expert_tensor, s.data, s.zero_stage, s.schedule)
        if key not in self._once:
            layout = lay_out(self._problem, s, self._constants)
            numel = layout.adapters[-1] if layout.adapters else layout.shapes.numel[-1] - layout.shapes.shared_numel
            if s.spreads_experts:  # theirs go over other ranks
                numel -= layout.shapes.expert_numel[-1]
            self._once[key] = once_a_step_seconds(layout) * numel / s.pipeline
        return self._once[key]
