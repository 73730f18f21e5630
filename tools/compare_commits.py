"""Whether two commits compile the same: every golden case and the plan of every ready recipe, byte
by byte.

    .venv/bin/python -m tools.compare_commits BASE [HEAD]

For moves, which may change nothing that a user sees. Each commit runs with its own package, in a
work tree of its own; the recipes are those of BASE, so that a recipe that was added is no
difference. Ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMINGS = ("search_seconds",)
"""Keys of `plan --json` that say how long the search took."""


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """path -> digest, twice. A line for each path that is in one of them only, or has other
    bytes."""
    lines = []
    for path in sorted(before.keys() | after.keys()):
        if path not in after:
            lines.append(f"gone     {path}")
        elif path not in before:
            lines.append(f"new      {path}")
        elif before[path] != after[path]:
            lines.append(f"changed  {path}")
    return lines


def outputs(tree: Path, inputs: Path, out: Path) -> dict[str, str]:
    """What the package in `tree` makes of the cases and recipes in `inputs`: path -> SHA-256, or
    the words of its refusal. out: an empty folder, in which everything stays to be looked at."""
    cases = sorted(path.parent for path in inputs.glob("tests/cases/*/recipe.yaml"))
    recipes = sorted(inputs.glob("recipes/*.yaml"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: _compile(tree, case, out / "cases" / case.name), cases))
        list(
            pool.map(
                lambda recipe: _plan(tree, recipe, out / "plans" / f"{recipe.stem}.json"), recipes
            )
        )
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def _compile(tree: Path, case: Path, out: Path) -> None:
    done = _shardwright(tree, case, "compile", "recipe.yaml", "-o", str(out))
    if done.returncode != 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "refused").write_text(done.stderr)


def _plan(tree: Path, recipe: Path, out: Path) -> None:
    done = _shardwright(tree, recipe.parent, "plan", recipe.name, "--json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_without_timings(done.stdout) if done.returncode == 0 else done.stderr)


def _without_timings(text: str) -> str:
    document = json.loads(text)
    return json.dumps({k: v for k, v in document.items() if k not in TIMINGS}, indent=1)


def _shardwright(tree: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "compiler"), "SHARDWRIGHT_CACHE": "off"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "shardwright", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _tree(commit: str, folder: Path) -> Path:
    subprocess.run(
        ["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True
    )
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", default="HEAD")
    parser.add_argument(
        "--keep", type=Path, help="a folder that does not exist: what both made stays there"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = given.keep or Path(scratch) / "out"
        trees = {name: Path(scratch) / name for name in ("base", "head")}
        try:
            base, head = (
                _tree(commit, trees[n])
                for n, commit in (("base", given.base), ("head", given.head))
            )
            before, after = outputs(base, base, out / "base"), outputs(head, base, out / "head")
        finally:
            for tree in trees.values():
                subprocess.run(
                    ["git", "worktree", "remove", "--force", str(tree)],
                    cwd=ROOT,
                    capture_output=True,
                )
    found = differences(before, after)
    print(
        "\n".join(found)
        if found
        else f"the same: {len(before)} files of {given.base} and {given.head}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
