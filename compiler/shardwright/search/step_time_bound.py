"""Bound a layout's step seconds from below, before its layers are assigned: a layout that cannot
win is not priced."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from shardwright.cost.calibrated_costs import calibrated_constants, measured_over_predicted
from shardwright.cost.layer_shapes import model_shapes
from shardwright.cost.layer_times import (
    FORWARD_SHARE,
    PassTimes,
    micro_batch_overhead_seconds,
    pass_times,
    pipeline_send_seconds,
)
from shardwright.cost.layout_costs import StageCosts
from shardwright.cost.peak_memory import usable_bytes
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.cost.step_time import (
    StageSeconds,
    bubble_divisor,
    data_comm_seconds,
    is_simulated,
    least_interleaved_seconds,
    least_once_a_step_seconds,
    optimizer_seconds,
)
from shardwright.layout.axes import AXES, Value
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.layout.stage_balancing import max_decoder_layers_per_stage
from shardwright.search.layers_that_fit import (
    Ints,
    LayerSeconds,
    LayersThatFit,
    LayersThatFitCache,
    commonest_layers,
    fewest_by_place,
    has_consecutive_layers,
    head_rank,
    seconds_by_layer_count,
    slowest_rank,
)
from shardwright.search.layout_resolution import searched_modules, with_hpz
from shardwright.search.stage_assignment import assign_interleaved_stages

PRICED_FACTOR = 1.05
"""Times the best layout's weighed time; what takes longer for certain is counted, not priced."""
ALWAYS_PRICED, ALWAYS_PRICED_FACTOR = 40, 1.25
"""The first so many layouts are priced to so many times the best one's step: what others lose by is
worth knowing."""
ROUNDING = 1e-9
"""Allows for another order of summation, where all of a step is known."""
PRICED_WHOLE = 250
"""Layouts, so many of which are priced in about half a second: all of them, for what a complete
list is worth."""

WORK_AXES: tuple[str, ...] = ("tensor", "context", "expert", "expert_tensor", "micro_batch_size")
WORK_AXES += ("activation_checkpointing", "sequence_parallel", "loss", "offload")
WORK_AXES += ("expert_dispatcher", "overlapped_share")
_work_key = operator.attrgetter(*WORK_AXES)
_state_key = operator.attrgetter(
    *(axis.name for axis in AXES if axis.affects_rank_state), "hpz_partition_size"
)
_key_without_checkpointing = operator.attrgetter(
    *(f.name for f in fields(Layout) if f.name != "activation_checkpointing")
)
_overhead_key = operator.attrgetter(
    *("tensor", "context", "data", "pipeline", "schedule", "micro_batch_size", "sequence_parallel")
)


class _Work(NamedTuple):
    """Holds seconds of one micro-batch, forward and backward. sums: prefix sums over the layers.
    compute: of all layers, without collectives."""

    sums: list[float]
    compute: float


def _work(found: PassTimes) -> _Work:
    sums = (found.forward_compute, found.backward_compute, found.forward_comm, found.backward_comm)
    return _Work(
        [sum(each) for each in zip(*sums, strict=True)],
        found.forward_compute[-1] + found.backward_compute[-1],
    )


def _without_recompute(s: Layout) -> Layout:
    is_kept = s.activation_checkpointing == "none"
    return s if is_kept else replace(s, activation_checkpointing="none")


class StepTimeBound:
    """Bounds the layouts of one problem and caches what several of them share."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._constants = calibrated_constants(problem.recipe)
        self._work: dict[tuple[Value, ...], _Work] = {}
        self._overheads: dict[tuple[Value, ...], tuple[float, float]] = {}
        self._once: dict[tuple[Value, ...], float] = {}
        self._without_recompute: dict[tuple[Value, ...], float] = {}
        self._layer_seconds: dict[tuple[Value, ...], LayerSeconds] = {}
        self._counted = commonest_layers(problem.graph)
        self._layers_that_fit = LayersThatFitCache(self._counted)
        recipe, graph = problem.recipe, problem.graph
        is_trained = (
            recipe.lora is None and not recipe.model.freeze and not graph.task_traits.has_images
        )
        self._knows_bytes = is_trained and not recipe.assume.ignore_memory
        """Knows the bytes of any layers: all their parameters are trained."""
        self._is_tied = model_shapes(problem.graph, 1).shared_numel > 0
        self._last: PricedLayout | None = None
        self._least_bytes: dict[tuple[Value, ...], float] = {}
        self._usable_bytes = usable_bytes(problem, self._constants)

    def _work_of(self, s: Layout) -> tuple[Value, ...]:
        """Return the key of a micro-batch's work over all layers. Of the other degrees it holds
        no more than whether there are several ranks; of the schedule, where it puts a tied
        tensor."""
        return *_work_key(s), self._is_tied and s.schedule, s.pipeline > 1, s.zero_world_size > 1

    def _priced_without_stages(self, s: Layout) -> PricedLayout:
        """Return the layout without boundaries; the last one asked for is cached."""
        if self._last is None or self._last.strategy is not s:
            self._last = build_priced_layout(self._problem, s, self._constants)
        return self._last

    def least_bytes(self, s: Layout) -> float:
        """Return the bytes of the model states, spread evenly: no assignment's peak-memory rank
        holds less."""
        key = _state_key(s)
        if key not in self._least_bytes:
            self._least_bytes[key] = StageCosts(self._priced_without_stages(s)).least_bytes
        return self._least_bytes[key]

    def may_fit(self, s: Layout) -> bool:
        return (
            self._problem.recipe.assume.ignore_memory or self.least_bytes(s) <= self._usable_bytes
        )

    def layers_may_fit(self, s: Layout) -> bool:
        """Return False where the layers certainly do not fit."""
        if not self._knows_layers_that_fit(s):
            return True
        return self._layers_that_fit.of(self._priced_without_stages(s)).suffices

    def least_seconds_in(self, s: Layout, room_bytes: float) -> float:
        """Bound as tight_least_seconds does, on devices with room_bytes."""
        least = self.least_seconds(s)
        if s.is_interleaved or not self._knows_bytes:
            return least if self.least_bytes(s) <= room_bytes else math.inf
        fit = self._layers_that_fit.of(self._priced_without_stages(s)).with_more_bytes(
            room_bytes - self._usable_bytes
        )
        if s.pipeline == 1:
            return least if fit.suffices else math.inf
        return max(least, self._of_slowest(s, self._layer_seconds_of(s), fit.most_layers()))

    def least_seconds(self, s: Layout) -> float:
        """Bound a step: all micro-batches, over ranks that share the layers in the best of all
        ways. A pipeline's bound includes a mean rank's gradients and update. Partial
        checkpointing may take less."""
        m, p = s.gradient_accumulation_steps, s.pipeline
        work, compute = self._layer_work(s)
        each, message = self._overhead_and_message_seconds(s)
        if p == 1:
            least = m * (work[-1] + each) + (
                self._once_a_step_without_pipeline(
                    s, StageSeconds(compute + each, work[-1] - compute, 0.0)
                )
                if s.offload == "none"
                else 0.0
            )
        elif s.is_interleaved:
            least = self._interleaved(s, work, 2 * message + each / s.virtual_stages)
        else:
            least = _pipelined(s, work[-1] + p * each, 2 * message)
        if p > 1:
            least += self._least_once_a_step(s)
        return (
            least
            * (1 - ROUNDING)
            * measured_over_predicted(self._problem.recipe, self._problem.graph, s)
        )

    def mean_rank_seconds(self, s: Layout) -> float:
        """Bound the layouts that differ from s in no degree, in no key of WORK_AXES but
        activation_checkpointing, and not in the schedule: by the layers of a mean rank."""
        if self._problem.recipe.cluster.measured is not None:  # a layout may have a run of its own
            return 0.0
        work = self._layer_work(_without_recompute(s)).sums[-1]
        return s.gradient_accumulation_steps * work / s.pipeline * (1 - ROUNDING)

    def _layer_work(self, s: Layout) -> _Work:
        key = self._work_of(s)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = _work(pass_times(self._priced_without_stages(s)))
        return work

    def least_seconds_without_recompute(self, s: Layout) -> float:
        """Bound the same layout with no layer recomputed."""
        key = _key_without_checkpointing(s)
        if key not in self._without_recompute:
            self._without_recompute[key] = self.least_seconds(_without_recompute(s))
        return self._without_recompute[key]

    def tight_least_seconds(
        self, s: Layout, *, allows_partial_checkpointing: bool = False
    ) -> float:
        """Bound a step more tightly, several times as slowly: no pipeline rank has more layers than
        fit.

        Infinite where the layers do not fit. allows_partial_checkpointing: s, which recomputes
        all layers, stands for those that recompute fewer.
        """
        least = self.least_seconds(s)
        if self._knows_layers_that_fit(s):
            fit = self._layers_that_fit.of(self._priced_without_stages(s))
            least = max(least, self._of_slowest(s, self._layer_seconds_of(s), fit.most_layers()))
        if allows_partial_checkpointing:
            least = min(least, self.least_partial_checkpointing_seconds(s))
            least = min(least, self.least_module_checkpointing_seconds(s))
        return least

    def least_module_checkpointing_seconds(self, s: Layout) -> float:
        """Bound the layouts that recompute modules of each layer, where s recomputes all layers;
        infinite where there are none. The first list that may fit takes the least time."""
        for modules in searched_modules(self._problem, s):
            other = replace(s, activation_checkpointing=modules)
            if self.layers_may_fit(other):
                return self.tight_least_seconds(other)
        return math.inf

    def least_partial_checkpointing_seconds(self, s: Layout) -> float:
        """Bound the layouts that recompute some layers of each stage, where s recomputes all."""
        kept = self.least_seconds_without_recompute(s)
        if not self._knows_layers_that_fit(s):
            return kept
        whole = replace(s, activation_checkpointing="none")
        fit = self._layers_that_fit.of(*map(self._priced_without_stages, (s, whole)))
        return max(kept, self._partial_checkpointing_seconds(s, whole, fit))

    def least_interleaved_step_seconds(self, layout: PricedLayout) -> float:
        """Bound a layout whose layers are assigned and whose price takes long; 0 for the others."""
        if not (layout.strategy.is_interleaved and is_simulated(layout.strategy)):
            return 0.0
        factor = measured_over_predicted(layout.recipe, layout.graph, layout.strategy)
        return least_interleaved_seconds(layout) * (1 - ROUNDING) * factor

    def _partial_checkpointing_seconds(self, s: Layout, whole: Layout, fit: LayersThatFit) -> float:
        """Return the least bound over all numbers of recomputed layers of a stage, from one on.
        More of them make room for layers, and take longer."""
        graph, recompute = self._problem.graph, self._recompute_seconds(s, whole)
        stages, most = s.stages // s.pipeline, max_decoder_layers_per_stage(self._problem.graph, s)
        best = math.inf
        for layers in range(max(1, fit.fewest_recomputed(most, stages)), most + 1):
            work = replace(
                self._layer_seconds_of(whole),
                recomputed_layers=layers * stages,
                recompute_seconds=recompute,
            )
            if self._of_slowest(whole, work, np.full(s.pipeline, graph.decoder_layers)) >= best:
                break
            best = min(best, self._of_slowest(whole, work, fit.most_layers(layers * stages)))
        return best

    def _knows_layers_that_fit(self, s: Layout) -> bool:
        """Return whether memory decides where layers are assigned, and their bytes are known."""
        return s.pipeline > 1 and not s.is_interleaved and self._knows_bytes

    def _recompute_seconds(self, s: Layout, whole: Layout) -> float:
        """Return the least seconds that recomputing one layer adds to a micro-batch."""
        return max(
            0.0, float((self._layer_seconds_of(s).each - self._layer_seconds_of(whole).each).min())
        )

    def _layer_seconds_of(self, s: Layout) -> LayerSeconds:
        key = (*self._work_of(s), has_consecutive_layers(s))
        work = self._layer_seconds.get(key)
        if work is None:
            work = self._layer_seconds[key] = seconds_by_layer_count(
                pass_times(self._priced_without_stages(s)),
                self._counted,
                has_consecutive_layers=has_consecutive_layers(s),
            )
        return work

    def _of_slowest(self, s: Layout, work: LayerSeconds, most: Ints) -> float:
        """Bound a step by its slowest rank. most: layers that each rank has memory for."""
        slowest = slowest_rank(work, most, head_rank(s))
        if slowest is None:
            return math.inf
        beyond = self._overhead_and_message_seconds(s)
        seconds = _of_slowest(s, work, *slowest, *beyond) + self._least_once_a_step(s)
        if is_simulated(s):
            seconds = max(
                seconds,
                _of_ranks(s, work, most, *beyond, functools.partial(self._least_once_a_step, s)),
            )
        return (
            seconds
            * (1 - ROUNDING)
            * measured_over_predicted(self._problem.recipe, self._problem.graph, s)
        )

    def _once_a_step_without_pipeline(self, s: Layout, stage: StageSeconds) -> float:
        """Return the seconds once a step without a pipeline, which are known exactly. stage: all
        layers."""
        graph = self._problem.graph
        layout = with_boundaries(self._priced_without_stages(s), (0, len(graph.layers)))
        copied = with_hpz(layout)
        data = min(
            data_comm_seconds(each, 0, stage) for each in (layout, copied) if each is not None
        )
        return data + optimizer_seconds(layout, 0)

    def _overhead_and_message_seconds(self, s: Layout) -> tuple[float, float]:
        """Return seconds of a micro-batch beyond the layers: on each rank, and of a message."""
        is_measured = self._problem.recipe.cluster.measured is not None
        key = (*_overhead_key(s), s.virtual_stages > 1, is_measured and s)
        if key not in self._overheads:
            layout = self._priced_without_stages(s)
            self._overheads[key] = (
                micro_batch_overhead_seconds(layout),
                pipeline_send_seconds(layout),
            )
        return self._overheads[key]

    def _interleaved(self, s: Layout, work: list[float], more: float) -> float:
        """Bound an interleaved schedule, whose parts are known. Rank r works on m micro-batches,
        after the first parts of the ranks before it went forward, and before they go backward.
        more: seconds of each part beyond its layers."""
        m, p = s.gradient_accumulation_steps, s.pipeline
        bounds = assign_interleaved_stages(
            self._problem.recipe, self._problem.graph, s.total_stages
        )
        parts = [work[stop] - work[start] + more for start, stop in itertools.pairwise(bounds)]
        before = itertools.accumulate(parts[:p], initial=0.0)
        return max(
            m * sum(parts[rank::p]) + ahead for rank, ahead in zip(range(p), before, strict=False)
        )

    def _least_once_a_step(self, s: Layout, layers: int = 0) -> float:
        """Bound the seconds once a step. layers: the fewest layers of a rank, where that is
        known."""
        if s.offload != "none":
            return 0.0
        key = (
            s.tensor,
            s.pipeline,
            s.context,
            s.expert,
            s.expert_tensor,
            s.data,
            s.zero_stage,
            s.schedule,
            layers,
        )
        if key not in self._once:
            self._once[key] = least_once_a_step_seconds(self._priced_without_stages(s), layers)
        return self._once[key]


def _of_slowest(
    s: Layout, work: LayerSeconds, slowest: float, first: int, each: float, message: float
) -> float:
    """Bound a step by its slowest rank. slowest: seconds of a micro-batch's layers there; first:
    that rank, or one before it. each, message: seconds of a rank beyond its layers, and of a
    message.

    A rank starts after the ranks before it, each of which has a layer. Under 1F1B it also waits
    for the first gradient. No two passes of one micro-batch run at once. Of the rank's own
    passes, only the min(p - rank, m) forward passes that it makes ahead run meanwhile.
    """
    m, p = s.gradient_accumulation_steps, s.pipeline
    own, all_ranks = slowest + each, work.total + p * each
    if s.pipeline_schedule.is_v_shaped:
        if is_simulated(s):
            return m * (own + 2 * message) + max(0, first - 1) * float(work.each.min())
        own, all_ranks = own + 4 * message, all_ranks + 8 * (p - 1) * message
        own = max(own, all_ranks / p)
        return m * own + (all_ranks - own) / bubble_divisor(s)
    share = max(work.forward_share, FORWARD_SHARE)
    ahead = min(p - first, m)
    waits = (
        all_ranks
        + (m - 1) * own
        - (ahead - 1) * share * own
        + (2 * (p - 1) + 2 * m - ahead - 1) * message
    )
    before = max(0, first - 1) * float(work.each.min()) + first * (each + 2 * message)
    return max(waits, m * (own + 2 * message) + before)


def _of_ranks(
    s: Layout,
    work: LayerSeconds,
    most: Ints,
    each: float,
    message: float,
    once: Callable[[int], float],
) -> float:
    """Bound a simulated schedule's step by all ranks together. once: seconds once a step, by the
    layers of a rank.

    One micro-batch takes W on all ranks. Besides, rank r has m - 1 of its own to do under 1F1B, but
    for the forward passes that it makes ahead. DualPipeV's rank r has made 2 p - r and p + 1
    forward passes of its two stages, and p - r backward passes of the second, before the first
    micro-batch comes back to the first (layout/pipeline_simulation.py). Of its four messages with a
    neighbour, two at most pass at once.

    Let the rank with the most layers have c of them. Of the k ranks with the most, the last one
    is rank k - 1 or a later one. The longest of these bounds is the step's bound for this c, and
    the least over c is the layout's. The first of them grows with c.
    """
    m, p = s.gradient_accumulation_steps, s.pipeline
    rank = np.arange(p)
    alone = np.full(p, work.total + p * each)
    if s.schedule == "1f1b":
        ahead = np.minimum(p - rank, m)
        alone += (2 * (p - 1) + 2 * m - ahead - 1) * message
        times, forwards = np.full(p, m - 1), ahead - 1
    else:
        alone += (2 * m + 3 * (p - 2)) * message
        times, forwards = m - p + rank, np.full(p, p)
    waits = times - forwards * max(work.forward_share, FORWARD_SHARE)
    most, best = -np.sort(-most), math.inf
    for largest in range(-(-work.layers // p), work.layers + 1):
        held = fewest_by_place(work.layers, most, largest)
        if held is None:
            continue
        # Of n <= c layers, n r / c at least are among the r that are recomputed.
        recompute = times * work.recompute_seconds_on(
            held
        ) + work.layers * work.recompute_seconds * min(1.0, work.recomputed_layers / largest)
        seconds = alone + waits * (work.least[held] + each) + recompute
        more = once(largest)
        best = min(best, float(seconds.max()) + more)
        if seconds[0] + more >= best:
            break
    return best


def _pipelined(s: Layout, work: float, messages: float) -> float:
    """Bound a pipelined step. work: seconds of one micro-batch on all ranks; messages: of one each
    way.

    Under 1F1B rank r starts when the ranks before it have passed a micro-batch on, and ends as
    long before they do. With w_r its share of the work W, the step T is at least m w_r + (w_0 +
    ... + w_(r-1)). Equal bounds are the best that any shares make of it: T = W / (1 - (1 -
    1/m)^p). A rank between two others exchanges two messages with each for every micro-batch;
    those before it were passed by one of each kind.
    """
    m, p = s.gradient_accumulation_steps, s.pipeline
    if s.schedule != "1f1b":
        return m / p * work
    return (work + 2 * (p - 1) * messages) / (1 - (1 - 1 / m) ** p) - (p - 1) * messages
