"""Where the data folders are: inside an installed package, or at the top of the repository in an
editable install."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_REPOSITORY = _PACKAGE.parent.parent


def templates_folder() -> Path:
    """The Jinja2 templates of the launch files."""
    return _folder("templates")


def recipes_folder() -> Path:
    """The ready recipes."""
    return _folder("recipes")


def _folder(name: str) -> Path:
    # pyproject.toml copies <name>/ to shardwright/_<name>/ in a wheel.
    packaged = _PACKAGE / f"_{name}"
    return packaged if packaged.is_dir() else _REPOSITORY / name
