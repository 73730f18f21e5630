"""The keys of a config.json that transformers reads for a configuration class, found by asking the
class.

A class takes its fields, but reads more: names that its __post_init__ takes from the keywords
(older files' names), and names that the modeling code reads with getattr. All other keywords become
attributes that nothing looks at.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig


@functools.cache
def config_class_keys(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """Return every key that `config_class`, its bases or its modeling code reads; metadata is not
    among them."""
    keys = {field.name for field in dataclasses.fields(config_class)} | set(
        config_class.attribute_map
    )
    keys |= _keyword_keys(config_class) | _flat_keys(config_class)
    keys |= {name for name in _modeling_keys(config_class) if not hasattr(PretrainedConfig, name)}
    keys |= set(
        GenerationConfig._get_default_generation_params()
    )  # read, and dropped, by the base class
    return frozenset(key for key in keys if not key.startswith("_"))


def _keyword_keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Names that the methods of the class and of its bases look up in their keywords."""
    methods = ["__init__", "__post_init__"]
    if "rope_parameters" in config_class.__dataclass_fields__:
        methods.append("convert_rope_params_to_dict")
    return {
        name
        for method in methods
        for base, source in _sources(config_class, method)
        for name in _looked_up(config_class, base, ast.parse(source))
    }


def _sources(config_class: type[PretrainedConfig], method: str) -> Iterator[tuple[type, str]]:
    """(class, source) of each definition of `method` that a call runs, the class's own first."""
    for base in config_class.__mro__:
        function = inspect.unwrap(vars(base).get(method, object))
        if not inspect.isfunction(function) or not function.__module__.startswith("transformers."):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function))
        except OSError:  # made by the dataclass decorator
            continue
        yield base, source
        if "super()" not in source and f".{method}(" not in source:
            return


def _looked_up(config_class: type, base: type, tree: ast.AST) -> Iterator[str]:
    """Strings that `kwargs.pop`, `.get`, `.setdefault`, `[...]` or `in kwargs` name, loops over
    names included."""
    loops = dict(_loops(config_class, tree))
    for node in ast.walk(tree):
        asked: ast.expr | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _is_kwargs(node.func.value)
        ):
            asked = (
                node.args[0]
                if node.args and node.func.attr in ("pop", "get", "setdefault")
                else None
            )
        elif isinstance(node, ast.Subscript) and _is_kwargs(node.value):
            asked = node.slice
        elif isinstance(node, ast.Compare) and _is_kwargs(node.comparators[0]):
            asked = node.left
        elif (
            base is not PretrainedConfig
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
        ):
            is_own = (
                node.func.id == "getattr"
                and isinstance(node.args[0], ast.Name)
                and node.args[0].id == "self"
            )
            asked = node.args[1] if is_own else None
        yield from _strings(asked, loops)


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "kwargs"


def _strings(node: ast.expr | None, loops: dict[str, list[str]]) -> Iterator[str]:
    """The values of a constant, of a loop's variable, or of an f-string that ends in such a
    variable."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name):
        yield from loops.get(node.id, ())
    elif isinstance(node, ast.JoinedStr):
        match node.values:
            case [ast.Constant(value=str(prefix)), ast.FormattedValue(value=ast.Name(id=variable))]:
                yield from (prefix + value for value in loops.get(variable, ()))


def _loops(config_class: type, tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Loop variable -> the strings it runs through, of loops over written names or a table of the
    class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.For | ast.comprehension):
            continue
        first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
        if not isinstance(first, ast.Name):
            continue
        written = [part.value for part in ast.walk(node.iter) if isinstance(part, ast.Constant)]
        tables = [
            getattr(config_class, part.attr, ())
            for part in ast.walk(node.iter)
            if isinstance(part, ast.Attribute)
        ]
        named = [
            name for table in tables if isinstance(table, dict | list | tuple) for name in table
        ]
        yield first.id, [name for name in (*written, *named) if isinstance(name, str)]


def _flat_keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Keys of a part that the class takes from the outermost level too, as Qwen2.5-VL's files are
    written: those that it hands on, instead of keeping them as attributes of its own."""
    given: dict[str, object] = {}
    for part in getattr(config_class, "sub_configs_defaults", {}).values():
        try:
            given |= part.default_config_fields()
        except Exception:  # a part whose class has no defaults
            continue
    given = {
        name: value
        for name, value in given.items()
        if not hasattr(config_class, name) and value is not None
    }
    try:
        kept = vars(config_class(**given))
    except Exception:  # the class refuses keys of its parts
        return set()
    return {name for name in given if name not in kept}


def _modeling_keys(config_class: type[PretrainedConfig]) -> set[str]:
    """Attributes that the modeling files beside the class read from a configuration of this
    class."""
    source = sys.modules[config_class.__module__].__file__
    if source is None or ".models." not in config_class.__module__:
        return set()
    names = {base.__name__ for base in config_class.__mro__}
    files = sorted(Path(source).parent.glob("modeling_*.py"))
    # Unannotated code of a model in parts may be that of any part.
    is_one = not getattr(config_class, "sub_configs_defaults", {})
    reads = (each for file in files for each in _reads(file))
    return {
        key for owners, keys in reads if owners & names or (is_one and not owners) for key in keys
    }


@functools.cache
def _reads(file: Path) -> tuple[tuple[frozenset[str], frozenset[str]], ...]:
    """(classes of the configuration that it is annotated with, attributes read) of each class and
    function."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return tuple((frozenset(_annotated(part)), frozenset(_attributes(part))) for part in body)


def _annotated(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        annotation: ast.expr | None = None
        match node:
            case ast.arg(arg="config") | ast.AnnAssign(target=ast.Name(id="config")):
                annotation = node.annotation
        for part in ast.walk(annotation) if annotation is not None else ():
            if isinstance(part, ast.Name):
                yield part.id


def _attributes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and _is_config(node.args[0])
            and isinstance(node.args[1], ast.Constant)
        ):
            yield str(node.args[1].value)


def _is_config(node: ast.expr) -> bool:
    """Whether the expression is `config` or `self.config`."""
    return (isinstance(node, ast.Name) and node.id == "config") or (
        isinstance(node, ast.Attribute)
        and node.attr == "config"
        and isinstance(node.value, ast.Name)
    )
