"""What a layout takes at least, before its layers are placed: no search prices what can be no answer."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace

from shardwright.cost.layout import lay_out, placed
from shardwright.cost.passes import Passes, message_seconds, passes, rank_seconds
from shardwright.cost.replaced import constants_of, run_factor
from shardwright.cost.timing import data_seconds, once_a_step_seconds, optimizer_seconds
from shardwright.layout.axes import Value
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import Strategy
from shardwright.partition.placing import place_parts
from shardwright.search.settle import with_hpz

WORTH_PRICING = 1.1
"""Times the best layout's weighed time; what takes longer for certain is counted, not priced."""
ROUNDING = 1e-9
"""Where all of a step is known, it is summed in another order."""
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
_same = operator.attrgetter(*SAME)
_placing = operator.attrgetter(*SAME, "pipeline", "data")


def _work(found: Passes) -> list[float]:
    """Of one micro-batch, forward and backward: prefix sums over the layers."""
    sums = (found.forward_compute, found.backward_compute, found.forward_comm, found.backward_comm)
    return [sum(each) for each in zip(*sums, strict=True)]


class Bound:
    """Of one problem's layouts; what several of them share is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._constants = constants_of(problem.recipe)
        self._work: dict[tuple[Value, ...], list[float]] = {}
        self._beyond: dict[tuple[Value, ...], tuple[float, float]] = {}
        self._once: dict[tuple[Value, ...], float] = {}

    def least_seconds(self, s: Strategy) -> float:
        """Of a step: all micro-batches over ranks that share the layers in the best of all shares; of a pipeline also a
        mean rank's gradients and update. Recomputing only a part of the layers may take less.
        """
        m, p = s.gradient_accumulation_steps, s.pipeline
        key: tuple[Value, ...] = (*_same(s), p > 1, s.shards > 1)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = _work(passes(lay_out(self._problem, s, self._constants)))
        each, message = self._beyond_layers(s)
        if p == 1:
            least = m * (work[-1] + each)
            if s.activation_checkpointing == "full":  # stands for those that recompute a part of the layers, too
                least = max(least, self.least_kept_seconds(s))
            elif s.offload == "none":
                least += self._of_one_stage(s)
        elif s.interleaves:
            least = self._interleaved(s, work, 2 * message + each / s.virtual_stages)
        else:
            least = _pipelined(s, work[-1] + p * each, 2 * message)
        if p > 1 and s.offload == "none":
            least += self._once_a_step(s)
        return least * (1 - ROUNDING) * run_factor(self._problem.recipe, self._problem.graph, s)

    def least_kept_seconds(self, s: Strategy) -> float:
        """The same with no layer recomputed."""
        kept = s if s.activation_checkpointing == "none" else replace(s, activation_checkpointing="none")
        return self.least_seconds(kept)

    def _of_one_stage(self, s: Strategy) -> float:
        """Once a step, without a pipeline: all of it is known."""
        graph = self._problem.graph
        layout = placed(lay_out(self._problem, s, self._constants), (0, len(graph.layers)))
        copied = with_hpz(layout)
        data = min(data_seconds(each) for each in (layout, copied) if each is not None)
        return data + optimizer_seconds(layout, 0)

    def _beyond_layers(self, s: Strategy) -> tuple[float, float]:
        """Seconds of a micro-batch: on each rank, and of a message."""
        key = (*_placing(s), self._problem.recipe.cluster.measured is not None and s)
        if key not in self._beyond:
            layout = lay_out(self._problem, s, self._constants)
            self._beyond[key] = rank_seconds(layout), message_seconds(layout)
        return self._beyond[key]

    def _interleaved(self, s: Strategy, work: list[float], more: float) -> float:
        """Its parts are placed already: rank r works on m micro-batches, after the first parts of the ranks before it
        went forward, and before they go backward. more: of each part, beyond its layers."""
        m, p = s.gradient_accumulation_steps, s.pipeline
        bounds = place_parts(self._problem.recipe, self._problem.graph, s.parts)
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


def _pipelined(s: Strategy, work: float, messages: float) -> float:
    """work: of one micro-batch on all ranks; messages: one each way.

    Under 1F1B rank r begins when the ranks before it have passed a micro-batch on, and ends as long before they do:
    the step T is at least m w_r + (w_0 + ... + w_(r-1)), w_r being its own share of the work W. With all of these
    equal, which is the best that any shares make of it, T = W / (1 - (1 - 1/m)^p). A rank between two others trades
    two messages with each for every micro-batch; those before it were passed by one of each kind.
    """
    m, p = s.gradient_accumulation_steps, s.pipeline
    if s.schedule != "1f1b":
        return m / p * work
    return (work + 2 * (p - 1) * messages) / (1 - (1 - 1 / m) ** p) - (p - 1) * messages
