"""Merges a recipe's layers: the bases that `extends` names, the file itself, and --set of the
command line. Later layers win.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import os
import sys
from collections.abc import Callable, Sequence

from shardwright.diagnostics import Diagnostic, Location, found
from shardwright.recipe.recipe_parser import MAX_RECIPE_BYTES, parse_recipe_text
from shardwright.recipe.recipe_tree import (
    LineOffsets,
    ListNode,
    MapEntry,
    MapNode,
    Node,
    ScalarNode,
)
from shardwright.recipe.recipe_types import BUILT_IN_DATASETS
from shardwright.utils.file_io import read_regular_file

# Which keys hold paths, and what a relative one is relative to: the file that holds it.


GLOB_KINDS = ("text", "jsonl", "parquet", "chat", "preference")

# "*" stands for every item of a list.
_PATH_KEYS: tuple[tuple[str, ...], ...] = (
    ("data", "path"),
    ("data", "mixture", "*", "path"),
    ("data", "images", "folder"),
    ("data", "mixture", "*", "images", "folder"),
    ("validation", "images", "folder"),
    ("validation", "path"),
    ("training", "objective", "teacher"),
    ("cluster", "measured"),
    ("cluster", "measured", "file"),
    ("launch", "hostfile"),
    ("launch", "setup_script"),
    ("training", "objective", "reference"),
    ("training", "objective", "reference_model"),
)
_FOLDER_OR_NAME_KEYS: tuple[tuple[str, ...], ...] = (
    ("model", "source"),
    ("model", "trust_remote_code"),
    ("data", "tokenizer"),
    ("data", "mixture", "*", "tokenizer"),
    ("validation", "tokenizer"),
)


def is_folder(text: str, directory: str) -> bool:
    """Tell whether a model source or tokenizer is a folder rather than a hub name. directory: of
    the file that names it."""
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
    """Return the absolute path or glob of a data set. In a glob the name of the recipe's folder is
    escaped."""
    full = absolute_path(text, directory)
    if BUILT_IN_DATASETS.get(text) == kind:
        return text
    if kind not in GLOB_KINDS or os.path.isfile(full) or os.path.isabs(os.path.expanduser(text)):
        return full
    folder = glob.escape(os.path.join(directory, ""))
    return os.path.normpath(folder + text) if folder != os.path.join(directory, "") else full


def rebase_paths(node: Node, base_directory: str, directory: str) -> Node:
    """Return the tree of a base file with its paths made relative to the recipe that extends
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
            return dataclasses.replace(node, value=change(node.value))
        return node
    if isinstance(node, ListNode) and keys[0] == "*":
        items = tuple(_rewrite(item, keys[1:], change) for item in node.items)
        return dataclasses.replace(node, items=items)
    if isinstance(node, MapNode) and keys[0] in node.entries:
        key, below = node.entries[keys[0]]
        entry = MapEntry(key, _rewrite(below, keys[1:], change))
        return dataclasses.replace(node, entries={**node.entries, keys[0]: entry})
    return node


COMMAND_LINE = "--set"
STDIN = "<stdin>"
_LONGEST_CHAIN = 16

EXCLUSIVE_KEYS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("model",), ("source", "config")),
    (("training",), ("steps", "tokens", "epochs")),
    (("training", "scheduler"), ("warmup_steps", "warmup_ratio")),
    (("training", "scheduler"), ("min_lr", "min_lr_ratio")),
)
"""Lists keys that replace each other: a layer with one drops the others from the layers below."""


class RecipeComposer:
    """Reads the layers, and collects their texts for the renderer and their errors."""

    def __init__(self, stdin_text: str | None = None) -> None:
        self.texts: dict[str, str] = {}
        self.errors: list[Diagnostic] = []
        self._stdin_text = stdin_text

    def read_file(self, name: str, directory: str, chain: tuple[str, ...] = ()) -> MapNode | None:
        """Read the file, merged over its bases. name: as the user wrote it. directory: what its
        paths become relative to.

        None where the text gives no mapping; `errors` then has the reason.
        """
        text = self._text(name, None)
        root = None if text is None else self._root(name, text)
        if root is None:
            return None
        return self._with_base(root, name, (*chain, os.path.realpath(name)), directory)

    def _with_base(
        self, root: MapNode, name: str, chain: tuple[str, ...], directory: str
    ) -> MapNode:
        entry = root.entries.get("extends")
        if (
            entry is None
            or not isinstance(entry.node, ScalarNode)
            or not isinstance(entry.node.value, str)
        ):
            return root  # the schema refuses what is neither text nor null
        base_name, place = entry.node.value, entry.node.location
        entries = {name: e for name, e in root.entries.items() if name != "extends"}
        root = dataclasses.replace(root, entries=entries)
        if not base_name or any(ord(c) < 32 for c in base_name):
            help = "Write the path of a recipe."
            self._error("SW1022", "`extends` does not name a file", place, help)
            return root
        here = os.getcwd() if name == STDIN else os.path.dirname(name)
        path = os.path.normpath(os.path.join(here, os.path.expanduser(base_name)))
        if os.path.realpath(path) in chain or len(chain) > _LONGEST_CHAIN:
            names = [os.path.basename(p) for p in (*chain, path)]
            self._error(
                "SW1021",
                f"`extends` is a cycle: {' -> '.join(names)}",
                place,
                "Remove `extends` from one of them.",
            )
            return root
        text = self._text(path, place)
        base = None if text is None else self._root(path, text)
        if base is None:
            return root
        base_directory = os.path.abspath(os.path.dirname(path))
        merged = self._with_base(base, path, (*chain, os.path.realpath(path)), base_directory)
        moved = rebase_paths(merged, base_directory, directory)
        assert isinstance(moved, MapNode)
        return merge_maps(moved, root)

    def override(self, root: MapNode, overrides: Sequence[str]) -> MapNode:
        """Apply each override "a.b=value" to the tree; the value is YAML."""
        text = "\n".join(overrides)
        if overrides:
            self.texts[COMMAND_LINE] = text
        offset = 0
        for override in overrides:
            layer = self._override(
                root, override, LineOffsets(COMMAND_LINE, text, offset), text, offset
            )
            root = root if layer is None else merge_maps(root, layer, keep_base_locations=True)
            offset += len(override) + 1
        return root

    def _override(
        self, root: MapNode, override: str, lines: LineOffsets, text: str, offset: int
    ) -> MapNode | None:
        keys_text, equals, value_text = override.partition("=")
        keys = keys_text.strip().split(".")
        place = lines.at(0, len(keys_text))
        if not equals or not all(keys):
            help = "Write for example `--set training.steps=100`."
            self._error(
                "SW1031", f"`{override}` is not key=value", lines.at(0, len(override)), help
            )
            return None
        if keys == ["extends"]:
            help = "Write `extends` into the recipe; the command line is laid over the result."
            self._error("SW1031", "`extends` cannot be set on the command line", place, help)
            return None
        below: Node = root
        for depth, name in enumerate(keys):
            if not isinstance(below, MapNode):
                if isinstance(below, ScalarNode) and below.value is None:
                    break
                parent = ".".join(keys[:depth])
                help = f"Set the whole of it, such as `--set '{parent}=...'`."
                self._error(
                    "SW1032",
                    f"`{parent}` is not a mapping of keys, so it has no `{name}`",
                    place,
                    help,
                )
                return None
            entry = below.entries.get(name)
            if entry is None:
                break
            below = entry.node
        value, errors = parse_recipe_text(
            value_text, LineOffsets(COMMAND_LINE, text, offset + len(keys_text) + 1)
        )
        self.errors.extend(errors)
        if value is None:
            if errors:
                return None
            value = ScalarNode(value=None, text="", location=place, span=(0, 0))
        for name in reversed(keys):
            key = ScalarNode(value=name, text=name, location=place, span=(0, 0))
            entries = {name: MapEntry(key, value)}
            value = MapNode(entries=entries, location=place, span=(0, 0))
        assert isinstance(value, MapNode)
        return value

    def _root(self, name: str, text: str) -> MapNode | None:
        self.texts[name] = text
        root, errors = parse_recipe_text(text, LineOffsets(name, text))
        self.errors.extend(errors)
        if isinstance(root, MapNode):
            return root
        if not errors:
            help = "A recipe begins with `version: 1`; `shardwright schema` prints every key."
            if root is None or (isinstance(root, ScalarNode) and root.value is None):
                first = Location(file=name, line=1, column=1)
                self._error("SW1004", "the recipe is empty", first, help)
            else:
                message = "the recipe is not a mapping of keys to values"
                self._error("SW1012", message, root.location, help)
        return None

    def _text(self, name: str, place: Location | None) -> str | None:
        """Read the text of a file, without a byte order mark. place: of the `extends` that names
        it."""
        if name == STDIN and self._stdin_text is not None:
            return self._stdin_text.removeprefix("\ufeff")
        try:
            if name == STDIN:
                data = sys.stdin.buffer.read(MAX_RECIPE_BYTES + 1)  # bounded, so that it ends
            else:
                data = read_regular_file(name, MAX_RECIPE_BYTES)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                self._too_large(name)
                return None
            cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
            message = f"cannot read {name}: {cause}"
            if place is not None:
                self._error("SW1022", message, place, "`extends` is relative to this file.")
            else:
                code = "SW1002" if isinstance(error, IsADirectoryError) else "SW1001"
                help = "Give the path of a recipe, a YAML or JSON file; `-` is standard input."
                self._error(code, message, Location(file=name, line=0, column=0), help)
            return None
        if len(data) > MAX_RECIPE_BYTES:
            self._too_large(name)
            return None
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            before = data[: error.start].decode("utf-8", "replace")
            self.texts[name] = data.decode("utf-8", "replace").removeprefix("\ufeff")
            self._error(
                "SW1003",
                f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8 text",
                LineOffsets(name, self.texts[name]).at(
                    len(before.removeprefix("\ufeff")), len(before) + 1
                ),
                "Save the file as UTF-8.",
            )
            return None

    def _too_large(self, name: str) -> None:
        help = f"A recipe has at most {MAX_RECIPE_BYTES // 1024} KiB."
        self._error(
            "SW1011",
            f"{name} is too large for a recipe",
            Location(file=name, line=0, column=0),
            help,
        )

    def _error(self, code: str, message: str, place: Location, help: str) -> None:
        self.errors.append(found(code, place, message, help))


def merge_maps(
    base: MapNode, over: MapNode, path: tuple[str, ...] = (), *, keep_base_locations: bool = False
) -> MapNode:
    """Merge mappings key by key and replace other values. Keys of `base` keep their order.

    A mapping in both has the place of `over`, or with keep_base_locations that of `base`: an error
    about a key that --set leaves missing points into the file.
    """
    given = {
        name
        for name, entry in over.entries.items()
        if not (isinstance(entry.node, ScalarNode) and entry.node.value is None)
    }
    dropped: set[str] = set()
    for where, keys in EXCLUSIVE_KEYS:
        if where == path and given & set(keys):
            dropped |= set(keys) - over.entries.keys()
    entries = {name: entry for name, entry in base.entries.items() if name not in dropped}
    for name, (key, node) in over.entries.items():
        below = entries.get(name)
        if below is not None and isinstance(below.node, MapNode) and isinstance(node, MapNode):
            merged = merge_maps(
                below.node, node, (*path, name), keep_base_locations=keep_base_locations
            )
            entries[name] = MapEntry(below.key if keep_base_locations else key, merged)
        else:
            entries[name] = MapEntry(key, node)
    return dataclasses.replace(base if keep_base_locations else over, entries=entries)
