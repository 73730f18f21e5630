"""Keys of `training.objective`: defaults, refusals, and recipes without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.recipe.input_file_checks import check_files, missing_teacher_warning
from shardwright.recipe.objectives import OBJECTIVE_KEYS, OBJECTIVES
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from tests.unit.recipe.test_bad_input import GOOD, changed

PAIRS = "{kind: preference, path: python-docstrings, tokenizer: byte}"
TEXT = "{kind: text, path: python-stdlib, tokenizer: byte}"


def loaded(folder: Path, objective: str | None, data: str = PAIRS) -> Recipe:
    text = (
        GOOD if objective is None else changed("steps: 20", f"steps: 20\n  objective: {objective}")
    )
    lines = [line for line in text.splitlines() if not line.startswith("data:")]
    (folder / "recipe.yaml").write_text("\n".join([*lines, f"data: {data}", ""]))
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if OBJECTIVES[n].reads_preferences])
def test_an_objective_has_its_defaults(name: str, tmp_path: Path) -> None:
    objective = loaded(tmp_path, f"{{name: {name}}}").training.objective
    for key in OBJECTIVE_KEYS:
        assert getattr(objective, key) == OBJECTIVES[name].defaults.get(key)
    key = next(iter(OBJECTIVES[name].defaults))
    given = loaded(tmp_path, f"{{name: {name}, {key}: 0.7}}").training.objective
    assert getattr(given, key) == 0.7


def test_distillation_needs_a_teacher_and_takes_other_data(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, "{name: distill}", TEXT)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1253" and "shardwright score" in str(diagnostic.help)
    training = loaded(tmp_path, "{name: distill, teacher: scores/qwen}", TEXT).training
    assert training.objective.teacher == str(tmp_path / "scores" / "qwen")
    assert training.objective.teacher_weight == 1.0
    assert training.sequences_of(3) == 3


@pytest.mark.parametrize("weight", ["0", "1.01"])
def test_the_weight_of_a_teacher_is_a_share(weight: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, f"{{name: distill, teacher: a, teacher_weight: {weight}}}", TEXT)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.key == ("training", "objective", "teacher_weight")


def test_batch_sizes_count_pairs(tmp_path: Path) -> None:
    training = loaded(tmp_path, "{name: dpo}").training
    assert training.sequences_of(3) == 6
    batch, length = training.global_batch_size, training.sequence_length
    assert training.tokens_per_step == 2 * batch * length


def packed(data: str, packing: str = "true") -> str:
    return f"{data[:-1]}, packing: {packing}}}"


def test_batch_sizes_count_sequences_of_packed_pairs(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, "{name: dpo}", packed(PAIRS))
    assert recipe.training.objective.packed and recipe.training.sequences_of(3) == 3
    [(_, data)] = recipe.dataset_sections()
    assert data.joins_documents


def test_pairs_that_are_not_packed_make_the_same_recipe(tmp_path: Path) -> None:
    without = loaded(tmp_path, "{name: dpo}")
    said = loaded(tmp_path, "{name: dpo}", packed(PAIRS, "false"))
    assert without.document == said.document and without.training.objective.packed is None
    [(_, data)] = without.dataset_sections()
    assert not data.joins_documents


def test_labelled_completions_are_not_packed(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, "{name: kto}", packed(PAIRS))
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1263" and diagnostic.key == ("data", "packing")


def test_all_pairs_are_packed_or_none(tmp_path: Path) -> None:
    mixture = f"{{mixture: [{packed(PAIRS)[:-1]}, weight: 2}}, {PAIRS[:-1]}, weight: 1}}]}}"
    validation = f"{packed(PAIRS)}\nvalidation: {PAIRS[:-1]}, every_steps: 5}}"
    for data, key in (
        (mixture, ("data", "mixture", "1", "packing")),
        (validation, ("validation", "packing")),
    ):
        with pytest.raises(Refusal) as refused:
            loaded(tmp_path, "{name: dpo}", data)
        [diagnostic] = refused.value.diagnostics
        assert diagnostic.code == "SW1264" and diagnostic.key == key


def test_a_key_of_another_objective_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, "{name: dpo, gamma: 1}")
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1227" and diagnostic.key == ("training", "objective", "gamma")
    assert "name: simpo" in str(diagnostic.help)


@pytest.mark.parametrize(
    ("objective", "data"),
    [
        ("{name: dpo}", TEXT),
        ("{name: distill, teacher: scores}", PAIRS),
        ("{name: next-token}", PAIRS),
    ],
)
def test_objective_and_data_must_fit(objective: str, data: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, objective, data)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1228" and diagnostic.key == ("data", "kind")


def test_parts_of_a_mixture_must_fit(tmp_path: Path) -> None:
    text = "{kind: text, path: python-stdlib, tokenizer: byte, weight: 1}"
    mixture = f"{{mixture: [{PAIRS[:-1]}, weight: 2}}, {text}]}}"
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, "{name: dpo}", mixture)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1228"


def test_a_recipe_without_the_key_is_the_same_recipe(tmp_path: Path) -> None:
    without: Any = loaded(tmp_path, None, TEXT).document["training"]
    assert loaded(tmp_path, "{name: next-token}", TEXT).document["training"] == without
    assert without["objective"] == {"name": "next-token"}


@pytest.mark.parametrize("text", ["dpo", "cost"])
def test_a_text_says_where_a_name_goes(text: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, text)
    first = refused.value.diagnostics[0]
    assert first.code == "SW1102" and "{name: dpo}" in str(first.help)
    assert "at the top of the recipe" in str(first.help)


def test_a_reference_is_relative_to_the_recipe(tmp_path: Path) -> None:
    objective = loaded(tmp_path, "{name: kto, reference: a, reference_model: ../b}").training
    assert objective.objective.reference == str(tmp_path / "a")
    assert objective.objective.reference_model == str(tmp_path.parent / "b")
    own, bare = loaded(tmp_path, "{name: dpo, reference: null}"), loaded(tmp_path, "{name: dpo}")
    assert own.document == bare.document


@pytest.mark.parametrize("key", ["reference", "reference_model"])
def test_an_objective_without_a_reference_takes_none(key: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, f"{{name: simpo, {key}: ./a}}")
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1227" and diagnostic.key == ("training", "objective", key)


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ("reference: ./missing", "is no folder"),
        ("reference: ./empty", "has no config.json"),
        ("reference: ./scores, reference_model: ./scores", "has no config.json"),
        ("reference: ./model", None),
        ("reference: ./scores", None),
        ("reference: ./scores, reference_model: ./model", None),
    ],
)
def test_a_reference_is_a_model_or_a_score_file(
    keys: str, wrong: str | None, tmp_path: Path
) -> None:
    for name, file in (("empty", None), ("model", "config.json"), ("scores", "manifest.json")):
        (tmp_path / name).mkdir()
        if file is not None:
            (tmp_path / name / file).write_text("{}")
    recipe = loaded(tmp_path, f"{{name: dpo, {keys}}}")
    errors = [d for d in check_files(recipe) if d.code == "SW1243"]
    assert [wrong in d.message for d in errors if wrong] == ([True] if wrong else [])
    assert bool(errors) == (wrong is not None)


def test_a_reward_model_is_a_sequence_classification(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, "{name: reward}")
    assert recipe.model.task == "sequence-classification"
    assert recipe.data is not None and recipe.data.scored
    assert loaded(tmp_path, "{name: dpo}").model.task == "auto"


@pytest.mark.parametrize(
    ("objective", "task"), [("reward", "causal-lm"), ("dpo", "sequence-classification")]
)
def test_a_task_of_another_objective_is_refused(objective: str, task: str, tmp_path: Path) -> None:
    loaded(tmp_path, f"{{name: {objective}}}")
    with pytest.raises(Refusal) as refused:
        load_recipe(tmp_path / "recipe.yaml", [f"model.task={task}"])
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1246" and diagnostic.key == ("model", "task")
    assert "Leave `task` out" in str(diagnostic.help)


@pytest.mark.parametrize(
    ("manifest", "code", "words"),
    [
        (None, "", ""),
        ("{", "SW1302", "is no score file"),
        ('{"parts": {}}', "SW1302", "is no score file"),
        ('{"top": 0}', "SW1302", "the labels' log-probabilities alone"),
        ('{"top": 8}', "", ""),
    ],
)
def test_a_teacher_is_a_score_file_with_top_tokens(
    manifest: str | None, code: str, words: str, tmp_path: Path
) -> None:
    if manifest is not None:
        (tmp_path / "scores").mkdir()
        (tmp_path / "scores" / "manifest.json").write_text(manifest)
    key = ("training", "objective", "teacher")
    recipe = loaded(tmp_path, "{name: distill, teacher: scores}", TEXT)
    found = [d for d in check_files(recipe) if d.key == key]
    assert [d.code for d in found] == ([code] if code else [])
    for diagnostic in found:
        assert words in diagnostic.message and "--top" in str(diagnostic.help)
    warned = [(d.code, d.severity) for d in missing_teacher_warning(recipe)]
    assert warned == ([] if manifest else [("SW1301", "warning")])
