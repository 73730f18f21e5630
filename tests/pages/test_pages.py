"""The pages of docs/ that are made are fresh, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.cli.main import COMMANDS
from shardwright.recipe.recipe_schema import recipe_schema
from shardwright.search.rule_registry import rules_for
from tests.pages.threads import THREADS, Thread
from tools.generate.docs_pages import DOCS, PAGES
from tools.generate.rules_page import examples

ROOT = DOCS.parent
WRITTEN_BY_HAND = ("cost-model.md", "extending.md")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_fresh(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make generated`"


def test_every_key_has_a_row() -> None:
    page = (DOCS / "recipe.md").read_text(encoding="utf-8")

    def keys(schema: object) -> set[str]:
        """Every property name anywhere in the schema but those of Hugging Face's configurations."""
        if isinstance(schema, list):
            return set().union(*map(keys, schema)) if schema else set()
        if not isinstance(schema, dict):
            return set()
        own = (
            set(schema.get("properties", {}))
            if isinstance(schema.get("properties"), dict)
            else set()
        )
        return own.union(
            *(keys(value) for name, value in schema.items() if name not in ("if", "config"))
        )

    named = set(
        re.findall(r"[\w\[\]]+", " ".join(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)))
    )
    sections = {
        "model",
        "cluster",
        "training",
        "data",
        "parallelism",
        "launch",
        "checkpoint",
        "assume",
    }
    assert keys(recipe_schema()) - named - sections <= {
        "optimizer",
        "scheduler",
        "slurm",
        "kubernetes",
        "model_type",
    }


def test_every_rule_says_something() -> None:
    """SW3113 needs a model that drops layers, SW1431, SW3123 and SW3124 types that are not shipped,
    SW3171 and SW3172 one that sees, SW3160 one whose configuration asks for router logits."""
    rare = {
        "SW1431",
        "SW3113",
        "SW3123",
        "SW3124",
        "SW3126",
        "SW3130",
        "SW3131",
        "SW3160",
        "SW3171",
        "SW3172",
    }
    rare |= {"SW3181", "SW3182", "SW3183"}  # a model that learns from pairs
    rare |= {"SW3125"}  # a state space model on packed documents
    rare |= {"SW3196"}  # a list of recomputed modules, which only target: megatron takes
    rare |= {"SW3136", "SW3220"}  # a longrope model on packed documents; a run of few steps
    assert (rules_for("deepspeed") | rules_for("reference")).keys() - set(examples()) <= rare


@pytest.mark.parametrize("name", WRITTEN_BY_HAND)
def test_what_a_page_names_is_there(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    paths = re.findall(
        r"`((?:compiler|tests|tools|benchmarks|templates|recipes|docs)/[\w./*-]+)`", text
    )
    assert paths
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"{name} names {path}"
    for command in re.findall(r"\bshardwright ([a-z]+)\b(?! on)", text):
        assert command in COMMANDS, f"{name} names `shardwright {command}`"
    targets = re.findall(r"`make ([a-z-]+)`", text)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert f"\n{target}:" in makefile, f"{name} names `make {target}`"


@pytest.mark.parametrize("thread", THREADS, ids=lambda thread: thread.threads[0])
def test_what_others_ran_into(thread: Thread, tmp_path: Path) -> None:
    """The page answers it, and the program does what the answer says."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if f"| {', '.join(thread.threads)} |" in line)
    assert thread.says in row
    assert thread.says in thread.tried(tmp_path)


def test_every_thread_of_the_page_is_tried() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## What others ran into")
    named = set(re.findall(r"\b[A-Za-z]+#\d+", section.partition("\n## ")[0]))
    assert named == {name for thread in THREADS for name in thread.threads}
