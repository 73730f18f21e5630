"""`explain --trace`: the page, its JSON, the file of --calibrate, and the files that it refuses."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.trace.kernel_classes import LINES
from tests.cli.test_speed import LIGHT
from tests.unit.trace.test_memory_snapshot import a_step
from tests.unit.trace.trace_files import LAYERS, kernel, nccl, step_marks, write_trace

ROOT = Path(__file__).resolve().parents[3]


def recipe(folder: Path, gpus: int = 1, **cluster: Any) -> str:
    document = {
        "version": 1,
        "name": "traced",
        "model": {"source": "meta-llama/Llama-3.2-1B", "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": gpus, "gpu": "h100-sxm-80gb", **cluster},
        "training": {"sequence_length": 4096, "global_batch_size": gpus, "steps": 1000},
        "data": {"kind": "synthetic"},
        "parallelism": {"tensor": 1, "pipeline": 1, "data": gpus, "zero_stage": 1}
        | {"micro_batch_size": 1, "activation_checkpointing": "none"},
    }
    path = folder / "r.json"
    path.write_text(json.dumps(document))
    return str(path)


def trace(folder: Path, rank: int = 0, world: int = 1, late: float = 0.0) -> str:
    """Write a step of a rank that begins its all-reduce `late` milliseconds after the others."""
    first = 30 + late
    events = [
        kernel("matrix_products", 0, first),
        kernel("memory_bound", first, 60),
        *(kernel("attention", first + 60 + layer / 2, 0.5) for layer in range(LAYERS)),
        kernel("optimizer", 180, 12),
        *step_marks((0, 200)),
    ]
    if world > 1:
        events.append(nccl("all_reduce", first + 68, 170 - first - 68, 10**9, range(world)))
    return str(write_trace(folder / f"rank{rank}.json", events, rank=rank, world=world))


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["explain", *words]) == code
    found = capsys.readouterr()
    return found.out, found.err


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json")[0])


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, recipe(tmp_path), "--trace", trace(tmp_path))
    assert err == ""
    assert "measured 0.2 s" in out and "1 step on NVIDIA H100 80GB HBM3" in out
    (first, *_) = [line for line in out.splitlines() if line.startswith("  1. ")]
    assert "idle (host)" in first and "micro_batch_size" in first
    rows = [line.split("  ")[1] for line in out.splitlines() if line.startswith("  ")]
    assert {"memory-bound kernels", "matrix products", "attention", "optimizer"} <= set(rows)


def test_json_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, recipe(tmp_path), "--trace", trace(tmp_path))
    assert found["step"]["measured_seconds"] == pytest.approx(0.2)
    (one,) = found["traces"]
    assert set(one["lines"]) == set(LINES)
    assert sum(line["seconds"] for line in one["lines"].values()) == pytest.approx(0.2)
    assert sum(line["measured_seconds"] for line in found["lines"]) == pytest.approx(0.2)
    assert sum(line["predicted_seconds"] for line in found["lines"]) == pytest.approx(
        found["step"]["predicted_seconds"]
    )
    differences = [abs(line["difference_seconds"]) for line in found["lines"]]
    assert differences == sorted(differences, reverse=True)
    assert found["causes"] == [] and found["memory"] is None and found["calibration"] is None


def test_a_late_rank_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [trace(tmp_path, rank, 4, late=50.0 * (rank == 2)) for rank in range(4)]
    out, _ = run(capsys, recipe(tmp_path, 4), "--trace", *files)
    (first, *_) = [line for line in out.splitlines() if line.startswith("  1. ")]
    assert "late rank: rank 2 comes last to 1 of 1 collectives" in first
    assert "4 files, 1 step on NVIDIA H100 80GB HBM3, ranks 0, 1, 2, 3" in out
    found = told(capsys, recipe(tmp_path, 4), "--trace", *files)
    assert (found["causes"][0]["kind"], found["causes"][0]["subject"]) == ("late_rank", "rank 2")
    assert found["causes"][0]["seconds"] == pytest.approx(0.05)


def test_the_file_of_calibrate_is_taken_by_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = recipe(tmp_path), tmp_path / "measured.json"
    out, _ = run(capsys, path, "--trace", trace(tmp_path), "--calibrate", str(file))
    assert str(file) in out and "memory_efficiency" in out and "cluster.measured" in out
    again = recipe(tmp_path, measured="measured.json")
    capsys.readouterr()
    assert main(["estimate", again, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["time"]["step_seconds"] == pytest.approx(0.2)
    found = told(capsys, again, "--trace", trace(tmp_path))
    assert found["step"]["ratio"] == pytest.approx(1)
    assert not any(line["advice"] for line in found["lines"])


def test_a_memory_snapshot_beside_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "s.pickle"
    snapshot.write_bytes(pickle.dumps(a_step()))
    for files in ([str(snapshot)], [str(snapshot), trace(tmp_path)]):
        out, _ = run(capsys, recipe(tmp_path), "--trace", *files)
        assert "Memory of GPU 0, at the peak: GiB" in out and "activations" in out
        found = told(capsys, recipe(tmp_path), "--trace", *files)
        kinds = {row["kind"]: row for row in found["memory"]["kinds"]}
        assert kinds["activations"]["measured_bytes"] == 200
        assert kinds["activations"]["predicted_bytes"] > 2**30
        assert found["memory"]["advice"]
        assert (found["step"] is None) == (len(files) == 1)


def refusal(
    capsys: pytest.CaptureFixture[str], folder: Path, files: Sequence[str], code: str
) -> None:
    out, err = run(capsys, recipe(folder), "--trace", *files, code=1)
    assert out == "" and err.startswith(f"error[{code}]: ") and "= help: " in err
    capsys.readouterr()
    assert main(["explain", recipe(folder), "--trace", *files, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [d["code"] for d in document["diagnostics"]] == [code]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = trace(tmp_path)
    files = {
        "SW3311": None,
        "SW3312": b'{"compilerOptions": {}}',
        "SW3313": Path(good).read_bytes()[:-200],
        "SW3314": pickle.dumps(eval),
        "SW3315": json.dumps(
            [
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": "aten::mm",
                    "pid": 1,
                    "tid": 1,
                    "ts": 0,
                    "dur": 9,
                }
            ]
        ).encode(),
        "SW3316": b'{"traceEvents": []}',
    }
    for code, content in files.items():
        path = tmp_path / f"{code}.json"
        if content is not None:
            path.write_bytes(content)
        refusal(capsys, tmp_path, [str(path)], code)


def test_a_snapshot_alone_calibrates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, file = tmp_path / "s.pickle", tmp_path / "m.json"
    snapshot.write_bytes(pickle.dumps(a_step()))
    words = ("--trace", str(snapshot), "--calibrate", str(file))
    _, err = run(capsys, recipe(tmp_path), *words, code=1)
    assert "SW3317" in err and not file.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate", "m.json"], "--calibrate needs --trace FILE"),
        (["--steps", "3"], "--steps needs --trace FILE"),
        (["--trace", "t.json", "--why-not", "tensor=2"], "--trace and --why-not"),
        (["--trace", "t.json", "--calibrate", "none/m.json"], "none is not a folder"),
    ],
)
def test_usage(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run(capsys, recipe(tmp_path), *words, code=1)
    assert message in err


def test_a_code_has_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trace" in run(capsys, "SW3312", "--trace", "t.json", code=1)[1]


def test_without_torch_and_network(tmp_path: Path) -> None:
    words = ["explain", recipe(tmp_path), "--trace", trace(tmp_path), "--calibrate", "m.json"]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "compiler")},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "m.json").exists()
