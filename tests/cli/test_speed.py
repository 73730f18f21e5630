"""The light commands answer at once: --help within 0.15 s and check within 0.6 s, medians of ten, without torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command import GOOD

ROUNDS, RUNS = 3, 10


def seconds(command: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


@pytest.mark.parametrize(("arguments", "limit"), [(["--help"], 0.15), (["check", "r.yaml"], 0.6)])
def test_median_of_ten(arguments: list[str], limit: float, tmp_path: Path) -> None:
    """Another job may slow one round down; a command that is slow by itself fails all three."""
    (tmp_path / "r.yaml").write_text(GOOD)
    command = [sys.executable, "-m", "shardwright", *arguments]
    seconds(command, tmp_path)  # the byte code is compiled once
    medians: list[float] = []
    for _ in range(ROUNDS):
        medians.append(statistics.median(seconds(command, tmp_path) for _ in range(RUNS)))
        if medians[-1] <= limit:
            return
    pytest.fail(f"{' '.join(arguments)}: medians {medians} s, allowed {limit} s (load {os.getloadavg()[0]:.1f})")


@pytest.mark.parametrize("arguments", [["--help"], ["check", "r.yaml"]])
def test_no_torch(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    program = (
        "import sys; from shardwright.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'deepspeed', 'jinja2'} & {name.partition('.')[0] for name in sys.modules}; "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
