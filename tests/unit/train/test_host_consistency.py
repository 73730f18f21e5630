"""A compiled folder that was edited, and hosts that have other plans or other data, are refused by
name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.cli import main as cli
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data import dataset
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import BLOCK_BYTES, data_fingerprints
from shardwright.diagnostics import Refusal
from shardwright.launch.run_state import UNFINISHED_RUN_CODES
from shardwright.plan.plan import Plan, plan_from_json, read_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.train.host_consistency import check_folder_digests, host_difference


@pytest.fixture
def out(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    write_folder(tmp_path / "out", compile_recipe(load_recipe(write_recipe())).files)
    return tmp_path / "out"


def test_an_edited_ds_config_is_refused_before_anything_starts(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((out / "ds_config.json").read_text())
    config["gradient_clipping"] = 0.5
    (out / "ds_config.json").write_text(json.dumps(config))
    assert cli.main(["run", str(out)]) == 1
    error = capsys.readouterr().err
    assert "error[SW6010]: ds_config.json is not what compile wrote" in error
    assert "`extra:`" in error and "compile again" in error
    assert not (out / "run").exists()


def test_what_a_run_reads_as_data_is_locked_and_scripts_are_not(out: Path) -> None:
    plan = read_plan(out)
    assert set(plan.digests) == {"ds_config.json", "model/config.json"}
    for name in ("train.py", "launch.sh", "launch/hostfile"):
        (out / name).write_text((out / name).read_text() + "# mine\n")
    check_folder_digests(plan, out)
    (out / "model" / "config.json").unlink()
    with pytest.raises(Refusal) as caught:
        check_folder_digests(plan, out)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.message) == ("SW6010", "model/config.json is missing")
    assert "`model` section" in diagnostic.help


def test_a_plan_without_digests_is_refused(out: Path) -> None:
    document = json.loads((out / "plan.json").read_text())
    del document["digests"]
    with pytest.raises(ValueError, match="digests"):
        plan_from_json(json.dumps(document))


@pytest.mark.parametrize("name", ["/etc/passwd", "model/../../x", ".."])
def test_a_plan_names_files_of_its_own_folder_only(out: Path, name: str) -> None:
    document = json.loads((out / "plan.json").read_text())
    with pytest.raises(ValueError, match="is not a file of the compiled folder"):
        plan_from_json(json.dumps({**document, "digests": {name: "0" * 64}}))


PLANS = [
    ("a", {"plan.json": "1", "ds_config.json": "2"}),
    ("b", {"plan.json": "1", "ds_config.json": "2"}),
]


@pytest.mark.parametrize(
    ("gathered", "words"),
    [
        (PLANS, None),
        (
            [PLANS[0], ("b", {"plan.json": "9", "ds_config.json": "8"})],
            "host b has a different plan.json, ds_config.json",
        ),
        (
            [("a", {"plan.json": "9"}), ("b", {"plan.json": "1"}), ("c", {"plan.json": "1"})],
            "host a has a different plan",
        ),
        ([PLANS[0], ("b", {"plan.json": "1"})], "host b has a different ds_config.json than a"),
        (
            [("a", {"plan.json": "1"}), *((f"b{i}", {"plan.json": str(i)}) for i in range(2, 14))],
            "(and 4 more hosts)",
        ),
    ],
)
def test_hosts_that_differ_are_named(
    gathered: list[tuple[str, dict[str, str]]], words: str | None
) -> None:
    found = host_difference(gathered, "help")
    assert (found is None) == (words is None)
    if found is not None:
        assert found.code == "SW6011" and str(words) in found.message
        assert found.code in UNFINISHED_RUN_CODES  # exit 3


def planned(write_recipe: Callable[..., Path], data: dict[str, Any]) -> Plan:
    return compile_recipe(
        load_recipe(write_recipe({"data": data, "model.config.vocab_size": 260}))
    ).plan


def test_the_same_data_with_other_times_is_the_same(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").touch()
    plan = planned(write_recipe, {"kind": "text", "path": "corpus.txt", "tokenizer": "byte"})
    found = []
    for number, text in enumerate(("one text " * 99, "one text " * 99, "one test " * 99)):
        (tmp_path / "corpus.txt").write_text(text)
        os.utime(tmp_path / "corpus.txt", (number, number))
        folder = tmp_path / f"host-{number}"
        prepare(plan, folder, limit_bytes=None)
        found.append(data_fingerprints(plan, folder))
    assert found[0] == found[1] != found[2]
    assert list(found[0]) == [str(tmp_path / "corpus.txt")]


def test_of_a_large_array_the_size_and_blocks_from_end_to_end_are_read(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, blocks = tmp_path / "tokens.npy", 64
    monkeypatch.setattr(dataset, "BLOCKS", blocks)
    path.touch()
    tokens = np.zeros((2 * blocks * BLOCK_BYTES // 128, 32), dtype=np.int32)
    np.save(path, tokens)
    plan = planned(write_recipe, {"kind": "tokens", "path": "tokens.npy"})
    found = [data_fingerprints(plan, tmp_path)]
    for changed in (0, -1, len(tokens) // 2):
        other = tokens.copy()
        other[changed] = 1
        np.save(path, other)
        found.append(data_fingerprints(plan, tmp_path))
    assert len({one[str(path)] for one in found}) == 4 - (
        found[0] == found[3]
    )  # the middle may lie between two blocks
    assert found[0] != found[1] and found[0] != found[2]
