"""Checks `launch.slurm.extra` against the table of sbatch's options (sbatch.json)."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.utils.json_values import JsonValue

KEY: KeyPath = ("launch", "slurm", "extra")
SAFE_VALUE = re.compile(r"[A-Za-z0-9._,@+=:/%&|*()\[\] -]+")
"""Matches values that neither sbatch nor bash interprets: no quote, backslash, #, $ or line break.
Spaces get quotes."""

_NODES = "the plan has a task on each of cluster.nodes, which starts the node's ranks"
_GPUS = "the plan's GPUs are cluster.gpus_per_node; write launch.slurm.gres where they need a name"
_CPUS = "launch.slurm.cpus_per_node decides it"
_MEMORY = "launch.slurm.mem decides it"
_SHARED = "launch.slurm.exclusive decides it"
_REQUEUE = "launch.slurm.requeue decides it"
_CONTAINER = "launch.slurm.container decides it"
_LOG = "`run` and `logs` look for the job's output in run/slurm-JOB.log"
_FOLDER = "the job is launch/job.sh, in the compiled folder"
_ENVIRONMENT = "launch.env and launch.env_from set the ranks' environment"
_COMMAND_LINE = "it is an option of sbatch's command line, not of the job"

RESERVED_OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core"), _NODES
    ),
    **dict.fromkeys(("ntasks-per-socket", "ntasks-per-gpu", "ntasks-per-tres"), _NODES),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"), _GPUS),
    **dict.fromkeys(("tres-per-task", "resources"), _GPUS),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), _CPUS),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
    **dict.fromkeys(("exclusive", "oversubscribe"), _SHARED),
    **dict.fromkeys(("requeue", "no-requeue"), _REQUEUE),
    **dict.fromkeys(("container", "container-id", "container-type"), _CONTAINER),
    **dict.fromkeys(("output", "error", "open-mode"), _LOG),
    **dict.fromkeys(("chdir", "wrap", "input"), _FOLDER),
    **dict.fromkeys(("export", "export-file", "get-user-env"), _ENVIRONMENT),
    **dict.fromkeys(
        ("parsable", "quiet", "verbose", "help", "usage", "version", "wait", "test-only"),
        _COMMAND_LINE,
    ),
    **{name: f"launch.slurm.{name} decides it" for name in ("account", "partition", "qos", "time")},
    **{
        name: f"launch.slurm.{name} decides it" for name in ("exclude", "constraint", "reservation")
    },
    "job-name": "the recipe's name decides it",
    "signal": "launch.slurm.signal_seconds decides it",
    "array": "every job of an array would train in the same folder",
    "external": "the job would start nothing",
}
"""Maps an option to the reason why it may not stand in `extra`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOption:
    """Describes an option of sbatch. value: required | optional | none."""

    name: str
    short: str
    value: str


@functools.cache
def _table() -> Mapping[str, Any]:
    return cast(
        "Mapping[str, Any]",
        json.loads(Path(__file__).with_name("sbatch.json").read_text(encoding="utf-8")),
    )


def versions() -> str:
    return str(_table()["versions"])


@functools.cache
def options() -> Mapping[str, SbatchOption]:
    rows = _table()["options"].items()
    return {
        name: SbatchOption(name=name, short=row.get("short", ""), value=row["value"])
        for name, row in rows
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOption:
    """Holds one option of the recipe. name: as written, without hyphens. value: None where it has
    none."""

    key: KeyPath
    name: str
    value: str | None

    @property
    def option(self) -> SbatchOption | None:
        if len(self.name) == 1:
            return next(
                (option for option in options().values() if option.short == self.name), None
            )
        return options().get(self.name.lower().replace("_", "-"))


def sbatch_arguments(extra: JsonValue) -> tuple[str, ...]:
    """Return the #SBATCH options of an `extra` without errors, as `--name=value`."""
    arguments = []
    for given in _recipe_options(extra):
        if given.option is not None:
            quoted = f'"{given.value}"' if " " in (given.value or "") else given.value
            name = f"--{given.option.name}"
            arguments.append(name if quoted is None else f"{name}={quoted}")
    return tuple(arguments)


def _recipe_options(extra: JsonValue) -> Iterator[RecipeOption]:
    if isinstance(extra, Mapping):
        for key, value in extra.items():
            if value is not False:
                text = None if value is True else str(value).strip()
                yield RecipeOption(key=(*KEY, key), name=key.strip().lstrip("-"), value=text)
    else:
        for index, item in enumerate(cast("list[str]", extra)):
            yield _split(item.strip().removeprefix("#SBATCH").strip(), (*KEY, index))


def _split(word: str, key: KeyPath) -> RecipeOption:
    """Split --name=value, --name value, -N value or -Nvalue; quotes around the value are
    removed."""
    if word.startswith("-") and not word.startswith("--"):
        name, value = word[1:2], word[2:]
    else:
        word = word.removeprefix("--")
        name, _, value = word.partition("=" if "=" in word.split(" ")[0] else " ")
    value = value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    return RecipeOption(key=key, name=name, value=value or None)


def sbatch_option_errors(extra: JsonValue) -> Iterator[Diagnostic]:
    """Yield SW1218 for options that another key decides, SW1219 for options that sbatch does not
    know, and SW1220 for wrong values."""
    for given in _recipe_options(extra):
        option = given.option
        if option is None:
            dashed = f"-{given.name}" if len(given.name) == 1 else f"--{given.name}"
            written = given.name.lower().replace("_", "-")
            near = tuple(difflib.get_close_matches(written, options(), n=1, cutoff=0.6))
            message = f"launch.slurm.extra: {dashed} is no option of sbatch (Slurm {versions()})"
            help = (
                "Give an option of your site's plugins on the command line: `sbatch --its-option "
                "launch/job.sh`, in the compiled folder."
            )
            help = f"Did you mean `--{near[0]}`?" if near else help
            yield found("SW1219", given.key, message, help, near)
        elif option.name in RESERVED_OPTIONS:
            message = (
                f"launch.slurm.extra: --{option.name} cannot be set here: "
                f"{RESERVED_OPTIONS[option.name]}"
            )
            yield found("SW1218", given.key, message, "Remove it.")
        elif (misfit := _value_error(option, given.value)) is not None:
            what, help = misfit
            yield found("SW1220", given.key, f"launch.slurm.extra: --{option.name} {what}", help)


def _value_error(option: SbatchOption, value: str | None) -> tuple[str, str] | None:
    """Return (the fault of the value, the help); None for a right one."""
    if value is None:
        return (
            ("needs a value", f"Write --{option.name}=VALUE.")
            if option.value == "required"
            else None
        )
    if option.value == "none":
        return f"takes no value, and has {value!r}", f"Write --{option.name}."
    if " -" in value:
        return f"has another option in its value {value!r}", "Give each option an entry of its own."
    if not SAFE_VALUE.fullmatch(value):
        allowed = "letters, digits, spaces and . _ , @ + = : / % & | * ( ) [ ] -"
        return (
            f"has the value {value!r}, with characters that a job script cannot hold",
            f"Give only {allowed}.",
        )
    return None
