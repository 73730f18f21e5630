"""What `diff` says of checkpoints is what `run` does with them: every pair of a set of recipes,
both ways, and whether it looks at the recipes or at the folders that they were compiled to."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from shardwright.checkpoint.checkpoint_compatibility import check_resumable, compare_requirements
from shardwright.cli.command_options import read_priced_recipe
from shardwright.cli.diff_command import ResumeSide, resume_side, resume_verdict_of
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE

ADAPTERS = {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
LAYOUT = {
    "tensor": 1,
    "pipeline": 1,
    "data": 4,
    "zero_stage": 1,
    "micro_batch_size": 1,
    "activation_checkpointing": "none",
    "schedule": "1f1b",
}
PLAIN: dict[str, Any] = {
    "parallelism": LAYOUT,
    "data": {"kind": "text", "path": "corpus.txt", "tokenizer": "byte"},
}
LORA = {**PLAIN, "lora": ADAPTERS}
KINDS: dict[str, dict[str, Any]] = {
    "full": PLAIN,
    "full, two stages": {**PLAIN, "parallelism": {**LAYOUT, "pipeline": 2, "data": 2}},
    "full, ZeRO-3": {**PLAIN, "parallelism": {**LAYOUT, "zero_stage": 3}},
    "full, offload": {**PLAIN, "parallelism": {**LAYOUT, "offload": "optimizer"}},
    "full, bf16": {**PLAIN, "training.precision": "bf16"},
    "full, packed": {**PLAIN, "data": {**PLAIN["data"], "packing": False}},
    "full, eager": {**PLAIN, "model.attention": "eager"},
    "full, another key of DeepSpeed's": {
        **PLAIN,
        "extra": {"zero_optimization": {"reduce_bucket_size": 1000000}},
    },
    "full, another seed": {**PLAIN, "training.seed": 7},
    "full, some held out": {**PLAIN, "validation": {"fraction": 0.1, "every_steps": 5}},
    "another model": {**PLAIN, "model.config.intermediate_size": 80},
    "lora": LORA,
    "lora, renamed": {**LORA, "name": "other"},
    "lora, modules turned round": {
        **LORA,
        "lora": {**ADAPTERS, "target_modules": ["v_proj", "q_proj"]},
    },
    "lora, another rank": {**LORA, "lora": {**ADAPTERS, "rank": 8}},
    "lora, another alpha": {**LORA, "lora": {**ADAPTERS, "alpha": 16}},
    "lora, other modules": {**LORA, "lora": {**ADAPTERS, "target_modules": ["q_proj"]}},
    "lora, all modules": {**LORA, "lora": {"rank": 4, "alpha": 8}},
    "lora, dropout": {**LORA, "lora": {**ADAPTERS, "dropout": 0.1}},
    "lora, ZeRO-3": {**LORA, "parallelism": {**LAYOUT, "zero_stage": 3}},
}
SAME = {"lora": ("lora, renamed", "lora, modules turned round")}
"""What goes on bit for bit beside a kind itself."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    (root / "corpus.txt").write_text("a text of its own " * 100)
    made = {}
    for number, (name, changes) in enumerate(KINDS.items()):
        document = copy.deepcopy(SMALL_RECIPE)
        for dotted, value in changes.items():
            *parents, key = dotted.split(".")
            place = document
            for parent in parents:
                place = place[parent]
            place[key] = value
        recipe = root / f"{number}.json"
        recipe.write_text(json.dumps(document))
        made[name] = root / str(number)
        write_folder(made[name], compile_recipe(load_recipe(recipe)).files)
    return made


@dataclass(frozen=True)
class Answer:
    refused: bool
    moved: bool
    other_samples: bool


def run_says(saved: Path, here: Path) -> Answer:
    """A compiled folder's plan.json and tokenizer lie in its checkpoints as they lie in itself."""
    try:
        notes = check_resumable(read_plan(here), here, saved)
    except Refusal:
        return Answer(refused=True, moved=False, other_samples=False)
    return Answer(
        refused=False,
        moved=any("under another layout" in note for note in notes),
        other_samples=any("SW6207" in note for note in notes),
    )


def diff_says(a: ResumeSide, b: ResumeSide) -> tuple[str, Answer]:
    resume = resume_verdict_of(a, b)
    return resume.verdict, Answer(
        refused=resume.verdict == "no",
        moved=resume.verdict == "converted",
        other_samples=any("samples come in another order" in note for note in resume.notes),
    )


def test_diff_and_run_agree_on_every_pair(folders: dict[str, Path]) -> None:
    runs = {name: resume_side(read_priced_recipe(str(folder))) for name, folder in folders.items()}
    recipes = {
        name: resume_side(read_priced_recipe(f"{folder}.json")) for name, folder in folders.items()
    }
    verdicts = {}
    for a, b in itertools.product(folders, folders):
        verdicts[a, b], told = diff_says(runs[a], runs[b])
        done = run_says(folders[a], folders[b])
        assert told == done, (a, b)
        assert compare_requirements(recipes[a].facts, recipes[b].facts) == compare_requirements(
            runs[a].facts, runs[b].facts
        ), (a, b)
    for a, b in itertools.product(folders, folders):
        alike = a == b or any({a, b} <= {kind, *same} for kind, same in SAME.items())
        assert (verdicts[a, b] == "bit for bit") == alike, (a, b, verdicts[a, b])
        trained = ("lora" in a) == ("lora" in b)
        assert trained or verdicts[a, b] == "no"


def test_another_tokenizer_in_a_mixture_is_seen_by_both(
    write_recipe: Callable[..., Path], tmp_path: Path, byte_level: Path
) -> None:
    made: dict[str, Path] = {}
    for name in ("byte", str(byte_level)):
        part = {"kind": "text", "path": "corpus.txt", "tokenizer": name, "weight": 1.0}
        (tmp_path / "corpus.txt").write_text("a text of its own " * 100)
        recipe = write_recipe({"data": {"mixture": [part, part]}, "model.config.vocab_size": 300})
        made[name] = tmp_path / f"out-{len(made)}"
        write_folder(made[name], compile_recipe(load_recipe(recipe)).files)
    a, b = made.values()
    assert run_says(a, b).refused and not run_says(b, b).refused
    ours, theirs = (resume_side(read_priced_recipe(str(folder))) for folder in (a, b))
    assert diff_says(ours, theirs)[0] == "no" and diff_says(theirs, theirs)[0] == "bit for bit"


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder
