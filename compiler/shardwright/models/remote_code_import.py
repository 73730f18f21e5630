"""Import a model's own Python files, and register their classes with transformers.

The modules are made of exactly the bytes whose hashes were checked. Python's importer could take a
compiled module or an extension beside them, and transformers would copy the files to a shared cache
in the home folder, where the ranks of a node write at the same time.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from shardwright.models.model_files import RemoteCode
from shardwright.models.tasks.task_registry import CAUSAL_LM
from shardwright.utils.json_values import JsonObject


class NoRemoteClasses(ValueError):
    """auto_map does not name two classes in files beside it; it may name another repository or
    task."""


def needs_remote_code(config: JsonObject) -> bool:
    return "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING_NAMES


def read_remote_code(folder: Path, config: JsonObject) -> RemoteCode:
    """Read the files that config.json names, and run nothing.

    Raises NoRemoteClasses, OSError (a missing file), ValueError (a file outside the folder).
    """
    auto_map, model_key = config.get("auto_map"), CAUSAL_LM.auto_class.__name__
    classes = auto_map if isinstance(auto_map, dict) else {}
    references = [classes.get("AutoConfig"), classes.get(model_key)]
    if not all(isinstance(r, str) and r.count(".") == 1 and "--" not in r for r in references):
        raise NoRemoteClasses(
            f"auto_map in its config.json names no AutoConfig and {model_key} in files beside it"
        )
    config_class, model_class = map(str, references)
    modules = {
        folder / f"{reference.partition('.')[0]}.py" for reference in (config_class, model_class)
    }
    beside = {Path(path) for module in modules for path in get_relative_import_files(str(module))}
    files = sorted((modules | beside), key=str)
    return RemoteCode(
        config_class=config_class,
        model_class=model_class,
        files=tuple(
            (path.relative_to(folder).as_posix(), _sha256(path.read_bytes())) for path in files
        ),
    )


def register(folder: Path, code: RemoteCode) -> None:
    """Import and register the two classes. Raises ValueError for changed files, and anything the
    files raise."""
    package = f"shardwright_own_code_{code.fingerprint[:16]}"
    sources: dict[str, bytes] = {}
    for file, sha256 in code.files:
        name, _, suffix = file.partition(".")
        if not name.isidentifier() or suffix != "py":
            raise ValueError(f"{file!r} is not a Python file beside config.json")
        content = (folder / file).read_bytes()
        if _sha256(content) != sha256:
            raise ValueError(f"{file} is not the file that was compiled")
        sources[f"{package}.{name}"] = content
    if package not in sys.modules:
        specification = ModuleSpec(package, None, is_package=True)
        specification.submodule_search_locations = []  # nothing is looked for on the disk
        sys.modules[package] = importlib.util.module_from_spec(specification)
        sys.meta_path.append(_Sources(folder, sources))
    config_class = _class(package, code.config_class, PretrainedConfig)
    model_class = _class(package, code.model_class, PreTrainedModel)
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    CAUSAL_LM.auto_class.register(config_class, model_class, exist_ok=True)


class _Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import modules from bytes, by their full names.

    folder: where a traceback looks for their lines.
    """

    def __init__(self, folder: Path, sources: Mapping[str, bytes]) -> None:
        self.folder, self.sources = folder, sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.sources:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path(fullname), loader=self)

    def is_package(self, fullname: str) -> bool:
        return False

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.sources[fullname], self._path(fullname))

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.sources[fullname])

    def _path(self, fullname: str) -> str:
        return str(self.folder / f"{fullname.rpartition('.')[2]}.py")


def _class(package: str, reference: str, base: type) -> Any:
    module, _, name = reference.partition(".")
    found = getattr(importlib.import_module(f"{package}.{module}"), name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"{reference} is no {base.__name__}")
    return found


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
