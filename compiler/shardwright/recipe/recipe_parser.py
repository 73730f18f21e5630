"""Parses text into a tree, by ruamel.yaml's composer or as JSON. Errors that let the parser go on
are collected, not raised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

from ruamel.yaml import YAML, nodes
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from shardwright.diagnostics import Diagnostic, Location, found
from shardwright.recipe.recipe_tree import (
    LineOffsets,
    ListNode,
    Node,
    ScalarNode,
    json_tree,
    map_node,
    refuse_constant,
    yaml_scalar_value,
)

LARGEST_INTEGER = 2**53
INTEGER_HELP = "Write an integer of at most 9007199254740992, such as 1e12."
MAX_RECIPE_DEPTH = 48
_LESS_NESTING = f"Remove brackets or indentation: {MAX_RECIPE_DEPTH} levels are allowed."
MAX_RECIPE_NODES = 20_000
MAX_RECIPE_BYTES = 512 * 1024


class _ParseAborted(Exception):
    """Raised where reading cannot go on; holds the cause."""

    def __init__(self, code: str, message: str, place: Location, help: str) -> None:
        super().__init__(message)
        self.error = found(code, place, message, help)


def parse_recipe_text(text: str, lines: LineOffsets) -> tuple[Node | None, tuple[Diagnostic, ...]]:
    """Return the tree (None where the text has none) and everything wrong with it."""
    errors: list[Diagnostic] = []
    try:
        if _is_json(text):
            root: Node | None = json_tree(text, lines)
        else:
            root = _YamlTree(lines, errors).read(text)
        if root is not None:
            for error in _TreeErrors().find(root, root.location, 0):
                if error not in errors:  # an aliased value is met more than once
                    errors.append(error)
    except RecursionError:
        place = lines.at(0, 1)
        errors.append(found("SW1011", place, "the recipe is nested too deeply", _LESS_NESTING))
        return None, tuple(errors)
    except _ParseAborted as aborted:
        return None, (*errors, aborted.error)
    return root, tuple(errors)


def _is_json(text: str) -> bool:
    """Say whether the text is JSON, which has no NaN and no Infinity. Raises RecursionError."""
    if not text.lstrip(" \t\r\n").startswith(("{", "[", '"')):
        return False
    try:
        # Numbers stay text: Python's int() refuses thousands of digits.
        json.loads(text, parse_constant=refuse_constant, parse_int=str, parse_float=str)
    except ValueError:
        return False
    return True


class _TreeErrors:
    """Finds what neither a YAML nor a JSON recipe may hold. An alias counts each time it is
    used."""

    def __init__(self) -> None:
        self.nodes = 0

    def find(self, node: Node, place: Location, depth: int) -> Iterator[Diagnostic]:
        """Yield the errors of a tree. Raises _ParseAborted at `place`, the nearest key, for a tree
        that is too large."""
        self.nodes += 1
        if self.nodes > MAX_RECIPE_NODES:
            what = f"has more than {MAX_RECIPE_NODES} values, aliases included"
            help = "Shorten the recipe. An alias counts each time the recipe uses it."
            raise _ParseAborted("SW1011", f"the recipe {what}", place, help)
        if isinstance(node, ScalarNode):
            yield from _scalar_errors(node)
            return
        if depth == MAX_RECIPE_DEPTH:
            what = f"is nested more than {MAX_RECIPE_DEPTH} levels deep"
            raise _ParseAborted("SW1011", f"the recipe {what}", place, _LESS_NESTING)
        if isinstance(node, ListNode):
            for item in node.items:
                yield from self.find(item, place, depth + 1)
            return
        for key in node.duplicates:
            first = node.entries[key.text].key.location.line
            message = f"the key `{key.text}` stands here again; it is on line {first} already"
            yield found("SW1006", key.location, message, "Keep one of the two.")
        for key, below in node.entries.values():
            yield from _scalar_errors(key)
            yield from self.find(below, key.location, depth + 1)


def _scalar_errors(node: ScalarNode) -> Iterator[Diagnostic]:
    """Find numbers that JSON cannot hold, and halves of a surrogate pair."""
    value, place = node.value, node.location
    shown = node.text if len(node.text) <= 40 else f"{node.text[:37]}..."
    if isinstance(value, float) and not math.isfinite(value):
        help = "Write a finite number; a key that should have its default is left out."
        yield found("SW1013", place, f"{shown} is not a finite number", help)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        message = f"the integer {shown} is beyond 2^53, where JSON readers no longer agree"
        yield found("SW1014", place, message, INTEGER_HELP)
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        message = "this text holds half of a surrogate pair, which is no character"
        help = "Write the character itself, or both halves of its pair."
        yield found("SW1016", place, message, help)


_HINTS: dict[str, str] = {
    "found character '\\t' that cannot start any token": (
        "Indent with spaces; YAML does not allow tabs there."
    ),
    "mapping values are not allowed here": (
        "A value that holds `: ` needs quotes; check the indentation of this line."
    ),
    "could not find expected ':'": "Every key needs a colon and a space after it.",
    "found unexpected end of stream": "A quote or bracket is opened and never closed.",
}
_DEFAULT_HINT = "Check quotes, brackets and indentation at this place and just before it."
_UNTAGGED = Tag(suffix="")
_YamlNode = nodes.ScalarNode | nodes.CollectionNode


class _NoImplicitTags(VersionedResolver):
    """Leaves values without a tag of their own untagged: the core schema is in recipe_tree.py."""

    def resolve(self, kind: object, value: object, implicit: object) -> Tag:
        return _UNTAGGED


class _Composer(Composer):
    def compose_document(self) -> nodes.Node:
        event = self.parser.peek_event()
        if event.version not in (None, (1, 2)):
            version = ".".join(map(str, event.version))
            message = f"the file asks for YAML {version}; recipes are YAML 1.2"
            raise ComposerError(None, None, message, event.start_mark)
        document: nodes.Node = super().compose_document()
        return document


class _YamlTree:
    def __init__(self, lines: LineOffsets, errors: list[Diagnostic]) -> None:
        self.lines, self.errors = lines, errors
        self.finished: dict[int, Node] = {}
        self.unfinished: set[int] = set()

    def read(self, text: str) -> Node | None:
        """Parse YAML. Raises _ParseAborted with SW1005, SW1009, SW1010 or SW1015."""
        yaml = YAML(typ="safe", pure=True)
        yaml.Resolver, yaml.Composer = _NoImplicitTags, _Composer
        yaml.composer.warn_double_anchors = False
        try:
            root = yaml.compose(text)
        except ReaderError as error:
            number = error.character
            code_point = number if isinstance(number, int) else ord(str(number)[:1] or "\0")
            message = f"character U+{code_point:04X} is not allowed in YAML"
            help = "Remove it, or write it as an escape inside double quotes."
            raise self.stop("SW1005", message, int(error.position or 0), help) from None
        except MarkedYAMLError as error:
            raise self.marked_error(error, text) from None
        except (YAMLError, ValueError, IndexError, OverflowError, AssertionError) as error:
            # ruamel.yaml raises these, without a place, for some escapes and directives.
            message = f"not valid YAML: {' '.join(str(error).split()) or type(error).__name__}"
            raise self.stop("SW1005", message, 0, _DEFAULT_HINT) from None
        return None if root is None else self.convert(root, None)

    def marked_error(self, error: MarkedYAMLError, text: str) -> _ParseAborted:
        problem = " ".join(str(error.problem or error.context or "it cannot be read").split())
        # An unclosed quote is found at the end of the text, and is to be mended where it opened.
        unclosed = problem.startswith("found unexpected end of stream") and error.context_mark
        mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
        start = min(mark.index if mark else 0, len(text))
        if problem == "but found another document":
            message = "a second YAML document begins here; a recipe is one"
            return self.stop("SW1009", message, start, "Remove `---`.")
        if problem.startswith("found undefined alias"):
            name = problem.removeprefix("found undefined alias ").strip("'")
            message = f"there is no anchor &{name} before this alias"
            place = self.lines.at(start, start + 1 + len(name))
            return _ParseAborted("SW1010", message, place, "Write it out.")
        if problem.startswith("the file asks for YAML"):
            return self.stop("SW1005", problem, start, "Remove the %YAML line.")
        hints = (hint for words, hint in _HINTS.items() if problem.startswith(words))
        return self.stop("SW1005", f"not valid YAML: {problem}", start, next(hints, _DEFAULT_HINT))

    def stop(self, code: str, message: str, start: int, help: str) -> _ParseAborted:
        return _ParseAborted(code, message, self.lines.at(start, start + 1), help)

    def convert(self, node: _YamlNode, key: Location | None) -> Node:
        """Convert a node. key: place of its key, to show for a value without text or brackets."""
        if id(node) in self.finished:
            return self.finished[id(node)]
        start, end = span = node.start_mark.index, node.end_mark.index
        place = self.lines.at(start, end)
        if id(node) in self.unfinished:
            message = "an alias stands inside the value that it repeats"
            raise _ParseAborted("SW1010", message, key or place, "Write it out.")
        self.unfinished.add(id(node))
        if node.tag:
            shown = node.tag.replace("tag:yaml.org,2002:", "!!")
            help = "Remove it: quotes make text of a number."
            self.errors.append(found("SW1008", place, f"the tag {shown} is not allowed", help))
        converted: Node
        if isinstance(node, nodes.ScalarNode):
            value = node.value if node.style else yaml_scalar_value(node.value)
            place = (key or place) if start == end else place
            converted = ScalarNode(value=value, text=node.value, location=place, span=span)
        else:
            place = place if node.flow_style else key or self.lines.at(start, start + 1)
            if isinstance(node, nodes.SequenceNode):
                items = tuple(self.convert(item, None) for item in node.value)
                converted = ListNode(items=items, location=place, span=span)
            else:
                converted = map_node([self.pair(*pair) for pair in node.value], place, span)
        self.finished[id(node)] = converted
        return converted

    def pair(self, key: nodes.ScalarNode, node: _YamlNode) -> tuple[ScalarNode, Node]:
        name = self.convert(key, None)
        if not isinstance(name, ScalarNode):
            message, help = "a key must be plain text", "Write each key as `name: value`."
            raise _ParseAborted("SW1015", message, name.location, help)
        if name.text == "<<" and not key.style:
            message = "merge keys (`<<`) are not part of YAML 1.2"
            help = "Use `extends`, or write the keys out."
            self.errors.append(found("SW1007", name.location, message, help))
        name = replace(name, value=name.text)
        return name, self.convert(node, name.location)
