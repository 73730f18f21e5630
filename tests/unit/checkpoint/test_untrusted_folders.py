"""A checkpoint and a compiled folder from somebody else, with code of their own: inert under every
command that does not say that it runs the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint.huggingface_export import export_checkpoint
from shardwright.cli.main import main
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE
from tests.unit.checkpoint.written_checkpoints import sum_up, write_model_checkpoint
from tests.unit.models.own_model import FILES, write_own_model

CANARY = "import pathlib; pathlib.Path({path!r}).touch()\n"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model with code of its own, compiled by somebody who trusts it, with a
    checkpoint."""
    root = tmp_path_factory.mktemp("honest")
    write_own_model(root / "own")
    model = {"source": "./own", "trust_remote_code": "./own", "weights": "random"}
    layout = {"pipeline": 2, "data": 2, "micro_batch_size": 2}
    (root / "recipe.json").write_text(
        json.dumps({**SMALL_RECIPE, "model": model, "parallelism": layout})
    )
    write_folder(root / "out", compile_recipe(load_recipe(root / "recipe.json")).files)
    write_model_checkpoint(root / "out", _state(root / "out"))
    return root / "out"


def _state(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    from shardwright.parallel.model_loading import load_config

    torch.manual_seed(0)
    return dict(
        AutoModelForCausalLM.from_config(load_config(read_plan(folder), folder)).named_parameters()
    )


@pytest.fixture
def hostile(honest: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(the folder, the canary): every Python file of it, and every name that Python might look for,
    writes the canary; hashes and checksums are right, as the attacker made them."""
    import shutil

    folder, canary = tmp_path / "theirs", tmp_path / "canary"
    shutil.copytree(honest, folder)
    bite = CANARY.format(path=str(canary))
    (step,) = (folder / "checkpoints").iterdir()
    for place in (folder, step):
        plan = json.loads((place / "plan.json").read_text())
        code = plan["model"]["remote_code"]
        for name in FILES:
            (place / "model" / name).write_text(bite + FILES[name])
        import hashlib

        code["files"] = [
            [n, hashlib.sha256((place / "model" / n).read_bytes()).hexdigest()]
            for n, _ in code["files"]
        ]
        (place / "plan.json").write_text(json.dumps(plan))
        for name in (
            "sitecustomize.py",
            "usercustomize.py",
            "torch.py",
            "shardwright.py",
            "train.py",
            "env.sh",
        ):
            (place / name).write_text(bite)
    sum_up(step)
    write_own_model(folder / "hf")
    for name in FILES:
        (folder / "hf" / name).write_text(bite + FILES[name])
    return folder, canary


def run_in(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As its owner would type it, standing in the folder. Nobody is there to answer a question."""
    command = [str(Path(sys.executable).with_name("shardwright")), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_an_export_runs_nothing_without_the_fingerprint(
    hostile: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, canary = hostile
    step = folder / "checkpoints" / "step-00000004"
    wanted = read_plan(step).model.remote_code
    assert wanted is not None
    for given in ([], ["--trust-code", "0" * 64]):
        assert main(["export", str(step), "-o", str(tmp_path / "hf"), *given]) == 1
        told = capsys.readouterr().err
        assert "SW2014" in told and wanted.fingerprint in told
        assert all(name in told for name in FILES) and str(step / "model") in told
        assert not canary.exists() and not (tmp_path / "hf").exists()
    assert (
        main(["export", str(step), "-o", str(tmp_path / "hf"), "--trust-code", wanted.fingerprint])
        == 0
    )
    assert canary.exists()


def test_trusted_code_is_exactly_the_files_of_the_fingerprint(honest: Path, tmp_path: Path) -> None:
    """Python would rather load a folder, an extension or a compiled file of the same name from
    beside them."""
    import py_compile
    import shutil

    step = Path(
        shutil.copytree(honest / "checkpoints" / "step-00000004", tmp_path / "step-00000004")
    )
    plan, canary = read_plan(step), tmp_path / "canary"
    assert plan.model.remote_code is not None
    (step / "model" / "layers_tiny").mkdir()
    (step / "model" / "layers_tiny" / "__init__.py").write_text(CANARY.format(path=str(canary)))
    (tmp_path / "evil.py").write_text(CANARY.format(path=str(canary)))
    for name in FILES:
        compiled = (
            step / "model" / "__pycache__" / f"{Path(name).stem}.{sys.implementation.cache_tag}.pyc"
        )
        py_compile.compile(
            str(tmp_path / "evil.py"),
            str(compiled),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    sum_up(step)
    trusting = ["--trust-code", plan.model.remote_code.fingerprint]
    done = run_in(tmp_path, "export", step, "-o", tmp_path / "hf", *trusting)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()
    assert {*FILES, "config.json", "model.safetensors"} <= {
        p.name for p in (tmp_path / "hf").iterdir()
    }


def test_a_class_of_the_code_is_a_models(honest: Path, tmp_path: Path) -> None:
    """The plan names the classes, and is not in the fingerprint."""
    import shutil

    step = Path(
        shutil.copytree(honest / "checkpoints" / "step-00000004", tmp_path / "step-00000004")
    )
    document = json.loads((step / "plan.json").read_text())
    document["model"]["remote_code"]["config_class"] = "layers_tiny.torch"
    (step / "plan.json").write_text(json.dumps(document))
    sum_up(step)
    code = read_plan(step).model.remote_code
    assert code is not None
    with pytest.raises(Refusal) as caught:
        export_checkpoint(step, tmp_path / "hf", trust_code=code.fingerprint)
    assert caught.value.diagnostics[0].code == "SW6008"


INERT = (
    "report . -o page.html",
    "explain .",
    "explain . --why-not pipeline=1",
    "diff . .",
    "prepare .",
    "status .",
    "logs .",
    "stop .",
    "generate . --prompt x",
    "generate checkpoints/step-00000004 --prompt x",
    "generate hf --prompt x",
)
WORKS = ("report", "explain", "diff", "prepare")


def test_a_strangers_folder_is_data(hostile: tuple[Path, Path]) -> None:
    """Each command in turn, standing in the folder, in a process that imports from its own packages
    alone, as `shardwright` does."""
    folder, canary = hostile
    code = (
        "import sys\nfrom shardwright.cli.main import main\n"
        "for line in sys.argv[1:]: print('@', main(line.split()), line, flush=True)"
    )
    command = [sys.executable, "-P", "-c", code, *INERT]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert not canary.exists(), done.stderr
    ended = [line.split() for line in done.stdout.splitlines() if line.startswith("@ ")]
    assert [" ".join(words[2:]) for words in ended] == list(INERT), done.stderr
    assert "our fault" not in done.stderr
    for _, exit_code, name, *_ in ended:
        assert exit_code == "0" if name in WORKS else exit_code in "01", (name, done.stderr)
    assert done.stderr.count("error[SW2014]") == 2, (
        "a checkpoint's and a model folder's, without a fingerprint"
    )


def test_generate_runs_code_by_its_fingerprint(
    hostile: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, canary = hostile
    assert main(["generate", str(folder / "hf"), "--prompt", "x"]) == 1
    told = capsys.readouterr().err
    fingerprint = told.rpartition("--trust-code ")[2].strip()
    assert "SW2014" in told and str(folder / "hf") in told and all(name in told for name in FILES)
    assert not canary.exists()
    main(["generate", str(folder / "hf"), "--prompt", "x", "--trust-code", fingerprint])
    assert canary.exists()


def test_a_doctor_takes_the_networks_variables_alone(hostile: tuple[Path, Path]) -> None:
    folder, canary = hostile
    document = json.loads((folder / "plan.json").read_text())
    values = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "PYTHONPATH": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    document["launch"]["env"] = [list(pair) for pair in values.items()]
    (folder / "plan.json").write_text(json.dumps(document))
    (folder / "hostname").write_text(f"#!/bin/sh\ntouch {canary}\n")
    (folder / "hostname").chmod(0o755)
    done = run_in(folder, "doctor", ".")
    assert "GLOO_SOCKET_IFNAME=lo" in done.stdout, done.stderr
    assert not canary.exists()


def test_a_tokenizers_code_is_refused_and_nobody_is_asked(
    hostile: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, canary = hostile
    document = json.loads((folder / "plan.json").read_text())
    (tmp_path / "corpus.txt").write_text("some text\n" * 500)
    document["data"] |= {
        "kind": "text",
        "path": str(tmp_path / "corpus.txt"),
        "tokenizer": "tokenizer",
    }
    (folder / "plan.json").write_text(json.dumps(document))
    (folder / "tokenizer").mkdir()
    settings = {
        "tokenizer_class": "TheirTokenizer",
        "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]},
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer" / "theirs.py").write_text(CANARY.format(path=str(canary)))
    done = run_in(folder, "prepare", ".")
    assert done.returncode == 1 and not canary.exists()
    assert "SW6121" in done.stderr and "its own Python code" in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
