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
from shardwright.migrate.training_programs import TrainingProgram
from shardwright.recipe.recipe_schema import FILL_IN
from shardwright.utils.json_values import JsonObject, JsonValue
from shardwright.utils.shell_script import resolved_text

LONGEST_VALUE = 60
_SECRET = re.compile(
    r"token(?!i[sz]|_dispatcher)|secret|password|passwd|credential|api_?key", re.IGNORECASE
)


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
        sources: keys and words that this converts; the origin where none is given and it is one
        """
        self.values[key] = value
        if origin:
            self.origins[key] = origin
        is_key = bool(origin) and " " not in origin
        for source in sources or ((origin,) if is_key else ()):
            self.take(source, key)

    def take(self, source: str, key: str) -> None:
        self.carried[source] = key
        self.left.pop(source, None)

    def ask(self, key: str, what: str) -> None:
        """Leave a recipe key to the user; the first reason stays."""
        self.values[key] = FILL_IN
        self.fill.setdefault(key, what)
        self.origins.pop(key, None)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Hold a setting of a command or of a file.

    written: the name as it stands there: --learning_rate, learning_rate
    values: its words; none for a switch
    owner: who has it
    told_as: the value as it stands there, where `values` are another program's
    """

    written: str
    values: tuple[str, ...] = ()
    owner: str = "the command"
    told_as: str = ""

    @property
    def text(self) -> str:
        return " ".join(self.values)

    def read(self, reader: Callable[[JsonValue], T | None]) -> T | None:
        """Return the first word as `reader` reads it; None where only a shell knows it."""
        text = resolved_text(self.values[0]) if self.values and self.values[0] else None
        if text is None:
            return None if self.values and self.values[0] else reader(True)
        return reader(text)

    def told(self) -> str:
        """Return the setting as a reason: `the command has --lr $LR`."""
        return f"{self.owner} has {redacted(self.written, self.told_as or self.text)}"


@dataclass(slots=True)
class ImportSources:
    """config: ds_config's keys, without those that lint finds wrong. faulty: these, with what lint
    says. settings: of the script, by the Trainer's names where it has one. program: whose names
    and defaults these are; None without a command. is_trainer: the HF Trainer reads ds_config.
    world_size: ranks, None where nothing says."""

    draft: RecipeDraft
    config: JsonObject
    command: LaunchCommand
    is_trainer: bool
    settings: dict[str, Setting] = field(default_factory=dict)
    options: dict[str, Setting] = field(default_factory=dict)
    program: TrainingProgram | None = None
    faulty: Mapping[str, str] = field(default_factory=dict)
    has_document: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Mapping[str, tuple[JsonValue, str]] = field(default_factory=dict)
    read_files: frozenset[str] = frozenset()
    nodes: int | None = None
    gpus_per_node: int | None = None
    world_size: int | None = None

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

    @property
    def is_deepspeed(self) -> bool:
        """Return whether Accelerate's file says that DeepSpeed trains."""
        kind = self.options.get("distributed_type")
        return kind is not None and kind.text.upper() == "DEEPSPEED"

    @property
    def hidden(self) -> str:
        """Return why a setting that is not there may be there; empty where all words are known."""
        words = " ".join(self.command.hidden)
        return f"the command has {words}, and only the shell knows these words" if words else ""

    def setting(self, name: str) -> Setting | None:
        """Return a setting of the script, else an option of the launcher."""
        return self.settings.get(name) or self.options.get(name)

    def option(self, *names: str) -> tuple[str, str] | None:
        """Return (as written, value) of the first of these options of the launcher."""
        found = next((self.options[name] for name in names if name in self.options), None)
        return None if found is None else (found.written, found.text)

    def word(self, read: Callable[[JsonValue], T | None], *names: str) -> tuple[str, T] | None:
        """Return (as written, value) of the first of these settings that can be read."""
        for name in names:
            found = self.setting(name)
            value = found.read(read) if found is not None else None
            if found is not None and value is not None:
                return found.written, value
        return None

    def ask_unread(self, key: str, *names: str, dotted: str = "") -> bool:
        """Ask for a key whose value is there and cannot be read; return whether it is so."""
        if dotted in self.faulty:
            message = self.faulty[dotted]
            self.draft.ask(key, message if dotted in message else f"{dotted}: {message}")
            return True
        found = next((s for name in names if (s := self.setting(name)) is not None), None)
        if found is None:
            return False
        self.draft.ask(key, found.told())
        self.draft.take(found.written, key)
        for source in self.there(dotted):
            self.draft.take(source, key)
        return True

    def settle(
        self,
        key: str,
        read: Callable[[JsonValue], T | None],
        *words: str,
        dotted: str = "",
        otherwise: T | None = None,
        origin: str = "",
    ) -> T | None:
        """Set `key` from the file's `dotted`, else from the words, else from the program's default
        of the first word, else from `otherwise`, whose origin is told. A value that is there and
        cannot be read, or a default that depends on the program's version, is asked for."""
        given = read(self.get(dotted)) if dotted else None
        typed = self.word(read, *words)
        if given is None and typed is None and key in self.checkpoint:
            value, where = self.checkpoint[key]
            if (known := read(value)) is not None:
                self.draft.put(key, value, where, *self.there(dotted))
                return known
        if given is not None:
            self.draft.put(key, _plain(given), dotted)
            if typed is not None and typed[1] != given:
                why = f"the file's {dotted} is {given}, and the Trainer refuses two values"
                self.draft.leave(section_of(key), typed[0], _plain(typed[1]), why)
            elif typed is not None:
                self.draft.take(typed[0], key)
            return given
        if typed is not None:
            self.draft.put(key, _plain(typed[1]), typed[0], typed[0], *self.there(dotted))
            return typed[1]
        if self.ask_unread(key, *words, dotted=dotted):
            return None
        program = self.program
        if program is not None and words:
            default = read(program.defaults.get(words[0]))
            if default is not None:
                why = f"{program.defaults_of}'s default"
                self.draft.put(key, _plain(default), why, *self.there(dotted))
                return default
            if (reason := program.unknown_defaults.get(words[0])) is not None:
                self.unanswered(key, dotted, reason)
                return None
        if otherwise is not None:
            self.draft.put(key, _plain(otherwise), origin, *self.there(dotted))
        return otherwise

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
    return value if isinstance(value, str) and value and value.isprintable() else None


def _plain(value: object) -> JsonValue:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


# A draft as YAML, section by section in the order of a recipe, with a comment for what stayed
# behind.


SECTIONS = (
    "model",
    "cluster",
    "training",
    "data",
    "validation",
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
        *(
            f"target: {scalar(draft.values[key])} # {draft.origins[key]}"
            for key in ("target",)
            if key in draft.values
        ),
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
