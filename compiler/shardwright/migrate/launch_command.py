"""The command that starts a training: its launcher, where it runs, and the words of the script.

Nothing is run and nothing is expanded; a hostfile and Accelerate's file are read where they are
named and there.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwright.diagnostics import Diagnostic, Location, Refusal, Source, found
from shardwright.recipe.recipe_parser import MAX_RECIPE_BYTES, parse_recipe_text
from shardwright.recipe.recipe_tree import LineOffsets, node_value
from shardwright.utils.file_io import read_regular_text_file
from shardwright.utils.json_values import JsonObject

MOST_WORDS = 4096
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)

# Options of the launchers that take no value; every other one takes the word behind it.
_VALUELESS_OPTIONS = frozenset(
    {
        *(
            "module",
            "no_python",
            "no_local_rank",
            "no_ssh",
            "no_ssh_check",
            "force_multi",
            "save_pid",
        ),
        *(
            "elastic_training",
            "bind_cores_to_rank",
            "standalone",
            "use_deepspeed",
            "multi_gpu",
            "cpu",
            "use_fsdp",
        ),
        *("same_network", "quiet", "debug", "use_xpu", "tpu", "ipex"),
    }
)
_SHORT_OPTIONS: dict[str, str] = {
    "H": "hostfile",
    "i": "include",
    "e": "exclude",
    "m": "module",
    "q": "quiet",
}
_PYTHON_SWITCHES = frozenset({"u", "O", "OO", "B", "E", "I", "s", "S", "P"})

# First words -> the launcher that they start.
_LAUNCHERS: dict[tuple[str, ...], str] = {
    ("deepspeed",): "deepspeed",
    ("ds",): "deepspeed",
    ("python", "-m", "deepspeed.launcher.runner"): "deepspeed",
    ("accelerate", "launch"): "accelerate",
    ("accelerate-launch",): "accelerate",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("torchrun",): "torchrun",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "torch.distributed.launch"): "torchrun",
    ("python",): "python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """launcher: deepspeed | accelerate | torchrun | python. options: of the launcher, "" for a
    switch. words: of the script, each with its values; a word is written with underscores. rest:
    words of the script without a name."""

    launcher: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    script: str = ""
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rest: tuple[str, ...] = ()

    def option(self, *names: str) -> tuple[str, str] | None:
        """Return (as written, value) of the first of these options that is given."""
        return next(
            ((f"--{name}", self.options[name]) for name in names if name in self.options), None
        )


def read_command(text: str) -> LaunchCommand:
    """Parse a launch command. Raises Refusal with SW1451."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))
    except ValueError as error:
        raise _refused(f"--launch is no command of a shell: {str(error).lower()}") from None
    if not words:
        raise _refused("--launch is empty")
    if len(words) > MOST_WORDS:
        raise _refused(f"--launch has {len(words)} words, more than {MOST_WORDS}")
    environment: dict[str, str] = {}
    while words and (variable := _VARIABLE.fullmatch(words[0])):
        environment[variable[1]] = variable[2]
        words = words[1:]
    plain = [re.sub(r"python[\d.]*", "python", os.path.basename(w)) for w in words[:1]] + words[1:]
    longest_first = sorted(_LAUNCHERS, key=len, reverse=True)
    start = next((prefix for prefix in longest_first if tuple(plain[: len(prefix)]) == prefix), ())
    launcher, rest = _LAUNCHERS.get(start, ""), words[len(start) :]
    if not launcher:
        prefix = " ".join(words[:2]) or text.strip()
        raise _refused(
            f"--launch begins with {prefix!r}, which is none of deepspeed, accelerate launch, "
            "torchrun, python"
        )
    options: dict[str, str] = {}
    while rest and rest[0].startswith("-") and rest[0] != "-":
        name, equals, value = rest[0].lstrip("-").partition("=")
        rest = rest[1:]
        name = _SHORT_OPTIONS.get(name, name).replace("-", "_")
        if name == "":  # `--`: the script follows
            break
        switch = name in _VALUELESS_OPTIONS or (launcher == "python" and name in _PYTHON_SWITCHES)
        if not equals and not switch and rest:
            value, *rest = rest
        options[name] = value
    named: dict[str, tuple[str, ...]] = {}
    unnamed: list[str] = []
    name = ""
    for word in rest[1:]:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            named[name] = (value,) if equals else ()
            name = "" if equals else name
        elif name:
            named[name] = (*named[name], word)
        else:
            unnamed.append(word)
    return LaunchCommand(
        launcher=launcher,
        environment=environment,
        options=options,
        script=rest[0] if rest else "",
        words=named,
        rest=tuple(unnamed),
    )


def hostfile_slots(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, slots) of a hostfile; lines of another form are skipped, and `check` reports
    them."""
    for line in text.splitlines():
        found = re.fullmatch(r"\s*([^\s#]+)\s+slots=(\d{1,6})\s*(#.*)?", line)
        if found:
            yield found[1], int(found[2])


def parse_include_filter(filter_text: str) -> dict[str, tuple[int, ...] | None]:
    """Parse DeepSpeed's `worker-0:0,1@worker-1` to slots by host; None means all."""
    found: dict[str, tuple[int, ...] | None] = {}
    for part in filter(None, filter_text.split("@")):
        host, colon, slots = part.partition(":")
        numbers = [word for word in slots.split(",") if word.strip().isdigit()]
        found[host.strip()] = tuple(map(int, numbers)) if colon and numbers else None
    return found


def _refused(message: str) -> Refusal:
    help = (
        'Give the command as it is typed, such as --launch "deepspeed --num_gpus 8 train.py '
        '--deepspeed ds.json".'
    )
    return Refusal(Diagnostic(code="SW1451", message=message, help=help))


# Accelerate's own configuration file (`accelerate config`) -> options of its launcher, as they
# would be typed.


SECTION = "deepspeed_config"


def read_accelerate_config(path: str) -> dict[str, str]:
    """Read Accelerate's options, its DeepSpeed section included. Raises Refusal with SW1452."""
    try:
        text = read_regular_text_file(path, MAX_RECIPE_BYTES)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Refusal(_error(path, f"--config_file: {path} cannot be read: {cause}")) from None
    node, errors = parse_recipe_text(text, LineOffsets(path, text))
    source = Source(file=path, texts={path: text})
    if errors:
        raise Refusal(*(replace(error, code="SW1452") for error in errors), source=source)
    document = None if node is None else node_value(node)
    if not isinstance(document, Mapping):
        raise Refusal(
            _error(path, f"--config_file: {path} holds no keys of Accelerate"), source=source
        )
    return dict(_accelerate_config_options(document))


def _accelerate_config_options(document: JsonObject) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in document.items():
        if key == SECTION and isinstance(value, Mapping):
            found |= _accelerate_config_options(value)
        elif not isinstance(value, Mapping | list):
            # The one option that has another name on the command line.
            text = str(value).lower() if isinstance(value, bool) else str(value)
            name = "hostfile" if key == "deepspeed_hostfile" else key
            found[name] = "" if value is None else text
    return found


def resolve_config_path(path: str, name: str) -> str:
    """Resolve a path in a configuration against the working folder, as Accelerate does, else its
    own."""
    own = os.path.join(os.path.dirname(path), name)
    return name if os.path.isfile(name) or not os.path.isfile(own) else own


def _error(path: str, message: str) -> Diagnostic:
    help = "Give the YAML file that `accelerate config` wrote."
    return found("SW1452", Location(file=path, line=0, column=0), message, help)
