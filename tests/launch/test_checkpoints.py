"""One folder's checkpoints through what can happen to them: no place, a full disk, damage, copies
elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_manifest import damage
from shardwright.checkpoint.resume_checkpoint import choose_checkpoint
from shardwright.plan.plan import read_plan
from tests.parity.harness import STEPS, Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = pytest.mark.launch

FULL = """
import errno, os
import shardwright.checkpoint.checkpoint_saver as checkpoint
whole = checkpoint.save_safetensors
def full(tensors, path):
    if os.environ["RANK"] == "1" and "step-00000006" in str(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    whole(tensors, path)
checkpoint.save_safetensors = full
"""


def test_nothing_is_lost(tmp_path: Path) -> None:
    case = Case(model="llama", data=2)
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    store = tmp_path / "store"
    document["checkpoint"] = {"every_steps": 2, "keep": 2, "upload_to": f"file://{store}"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    root, script = out / "checkpoints", (out / "train.py").read_text()

    root.write_text("a file where the folder should be")
    refused = shardwright("run", out)
    assert refused.returncode == 1 and "error[SW6209]" in refused.stderr, refused.stderr
    assert not (out / "run" / "metrics.jsonl").exists()
    root.unlink()

    (out / "train.py").write_text(FULL + script)
    broken = shardwright("run", out)
    assert broken.returncode == 3, broken.stderr
    assert "error[SW6205]: rank 1 cannot write the checkpoint step-00000006" in broken.stderr
    assert "No space left on device" in broken.stderr and "Traceback" not in broken.stderr
    assert sorted(p.name for p in root.iterdir()) == ["step-00000002", "step-00000004"]
    assert all(damage(p, contents=True) is None for p in root.iterdir())
    (out / "train.py").write_text(script)

    newest = root / "step-00000004"
    data = newest / "rank-00001-000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])  # damaged here, whole in the store
    shutil.rmtree(root / "step-00000002")
    resumed = must(shardwright("run", out))
    assert "fetching step-00000004" in resumed.stdout
    assert [m["step"] for m in metrics(out)] == list(range(1, 9))
    for place in (root, store):
        kept = sorted(p for p in place.iterdir() if not p.name.startswith("."))
        assert [p.name for p in kept] == ["step-00000006", "step-00000008"]
        assert all(damage(p, contents=True) is None for p in kept)


@pytest.mark.prove
def test_a_run_that_diverges_ends_and_its_last_good_checkpoint_stays(tmp_path: Path) -> None:
    """A learning rate that no activation survives: the first loss is the last that is a number."""
    case = Case(model="gpt2", data=2)
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    store = tmp_path / "store"
    document["checkpoint"] = {"every_steps": 1, "keep": 1, "upload_to": f"file://{store}"}
    document["validation"] = {"fraction": 0.1, "every_steps": 2}
    document["training"] |= {"stop_after_nonfinite": 3, "steps": STEPS - 1}
    document["training"]["optimizer"]["lr"] = 1e30
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    ended = shardwright("run", out)
    assert ended.returncode == 3, ended.stderr
    assert (
        ended.stdout.count(
            "warning[SW6310]: step 2: the loss is nan; the run ends after 3 in a row"
        )
        == 1
    )
    assert "error[SW6311]: the loss is not finite in steps 2 to 4 (last: nan)" in ended.stderr
    assert "Traceback" not in ended.stderr

    run = out / "run"
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        read = [
            json.loads(line, parse_constant=pytest.fail)
            for line in (run / name).read_text().splitlines()
        ]
        assert [line["step"] for line in read] == ([1, 2, 3, 4] if name == "metrics.jsonl" else [2])
        assert [line.get("finite", True) for line in read] == [line["step"] == 1 for line in read]
    told = json.loads(must(shardwright("status", out, "--json")).stdout, parse_constant=pytest.fail)
    assert (told["status"], told["step"], told["loss"], told["finite"]) == (
        "failed",
        4,
        None,
        False,
    )
    assert "in steps 2 to 4" in told["cause"] and "training.optimizer.lr" in told["help"]

    for place in (out / "checkpoints", store):
        kept = sorted(path.name for path in place.glob("step-*"))
        assert kept == ["step-00000001", "step-00000003"], place
    chosen = choose_checkpoint(read_plan(out), out, "auto")
    assert chosen is not None and chosen.path.name == "step-00000001"
    assert chosen.notes[0].startswith("warning[SW6212]: step-00000003 was written after a loss")
