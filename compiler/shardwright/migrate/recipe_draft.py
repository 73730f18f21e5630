"""Build a recipe draft: its values, their sources, and what could not be converted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.engines.deepspeed.ds_config_schema import AUTO, FALSE_WORDS, TRUE_WORDS
from shardwright.migrate.launch_command import LaunchCommand
from shardwright.recipe.recipe_schema import FILL_IN
from shardwright.utils.json_values import JsonObject, JsonValue

LONGEST_VALUE = 60
_SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key", re.IGNORECASE)


@dataclass(slots=True)
class RecipeDraft:
    """Recipe keys are dotted, and so are the keys of ds_config; a word of the command line has its
    dashes.

    values: recipe key -> value. origins: recipe key -> where the value comes from, for the comment
    behind it. notes: recipe section -> lines of comment. behind: (recipe section, why) -> what was
    left there, as written. fill: recipe key -> what the user has to write there. carried: key or
    word that was understood -> recipe key. left: key or word that was not carried -> why.
    """

    values: dict[str, JsonValue] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    behind: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    fill: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: JsonValue, origin: str = "", *sources: str) -> None:
        """Set a recipe key.

        origin: words for the comment
        sources: keys and words that this converts; the origin where none is given
        """
        self.values[key] = value
        if origin:
            self.origins[key] = origin
        for source in sources or ((origin,) if origin else ()):
            self.take(source, key)

    def take(self, source: str, key: str) -> None:
        self.carried[source] = key
        self.left.pop(source, None)

    def ask(self, key: str, what: str) -> None:
        self.values[key] = FILL_IN
        self.fill[key] = what

    def note(self, section: str, text: str) -> None:
        lines = self.notes.setdefault(section, [])
        if text not in lines:
            lines.append(text)

    def comments(self, section: str) -> list[str]:
        left = [(why, what) for (where, why), what in self.behind.items() if where == section]
        return [
            *self.notes.get(section, ()),
            *(f"not carried, {why}: {', '.join(what)}" for why, what in left),
        ]

    def sections(self) -> list[str]:
        """Return the sections with a comment."""
        return list(dict.fromkeys([*self.notes, *(section for section, _ in self.behind)]))

    def leave(self, section: str, source: str, value: JsonValue, why: str) -> None:
        """Record that `source` is not converted; its comment is put into `section`."""
        if source not in self.carried and source not in self.left:
            self.left[source] = why
            self.behind.setdefault((section, why), []).append(redacted(source, value))


def is_secret(name: str) -> bool:
    return bool(_SECRET.search(name))


def redacted(source: str, value: JsonValue) -> str:
    """Format `key: value` or `--word value`, shortened, and without the value of a secret."""
    joint = " " if source.startswith("-") else "=" if source.isupper() else ": "
    if is_secret(source):
        return f"{escape_control_characters(source)}{joint}..."
    text = (
        value if isinstance(value, str) and joint != ": " else json.dumps(value, ensure_ascii=False)
    )
    text = text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
    return escape_control_characters(f"{source}{joint}{text}" if text else source)


# Where a value may stand: in ds_config, as a word of the script, as an option of the launcher, as
# a default of the Trainer's. ds_config goes first; its "auto" asks the others, as the Trainer and
# Accelerate fill it in.


T = TypeVar("T")
TRAINER_DEFAULT = "the Trainer's default"


@dataclass(slots=True)
class ImportSources:
    """config: the file's keys, without those that lint finds wrong. is_trainer: the HF Trainer
    reads the file, so that its defaults hold. has_command: --launch was given. world_size: ranks,
    None where nothing says."""

    draft: RecipeDraft
    config: JsonObject
    command: LaunchCommand
    is_trainer: bool
    has_command: bool
    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None
    used: set[str] = field(default_factory=set)

    def get(self, dotted: str) -> JsonValue:
        """Return a value of ds_config; None where it is missing or "auto"."""
        value: JsonValue = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return None if value == AUTO else value

    def has(self, dotted: str) -> bool:
        parent, _, last = dotted.rpartition(".")
        return last in (self.section(parent) if parent else self.config)

    def there(self, dotted: str) -> tuple[str, ...]:
        """Return the key itself where the file has it, also with "auto"."""
        return (dotted,) if dotted and self.has(dotted) else ()

    def section(self, dotted: str) -> JsonObject:
        value = self.get(dotted)
        return value if isinstance(value, Mapping) else {}

    def number(self, dotted: str) -> float | None:
        return as_number(self.get(dotted))

    def integer(self, dotted: str) -> int | None:
        return as_integer(self.get(dotted))

    def word(self, read: Callable[[JsonValue], T | None], *names: str) -> tuple[str, T] | None:
        """Return (as typed, value) of the first of these words or launcher options that can be
        read."""
        for name in names:
            for table in (
                self.command.words,
                {key: (value,) for key, value in self.command.options.items()},
            ):
                if name in table:
                    values = table[name]
                    value = read(values[0] if values and values[0] else True)
                    if value is not None:
                        self.used.add(name)
                        return f"--{name}", value
        return None

    def settle(
        self,
        key: str,
        read: Callable[[JsonValue], T | None],
        *words: str,
        dotted: str = "",
        default: T | None = None,
    ) -> T | None:
        """Set `key` from the file's `dotted`, else from the words, else from the Trainer's
        default."""
        given = read(self.get(dotted)) if dotted else None
        typed = self.word(read, *words)
        if given is not None:
            self.draft.put(key, _plain(given), dotted)
            if typed is not None and typed[1] != given:
                why = f"the file's {dotted} is {given}, and the Trainer refuses two values"
                self.draft.leave(section_of(key), typed[0], _plain(typed[1]), why)
            return given
        if typed is not None:
            self.draft.put(key, _plain(typed[1]), typed[0], typed[0], *self.there(dotted))
            return typed[1]
        if default is not None and self.is_trainer and self.has_command:
            self.draft.put(key, _plain(default), TRAINER_DEFAULT, *self.there(dotted))
            return default
        return None

    def unanswered(self, key: str, dotted: str, what: str) -> None:
        """Record a value that the recipe needs and no source gives."""
        if dotted and self.has(dotted):
            self.draft.take(dotted, key)
            what = (
                f"{what}; {redacted(dotted, AUTO)} was filled in by the Trainer from its arguments"
            )
        self.draft.ask(key, what)


def section_of(key: str) -> str:
    return key.rpartition(".")[0]


def as_number(value: JsonValue) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return value


def as_integer(value: JsonValue) -> int | None:
    number = as_number(value)
    return (
        int(number)
        if number is not None and float(number).is_integer() and abs(number) < 2**53
        else None
    )


def as_count(value: JsonValue) -> int | None:
    number = as_integer(value)
    return number if number is not None and number > 0 else None


def as_switch(value: JsonValue) -> bool | None:
    if isinstance(value, str):
        word = value.lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    return value if isinstance(value, bool) else None


def as_text(value: JsonValue) -> str | None:
    return value if isinstance(value, str) and value else None


def _plain(value: object) -> JsonValue:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


# A draft as YAML, section by section in the order of a recipe, with a comment for what stayed
# behind.


SECTIONS = (
    "model",
    "cluster",
    "training",
    "data",
    "lora",
    "parallelism",
    "launch",
    "extra",
    "checkpoint",
    "tracking",
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RESERVED = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_WIDTH = 116


def draft_yaml(draft: RecipeDraft, name: str, heading: list[str]) -> str:
    tree: dict[str, JsonValue] = {}
    for key, value in draft.values.items():
        *parents, last = key.split(".")
        place: dict[str, JsonValue] = tree
        for parent in parents:
            below = place.setdefault(parent, {})
            assert isinstance(below, dict)
            place = below
        place[last] = value
    lines = [
        *(f"# {escape_control_characters(line)}" for line in heading),
        "version: 1",
        f"name: {scalar(name)}",
        "",
    ]
    for section in SECTIONS:
        value = tree.get(section)
        found = list(_section(draft, section, value if isinstance(value, Mapping) else {}, 0))
        lines += [*found, ""] if found else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(draft: RecipeDraft, path: str, values: JsonObject, depth: int) -> Iterator[str]:
    indent = "  " * depth
    inside = "  " * (depth + 1) if values else indent
    if values:
        yield f"{indent}{scalar(path.rpartition('.')[2])}:"
        for key, value in values.items():
            below = f"{path}.{key}"
            if isinstance(value, Mapping) and value:
                yield from _section(draft, below, value, depth + 1)
            else:
                origin = draft.fill.get(below) or draft.origins.get(below)
                comment = f" # {escape_control_characters(origin)}" if origin else ""
                yield f"{inside}{scalar(key)}: {flow(value)}{comment}"
    for note in draft.comments(path):
        text = note if values else f"{path}: {note}"
        line = ""
        for word in escape_control_characters(text).split(" "):
            if line and len(inside) + 2 + len(line) + 1 + len(word) > _WIDTH:
                yield f"{inside}# {line}"
                line = f"  {word}"
            else:
                line = f"{line} {word}" if line else word
        yield f"{inside}# {line}"
    for below in [
        p
        for p in draft.sections()
        if p.rpartition(".")[0] == path and p.rpartition(".")[2] not in values
    ]:
        yield from _section(draft, below, {}, depth + 1 if values else depth)


def flow(value: JsonValue) -> str:
    """Format a value on one line; JSON's form of a text is valid YAML."""
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{scalar(key)}: {flow(below)}" for key, below in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow(below) for below in value) + "]"
    return scalar(value)


def scalar(value: JsonValue) -> str:
    if isinstance(value, str) and _WORD.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return json.dumps(value, ensure_ascii=not isinstance(value, str) or not value.isprintable())
