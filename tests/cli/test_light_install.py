"""`pip install shardwright` alone: what plans, checks and reports runs without torch and what is
built on it, and a command that needs more says which extra brings it, in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardwright.utils.installation import EXTRAS, recipes_folder
from tests.conftest import SMALL_RECIPE

ROOT = Path(__file__).resolve().parents[2]
RECIPES = recipes_folder()
MODULES = {
    "emerging-optimizers": "emerging_optimizers",
    "megatron-core": "megatron",
    "pillow": "PIL",
    "protobuf": "google",
}

"""Distribution -> its module, where they differ."""

# Runs commands where the modules of every extra cannot be imported or found.
WITHOUT_EXTRAS = """
import contextlib, io, json, sys, time

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in BLOCKED:
            return self.finder.find_spec(name, path, target)
    def find_distributions(self, context):
        if (context.name or "").replace("-", "_") in BLOCKED or context.name == "megatron-core":
            return ()
        return getattr(self.finder, "find_distributions", lambda context: ())(context)

BLOCKED = set(json.loads(sys.argv[1]))
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from shardwright.cli.main import main
results = []
for argv in json.loads(sys.argv[2]):
    out, err, start = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    results.append([code, out.getvalue(), err.getvalue(), time.process_time() - start])
print(json.dumps({"results": results, "modules": sorted(sys.modules)}))
"""
BLOCKED = sorted(EXTRAS.keys() | {"bokeh"} - {"google"})


def run_without_extras(
    commands: dict[str, list[str]], folder: Path, blocked: list[str] = BLOCKED
) -> tuple[dict[str, tuple[int, str, str, float]], set[str]]:
    """Name -> exit code, standard output, standard error and processor seconds; and the modules
    that were imported."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            WITHOUT_EXTRAS,
            json.dumps(blocked),
            json.dumps([*commands.values()]),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = dict(zip(commands, (tuple(each) for each in answer["results"]), strict=True))
    return found, set(answer["modules"])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    (folder / "ds_config.json").write_text(json.dumps(ds_config))
    own = {**SMALL_RECIPE, "model": {"config": {**SMALL_RECIPE["model"]["config"]}}}
    own["model"] |= {"weights": "random"}
    own["model"]["config"]["num_hidden_layers"] = 6
    (folder / "own.json").write_text(json.dumps(own))
    return folder


def test_commands_that_need_no_extra(inputs: Path) -> None:
    gpt2, llama = (str(RECIPES / f"{name}.yaml") for name in ("gpt2-xl-8xa100", "tiny-llama-cpu"))
    commands = {
        "plan MODEL": ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--top", "2"],
        "plan": ["plan", llama, "--top", "2"],
        "estimate": ["estimate", gpt2],
        "check": ["check", gpt2, llama],
        "lint": ["lint", "ds_config.json"],
        "lint --model": ["lint", "ds_config.json", "--model", "gpt2", "--gpu", "a100"],
        "import": ["import", "ds_config.json", "--launch", "deepspeed --num_gpus 8 train.py"],
        "explain": ["explain", gpt2],
        "explain CODE": ["explain", "SW3201"],
        "diff": ["diff", gpt2, llama],
        "init": ["init", "gpt2", "--gpu", "h100"],
        "schema": ["schema"],
        "models": ["models", "llama"],
    }
    found, modules = run_without_extras(commands, inputs)
    assert {name: code for name, (code, *_) in found.items()} == dict.fromkeys(commands, 0), found
    assert "why first" in found["plan MODEL"][1] and "our fault" not in str(found)
    assert not modules & set(BLOCKED)


def test_compiled_folders_are_read_without_extras(tmp_path: Path) -> None:
    from tests.report.folders import compiled, with_run

    folder = with_run(compiled(SMALL_RECIPE, tmp_path), 20)
    commands = {
        "explain": ["explain", str(folder)],
        "report": ["report", str(folder), "-o", "page.html"],
        "diff": ["diff", str(folder), str(folder)],
        "status": ["status", str(folder)],
    }
    found, modules = run_without_extras(commands, tmp_path)
    assert {name: code for name, (code, *_) in found.items()} == dict.fromkeys(commands, 0), found
    assert not modules & set(BLOCKED)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert 'id="chart-loss"' in page and "Bokeh.embed" in page
    refused, _ = run_without_extras({"run": ["run", str(folder)]}, tmp_path)
    code, _, err, _ = refused["run"]
    assert code == 1 and "error[SW6002]" in err and "pip install 'shardwright[train]'" in err
    assert err.count("error[") == 1 and "deepspeed" in err and "torch" in err


def test_a_command_that_needs_an_extra_names_it_in_one_line(inputs: Path) -> None:
    hf = inputs / "hf"
    hf.mkdir()
    (hf / "config.json").write_text('{"model_type": "gpt2"}')
    llama = str(RECIPES / "tiny-llama-cpu.yaml")
    commands = {
        "plan": ["plan", "own.json"],
        "check": ["check", "own.json"],
        "compile": ["compile", llama, "-o", "out"],
        "compile megatron": ["compile", llama, "-o", "out", "--set", "target=megatron"],
        "verify": ["verify", llama],
        "calibrate": ["calibrate", llama, "-o", "c.json"],
        "tune": ["tune", llama],
        "generate": ["generate", "hf", "--prompt", "x"],
        "completion": ["completion", "bash"],
    }
    extra = {"completion": "completion", "compile megatron": "megatron"}
    found, _ = run_without_extras(commands, inputs)
    code, out, _, _ = found.pop("check")
    assert code == 0 and out.startswith("ok own.json")
    for name, (code, _, err, _) in found.items():
        assert code == 1 and "our fault" not in err, (name, err)
        assert f"pip install 'shardwright[{extra.get(name, 'train')}]'" in err, (name, err)
        assert err.count("error[") == (2 if name == "compile megatron" else 1), (name, err)
    for name in ("plan", "verify", "calibrate", "tune", "generate"):
        first = next(line for line in found[name][2].splitlines() if line.startswith("error["))
        assert re.search(
            r"error\[SW1445\]: .* needs .*: pip install 'shardwright\[train\]'$", first
        )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["export", ".", "-o", "hf-out"], "SW6201"),
        (["export", "absent", "-o", "hf-out"], "SW6201"),
        (["generate", ".", "--prompt", "x"], "SW6402"),
        (["generate", "absent", "--prompt", "x"], "SW6402"),
    ],
)
def test_a_wrong_folder_is_refused_before_torch_is_imported(
    argv: list[str], words: str, tmp_path: Path
) -> None:
    found, modules = run_without_extras({"it": argv}, tmp_path, blocked=[])
    code, _, err, _ = found["it"]
    assert code == 1 and f"error[{words}]" in err
    assert not modules & {"torch", "transformers", "deepspeed", "numpy"}


def test_a_damaged_checkpoint_and_a_full_output_are_refused_before_torch_is_imported(
    tmp_path: Path,
) -> None:
    step = tmp_path / "step-00000001"
    step.mkdir()
    document: dict[str, Any] = {
        "version": 1,
        "step": 1,
        "optimizer_step": 1,
        "loss_scale": None,
        "rows": [],
        "data": {},
        "finite": True,
        "tensors": {},
    }
    document["files"] = [{"name": "a.safetensors", "size_bytes": 8}]
    (step / "manifest.json").write_text(json.dumps(document))
    (step / "SHA256SUMS").write_text(f"{'0' * 64}  a.safetensors\n")
    commands = {
        "export": ["export", str(step), "-o", "out"],
        "generate": ["generate", str(step), "--prompt", "x"],
    }
    found, modules = run_without_extras(commands, tmp_path, blocked=[])
    for code, _, err, _ in found.values():
        assert code == 1 and "error[SW6201]" in err and "a.safetensors is missing" in err
    (step / "a.safetensors").write_bytes(b"12345678")
    full = {"export": ["export", str(step), "-o", str(step)]}
    found, more = run_without_extras(full, tmp_path, blocked=[])
    assert "error[SW6401]" in found["export"][2]
    assert not (modules | more) & {"torch", "transformers"}


def test_the_table_of_extras_is_pyproject_tomls() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    installs = {
        MODULES.get(name, name): extra
        for extra in set(extras) - {"all", "dev", "test"}
        for name in (re.split(r"[^\w-]", text, maxsplit=1)[0] for text in extras[extra])
        if name != "shardwright"
    }
    assert installs.items() <= EXTRAS.items()
    # What these bring beside themselves.
    assert EXTRAS.keys() - installs.keys() == {"tokenizers", "pyarrow"}
    base = {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in project["dependencies"]}
    assert not base & EXTRAS.keys()
    assert set(extras["all"][0].partition("[")[2].rstrip("]").split(",")) == set(EXTRAS.values())
