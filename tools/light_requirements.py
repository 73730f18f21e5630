"""Print what `make test-light` and `make lint-light` install under another Python, where neither
torch nor what is built on it is.

python -m tools.light_requirements   a requirement a line
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {"hypothesis", "import-linter", "jsonschema", "pytest", "pytest-xdist", "ruff"}


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [*project["optional-dependencies"]["test"], *project["optional-dependencies"]["dev"]]
    return [*project["dependencies"], *(r for r in extras if _name(r) in TOOLS)]


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    print("\n".join(requirements()))
