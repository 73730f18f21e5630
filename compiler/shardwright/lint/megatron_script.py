"""Read the options that a launch script or an arguments file gives to Megatron-LM's
pretrain_gpt.py, without running anything.

A script is read as a shell reads it: variables, arrays, `+=`, quotes, continued lines. Its options
are the words behind the .py file of a command; all before it, and every array that only the
launcher gets, is the launcher's. What a condition decides, and what comes from outside the script,
is not known.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources

from shardwright.diagnostics import Location, Source
from shardwright.recipe.recipe_tree import LineOffsets

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """Describe an option.

    values: how many it takes: a number, "+" or "*"
    kind: int, float or text
    choices: () where any value is allowed
    """

    values: int | str
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOption:
    """Hold an option; its values are None where an unknown variable stands for them.

    is_certain: False where a condition decides whether it is given
    """

    name: str
    values: tuple[str | None, ...]
    place: Location
    is_certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Hold the options of a file.

    given: in the order of the command
    source: the text to show
    is_complete: False where words of the command are not known
    has_command: a command with a .py file was found
    """

    given: tuple[MegatronOption, ...]
    source: Source
    world_size: int | None
    is_complete: bool = True
    has_command: bool = False

    def last(self, name: str) -> MegatronOption | None:
        """Return the last option of this name, as argparse does."""
        return next((g for g in reversed(self.given) if g.name == name), None)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return an option's integer, or `default` where it is not given; None where it is
        unknown."""
        value = self.text(name)
        if value is None and not self.has(name):
            return default if self.is_complete else None
        return int(value) if value is not None and re.fullmatch(r"[+-]?\d+", value) else None

    def number(self, name: str) -> float | None:
        """Return an option's number; None where it is not given or unknown."""
        try:
            return float(self.text(name) or "")
        except ValueError:
            return None

    def text(self, name: str) -> str | None:
        """Return an option's first value; None where it is not given or unknown."""
        found = self.last(name)
        return found.values[0] if found and found.is_certain and found.values else None

    def has(self, name: str) -> bool:
        """Return whether an option is given, or may be."""
        return self.last(name) is not None

    def lacks(self, *names: str) -> bool:
        """Return whether none of these options can be given."""
        return self.is_complete and not any(map(self.has, names))

    def certain(self, name: str) -> MegatronOption | None:
        """Return an option that is given whatever a condition decides."""
        return next((g for g in reversed(self.given) if g.name == name and g.is_certain), None)


@functools.cache
def options() -> Mapping[str, OptionSpec]:
    """Return the options of Megatron-LM core_v0.19.0's parser, and those that pretrain_gpt.py adds.

    tools/generate/megatron_argument_parser.py writes the former.
    """
    text = resources.files("shardwright.lint").joinpath("megatron_options.json").read_text("utf-8")
    return {
        name: OptionSpec(values=values, kind=kind, choices=tuple(map(str, choices)))
        for name, (values, kind, choices) in json.loads(text)["options"].items()
    } | {name: OptionSpec(values=values, kind="text") for name, values in _MODELOPT.items()}


_MODELOPT: dict[str, int | str] = {
    **dict.fromkeys(
        (
            *("--export-legacy-megatron", "--export-te-mcore-model", "--export-default-te-spec"),
            *("--export-force-local-attention", "--freeze-base-for-mtp", "--export-qk-l2-norm"),
            *("--export-moe-apply-probs-on-input", "--export-offline-model"),
            *("--modelopt-enabled", "--enable-gpt-oss"),
        ),
        0,
    ),
    **dict.fromkeys(
        (
            *("--export-model-type", "--export-kv-cache-quant", "--export-real-quant-cfg"),
            *("--export-quant-cfg", "--export-kd-teacher-load", "--export-kd-teacher-model-config"),
            *("--export-kd-teacher-ckpt-format", "--export-kd-cfg", "--finetune-hf-dataset"),
            *("--finetune-data-split", "--qad-train-target"),
        ),
        1,
    ),
    "--finetune-data-files": "+",
}
"""Option -> how many values it takes: those that pretrain_gpt.py adds where ModelOpt is installed
(megatron.post_training.arguments, which is in Megatron-LM and not in megatron-core)."""

_TORCHRUN = re.compile(r"--(nproc[-_]per[-_]node|nnodes|node[-_]rank|rdzv[-_]\w+|master[-_]addr)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Hold a word of the script: its text as written, and whether a condition decides on it."""

    span: Span
    text: str
    is_certain: bool = True


@dataclass(slots=True, kw_only=True)
class _Statement:
    """Hold one command: shell words, each with the words that its quotes or parentheses hold."""

    words: list[list[Word]] = field(default_factory=list)


_TOKEN = re.compile(
    r"""(?P<comment>(?:(?<=\s)|(?<=^)|(?<=[;(]))\#[^\n]*)|(?P<continued>\\\r?\n)
    |(?P<substitution>\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`)|(?P<escaped>\\.)
    |(?P<end>\n|;;?|&&?|\|\|?)|(?P<space>\s+)|(?P<quote>["'])|(?P<paren>[()])
    |(?P<plain>[^\s"'();&|`\\$]+|\$\{[^}]*\}|\$)""",
    re.VERBOSE | re.MULTILINE,
)


def _statements(text: str) -> Iterator[_Statement]:
    """Split a script into commands. Quotes and parentheses group words and are left out."""
    statement, group, quote, depth = _Statement(), list[Word](), "", 0
    is_open, at = False, 0  # is_open: the next text continues the last word

    def add(span: Span, piece: str) -> None:
        if is_open and group:
            last = group[-1]
            group[-1] = replace(last, span=(last.span[0], span[1]), text=last.text + piece)
        else:
            group.append(Word(span=span, text=piece))

    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:  # a lone backslash at the end
            at += 1
            continue
        kind, piece, span = token.lastgroup, token[0], token.span()
        at = token.end()
        if kind == "comment" and quote:
            kind, piece, at = "plain", "#", span[0] + 1
            span = (span[0], at)
        if kind == "comment":
            continue
        if kind == "quote" and (not quote or piece == quote):
            quote = "" if quote else piece
            continue
        if kind == "paren" and not quote:
            depth = max(0, depth + (1 if piece == "(" else -1))
            is_open = is_open and piece == "("
            continue
        is_inside = bool(quote) or depth > 0
        if kind in ("space", "continued") or (kind == "end" and piece == "\n" and is_inside):
            is_open = False
            if not is_inside and group:
                statement.words.append(group)
                group = []
        elif kind == "end" and not is_inside:
            is_open = False
            if group:
                statement.words.append(group)
            if statement.words:
                yield statement
            statement, group = _Statement(), []
        else:
            unknown = kind == "substitution"
            add(span, "$" if unknown else piece[1:] if kind == "escaped" else piece)
            is_open = True
    if group:
        statement.words.append(group)
    if statement.words:
        yield statement


_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_WHOLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))")
_EXPANDED = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_PREFIXES = {"then", "else", "elif", "do", "export", "local", "declare", "readonly", "{", "set"}


@dataclass(slots=True, kw_only=True)
class _Script:
    """Hold what is known while a script is read.

    variables: name -> its words
    commands: the words behind each .py file, with the file's name
    loose: words that stand in no command, by variable or on lines of their own
    """

    variables: dict[str, list[Word]] = field(default_factory=dict)
    commands: list[tuple[str, list[Word]]] = field(default_factory=list)
    loose: list[list[Word]] = field(default_factory=list)

    def read(self, text: str) -> None:
        depth = 0
        for statement in _statements(text):
            words = statement.words
            while words and words[0][0].text in _OPENS | _CLOSES | _PREFIXES:
                depth += (words[0][0].text in _OPENS) - (words[0][0].text in _CLOSES)
                words = words[1:]
            while words and (assigned := _ASSIGNED.match(words[0][0].text)):
                self._assign(assigned, words[0], depth > 0)
                words = words[1:]
            if words:
                self._run([word for group in words for word in group], depth > 0)

    def _assign(self, assigned: re.Match[str], group: list[Word], is_conditional: bool) -> None:
        first = group[0]
        rest = first.text[assigned.end() :]
        start = max(first.span[0], first.span[1] - len(rest))  # behind a quote or parenthesis
        words = [replace(first, span=(start, first.span[1]), text=rest)] if rest else []
        spliced = [w for word in (*words, *group[1:]) for w in self._spliced(word)]
        value = [replace(word, text=self.text(word)) for word in spliced]
        name, before = assigned[1], self.variables.get(assigned[1], [])
        if is_conditional:
            value = [replace(word, is_certain=False) for word in value]
            before = before if assigned[2] else [replace(w, is_certain=False) for w in before]
            kept = [word for word in before if word.span not in {w.span for w in value}]
            value = [*kept, *value]
        elif assigned[2]:
            value = [*before, *value]
        self.variables[name] = value
        self.loose.append(value)

    def _run(self, words: list[Word], is_conditional: bool) -> None:
        expanded = [w for word in words for w in self._spliced(word)]
        if not expanded or expanded[0].text in ("echo", "printf", "[", "[[", "source", "."):
            return
        scripts = [
            n for n, word in enumerate(expanded) if self.text(word, guess=True).endswith(".py")
        ]
        if scripts:
            behind = expanded[scripts[0] + 1 :]
            self.commands.append((self.text(expanded[scripts[0]], guess=True), behind))
        elif expanded[0].text.startswith(("--", "$")):
            self.loose.append([replace(w, is_certain=not is_conditional) for w in expanded])

    def _spliced(self, word: Word) -> list[Word]:
        """Return the words of a variable that the whole word stands for."""
        found = _WHOLE.fullmatch(word.text)
        name = (found[1] or found[2]) if found else None
        known = self.variables.get(name) if name else None
        if known is None:
            return [word]
        return [replace(known[0], span=word.span)] if len(known) == 1 else known

    def text(self, word: Word, *, guess: bool = False) -> str:
        """Return a word with its variables; "$" stands in it for what is not known.

        guess: take what a condition decides
        """

        def value(m: re.Match[str]) -> str:
            words = self.variables.get(m[1] or m[3])
            if words is None:
                return m[2] if m[2] is not None else "$"
            if len(words) == 1 and (words[0].is_certain or guess):
                return words[0].text
            return words[-1].text if guess and words else "$" if words else ""

        return _EXPANDED.sub(value, word.text)

    def commands_of_the_program(self) -> list[list[Word]]:
        """Return the words of each command that starts pretrain_gpt.py or, where there is none,
        those that can be options in an arguments file."""
        named = [words for file, words in self.commands if _PRETRAIN.search(file)]
        if self.commands:
            return named or [words for _, words in self.commands]
        return [
            words for words in self.loose if not any(_TORCHRUN.match(word.text) for word in words)
        ]


_PRETRAIN = re.compile(r"(^|/)pretrain\w*\.py$")


def read_arguments(name: str, text: str, world_size: int | None) -> Arguments:
    """Return the options that stand in a script or an arguments file, each with its place."""
    script, lines = _Script(), LineOffsets(name, text)
    script.read(text)
    found: dict[tuple[str, Span], MegatronOption] = {}
    is_complete = True
    for words in script.commands_of_the_program():
        at = 0
        while at < len(words):
            word, shown = words[at], script.text(words[at])
            at += 1
            if not re.match(r"--[A-Za-z]", shown):
                is_complete &= "$" not in shown
                continue
            option, _, joined = shown.partition("=")
            values: list[str | None] = [_known(joined)] if joined else []
            spec = options().get(option)
            most = spec.values if spec is not None and isinstance(spec.values, int) else len(words)
            while not joined and at < len(words) and len(values) < most:
                value = script.text(words[at])
                if value.startswith("--"):
                    break
                values.append(_known(value) if words[at].is_certain else None)
                at += 1
            found[option, word.span] = MegatronOption(
                name=option,
                values=tuple(values),
                place=lines.at(*word.span),
                is_certain=word.is_certain,
            )
    return Arguments(
        given=tuple(found.values()),
        source=Source(file=name, texts={name: text}),
        world_size=world_size,
        is_complete=is_complete,
        has_command=bool(script.commands),
    )


def _known(text: str) -> str | None:
    """Return a value without the quotes of a shell that is started by another; None where it is
    not known."""
    return None if "$" in text else text.strip("\"'")
