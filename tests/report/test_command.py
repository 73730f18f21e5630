"""The `report` command: it needs a folder alone, no network, no torch and no code of the
model's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.compile.compiled_folder import read_folder
from shardwright.diagnostics import Refusal
from shardwright.report.report_files import write_report
from tests.conftest import SMALL_RECIPE
from tests.report.folders import compiled, small_with
from tests.unit.models.own_model import write_own_model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(SMALL_RECIPE, tmp_path_factory.mktemp("small"))


def test_the_command_is_deterministic_offline_and_without_torch(
    small: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(small, tmp_path / "elsewhere"))
    code = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise AssertionError('a network')\n"
        "socket.socket.connect = refuse\n"
        "from shardwright.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules), 'heavy'\n"
        "sys.exit(code)"
    )
    pages = []
    for name in ("a.html", "b.html"):
        arguments = ["report", str(moved), "-o", str(tmp_path / name), "--json"]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        written = json.loads(done.stdout)["files"]
        assert written == [
            {"path": str(tmp_path / name), "bytes": (tmp_path / name).stat().st_size}
        ]
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert str(tmp_path).encode() not in pages[0]


def test_the_folder_suffices_without_the_model_that_it_came_from(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(SMALL_RECIPE["model"]["config"]))
    document = small_with({"pipeline": 2})
    document["model"] = {"source": str(source), "weights": "random"}
    folder = compiled(document, tmp_path / "made")
    shutil.rmtree(source)
    subject = read_folder(folder)
    assert (
        not subject.has_stale_prediction
        and subject.graph.config_hash == subject.plan.model.config_hash
    )
    for name in ("model/config.json", "model_graph.json"):
        text = (folder / name).read_text()
        for damaged in (
            text.replace('"intermediate_size": 96', '"intermediate_size": 80'),
            text[:-9],
            "[" * 10**5,
        ):
            assert damaged != text
            (folder / name).write_text(damaged)
            with pytest.raises(Refusal) as refusal:
                read_folder(folder)
            assert refusal.value.diagnostics[0].code == "SW3322"
        (folder / name).write_text(text)


def test_no_torch_and_no_code_of_the_models_own(tmp_path: Path) -> None:
    """A stranger's folder is data, also where its plan names Python files in it."""
    write_own_model(tmp_path / "made" / "own")
    document = small_with({"pipeline": 2})
    document["model"] = {"source": "./own", "trust_remote_code": "./own", "weights": "random"}
    folder = compiled(document, tmp_path / "made")
    for path in (folder / "model").glob("*.py"):
        path.write_text("raise SystemExit('it ran')")
    shutil.rmtree(tmp_path / "made" / "own")
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('torch', 'transformers', 'deepspeed'))\n"
        "from shardwright.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", folder, "-o", page], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "TinyForCausalLM" in page.read_text()


def test_what_cannot_be_reported_on_is_said(small: Path, tmp_path: Path) -> None:
    def code_of(folder: Path, output: Path) -> str:
        with pytest.raises(Refusal) as refusal:
            write_report(folder, output, None)
        return refusal.value.diagnostics[0].code

    assert code_of(tmp_path, tmp_path / "a.html") == "SW6001"
    assert code_of(small, tmp_path) == "SW3323"
    assert code_of(small, tmp_path / "no" / "a.html") == "SW3323"
    other = Path(shutil.copytree(small, tmp_path / "other"))
    recipe = other / "recipe.resolved.json"
    recipe.write_text(recipe.read_text().replace('"steps": 10', '"steps": 11'))
    assert code_of(other, tmp_path / "a.html") == "SW3321"
    recipe.unlink()
    assert code_of(other, tmp_path / "a.html") == "SW3321"
