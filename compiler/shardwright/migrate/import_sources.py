"""Where a value may stand: in ds_config, as a word of the script, as an option of the launcher, as
a default of the Trainer's. ds_config goes first; its "auto" asks the others, as the Trainer and
Accelerate fill it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shardwright.engines.deepspeed.ds_config_validation import AUTO, FALSE_WORDS, TRUE_WORDS
from shardwright.migrate.launch_command import LaunchCommand
from shardwright.migrate.recipe_draft import RecipeDraft, redacted
from shardwright.utils.json_types import JsonObject, JsonValue

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
        """Of ds_config; None where there is nothing or "auto"."""
        value: JsonValue = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return None if value == AUTO else value

    def has(self, dotted: str) -> bool:
        parent, _, last = dotted.rpartition(".")
        return last in (self.section(parent) if parent else self.config)

    def there(self, dotted: str) -> tuple[str, ...]:
        """The key itself where the file has it, "auto" as well."""
        return (dotted,) if dotted and self.has(dotted) else ()

    def section(self, dotted: str) -> JsonObject:
        value = self.get(dotted)
        return value if isinstance(value, Mapping) else {}

    def number(self, dotted: str) -> float | None:
        return as_number(self.get(dotted))

    def integer(self, dotted: str) -> int | None:
        return as_integer(self.get(dotted))

    def word(self, read: Callable[[JsonValue], T | None], *names: str) -> tuple[str, T] | None:
        """(as typed, value) of the first of these words or launcher's options whose value can be
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
        """Puts `key` into the draft from the file's `dotted`, else from the words, else from the
        Trainer's default."""
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
        """A value that the recipe needs and that nothing here says."""
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
