"""One folder's checkpoints through what can happen to them: no place, a full disk, damage, copies elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shardwright.runtime.checkpoint_manifest import damage
from tests.parity.harness import Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = pytest.mark.launch

FULL = """
import errno, os
import shardwright.runtime.checkpoint as checkpoint
whole = checkpoint.save_readable
def full(tensors, path):
    if os.environ["RANK"] == "1" and "step-00000006" in str(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    whole(tensors, path)
checkpoint.save_readable = full
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
