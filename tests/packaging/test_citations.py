"""Pages, comments and docstrings cite no file and no room that is not there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import deepspeed
import pytest

import shardwright

PACKAGE = Path(shardwright.__file__).parent
ROOT = PACKAGE.parents[1]
PATHS = re.compile(r"(?<![\w/.{}*<-])((?:\w+/)+\w+\.py)\b(?!\.)")
FOLDERS = re.compile(r"`(?:shardwright/)?([a-z_]+(?:/[a-z_]+)*)/`")
NO_ROOMS = {"accelerate", "checkpoints", "expected", "run", "src", "tokenizer"}
"""Folders that a compile or a run writes, and one that was decided against."""
DEEPSPEED = Path(deepspeed.__file__).parent
MEGATRON = importlib.util.find_spec("megatron")
"""Of an optional extra: where it is not installed, its files are taken to be there."""
LATER = (
    "megatron/training/",
    "megatron/core/models/hybrid/",
    "megatron/core/transformer/mla_qk_norm_config.py",
)
"""In its wheels from 0.17 or 0.19 on, which want a later Python than the oldest that is tested
here."""
_MEGATRON = [Path(MEGATRON.submodule_search_locations[0]).parent] if MEGATRON else []  # type: ignore[index]
BASES = (
    *_MEGATRON,
    ROOT,
    ROOT / "compiler",
    PACKAGE,
    DEEPSPEED.parent,
    DEEPSPEED,
    DEEPSPEED / "runtime",
)
OWN_BASES = (ROOT, ROOT / "compiler", PACKAGE)
MADE_UP = {
    "tests/packaging/test_citations.py",
    "tests/tools/test_prove.py",
    "tests/unit/models/test_cache.py",
    "compiler/shardwright/data/indexed_dataset.py",  # Megatron-LM's file
}
"""Names files that are not of this repository."""


def prose() -> list[Path]:
    """Return the pages, comments and docstrings, which cite files."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").rglob("*.md")]
    code = [
        path for folder in ("compiler", "tests", "tools") for path in (ROOT / folder).rglob("*")
    ]
    kinds = (".py", ".md", ".toml")
    left_out = [ROOT / name for name in MADE_UP]
    return [path for path in [*pages, *code] if path.suffix in kinds and path not in left_out]


def there(path: str, beside: Path) -> bool:
    if path.startswith("megatron/") and (MEGATRON is None or path.startswith(LATER)):
        return True
    if (ROOT / "templates" / f"{path}.j2").exists():  # a compile writes it
        return True
    return any((base / path).exists() for base in [*BASES, beside.parent])


def cited(path: Path) -> list[str]:
    """The Python files, and of the package's own pages the rooms, that a text names and that are
    not there."""
    text = path.read_text(encoding="utf-8")
    missing = [name for name in PATHS.findall(text) if not there(name, path)]
    if path.suffix == ".md" and path.is_relative_to(ROOT / "compiler"):
        missing += [
            f"{name}/"
            for name in FOLDERS.findall(text)
            if name.split("/")[0] not in NO_ROOMS
            and not any((base / name).exists() for base in [*OWN_BASES, path.parent])
        ]
    return missing


def test_no_file_or_room_is_cited_that_is_not_there() -> None:
    assert {str(path.relative_to(ROOT)): names for path in prose() if (names := cited(path))} == {}


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        ("compiler/README.md", "`cost/` and cost/layer_shapes.py", []),
        (
            "compiler/README.md",
            "`runtime/` and runtime/launcher.py",
            ["runtime/launcher.py", "runtime/"],
        ),
        ("docs/x.md", "DeepSpeed's runtime/pipe/engine.py and pipe/engine.py", []),
        ("docs/x.md", "tests/nothing/test_here.py", ["tests/nothing/test_here.py"]),
    ],
)
def test_the_search_finds_what_is_gone(
    name: str, text: str, missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert cited(tmp_path / name) == missing
