"""The recipe in the making: its values, where each comes from, and what had to stay behind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.recipe.key_descriptions import FILL_IN
from shardwright.utils.json_types import JsonValue

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
        """origin: words for the comment. sources: keys and words that this settles; the origin
        where none is given."""
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
        """Those with a comment."""
        return list(dict.fromkeys([*self.notes, *(section for section, _ in self.behind)]))

    def leave(self, section: str, source: str, value: JsonValue, why: str) -> None:
        """`source` stays behind; its comment stands in `section`."""
        if source not in self.carried and source not in self.left:
            self.left[source] = why
            self.behind.setdefault((section, why), []).append(redacted(source, value))


def is_secret(name: str) -> bool:
    return bool(_SECRET.search(name))


def redacted(source: str, value: JsonValue) -> str:
    """`key: value` or `--word value`, cut short; the value of a secret never."""
    joint = " " if source.startswith("-") else "=" if source.isupper() else ": "
    if is_secret(source):
        return f"{escape_control_characters(source)}{joint}..."
    text = (
        value if isinstance(value, str) and joint != ": " else json.dumps(value, ensure_ascii=False)
    )
    text = text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
    return escape_control_characters(f"{source}{joint}{text}" if text else source)
