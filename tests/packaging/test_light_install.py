"""`make prove PIECES=light-install`: the wheel in a clean environment, with nothing but what it
requires, is small and plans at once.

The limit of a plan is in processor seconds, which other work on the machine does not lengthen much.
A machine that does nothing else takes as many seconds of the clock, which are recorded too."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES, MOST_SECONDS, ROUNDS = 150_000_000, 3.0, 3
COMES_WITH_VENV = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
PLAN = ("plan", "meta-llama/Llama-3.1-8B", "--gpu", "h100")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)


def seconds_of(*command: str | Path) -> tuple[float, float]:
    """Return wall-clock and processor seconds of the round that took least of the processor."""
    found = []
    for _ in range(ROUNDS):
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = run(*command)
        seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append((round(seconds, 2), round(used, 2)))
    return min(found, key=lambda each: each[1])


@pytest.mark.prove
def test_a_clean_install_is_small_and_plans_at_once(
    tmp_path: Path, proved: Callable[..., None]
) -> None:
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check")
    done = run(*build, "--outdir", tmp_path, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv/bin"
    pip = (programs / "python", "-m", "pip", "install", "--disable-pip-version-check")
    done = run(*pip, "-c", ROOT / "constraints.txt", wheel)
    assert done.returncode == 0, done.stderr[-2000:]
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    assert not {"torch", "transformers", "deepspeed", "bokeh"} & {
        p.name for p in packages.iterdir()
    }
    sizes: dict[str, int] = {}
    for path in packages.rglob("*"):
        top = path.relative_to(packages).parts[0]
        if not path.is_dir() and not top.startswith(COMES_WITH_VENV):
            sizes[top] = sizes.get(top, 0) + path.lstat().st_blocks * 512
    assert sum(sizes.values()) < MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:8]

    shardwright = programs / "shardwright"
    seconds, used = seconds_of(shardwright, *PLAN)
    assert used < MOST_SECONDS, (seconds, used)
    recipes = sorted((packages / "shardwright/_recipes").glob("*.yaml"))
    checked = run(shardwright, "check", *recipes)
    assert checked.returncode == 0, checked.stderr
    refused = run(shardwright, "compile", recipes[0], "-o", tmp_path / "out")
    assert refused.returncode == 1 and "pip install 'shardwright[train]'" in refused.stderr
    for folder in sorted(packages.rglob("__pycache__"), reverse=True):
        for path in folder.iterdir():
            path.unlink()
    bare = seconds_of(programs / "python", "-B", "-m", "shardwright", *PLAN)
    figures = {
        "megabytes": round(sum(sizes.values()) / 1e6),
        "packages": len([name for name in sizes if name.endswith(".dist-info")]),
        "first_plan_seconds": seconds,
        "first_plan_processor_seconds": used,
        "without_byte_code_processor_seconds": bare[1],
    }
    proved("light-install", f"python{sys.version_info[0]}.{sys.version_info[1]}", figures)
