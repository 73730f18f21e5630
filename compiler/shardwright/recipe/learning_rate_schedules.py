"""List the learning rate schedules of `training.scheduler.name`, one row each, in closed form.

The formulas and defaults are those of transformers/optimization.py (5.23).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.recipe.recipe_types import SchedulerFields


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePoint:
    """Holds a place on a schedule: step `step` of `steps`, and the recipe's keys."""

    keys: SchedulerFields
    lr: float
    steps: int
    step: int

    @property
    def warmup(self) -> int:
        return self.keys.warmup_steps or 0

    @property
    def min_lr(self) -> float:
        return self.keys.min_lr or 0.0

    @property
    def progress(self) -> float:
        """Return the share of the steps behind the warm-up that are made."""
        return (self.step - self.warmup) / max(1, self.steps - self.warmup)

    def above_min(self, share: float) -> float:
        """Return the rate at this share of the way from min_lr up to lr."""
        return self.min_lr + (self.lr - self.min_lr) * share


Curve = Callable[[SchedulePoint], float]


def _constant(x: SchedulePoint) -> float:
    return x.lr


def _linear(x: SchedulePoint) -> float:
    return x.lr + (x.min_lr - x.lr) * x.progress


def _wave(cycles: float | None, progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * (0.5 if cycles is None else cycles) * 2.0 * progress))


def _cosine(x: SchedulePoint) -> float:
    return max(0.0, x.above_min(_wave(x.keys.num_cycles, x.progress)))


def _cosine_with_restarts(x: SchedulePoint) -> float:
    if x.progress >= 1.0:
        return 0.0
    cycles = 1.0 if x.keys.num_cycles is None else x.keys.num_cycles
    return x.lr * 0.5 * (1.0 + math.cos(math.pi * (cycles * x.progress % 1.0)))


DEFAULT_LR_END = 1e-7
"""Is the last rate of a polynomial schedule without lr_end."""


def _polynomial(x: SchedulePoint) -> float:
    end = DEFAULT_LR_END if x.keys.lr_end is None else x.keys.lr_end
    power = 1.0 if x.keys.power is None else x.keys.power
    return (x.lr - end) * math.pow(1.0 - x.progress, power) + end


def _inverse_sqrt(x: SchedulePoint) -> float:
    timescale = x.keys.timescale or x.warmup or 10_000
    return x.lr / math.sqrt((x.step + timescale - x.warmup) / timescale)


def _stable_then_decay(x: SchedulePoint) -> float:
    """Return lr, then the decay of the last decay_steps."""
    decay = x.keys.decay_steps or 0
    done = x.step - (x.steps - decay)
    if done <= 0:
        return x.lr
    if done >= decay:
        return x.min_lr
    kind = x.keys.decay_type or SCHEDULES[x.keys.name].decay_type
    if kind == "cosine":
        left = _wave(x.keys.num_cycles, done / decay)
    else:
        left = 1.0 - (math.sqrt(done / decay) if kind == "1-sqrt" else done / decay)
    return max(0.0, x.above_min(left))


Warmup = Callable[[SchedulePoint], float]


def _straight(x: SchedulePoint) -> float:
    return x.lr * x.step / x.warmup


def _from_warmup_rate(x: SchedulePoint) -> float:
    first = x.keys.warmup_lr_rate
    if first is None:
        return _straight(x)
    return x.lr * (first + (1.0 - first) * (x.step - 1) / max(1, x.warmup - 1))


def _typed_share(x: SchedulePoint) -> float:
    done, kind = x.step / x.warmup, x.keys.warmup_type
    if kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * done))
    return 1.0 - math.sqrt(1.0 - done) if kind == "1-sqrt" else done


def _typed(x: SchedulePoint) -> float:
    share = _typed_share(x)
    return x.above_min(share) if SCHEDULES[x.keys.name].starts_at_min else x.lr * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Describes a schedule: its rates, and the keys that it takes beside the warm-up's.

    needs: keys of which one must be there
    counts_from_one: the formula gives update k the rate at k; `first_step` changes nothing
    starts_at_min: the warm-up begins at min_lr, not at 0
    decay_type: the default of the key
    megatron: Megatron-LM's --lr-decay-style, None where it has none
    """

    curve: Curve
    keys: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    warmup: Warmup = _straight
    counts_from_one: bool = False
    starts_at_min: bool = False
    decay_type: str = "linear"
    megatron: str | None = None


_MIN = ("min_lr", "min_lr_ratio")
_WSD = ("decay_steps", *_MIN, "warmup_type", "decay_type", "num_cycles")

SCHEDULES: Mapping[str, Schedule] = {
    "constant": Schedule(curve=_constant, keys=_MIN, megatron="constant"),
    "linear": Schedule(curve=_linear, keys=_MIN, megatron="linear"),
    "cosine": Schedule(curve=_cosine, keys=(*_MIN, "num_cycles"), megatron="cosine"),
    "wsd": Schedule(
        curve=_stable_then_decay, keys=_WSD, needs=("decay_steps",), warmup=_typed, megatron="WSD"
    ),
    "constant_with_warmup": Schedule(curve=_constant, megatron="constant"),
    "cosine_with_restarts": Schedule(curve=_cosine_with_restarts, keys=("num_cycles",)),
    "polynomial": Schedule(curve=_polynomial, keys=("power", "lr_end"), megatron="linear"),
    "inverse_sqrt": Schedule(
        curve=_inverse_sqrt, keys=("timescale",), megatron="inverse-square-root"
    ),
    "cosine_with_min_lr": Schedule(
        curve=_cosine, keys=(*_MIN, "num_cycles"), needs=_MIN, megatron="cosine"
    ),
    "cosine_warmup_with_min_lr": Schedule(
        curve=_cosine,
        keys=(*_MIN, "num_cycles", "warmup_lr_rate"),
        needs=_MIN,
        warmup=_from_warmup_rate,
        counts_from_one=True,
        megatron="cosine",
    ),
    "warmup_stable_decay": Schedule(
        curve=_stable_then_decay,
        keys=_WSD,
        needs=("decay_steps",),
        warmup=_typed,
        starts_at_min=True,
        decay_type="cosine",
        megatron="WSD",
    ),
}
"""Maps each name to its row. A constant rate ignores min_lr, so that `name: constant` is a whole
override of a schedule that ends at one."""

OPTIONAL_KEYS: Mapping[str, int | None] = {
    field.name: field.default
    for field in dataclasses.fields(SchedulerFields)
    if field.default is not dataclasses.MISSING and field.name != "warmup_ratio"
}
"""Maps the keys that only some schedules take to their default."""

SCHEDULE_NAME_KEY = ("training", "scheduler", "name")

UNPLANNED_SCHEDULES: Mapping[str, str] = {
    "reduce_lr_on_plateau": "lowers the learning rate where a validation loss stops falling",
    "greedy": "changes the learning rate by the losses of the run",
}
"""Maps transformers' other schedules to what makes their rates unknown before the run."""


def scheduled_rate(lr: float, scheduler: SchedulerFields, steps: int, update: int) -> float:
    """Return the learning rate of update `update` (from 1) of `steps`."""
    row = SCHEDULES[scheduler.name]
    first = 1 if row.counts_from_one else scheduler.first_step
    point = SchedulePoint(keys=scheduler, lr=lr, steps=steps, step=update - 1 + first)
    in_warmup = point.warmup > 0 and point.step <= point.warmup
    return row.warmup(point) if in_warmup else row.curve(point)
