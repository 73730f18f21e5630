"""Loads a model's own Python files and tells transformers' Auto classes of them: code that was trusted by name only.

The files are imported from where they lie. transformers would copy them to a cache in the home folder first, where the
ranks of a node write at the same time.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files

from shardwright.ir.own_code import OwnCode


def describe(folder: Path, config_class: str, model_class: str) -> OwnCode:
    """Reads the files, runs nothing. Raises OSError where one is missing, ValueError where one lies elsewhere."""
    modules = {folder / f"{reference.partition('.')[0]}.py" for reference in (config_class, model_class)}
    beside = {Path(path) for module in modules for path in get_relative_import_files(str(module))}
    files = sorted((modules | beside), key=str)
    return OwnCode(
        config_class=config_class,
        model_class=model_class,
        files=tuple((path.relative_to(folder).as_posix(), _sha256(path)) for path in files),
    )


def register(folder: Path, code: OwnCode) -> None:
    """Imports the two classes and registers them. Raises whatever the files raise; ValueError where they are not the
    ones that `code` describes."""
    for name, sha256 in code.files:
        if _sha256(folder / name) != sha256:
            raise ValueError(f"{name} is not the file that was compiled")
    package = f"shardwright_own_code_{fingerprint(code)[:16]}"
    if package not in sys.modules:
        specification = importlib.machinery.ModuleSpec(package, None, is_package=True)
        specification.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(specification)
    config_class, model_class = _class(package, code.config_class), _class(package, code.model_class)
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def fingerprint(code: OwnCode) -> str:
    """sha256 (hex) over all the files' names and contents."""
    return hashlib.sha256(repr(code.files).encode()).hexdigest()


def _class(package: str, reference: str) -> Any:
    module, _, name = reference.partition(".")
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no __pycache__ in the compiled folder
    try:
        return getattr(importlib.import_module(f"{package}.{module}"), name)
    finally:
        sys.dont_write_bytecode = bytecode


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
