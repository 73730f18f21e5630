"""Check Megatron-LM's arguments: what its parser rejects, and layouts that it accepts although
Megatron-Core cannot run them. Line numbers are of megatron-core 0.19.0.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.diagnostics import Diagnostic, Location, Severity, Source, found
from shardwright.recipe.recipe_tree import LineOffsets

# A shell script or an arguments file -> the options that pretrain_gpt.py is given, and where each
# stands.
#
# Words are read as a shell splits them, without running anything: `NAME=value` is known in `$NAME`
# and `${NAME}` afterwards; any other expansion is a value that is not known. Quotes and parentheses
# only separate.


Span = tuple[int, int]
_WORD = re.compile(r"[^\s\"'()]+")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=")
_EXPANDED = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")


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
    """Hold an option; its values are None where an unknown variable stands for them."""

    name: str
    values: tuple[str | None, ...]
    place: Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Hold the options of a file.

    given: in the order of the file
    source: the text to show
    """

    given: tuple[MegatronOption, ...]
    source: Source
    world_size: int | None

    def last(self, name: str) -> MegatronOption | None:
        """Return the last option of this name, as argparse does."""
        return next((g for g in reversed(self.given) if g.name == name), None)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return an option's integer, or `default` where it is not given; None where it is
        unknown."""
        found = self.last(name)
        if found is None:
            return default
        value = found.values[0] if found.values else None
        return int(value) if value is not None and re.fullmatch(r"[+-]?\d+", value) else None

    def has(self, name: str) -> bool:
        return self.last(name) is not None


@functools.cache
def options() -> Mapping[str, OptionSpec]:
    """Return the options of Megatron-LM core_v0.19.0's parser.

    tools/generate/megatron_argument_parser.py writes them.
    """
    text = resources.files("shardwright.lint").joinpath("megatron_options.json").read_text("utf-8")
    return {
        name: OptionSpec(values=values, kind=kind, choices=tuple(map(str, choices)))
        for name, (values, kind, choices) in json.loads(text)["options"].items()
    }


def read_arguments(name: str, text: str, world_size: int | None) -> Arguments:
    lines = LineOffsets(name, text)
    given: list[MegatronOption] = []
    words = list(_words(text))
    at = 0
    while at < len(words):
        (start, end), word = words[at]
        at += 1
        if word is None or not re.match(r"--[A-Za-z]", word):
            continue
        option, _, joined = word.partition("=")
        values: list[str | None] = [joined] if joined else []
        while not joined and at < len(words) and not (words[at][1] or "").startswith("--"):
            values.append(words[at][1])
            at += 1
        known = options().get(option)
        if known is not None and isinstance(
            known.values, int
        ):  # what follows belongs to something else
            values = values[: known.values]
        given.append(MegatronOption(name=option, values=tuple(values), place=lines.at(start, end)))
    return Arguments(
        given=tuple(given), source=Source(file=name, texts={name: text}), world_size=world_size
    )


def _words(text: str) -> Iterator[tuple[Span, str | None]]:
    """Yield words that can be options of the script: those after the .py file of a line with a
    program."""
    variables: dict[str, str] = {}
    offset, continued, skips = 0, False, False
    for line in text.splitlines(keepends=True):
        uncommented = _COMMENT.sub("", line.rstrip("\r\n"))
        words = [m for m in _WORD.finditer(uncommented) if m[0] != "\\"]
        if not continued:
            first = words[0][0] if words else "--"
            is_assigned = _ASSIGNED.match(uncommented.strip())
            skips = not (first.startswith(("--", "$")) or is_assigned)  # a program starts here
        continued = uncommented.rstrip().endswith("\\")
        assigned = _ASSIGNED.match(uncommented.strip())
        for m in words:
            whole = m[0]
            if assigned and whole.startswith(f"{assigned[1]}") and "=" in whole:
                whole = whole.partition("=")[2]
                if whole and not whole.startswith("--"):
                    value = _expanded(whole, variables)
                    if value is not None:
                        variables[assigned[1]] = value
                    continue
            if skips:
                skips = not whole.endswith(".py")
                continue
            if whole and whole != "export":
                yield (offset + m.start(), offset + m.end()), _expanded(whole, variables)
        offset += len(line)


def _expanded(word: str, variables: Mapping[str, str]) -> str | None:
    """Expand variables; None where one is unknown."""
    known = True

    def value(m: re.Match[str]) -> str:
        nonlocal known
        found = variables.get(m[1] or m[3], m[2])
        known &= found is not None
        return found or ""

    text = _EXPANDED.sub(value, word)
    return text if known and "$" not in text and "`" not in text else None


Check = Callable[[Arguments], Iterator[Diagnostic]]
TENSOR, PIPELINE, CONTEXT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
EXPERT, EXPERT_TENSOR = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
VIRTUAL, PER_VIRTUAL = (
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
LAYOUT, LAYERS, EXPERTS = "--pipeline-model-parallel-layout", "--num-layers", "--num-experts"
GLOBAL, MICRO = "--global-batch-size", "--micro-batch-size"
_UNEVEN = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)


def unknown_options(a: Arguments) -> Iterator[Diagnostic]:
    for given in a.given:
        if given.name in options():
            continue
        near = difflib.get_close_matches(given.name, options(), n=1, cutoff=0.8)
        help = (
            f"Did you mean `{near[0]}`?"
            if near
            else "Leave it out, unless your script adds it to the parser."
        )
        severity: Severity = "error" if near else "warning"
        message = f"`{given.name}` is not an option of Megatron-LM, whose parser stops at it"
        yield found("SW4901", given.place, message, help, severity=severity)


def wrong_values(a: Arguments) -> Iterator[Diagnostic]:
    for given in a.given:
        known = options().get(given.name)
        if known is None:
            continue
        required = (
            known.values if isinstance(known.values, int) else 1 if known.values == "+" else 0
        )
        if len(given.values) < required:
            message = f"`{given.name}` has no value"
            yield found("SW4902", given.place, message, "Write its value after it.", known.choices)
            continue
        for value in given.values:
            if value is None:
                continue
            if known.choices and value not in known.choices:
                message = f"{given.name}: {value} is not one of {', '.join(known.choices)}"
                yield found("SW4902", given.place, message, "Write one of them.", known.choices)
            elif not _has_type(known.kind, value):
                noun = {"int": "a whole number", "float": "a number"}[known.kind]
                message = f"{given.name} {value}: the parser takes {noun}"
                yield found("SW4902", given.place, message, f"Write {noun}.")


def _has_type(kind: str, value: str) -> bool:
    if kind == "int":
        return re.fullmatch(r"[+-]?\d+", value) is not None
    if kind == "float":
        try:
            return math.isfinite(float(value))
        except ValueError:
            return False
    return True


def ranks_do_not_divide(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:430."""
    ranks = _product(a.integer(name, 1) for name in (TENSOR, PIPELINE, CONTEXT))
    if a.world_size is None or not ranks or a.world_size % ranks == 0:
        return
    message = f"tensor x pipeline x context = {ranks} ranks do not divide a world of {a.world_size}"
    yield found(
        "SW4911",
        _place(a, TENSOR, PIPELINE, CONTEXT),
        message,
        "Change a degree or the number of GPUs.",
    )


def batch_does_not_divide(a: Arguments) -> Iterator[Diagnostic]:
    """Check megatron/core/num_microbatches_calculator.py, ConstantNumMicroBatchesCalculator."""
    batch, micro, data = a.integer(GLOBAL), a.integer(MICRO), _data(a)
    if not batch or not micro or data is None or batch % (micro * data) == 0:
        return
    message = f"{GLOBAL} {batch} is not a multiple of {micro} x {data} data ranks"
    yield found("SW4912", _place(a, GLOBAL), message, f"Take a multiple of {micro * data}.")


def layers_do_not_divide(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:963."""
    layers, pipeline = a.integer(LAYERS), a.integer(PIPELINE, 1)
    if not layers or not pipeline or layers % pipeline == 0 or any(map(a.has, (LAYOUT, *_UNEVEN))):
        return
    message = f"{LAYERS} {layers} is not a multiple of {pipeline} pipeline ranks"
    help = f"Give the layers of each rank: {LAYOUT}, or {_UNEVEN[0]} and {_UNEVEN[1]}."
    yield found("SW4913", _place(a, LAYERS), message, help)


def layers_of_a_virtual_stage(a: Arguments) -> Iterator[Diagnostic]:
    """Check what the parser misses and transformer_block.py:169 asserts once the rank builds its
    layers."""
    layers, pipeline, virtual = a.integer(LAYERS), a.integer(PIPELINE, 1), a.integer(VIRTUAL)
    if (
        not layers
        or not pipeline
        or not virtual
        or layers % pipeline
        or any(map(a.has, (LAYOUT, *_UNEVEN)))
    ):
        return
    each = layers // pipeline
    if each % virtual:
        message = f"{VIRTUAL} {virtual} does not divide the {each} layers of a pipeline rank"
        valid = [n for n in range(1, each + 1) if each % n == 0]
        yield found(
            "SW4921", _place(a, VIRTUAL), message, f"Take a divisor of {each}, or {LAYOUT}.", valid
        )


def micro_batches_of_a_group(a: Arguments) -> Iterator[Diagnostic]:
    """Check schedules.py:1145: the interleaved schedule groups as many micro-batches as pipeline
    ranks."""
    batch, micro, pipeline, data = (
        a.integer(GLOBAL),
        a.integer(MICRO),
        a.integer(PIPELINE, 1),
        _data(a),
    )
    virtual, group = (
        _virtual(a),
        a.integer("--microbatch-group-size-per-virtual-pipeline-stage", pipeline),
    )
    if (
        not batch
        or not micro
        or not pipeline
        or not data
        or not group
        or not virtual
        or virtual == 1
    ):
        return
    count = batch // (micro * data)
    rest = count % group
    if count >= group >= pipeline and (rest == 0 or rest >= pipeline):
        return
    message = f"{count} micro-batches do not form groups of {group} over {pipeline} pipeline ranks"
    help = f"Take a {GLOBAL} that is a multiple of {micro * data * pipeline}."
    yield found("SW4922", _place(a, GLOBAL), message, help)


def experts_over_the_world(a: Arguments) -> Iterator[Diagnostic]:
    """Check parallel_state.py:882: expert ranks are taken from all ranks of a pipeline stage."""
    expert, tensor, pipeline = a.integer(EXPERT, 1), a.integer(TENSOR, 1), a.integer(PIPELINE, 1)
    ranks = _product((expert, a.integer(EXPERT_TENSOR, tensor), pipeline))
    if a.world_size is None or expert == 1 or not ranks or a.world_size % ranks == 0:
        return
    message = (
        f"expert-tensor x expert x pipeline = {ranks} ranks do not divide a world of {a.world_size}"
    )
    help = f"Take a smaller {EXPERT}, or {EXPERT_TENSOR} 1."
    yield found("SW4923", _place(a, EXPERT), message, help)


def experts_without_sequence(a: Arguments) -> Iterator[Diagnostic]:
    """Check megatron/core/transformer/moe/moe_layer.py:629, which fails in the first forward
    pass."""
    tensor = a.integer(TENSOR, 1)
    if not tensor or tensor == 1 or not a.has(EXPERTS) or a.has("--sequence-parallel"):
        return
    message = f"{EXPERTS} with {tensor} tensor ranks needs sequence parallelism"
    yield found("SW4924", _place(a, EXPERTS), message, "Add --sequence-parallel.")


RULES: dict[str, Check] = {
    "SW4901": unknown_options,
    "SW4902": wrong_values,
    "SW4911": ranks_do_not_divide,
    "SW4912": batch_does_not_divide,
    "SW4913": layers_do_not_divide,
    "SW4921": layers_of_a_virtual_stage,
    "SW4922": micro_batches_of_a_group,
    "SW4923": experts_over_the_world,
    "SW4924": experts_without_sequence,
}


def lint_arguments(a: Arguments) -> tuple[Diagnostic, ...]:
    """Return the findings by position in the file."""
    if not a.given:
        first = Location(file=a.source.file, line=1, column=1)
        help = "Options stand as `--name value`; those before a .py file are the launcher's."
        return (found("SW4900", first, f"{a.source.file} holds no option of Megatron-LM", help),)
    told = [diagnostic for check in RULES.values() for diagnostic in check(a)]
    return tuple(sorted(told, key=operator.attrgetter("location.line", "location.column", "code")))


def _product(numbers: Iterator[int | None] | tuple[int | None, ...]) -> int | None:
    """Return the product; None where a factor is unknown."""
    known = list(numbers)
    return None if None in known else math.prod(n for n in known if n is not None)


def _data(a: Arguments) -> int | None:
    ranks = _product(a.integer(name, 1) for name in (TENSOR, PIPELINE, CONTEXT))
    return a.world_size // ranks if a.world_size and ranks and a.world_size % ranks == 0 else None


def _virtual(a: Arguments) -> int | None:
    """Return the stages of a pipeline rank; None where they are unknown."""
    layers, pipeline, each = a.integer(LAYERS), a.integer(PIPELINE, 1), a.integer(PER_VIRTUAL)
    layout = a.last(LAYOUT)
    if a.has(VIRTUAL):
        return a.integer(VIRTUAL)
    if layout is not None and pipeline:
        text = layout.values[0] if layout.values else None
        if text is None or "(" in text or "*" in re.sub(r"[Etm]\*", "", text):
            return None
        return (text.count("|") + 1) // pipeline
    if a.has(PER_VIRTUAL):
        return layers // pipeline // each if layers and pipeline and each else None
    return 1


def _place(a: Arguments, *names: str) -> Location:
    """Return the position of the first of these options in the file."""
    given: MegatronOption | None = next(
        (g for name in names if (g := a.last(name)) is not None), None
    )
    return given.place if given else Location(file=a.source.file, line=1, column=1)
