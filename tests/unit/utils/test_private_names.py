"""Private names of other packages: the table, what it finds, and that it is complete."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardwright
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils import private_names
from shardwright.utils.installation import installed_version
from shardwright.utils.private_names import (
    PRIVATE_NAMES,
    VERIFIED_VERSIONS,
    PrivateNames,
    private_name_errors,
)

SOURCES = Path(shardwright.__file__).parent
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
PACKAGES = ("deepspeed", "megatron", "peft", "torch", "torchao", "transformers")
# Modules whose names are documented, or which versions may lack.
PUBLIC = {
    *("deepspeed.accelerator", "deepspeed.pipe", "torchao.float8", "transformers.utils"),
    *("megatron.core", "megatron.core.distributed", "megatron.core.models.gpt"),
    *("megatron.core.pipeline_parallel", "transformers.utils.chat_template_utils"),
    # megatron-core 0.19 alone has them, and rules refuse 0.16 where they are needed.
    "megatron.core.models.hybrid.hybrid_block",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer.emerging_optimizers",
    # It does not come with megatron-core; the check that imports it says so.
    "megatron.training",
    # Checks of the compile, in processes of their own.
    "torch.testing._internal.distributed.fake_pg",
}
# Attributes of torch's tensors and modules, of torch.ops, and of Python's own classes; what is set
# where a version lacks it.
PYTHON = {
    *("register_parameter", "te_general_gemm"),
    *("_base", "_buffers", "_cdata", "_modules", "_non_persistent_buffers_set", "_parameters"),
    *("_grouped_mm", "_scaled_dot_product_efficient_attention", "_version"),
    *("_scaled_dot_product_efficient_attention_backward", "_get_sequence_number_for_group"),
    *("_actions", "_current_frames", "_exit", "_fields", "_replace", "_run_exitfuncs"),
}


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=lambda row: row.module)
def test_the_installed_package_has_the_names(row: PrivateNames) -> None:
    top = row.module.partition(".")[0]
    pytest.importorskip(top)
    assert private_names._missing(row) == []
    if top == "megatron":  # to import it takes a GPU, or the patches of torch
        return
    module = importlib.import_module(row.module)
    for name in row.names:
        owner, _, attribute = name.rpartition(".")
        found = getattr(module, owner) if owner else module
        if attribute.startswith("__") and not attribute.endswith("__"):
            attribute = f"_{owner}{attribute}"
        is_of_instances = re.search(
            rf"(?:self|lp_param)\.{attribute}\b.*=", Path(str(module.__file__)).read_text()
        )
        assert hasattr(found, attribute) or is_of_instances, name


@pytest.mark.parametrize("package", VERIFIED_VERSIONS)
def test_the_pinned_version_is_among_those_that_have_the_names(package: str) -> None:
    (*_, newest) = re.findall(rf"^{package}==([^\s;]+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert newest in VERIFIED_VERSIONS[package]


LAYOUT = {"tensor": 1, "pipeline": 1, "data": 1, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("module", "name", "needing", "other", "purpose"),
    [
        (
            "transformers.masking_utils",
            "remap_positions_for_packed_sequence",
            {"context": 2},
            {"tensor": 2},
            "context parallelism",
        ),
        (
            "deepspeed.runtime.pipe.module",
            "_local_start",
            {"pipeline": 2, "micro_batch_size": 1},
            {"context": 2},
            "a pipeline under DeepSpeed",
        ),
        ("deepspeed.utils.bwc", None, {"tensor": 2}, None, "every run under DeepSpeed"),
    ],
)
def test_compile_refuses_the_layout_that_needs_a_missing_name(
    module: str,
    name: str | None,
    needing: dict[str, int],
    other: dict[str, int] | None,
    purpose: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    write_recipe: Callable[..., Path],
) -> None:
    """The package is a copy of the module alone, without the name."""
    pytest.importorskip("deepspeed")
    source = Path(str(importlib.import_module(module).__file__))
    rows = tuple(row for row in PRIVATE_NAMES if row.module == module)
    copy = tmp_path.joinpath("packages", *module.split(".")).with_suffix(".py")
    copy.parent.mkdir(parents=True)
    if name is not None:
        copy.write_text(re.sub(rf"\b{name}\b", "renamed", source.read_text()))
    top = copy.parents[module.count(".") - 1]
    top.joinpath("__init__.py").touch()
    spec = importlib.machinery.PathFinder.find_spec(top.name, [str(top.parent)])
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", rows)
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: spec)

    def compiled(layout: dict[str, int]) -> None:
        changes = {"parallelism": {**LAYOUT, **layout}, "cluster.gpus_per_node": 2}
        compile_recipe(load_recipe(write_recipe(changes)))

    with pytest.raises(Refusal) as refused:
        compiled(needing)
    (error,) = refused.value.diagnostics
    package = module.partition(".")[0]
    missing = module if name is None else name
    assert error.code == "SW1926"
    assert error.message.startswith(f"{package} {installed_version(package)} has no {module}")
    assert missing in error.message and error.message.endswith(f", which {purpose} needs")
    assert f"pip install '{package}=={VERIFIED_VERSIONS[package][-1]}'" in error.help
    if other is not None:
        compiled(other)


def test_a_package_that_is_not_installed_lacks_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    assert private_name_errors(*(row.purpose for row in PRIVATE_NAMES)) == ()


@pytest.mark.parametrize(
    ("source", "has_it"),
    [
        ("def wanted():\n", True),
        ("class wanted(Base):\n", True),
        ("    async def wanted(self):\n", True),
        ("wanted = 1\n", True),
        ("        self.wanted: int = 1\n", True),
        ("first, wanted = 1, 2\n", True),
        ("from somewhere import (\n    other,\n    wanted,\n)\n", True),
        ("from somewhere import other, wanted\n", True),
        ("def unwanted():\n    return wanted\n", False),
        ("# wanted is gone\nif x.wanted == 1:\n    call(wanted)\n", False),
        ("def wanted_more():\n", False),
    ],
)
def test_what_binds_a_name(source: str, has_it: bool) -> None:
    assert private_names._binds(source, "wanted") == has_it


def test_every_private_name_of_the_sources_is_in_the_table() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    known = {row.module.rpartition(".")[2] for row in PRIVATE_NAMES}
    known |= {part for row in PRIVATE_NAMES for name in row.names for part in name.split(".")}
    missing = {
        f"{path.relative_to(SOURCES)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in _foreign_private_names(tree, own)
        if name not in known
    }
    assert not missing, "add them to utils/private_names.py"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from transformers import x\nx.y._hidden()", ["_hidden"]),
        ("import deepspeed as d\nd.engine.step = None", ["step"]),
        ("from deepspeed import ops\nsetattr(ops, 'name', 1)", ["name"]),
        ("from transformers import x\nwith patch.object(x.y, 'name', 1): pass", ["name"]),
        ("from deepspeed.runtime.utils import norm", ["norm"]),
        ("from torch.distributed import _internal", ["_internal"]),
        ("def f(engine):\n    return engine.optimizer._masters", ["_masters"]),
        ("from torch import nn\nnn.functional.relu(x._parameters)", []),
        ("from transformers import AutoConfig\nself._own = AutoConfig.for_model", []),
    ],
)
def test_a_private_name_is_found(source: str, found: list[str]) -> None:
    tree = ast.parse(source)
    assert [name for _, name in _foreign_private_names(tree, set(_own_names(tree)))] == found


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Names that this project gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if _root(node.value) in ("self", "cls") else []


def _foreign_private_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each name that is private, comes from an undocumented module of another
    package, or is replaced in one."""
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.asname or each.name.partition(".")[0] for each in node.names]
            foreign |= {
                n for n, each in zip(names, node.names, strict=True) if _is_foreign(each.name)
            }
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module or ""):
            module = str(node.module)
            foreign |= {each.asname or each.name for each in node.names}
            is_private = "._" in module or ("." in module and not module.startswith("torch."))
            for each in node.names:
                if module not in PUBLIC and (is_private or each.name.startswith("_")):
                    yield node.lineno, each.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in PYTHON:
            is_replaced = isinstance(node.ctx, ast.Store) and _root(node) in foreign - {"torch"}
            if is_replaced or (re.match(r"_[^_]", node.attr) and node.attr not in own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("patch.object", "setattr"):
            owner, name = node.args[0], node.args[1]
            if isinstance(name, ast.Constant) and name.value not in PYTHON:
                yield from [(node.lineno, str(name.value))] if _root(owner) in foreign else []


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _root(node: ast.AST) -> str:
    """Return the name before the first dot."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
