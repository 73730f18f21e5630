"""Estimate what scoring a reference or a teacher takes before the first step, and its file."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layout_costs import break_down
from shardwright.cost.priced_layout import build_priced_layout, with_boundaries
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import TrainingFields

ASSUMED_TOP = 32
"""`score --top` of a teacher, which the recipe does not name."""
LABEL_BYTES = 8
"""Bytes of a label's place and log-probability in a score file (data/score_files.py)."""
TOP_LABEL_BYTES, TOP_TOKEN_BYTES = 12, 8
"""Count, with `--top`, its normalizer too, and an id and a log-probability for each token."""
SEQUENCE_BYTES = 16
"""Bytes of a sequence's offset and checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCost:
    """Hold `scoring` of `plan --json`, `estimate --json` and `explain --json`.

    scored: the folder of the reference or of the teacher's scores; None for the starting weights
    top: `score --top` that is assumed of a teacher; 0 for a reference
    step_seconds: to score as many examples as a step takes, in the training's layout; None where
        `shardwright score` scores them in another one
    training_seconds: for as many as all steps take; None where those are not known either
    step_bytes, training_bytes: of the score file of so many examples, if every token is a label
    """

    scored: str | None
    top: int
    steps: int
    step_seconds: float | None
    training_seconds: float | None
    step_bytes: int
    training_bytes: int | None


def scoring_cost(problem: Problem, estimate: Estimate) -> ScoringCost | None:
    """Estimate the scoring of a layout's recipe; None where the objective reads no scores."""
    training, s = problem.recipe.training, estimate.strategy
    traits = training.objective.traits
    seconds = None
    if traits.reads_reference and training.objective.reference is None:
        priced = with_boundaries(
            build_priced_layout(problem, s, default_constants()), estimate.boundaries
        )
        step = break_down(priced, estimate).step
        seconds = step.scoring_seconds(s.zero_stage, 1 + traits.forward_only_passes)
    return cost_of_scores(training, estimate.training.steps, seconds)


def cost_of_scores(
    training: TrainingFields, steps: int, step_seconds: float | None
) -> ScoringCost | None:
    """Return the seconds and bytes of a recipe's scores.

    steps: 0 where they are not known yet
    step_seconds: of the forward passes over a step's examples; None for another model
    """
    objective, traits = training.objective, training.objective.traits
    if not (traits.reads_reference or traits.reads_teacher):
        return None
    top = ASSUMED_TOP if traits.reads_teacher else 0
    label = TOP_LABEL_BYTES + TOP_TOKEN_BYTES * top if top else LABEL_BYTES
    # A labelled completion has one of another prompt beside it.
    sequences = training.sequences_of(training.global_batch_size)
    sequences *= 1 + traits.forward_only_passes
    size = sequences * ((training.sequence_length - 1) * label + SEQUENCE_BYTES)
    return ScoringCost(
        scored=objective.teacher if traits.reads_teacher else objective.reference,
        top=top,
        steps=steps,
        step_seconds=step_seconds,
        training_seconds=None if step_seconds is None or not steps else steps * step_seconds,
        step_bytes=size,
        training_bytes=steps * size if steps else None,
    )
