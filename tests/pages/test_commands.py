"""Every fenced block of every page: commands run and print what is shown, scripts train, recipes
load."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from shardwright.cli.main import COMMANDS
from shardwright.recipe.recipe_loader import load_recipe
from tests.pages.samples import ELSEWHERE, SAMPLES
from tools.pages.page_commands import (
    EXCEPTIONS,
    ROOT,
    Block,
    Session,
    blocks,
    commands,
    exit_code,
    inline_commands,
    pages,
    parse,
    part_of,
    same,
)

LANGUAGES = ("sh", "console", "python", "yaml", "text")
BLOCKS = [block for page in pages() for block in blocks(page)]
WITH_COMMANDS = sorted({block.page for block in BLOCKS if commands(block)})


def follow(page: str, folder: Path, *, thorough: bool) -> None:
    """Every command of the page in its order. thorough: those that only `make prove` runs, too."""
    session = Session(folder)
    for block in blocks(page):
        session.save(block)
        for command in commands(block):
            instead, run, shown = EXCEPTIONS.get((page, command.text)), command.text, command.shown
            if instead is not None and instead.how == "target":
                run, shown = run.replace("make", "make -n -o .venv/.installed", 1), None
            elif instead is not None and not thorough:
                if run.startswith("shardwright"):
                    parse(run)
                if not instead.part:
                    continue
                run, shown = instead.part, part_of(shown or "")
            elif run.startswith("make"):
                run = run.replace(
                    "make", "make -o .venv/.installed", 1
                )  # it is set up: the tests run
            code, printed = session.run(run)
            expected = 1 if instead is not None and instead.how == "refused" else exit_code(shown)
            assert code == expected, f"{block}: `{run}` ended with {code}\n{printed[-3000:]}"
            if shown is not None:
                assert same(shown, printed), (
                    f"{block}: `{run}` prints other than shown (`make generated`):\n{printed}"
                )


@pytest.mark.launch
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path, thorough=False)


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize(
    "page", sorted({page for (page, _), way in EXCEPTIONS.items() if way.how == "prove"})
)
def test_all_commands_of_a_page(page: str, tmp_path: Path) -> None:
    follow(page, tmp_path, thorough=True)


def test_no_exception_is_for_a_command_that_is_gone() -> None:
    assert EXCEPTIONS.keys() <= {
        (block.page, command.text) for block in BLOCKS for command in commands(block)
    }
    assert all(way.reason for way in EXCEPTIONS.values())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_says_what_it_is(block: Block) -> None:
    assert block.language in LANGUAGES, f"write one of {LANGUAGES} behind the fence"
    assert bool(commands(block)) == (block.language in ("sh", "console"))
    if block.language == "python":
        assert block.title, "name the file behind the fence, and a command that runs it below"
        below = [c for b in blocks(block.page) if b.line > block.line for c in commands(b)]
        assert any(block.title in command.text for command in below)


def first_word(block: Block) -> tuple[str, str]:
    word = block.text.split(maxsplit=1)[0].rstrip(":")
    return block.page, word if (block.page, word) in SAMPLES else word.partition("[")[0]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "text"], ids=str)
def test_a_sample_is_what_the_program_says(block: Block, tmp_path: Path) -> None:
    """A `text` block is made by a function of samples.py, or named there with what tries it."""
    name = first_word(block)
    if name not in ELSEWHERE:
        assert block.text == SAMPLES[name](tmp_path)


def test_no_sample_is_for_a_block_that_is_gone() -> None:
    named = {first_word(block) for block in BLOCKS if block.language == "text"}
    assert SAMPLES.keys() | ELSEWHERE.keys() <= named


def test_the_stages_of_the_picture() -> None:
    (picture,) = (
        block.text for block in BLOCKS if first_word(block) == ("README.md", "recipe.yaml")
    )
    table = (ROOT / "compiler/README.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d) (\w+)  ", picture) == re.findall(
        r"^\| (\d) (\w+) \|", table, re.MULTILINE
    )


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_a_part_of_a_recipe_loads(
    block: Block, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    part = YAML(typ="safe").load(block.text)
    for section, keys in part.items():
        alone = section == "data" or "source" in keys  # instead of what the small recipe has
        small_recipe[section] = keys if alone else {**small_recipe.get(section, {}), **keys}
    (tmp_path / "recipe.json").write_text(json.dumps(small_recipe))
    load_recipe(tmp_path / "recipe.json")


@pytest.mark.parametrize("page", [page for page in pages() if any(inline_commands(page))])
def test_commands_in_the_text_have_right_arguments(page: str) -> None:
    for command in inline_commands(page):
        _, name, *arguments = command.split()
        assert name in COMMANDS, command
        if arguments:
            parse(command)


def test_a_forgotten_or_wrong_block_is_found(tmp_path: Path) -> None:
    """The collection itself: prompts, here-documents, comments, elisions."""
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ncat <<'E' # two\n$ no\nE\ntrue\n```\n\n```console\n$ a <<'E'\n> b # c\n> E\n1\n$ d "
        "# e\n```\n"
    )
    script, session = blocks(str(page))
    assert [c.text for c in commands(script)] == ["cat <<'E'\n$ no\nE", "true"]
    assert [(c.text, c.shown) for c in commands(session)] == [
        ("a <<'E'\nb # c\nE", "1\n"),
        ("d", ""),
    ]
    assert same("a\n...\nsearched in 1.2 s\n", "a\nb\nc\nsearched in 3 s\n")
    assert not same("a\n...\nd\n", "a\nb\nc\n")
    assert exit_code("error[SW1102]: no\n") == 1 and exit_code("step 1\n") == 0
    with pytest.raises(SystemExit):
        parse("shardwright plan my.yaml --topp 3")


def test_make_knows_no_other_target(tmp_path: Path) -> None:
    """What `make -n` is worth: it fails for a target that is not there."""
    assert subprocess.run(["make", "-n", "docks"], cwd=ROOT, capture_output=True).returncode != 0
