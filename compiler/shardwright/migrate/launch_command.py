"""The command that starts a training: its launcher, where it runs, and the words of the script.

Nothing is run. Words before the launcher (srun, nohup, uv run, env) are read for its counts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.utils.shell_script import ShellCommand, read_shell_commands, slurm_directives

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)

_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
_BARE_VARIABLE = re.compile(r"\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*\}")

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

# First words -> the launcher that they start. The last ones start the program's own script.
_LAUNCHERS: dict[tuple[str, ...], str] = {
    ("deepspeed",): "deepspeed",
    ("ds",): "deepspeed",
    ("python", "-m", "deepspeed.launcher.runner"): "deepspeed",
    ("python", "-m", "deepspeed"): "deepspeed",
    ("accelerate", "launch"): "accelerate",
    ("accelerate-launch",): "accelerate",
    ("python", "-m", "accelerate.commands.launch"): "accelerate",
    ("torchrun",): "torchrun",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python", "-m", "torch.distributed.launch"): "torchrun",
    ("python",): "python",
    ("llamafactory-cli", "train"): "llamafactory-cli",
    ("lmf", "train"): "llamafactory-cli",
    **{
        (c, n): "llamafactory-cli"
        for c in ("llamafactory-cli", "lmf")
        for n in ("sft", "dpo", "rm")
    },
    ("axolotl", "train"): "axolotl",
    **{("swift", name): "swift" for name in ("pt", "sft", "rlhf")},
    **{("megatron", name): "swift" for name in ("pt", "sft", "rlhf")},
    **{
        ("trl", name): "trl"
        for name in ("sft", "dpo", "grpo", "kto", "reward", "rloo", "gkd", "online_dpo")
    },
}
OWN_SCRIPTS = frozenset({"llamafactory-cli", "axolotl", "swift", "trl"})
"""Lists the launchers whose words are the training's, not those of a script behind them."""
_NAMES_OF_LAUNCHERS = (
    "deepspeed, accelerate launch, torchrun, python, llamafactory-cli train, axolotl train, "
    "swift sft, trl sft"
)

_UV_VALUES = "p with extra group project directory python env-file"
_SRUN_VALUES = (
    "N n c p A t J w o e q G nodes ntasks ntasks-per-node cpus-per-task gpus gpus-per-node "
    "gpus-per-task gres partition account time job-name nodelist output error qos mem "
    "container-image container-mounts container-workdir container-name mpi jobid export chdir"
)
# Words before a launcher -> their options that take the next word.
_WRAPPERS: dict[tuple[str, ...], frozenset[str]] = {
    **dict.fromkeys((("nohup",), ("exec",), ("time",), ("env",), ("setsid",)), frozenset[str]()),
    ("uv", "run"): frozenset(_UV_VALUES.split()),
    ("poetry", "run"): frozenset(),
    ("pipenv", "run"): frozenset(),
    ("pdm", "run"): frozenset(),
    ("pixi", "run"): frozenset({"e", "environment"}),
    **{(c, "run"): frozenset({"n", "p", "name", "prefix"}) for c in ("conda", "micromamba")},
    ("srun",): frozenset(_SRUN_VALUES.split()),
    ("sudo",): frozenset({"u", "user"}),
    ("nice",): frozenset({"n"}),
    ("stdbuf",): frozenset({"o", "e", "i"}),
    ("numactl",): frozenset(),
}
_SHELLS = frozenset({"bash", "sh", "zsh"})
# Slurm's options -> options of a launcher.
_SLURM_NODES = ("nodes", "N")
_SLURM_GPUS = ("gpus-per-node", "ntasks-per-node", "gres")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """launcher: deepspeed | accelerate | torchrun | python, or one of OWN_SCRIPTS. options: of the
    launcher, "" for a switch. words: of the script, each with its values; a word is written with
    underscores. rest: words of the script without a name. hidden: variables that may stand for
    any words. before: words before the launcher that say nothing here. others: further training
    commands of the same text."""

    launcher: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    script: str = ""
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def read_command(text: str, owner: str = "--launch") -> LaunchCommand:
    """Parse the launch command of a text; a shell script's first one that trains.

    owner: what messages call the text

    Raises Refusal with SW1451.
    """
    try:
        commands = read_shell_commands(text)
    except ValueError as error:
        raise _refused(f"{owner} is no command of a shell: {str(error).lower()}") from None
    slurm = _slurm_counts(slurm_directives(text))
    launches = [found for command in commands if (found := _launch(command, slurm)) is not None]
    if not launches:
        if not commands:
            raise _refused(f"{owner} has no command" if text.strip() else f"{owner} is empty")
        begins = f"begins with {' '.join(commands[0].words[:2])!r}"
        what = (
            f"{begins}, which is" if len(commands) == 1 else "starts no training: its commands are"
        )
        raise _refused(f"{owner} {what} none of {_NAMES_OF_LAUNCHERS}")
    launches.sort(key=lambda found: (found.launcher == "python", not found.words))
    first, *others = launches
    return replace(first, others=tuple(f"{o.launcher} {o.script}".strip() for o in others))


def _launch(command: ShellCommand, slurm: dict[str, str]) -> LaunchCommand | None:
    """Return the training that a command starts; None where it starts none."""
    environment, words = dict(command.environment), list(command.words)
    before: list[str] = []
    while words:
        if variable := _VARIABLE.fullmatch(words[0]):
            environment[variable[1]] = variable[2]
            words = words[1:]
            continue
        wrapper = next((w for w in _WRAPPERS if tuple(words[: len(w)]) == w), None)
        if wrapper is None:
            break
        words, own = _without_options(words[len(wrapper) :], _WRAPPERS[wrapper])
        slurm = {**slurm, **(_slurm_counts(own) if wrapper == ("srun",) else {})}
        before += [" ".join((*wrapper, *(f"{name} {own[name]}".strip() for name in own)))]
    if words and os.path.basename(words[0]) in _SHELLS and words[1:2] in (["-c"], ["-lc"]):
        with contextlib.suppress(ValueError):
            inner = [
                found
                for below in read_shell_commands(" ".join(words[2:3]))
                if (found := _launch(below, slurm)) is not None
            ]
            if inner:
                return replace(inner[0], environment={**environment, **inner[0].environment})
        return None
    plain = [re.sub(r"^python[\d.]*$", "python", os.path.basename(w)) for w in words[:1]]
    plain += words[1:]
    longest_first = sorted(_LAUNCHERS, key=len, reverse=True)
    start = next((prefix for prefix in longest_first if tuple(plain[: len(prefix)]) == prefix), ())
    launcher, rest = _LAUNCHERS.get(start, ""), words[len(start) :]
    if not launcher or (launcher == "python" and "-c" in rest[:1]):
        return None
    options = {
        name: count for name, count in slurm.items() if launcher == "python" or name == "nnodes"
    }
    if launcher in OWN_SCRIPTS:
        rest = [" ".join(start), *rest]
        if "--" in rest:  # `axolotl train x.yaml -- --nproc_per_node 8`: the launcher's options
            _, own = _without_options(rest[rest.index("--") + 1 :], _EVERY_OPTION)
            options |= {name.lstrip("-").replace("-", "_"): value for name, value in own.items()}
            rest = rest[: rest.index("--")]
    while rest and rest[0].startswith("-") and rest[0] != "-":
        name, equals, value = rest[0].lstrip("-").partition("=")
        rest = rest[1:]
        name = _SHORT_OPTIONS.get(name, name).replace("-", "_")
        if name == "":  # `--`: the script follows
            break
        switch = name in _VALUELESS_OPTIONS or (launcher == "python" and name in _PYTHON_SWITCHES)
        if not equals and not switch and rest:
            value, *rest = rest
        if name in ("nnodes", "num_nodes", "num_machines", "nproc_per_node"):
            options.pop("nnodes" if name != "nproc_per_node" else name, None)
        if not (launcher == "python" and name in _PYTHON_SWITCHES):
            options[name] = value
    named: dict[str, tuple[str, ...]] = {}
    unnamed: list[str] = []
    name = ""
    hidden: list[str] = []
    for word in rest[1:]:
        is_unnamed = not name or bool(named[name])
        if _ARRAY.fullmatch(word) or (is_unnamed and _BARE_VARIABLE.fullmatch(word)):
            hidden.append(word)
            name = ""
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            named[name] = (value,) if equals else ()
            name = "" if equals else name
        elif name:
            named[name] = (*named[name], word)
        elif launcher in OWN_SCRIPTS and (pair := _VARIABLE.fullmatch(word)):
            named[pair[1]] = (pair[2],)  # LLaMA-Factory's key=value
        else:
            unnamed.append(word)
    return LaunchCommand(
        launcher=launcher,
        environment=environment,
        options=options,
        script=rest[0] if rest else "",
        words=named,
        rest=tuple(unnamed),
        hidden=tuple(hidden),
        before=tuple(before),
    )


_EVERY_OPTION: frozenset[str] = frozenset({""})
"""Stands for options that take the next word where it is none."""


def _without_options(words: list[str], valued: frozenset[str]) -> tuple[list[str], dict[str, str]]:
    """Split the options from the front of words."""
    own: dict[str, str] = {}
    while words and words[0].startswith("-"):
        written, equals, value = words[0].partition("=")
        name = written.lstrip("-")
        words = words[1:]
        is_followed = bool(words) and not words[0].startswith("-")
        takes_word = name in valued or (valued is _EVERY_OPTION and is_followed)
        if not equals and takes_word and words:
            value, *words = words
        own[written] = value
        if written == "--":
            break
    return words, own


def _slurm_counts(options: dict[str, str]) -> dict[str, str]:
    """Convert Slurm's options to the two counts of a launcher."""
    plain = {name.lstrip("-"): value for name, value in options.items()}
    found: dict[str, str] = {}
    for names, count in ((_SLURM_NODES, "nnodes"), (_SLURM_GPUS, "nproc_per_node")):
        value = next((plain[name] for name in names if name in plain), None)
        if value is not None and (number := re.fullmatch(r"(?:gpu:)?(?:[\w-]+:)?(\d+)", value)):
            found[count] = number[1]
    return found


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
