"""Which keys hold paths, and what a relative one is relative to: the file that holds it."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable

from shardwright.recipe.recipe_nodes import ListNode, MapNode, Node, ScalarNode
from shardwright.recipe.recipe_types import BUILT_IN_DATASETS

GLOB_KINDS = ("text", "jsonl", "parquet", "chat")

# "*" stands for every item of a list.
_PATH_KEYS: tuple[tuple[str, ...], ...] = (
    ("data", "path"),
    ("data", "mixture", "*", "path"),
    ("data", "images", "folder"),
    ("data", "mixture", "*", "images", "folder"),
    ("validation", "images", "folder"),
    ("validation", "path"),
    ("cluster", "measured"),
    ("cluster", "measured", "file"),
    ("launch", "hostfile"),
    ("launch", "setup_script"),
)
_FOLDER_OR_NAME_KEYS: tuple[tuple[str, ...], ...] = (
    ("model", "source"),
    ("model", "trust_remote_code"),
    ("data", "tokenizer"),
    ("data", "mixture", "*", "tokenizer"),
    ("validation", "tokenizer"),
)


def is_folder(text: str, directory: str) -> bool:
    """Whether a model source or tokenizer is a folder rather than a hub name; `directory`: of the
    file that says so."""
    if text in ("byte", "auto"):
        return False
    return (
        text.startswith(("./", "../", "/", "~"))
        or text in (".", "..")
        or os.path.isdir(os.path.join(directory, text))
    )


def absolute_path(text: str, directory: str) -> str:
    return os.path.normpath(os.path.join(directory, os.path.expanduser(text)))


def absolute_dataset_path(text: str, directory: str, kind: str) -> str:
    """For kinds that take a glob, only the recipe's own text is one: its folder's name is
    escaped."""
    full = absolute_path(text, directory)
    if BUILT_IN_DATASETS.get(text) == kind:
        return text
    if kind not in GLOB_KINDS or os.path.isfile(full) or os.path.isabs(os.path.expanduser(text)):
        return full
    folder = glob.escape(os.path.join(directory, ""))
    return os.path.normpath(folder + text) if folder != os.path.join(directory, "") else full


def rebase_paths(node: Node, base_directory: str, directory: str) -> Node:
    """The tree of a base file, with its paths rewritten to be relative to the recipe that extends
    it."""
    if os.path.realpath(base_directory) == os.path.realpath(directory):
        return node

    def relative_to_recipe(text: str) -> str:
        if text.startswith(("/", "~")) or text in BUILT_IN_DATASETS:
            return text
        path = os.path.relpath(os.path.join(base_directory, text), directory)
        return path if path.startswith("..") else f"./{path}"

    for keys in _PATH_KEYS:
        node = _rewrite(node, keys, relative_to_recipe)
    for keys in _FOLDER_OR_NAME_KEYS:
        node = _rewrite(
            node,
            keys,
            lambda text: relative_to_recipe(text) if is_folder(text, base_directory) else text,
        )
    return node


def _rewrite(node: Node, keys: tuple[str, ...], change: Callable[[str], str]) -> Node:
    if not keys:
        if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.value:
            return ScalarNode(value=change(node.value), location=node.location)
        return node
    if isinstance(node, ListNode) and keys[0] == "*":
        items = tuple(_rewrite(item, keys[1:], change) for item in node.items)
        return dataclasses.replace(node, items=items)
    if isinstance(node, MapNode):
        entries = tuple(
            dataclasses.replace(entry, node=_rewrite(entry.node, keys[1:], change))
            if entry.key == keys[0]
            else entry
            for entry in node.entries
        )
        return dataclasses.replace(node, entries=entries)
    return node
