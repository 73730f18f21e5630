"""Read the options that a launch script or an arguments file gives to Megatron-LM's
pretrain_gpt.py, without running anything.

They are the words behind the .py file of a command; all before it, and every array that only the
launcher gets, is the launcher's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.diagnostics import Location, Source
from shardwright.recipe.recipe_tree import LineOffsets
from shardwright.utils.shell_script import ShellWord, read_shell_script, reread, resolved_text


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
_PRETRAIN = re.compile(r"(^|/)pretrain\w*\.py$")
_PRINTING = ("echo", "printf", "source", ".")


def _words_of_the_program(text: str) -> tuple[list[list[ShellWord]], bool]:
    """Return the words of each command that starts pretrain_gpt.py, and whether there is one;
    where there is none, the words that can be options in an arguments file."""
    commands: list[tuple[str, list[ShellWord]]] = []
    loose: list[list[ShellWord]] = []  # by variable, or on lines of their own
    for statement in read_shell_script(text)[0]:
        words = [*reread(statement.shell_words or statement.assigned)]
        script = next((n for n, word in enumerate(words) if word.text.endswith(".py")), None)
        if not words or words[0].text in _PRINTING:
            continue
        if statement.assigned:
            loose.append(words)
        elif script is not None:
            commands.append((words[script].text, words[script + 1 :]))
        elif words[0].text.startswith(("--", "$")):
            is_certain = statement.is_certain
            loose.append([w._replace(is_certain=w.is_certain and is_certain) for w in words])
    if commands:
        named = [words for file, words in commands if _PRETRAIN.search(file)]
        return named or [words for _, words in commands], True
    return [words for words in loose if not any(_TORCHRUN.match(w.text) for w in words)], False


def read_arguments(name: str, text: str, world_size: int | None) -> Arguments:
    """Return the options that stand in a script or an arguments file, each with its place."""
    lines = LineOffsets(name, text)
    commands, has_command = _words_of_the_program(text)
    found: dict[tuple[str, int], MegatronOption] = {}
    is_complete = True
    for words in commands:
        at = 0
        while at < len(words):
            word = words[at]
            resolved = resolved_text(word.text)
            at += 1
            option, _, joined = (resolved or word.text).partition("=")
            if not re.match(r"--[A-Za-z]", option):
                is_complete &= resolved is not None
                continue
            values = [_known(joined)] if joined else []
            spec = options().get(option)
            most = spec.values if spec is not None and isinstance(spec.values, int) else len(words)
            while not joined and at < len(words) and len(values) < most:
                value = words[at]
                if value.text.startswith("--"):
                    break
                values.append(_known(value.text) if value.is_certain else None)
                at += 1
            found[option, word.span[0]] = MegatronOption(
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
        has_command=has_command,
    )


def _known(text: str) -> str | None:
    """Return a value without the quotes of a shell that is started by another; None where it is
    not known."""
    known = resolved_text(text)
    return None if known is None else known.strip("\"'")
