"""`shardwright score`, through the real launcher: killed and started again, of a checkpoint, and as
the reference of preference training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.data.score_files import TRAIN, VALIDATION, ScoreFile
from tests.launch.wait_until import wait_for
from tests.parity.harness import LENGTH, Case, metrics, must, recipe, shardwright
from tests.parity.models import MODELS
from tests.parity.preference import PreferenceCase, write_pairs

pytestmark = pytest.mark.launch

CASE = Case(model="llama", data=2)
BLOCK = 20


def written(folder: Path, sequences: int, steps: int = 2) -> Path:
    """A recipe with a fifth of its sequences held out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(5).integers(0, 257, (sequences, LENGTH), dtype=np.int32)
    np.save(folder / "tokens.npy", tokens)
    document = recipe(CASE, folder)
    document["training"] |= {
        "steps": steps,
        "scheduler": {"name": "constant", "warmup_steps": 0},
    }
    document["validation"] = {"fraction": 0.2, "every_steps": steps}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return folder / "recipe.yaml"


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 of the command, the launcher and the ranks."""
    own = psutil.Process(process.pid)
    all_processes = [own, *own.children(recursive=True)]
    for each in all_processes:
        each.kill()
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(all_processes, timeout=60)
    assert not alive


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwright", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.prove
def test_a_killed_score_goes_on_from_its_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, 60 * BLOCK)
    options = (path, "--top", 3, "--block", BLOCK, "-o")
    must(shardwright("score", *options, tmp_path / "whole"))
    out, parts = tmp_path / "killed", tmp_path / "killed.parts"
    process = start("score", *options, out)
    wait_for(lambda: len(list(parts.glob("run/scores/*/train-*.safetensors"))) > 2, process)
    kill_all(process)
    assert not out.exists()
    kept = {
        block.name: block.stat().st_mtime_ns
        for block in parts.glob("run/scores/*/*.safetensors")
        if not block.name.startswith(".")
    }
    assert len(kept) < 60, "the score was over before it was killed"
    again = must(shardwright("score", *options, out)).stdout
    assert f"{len(kept)} of 60 blocks were computed before" in again
    assert f"of {(60 - len(kept)) * BLOCK:,} examples" in again
    assert not parts.exists()
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    whole = tmp_path / "whole"
    files = {each.name for each in out.iterdir()}
    assert files == {each.name for each in whole.iterdir()}
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in files)
    refused = shardwright("score", *options, out)
    assert refused.returncode == 1
    assert "SW1240" in refused.stderr


@pytest.mark.prove
def test_a_checkpoint_is_evaluated(tmp_path: Path) -> None:
    path, out = written(tmp_path, 80), tmp_path / "out"
    must(shardwright("compile", path, "-o", out))
    must(shardwright("run", out))
    (line,) = (out / "run" / "evaluation.jsonl").read_text().splitlines()
    printed = must(shardwright("score", out, "-o", tmp_path / "scores")).stdout
    held_out = ScoreFile(tmp_path / "scores").manifest.parts[VALIDATION]
    assert held_out.loss == pytest.approx(json.loads(line)["loss"], rel=1e-6)
    assert f"held-out  loss {held_out.loss:.6f}" in printed
    assert held_out.tokens == 16 * (LENGTH - 1)
    assert not list(tmp_path.glob("scores.*"))


def preference_recipe(folder: Path, name: str, **objective: object) -> Path:
    """Trains two steps of DPO; `other` is a smaller model."""
    write_pairs(PreferenceCase(model="llama", data=2), folder)
    document = json.loads((folder / "recipe.yaml").read_text())
    document["training"] |= {
        "steps": 2,
        "objective": {"name": "dpo", "beta": 0.3, **objective},
        "scheduler": {"name": "constant", "warmup_steps": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(document))
    return path


def other_model(folder: Path, **changes: object) -> None:
    fields: dict[str, Any] = {**MODELS["llama"], "hidden_size": 32, **changes}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder)


def test_another_model_is_the_reference(tmp_path: Path) -> None:
    other_model(tmp_path / "other")
    path, out = preference_recipe(tmp_path, "model", reference="other"), tmp_path / "model"
    must(shardwright("compile", path, "-o", out))
    must(shardwright("run", out))
    (scores,) = (out / "run" / "reference").iterdir()
    assert ScoreFile(scores).manifest.sequences_per_example == 2
    # Its score file, in a run of its own.
    scores.rename(tmp_path / "scores")
    path = preference_recipe(tmp_path, "file", reference="scores", reference_model="other")
    must(shardwright("compile", path, "-o", tmp_path / "file"))
    printed = must(shardwright("run", tmp_path / "file")).stdout
    assert "scored" not in printed
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("model", "file")]
    assert losses[0] == losses[1]
    assert abs(losses[0][0] - np.log(2)) > 1e-3, "the model was its own reference"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("changes", "named"),
    [({}, "the model's weights"), ({"sequence_length": LENGTH - 2}, "the sequence length")],
)
def test_other_scores_are_no_reference(changes: dict[str, int], named: str, tmp_path: Path) -> None:
    """Nothing is started."""
    path = preference_recipe(tmp_path, "first")
    must(shardwright("score", path, "-o", tmp_path / "scores"))
    assert ScoreFile(tmp_path / "scores").manifest.parts[TRAIN].tokens
    path = preference_recipe(tmp_path, "second", reference="scores")
    document = json.loads(path.read_text())
    document["training"] |= changes or {"seed": 99}
    path.write_text(json.dumps(document))
    must(shardwright("compile", path, "-o", tmp_path / "out"))
    refused = shardwright("run", tmp_path / "out")
    assert refused.returncode == 1
    assert "SW6271" in refused.stderr
    assert named in refused.stderr
    assert not (tmp_path / "out" / "run" / "attempt.json").exists()


SMALL_BLOCKS = """
import time
from shardwright.train import score_blocks
score_blocks.BLOCK_VALUES = 512
_pack_block = score_blocks.pack_block
def _slowed(*arguments):
    time.sleep(0.3)
    return _pack_block(*arguments)
score_blocks.pack_block = _slowed
"""
"""Before the compiled folder's own script: many blocks, which take their time."""


@pytest.mark.prove
def test_a_preference_run_killed_while_it_scores_loses_nothing(tmp_path: Path) -> None:
    path = preference_recipe(tmp_path, "dpo")
    for name in ("whole", "killed"):
        must(shardwright("compile", path, "-o", tmp_path / name))
        script = tmp_path / name / "train.py"
        script.write_text(SMALL_BLOCKS + script.read_text())
    must(shardwright("run", tmp_path / "whole"))
    whole = sorted((tmp_path / "whole").glob("run/reference/*/*.safetensors"))
    out = tmp_path / "killed"
    process = start("run", out)
    wait_for(lambda: len(list(out.glob("run/reference/*/train-*.safetensors"))) > 1, process)
    kill_all(process)
    blocks = out.glob("run/reference/*/train-*.safetensors")
    kept = {p.name: p.stat().st_mtime_ns for p in blocks}
    assert 1 < len(kept) < len(whole)
    must(shardwright("run", out))
    found = sorted(out.glob("run/reference/*/*.safetensors"))
    assert [p.relative_to(out) for p in found] == [p.relative_to(tmp_path / "whole") for p in whole]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(found, whole, strict=True))
    assert {p.name: p.stat().st_mtime_ns for p in found if p.name in kept} == kept
    losses = [m["loss"] for m in metrics(tmp_path / "whole")]
    assert [m["loss"] for m in metrics(out)] == losses
    # The run's own score file is the reference of another run.
    path = preference_recipe(tmp_path, "again", reference=str(found[0].parent))
    must(shardwright("compile", path, "-o", tmp_path / "again"))
    must(shardwright("run", tmp_path / "again"))
    assert not (tmp_path / "again" / "run" / "reference").exists()
    assert [m["loss"] for m in metrics(tmp_path / "again")] == losses
