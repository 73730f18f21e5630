"""What the tests without torch need, a requirement a line: `make test-light` installs it for another Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HEAVY = {"deepspeed", "torch", "transformers"}
TOOLS = {"hypothesis", "pytest", "pytest-xdist"}


def name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower()


def requirements() -> list[str]:
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    tools = [r for r in project["optional-dependencies"]["test"] if name(r) in TOOLS]
    return [r for r in project["dependencies"] if name(r) not in HEAVY] + tools


if __name__ == "__main__":
    print("\n".join(requirements()))
