"""The digests of scores: a change of what is scored changes its own, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.forward_only_recipe import forward_only_recipe
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.data_preparation import prepare
from shardwright.data.score_digests import (
    TOKENIZER_CONFIG,
    check_same_tokenizer,
    reference_digests,
    reference_score_file,
    score_digests,
    template_digest,
    tokenizer_digest,
)
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
PAIR = {"prompt": "What?", "chosen": "Yes.", "rejected": "No, not at all."}


def prepared(
    folder: Path, *overrides: str, forward_only: bool = False, count: int = 40
) -> tuple[Plan, Path]:
    """The tiny preference recipe over `count` equal pairs."""
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text(f"{json.dumps(PAIR)}\n" * count)
    text = (RECIPES / "tiny-dpo-cpu.yaml").read_text()
    text = text.replace("path: python-docstrings", "path: ./pairs.jsonl")
    (folder / "recipe.yaml").write_text(text)
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    compiled = compile_recipe(forward_only_recipe(recipe) if forward_only else recipe)
    out = folder / ("scored" if forward_only else "trained")
    write_folder(out, compiled.files)
    prepare(compiled.plan, out, limit_bytes=None)
    return compiled.plan, out


def test_a_score_is_of_the_recipe_that_trains(tmp_path: Path) -> None:
    """The layout, the folder and what is frozen do not count."""
    trained = score_digests(*prepared(tmp_path / "a"))
    assert trained == score_digests(*prepared(tmp_path / "b", forward_only=True))


@pytest.mark.parametrize(
    ("override", "differing"),
    [
        ("training.seed=7", {"weights", "settings"}),  # it draws the held-out pairs, too
        ("model.config.hidden_size=128", {"weights"}),
        ("training.sequence_length=64", {"settings"}),
        ("training.precision=bf16", {"precision"}),
        ("validation.fraction=0.2", {"settings"}),
        ("training.optimizer.lr=1e-3", set()),
    ],
)
def test_one_change_changes_its_digest(override: str, differing: set[str], tmp_path: Path) -> None:
    own = score_digests(*prepared(tmp_path / "a"))
    other = score_digests(*prepared(tmp_path / "b", override))
    assert {name for name in own if own[name] != other[name]} == differing


def test_other_data_has_another_digest(tmp_path: Path) -> None:
    own = score_digests(*prepared(tmp_path / "a"))
    other = score_digests(*prepared(tmp_path / "b", count=41))
    assert {name for name in own if own[name] != other[name]} == {"data"}


def test_another_model_is_told_by_its_weights(tmp_path: Path) -> None:
    plan, folder = prepared(tmp_path / "a")
    for name, content in (("one", b"1"), ("two", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    found = []
    for name in ("one", "two"):
        objective = replace(plan.training.objective, reference=str(tmp_path / name))
        other = replace(plan, training=replace(plan.training, objective=objective))
        digests = reference_digests(other, folder)
        assert digests == {**score_digests(plan, folder), "weights": digests["weights"]}
        found.append((digests["weights"], reference_score_file(other, folder)))
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_the_chat_template_is_no_part_of_the_tokenizer(tmp_path: Path) -> None:
    plan, _ = prepared(tmp_path / "a")
    part = replace(plan.data, tokenizer="tokenizer")
    here = tmp_path / "tokenizer"
    here.mkdir()

    def written(ids: str, template: str, bos: str) -> tuple[object, object]:
        (here / "tokenizer.json").write_text(ids)
        config = {"chat_template": template, "bos_token": bos}
        (here / TOKENIZER_CONFIG).write_text(json.dumps(config))
        return tokenizer_digest(part, tmp_path), template_digest(part, tmp_path)

    tokenizer, template = written("{}", "a", "<s>")
    assert written("{}", "b", "<s>")[0] == tokenizer
    assert written("{}", "b", "<s>")[1] != template
    for ids, bos in (("[]", "<s>"), ("{}", "<bos>")):
        other = written(ids, "a", bos)
        assert other[0] != tokenizer and other[1] == template
    (here / "chat_template.jinja").write_text("c")
    other = written("{}", "a", "<s>")
    assert other[0] == tokenizer and other[1] != template
    named = replace(part, template="d")
    assert template_digest(named, tmp_path) == "d"


def test_a_reference_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    plan, _ = prepared(tmp_path / "a")
    own = replace(plan, data=replace(plan.data, tokenizer="tokenizer"), validation=None)
    here, other = tmp_path / "tokenizer", tmp_path / "other"

    def written(folder: Path, **vocabulary: int) -> None:
        folder.mkdir(exist_ok=True)
        added = [{"content": "<s>", "id": 7, "special": True}]
        document = {"model": {"vocab": vocabulary, "merges": []}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(document))

    written(here, a=0, b=1)
    other.mkdir()
    check_same_tokenizer(own, tmp_path, str(other))  # it has none
    written(other, b=1, a=0)
    check_same_tokenizer(own, tmp_path, str(other))
    written(other, a=1, b=0)
    for each in (own, plan):  # the latter's data is bytes
        with pytest.raises(Refusal, match="SW6275"):
            check_same_tokenizer(each, tmp_path, str(other))
    check_same_tokenizer(
        replace(own, data=replace(plan.data, tokenizer=None)), tmp_path, str(other)
    )
