"""`make generated`: runs every program that writes files of this repository, in an order in which
each finds what it reads.

ONLY="docs_pages golden" runs these alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN, UPDATE = "golden", "--update-golden"
GENERATORS = (
    # What installed packages take.
    "deepspeed_config_snapshot",
    "transformers_config_keys",
    "kubernetes_pod_fields",
    "megatron_argument_parser",
    "autoep_support",
    "bokeh_script",
    # What the planner reads.
    "support_matrix",
    "traced_graphs",
    # What the planner writes.
    GOLDEN,
    "recipe_plans",
    # Pages.
    "docs_pages",
    "lint_page",
    "command_outputs",
)


def command_of(generator: str) -> list[str]:
    if generator == GOLDEN:
        tests = ("tests/cases/test_cases.py", "tests/lint/test_rules.py")
        return [sys.executable, "-m", "pytest", "-q", "-k", "golden or bad_file", *tests, UPDATE]
    return [sys.executable, "-m", f"tools.generate.{generator}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.generate")
    parser.add_argument("only", nargs="*", metavar="GENERATOR", help=", ".join(GENERATORS))
    only = parser.parse_args().only
    if unknown := sorted(set(only) - set(GENERATORS)):
        parser.error(f"unknown generator {unknown[0]!r}: choose from {', '.join(GENERATORS)}")
    for generator in GENERATORS:
        if only and generator not in only:
            continue
        begun = time.monotonic()
        done = subprocess.run(command_of(generator), cwd=ROOT)
        if done.returncode != 0:
            print(f"{generator} failed with exit code {done.returncode}", file=sys.stderr)
            return 1
        print(f"{generator}: {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
