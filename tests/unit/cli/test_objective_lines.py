"""Test what `explain` and the report say of an objective: its examples and another model's cost."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.scoring_cost import cost_of_scores
from shardwright.recipe.objectives import PLAIN_OBJECTIVE, ObjectiveSection
from shardwright.recipe.recipe_types import TrainingFields
from shardwright.report.plan_sentences import objective_lines
from shardwright.utils.number_format import format_bytes

DPO = ObjectiveSection(name="dpo", beta=0.1)


def lines(objective: ObjectiveSection, steps: int = 100, seconds: float | None = 3.0) -> list[str]:
    training = TrainingFields(
        sequence_length=64,
        global_batch_size=8,
        steps=100,
        precision="fp32",
        gradient_accumulation_dtype=None,
        gradient_clipping=1.0,
        seed=1,
        objective=objective,
    )
    is_own = objective.reference is None and objective.teacher is None
    return objective_lines(training, cost_of_scores(training, steps, seconds if is_own else None))


def test_next_tokens_need_no_words() -> None:
    assert lines(PLAIN_OBJECTIVE) == []


@pytest.mark.parametrize("name", ["simpo", "orpo", "reward"])
def test_pairs_without_a_reference(name: str) -> None:
    assert lines(ObjectiveSection(name=name)) == [f"{name}: 8 pairs of two sequences a step"]


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_the_reference_is_scored_in_the_trainings_layout(name: str) -> None:
    first, scored, size = lines(ObjectiveSection(name=name, beta=0.1))
    assert first == f"{name}: 8 pairs of two sequences a step"
    assert "about 3 seconds for as many pairs as a step takes, 5 minutes for as many as" in scored
    assert "does not count" in scored
    # 16 sequences of 63 labels.
    of_step = 16 * (63 * 8 + 16)
    assert size == (
        f"the score file has at most {format_bytes(of_step)} for as many pairs as a step takes, "
        f"{format_bytes(100 * of_step)} for as many as 100 steps take"
    )


def test_epochs_do_not_tell_the_steps() -> None:
    _, scored, size = lines(DPO, steps=0)
    assert "3 seconds for as many pairs as a step takes;" in scored
    assert size.endswith("for as many pairs as a step takes")


def test_kto_runs_forward_once_more() -> None:
    first, scored, size = lines(ObjectiveSection(name="kto", beta=0.1))
    assert "8 labelled completions" in first and "the step counts both" in first
    assert "for as many completions as a step takes" in scored
    assert f"at most {format_bytes(16 * (63 * 8 + 16))} for" in size, "both completions"


def test_other_models_are_scored_elsewhere() -> None:
    _, reference, _ = lines(dataclasses.replace(DPO, reference="/models/other"))
    assert "/models/other" in reference and "does not count" in reference.replace(
        "do not", "does not"
    )
    teacher, size = lines(ObjectiveSection(name="distill", teacher="/scores", teacher_weight=1.0))
    assert "/scores" in teacher and "shardwright score" in teacher
    assert f"with --top 32 has at most {format_bytes(8 * (63 * (12 + 8 * 32) + 16))} for" in size
