"""`explain --trace` of real runs on this CPU: a planted slow layer, late rank and slow link are
each named first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch import profiled_loop_worker
from tests.parity.harness import must, shardwright

WORKER = Path(profiled_loop_worker.__file__)
SLOW_WRITES = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>
/* A link of 1 MB/s: gloo sends with writev. Small messages, such as the store's, go at once. */
ssize_t writev(int fd, const struct iovec *parts, int count) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  ssize_t sent = real(fd, parts, count);
  if (sent > 4096) usleep(sent);
  return sent;
}
"""


def recipe(folder: Path, ranks: int) -> Path:
    worker = profiled_loop_worker
    document = {
        "version": 1,
        "name": "profiled",
        "model": {"config": {"model_type": "llama", **worker.CONFIG}, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": ranks, "gpu": "cpu"},
        "training": {
            "sequence_length": worker.LENGTH,
            "global_batch_size": worker.ROWS * ranks,
            "steps": 10,
            "precision": "fp32",
        },
        "data": {"kind": "synthetic"},
        "parallelism": {
            "tensor": 1,
            "pipeline": 1,
            "data": ranks,
            "zero_stage": 0,
            "micro_batch_size": worker.ROWS,
            "activation_checkpointing": "none",
        },
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    return path


def profiled(folder: Path, ranks: int, planted: str, **environment: str) -> list[Path]:
    """Train, and return the trace of each rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(WORKER), str(folder), planted]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return [folder / f"{rank}.json" for rank in range(ranks)]


def explained(folder: Path, ranks: int, traces: list[Path]) -> tuple[dict[str, Any], str]:
    """Return the JSON and the first finding of the page."""
    words = ("explain", recipe(folder, ranks), "--trace", *traces)
    found = json.loads(must(shardwright(*words, "--json")).stdout)
    page = must(shardwright(*words)).stdout
    step = found["step"]["measured_seconds"]
    for trace in found["traces"]:
        seconds = sum(line["seconds"] for line in trace["lines"].values())
        assert seconds == pytest.approx(trace["step_seconds"])
    assert sum(line["measured_seconds"] for line in found["lines"]) == pytest.approx(step)
    (first, *_) = [line for line in page.splitlines() if line.startswith("  1. ")]
    return found, first


@pytest.mark.launch
def test_a_slow_layer_is_named_first(tmp_path: Path) -> None:
    found, first = explained(tmp_path, 1, profiled(tmp_path, 1, "layer"))
    assert first.startswith("  1. slow layer: layer 1 to 2, from attention to attention")
    slept = profiled_loop_worker.SLEEP_SECONDS
    assert found["causes"][0]["seconds"] == pytest.approx(slept, rel=0.25)
    assert not found["diagnostics"]


@pytest.mark.prove
@pytest.mark.launch
def test_a_late_rank_is_named_first_and_corrects_the_plan(tmp_path: Path) -> None:
    traces = profiled(tmp_path, 2, "rank")
    found, first = explained(tmp_path, 2, traces)
    assert first.startswith("  1. late rank: rank 1 comes last") and "its own idle (host)" in first
    slept = profiled_loop_worker.SLEEP_SECONDS
    assert found["causes"][0]["seconds"] == pytest.approx(slept, rel=0.4)
    path, file = recipe(tmp_path, 2), tmp_path / "measured.json"
    must(shardwright("explain", path, "--trace", *traces, "--calibrate", file))
    document = json.loads(path.read_text())
    document["cluster"]["measured"] = str(file)
    path.write_text(json.dumps(document))
    told = json.loads(must(shardwright("estimate", path, "--json")).stdout)
    assert told["time"]["step_seconds"] == pytest.approx(found["step"]["measured_seconds"])


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_slow_link_is_named_first(tmp_path: Path) -> None:
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_WRITES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    traces = profiled(tmp_path, 2, "none", LD_PRELOAD=str(library))
    found, first = explained(tmp_path, 2, traces)
    assert first.startswith("  1. slow link: the link of ranks 0, 1 is slow: all-reduce reaches")
    (link, *_) = found["causes"]
    assert link["kind"] == "slow_link" and link["seconds"] > 0.5
