"""Name the packages that a tokenizer's files need, without numpy or transformers (for `check`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.utils.installation import install_command

INSTALL = install_command("sentencepiece")


def missing_packages(folder: Path) -> tuple[str, ...]:
    """Return the packages that the tokenizer in `folder` needs and that are not installed.

    Only a tokenizer.model has to be converted.
    """
    if (folder / "tokenizer.json").is_file():
        return ()
    needed: set[str] = set()
    for path in folder.glob("*.model"):
        try:
            with path.open("rb") as file:
                # SentencePiece writes a protocol buffer that starts with a message; tiktoken, text.
                needed |= {"sentencepiece", "protobuf"} if file.read(1) == b"\n" else {"tiktoken"}
        except OSError:
            continue
    return tuple(sorted(name for name in needed if not _is_installed(name)))


def _is_installed(package: str) -> bool:
    try:
        return (
            importlib.util.find_spec({"protobuf": "google.protobuf"}.get(package, package))
            is not None
        )
    except (ImportError, ValueError):
        return False


def missing_packages_warning(folder: Path, key: KeyPath) -> Iterator[Diagnostic]:
    """Yield a warning where `prepare` could not read the tokenizer on this machine."""
    if missing := missing_packages(folder):
        yield found(
            "SW1454",
            key,
            f"the tokenizer in {str(folder)!r} has no tokenizer.json: `prepare` and `run` need the "
            f"package {' and '.join(missing)}, which this machine does not have",
            f"Run {INSTALL} where they run.",
            severity="warning",
        )
