"""The `shardwright` command: picks one command's module, runs it, and turns whatever happens into
an exit code.

0 done, 1 refused (bad input, usage), 2 our fault, 3 training did not finish, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from shardwright import __version__
from shardwright.cli.terminal import error as say
from shardwright.cli.terminal import print_refusal

DONE, REFUSED, OUR_FAULT, INTERRUPTED = 0, 1, 2, 130


class Command(NamedTuple):
    """Describes a row of `shardwright --help`. Its module in cli/ defines `add_<name>_arguments`
    and `run_<name>`, and is imported when the command is chosen."""

    group: str
    module: str
    help: str

    def functions(
        self, name: str
    ) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
        """Import the command's module and return `add_<name>_arguments` and `run_<name>`."""
        module = importlib.import_module(f"shardwright.cli.{self.module}")
        name = name.replace("-", "_")
        return getattr(module, f"add_{name}_arguments"), getattr(module, f"run_{name}")


WRITE, PLAN, LAUNCH = "write a recipe", "plan", "launch"
LOOK, AFTER = "look at a run", "after the run"
MEASURE, ANYONE = "on the hardware", "for anyone"

COMMANDS: dict[str, Command] = {
    "init": Command(
        WRITE, "recipe_commands", "write a commented starter recipe for a model and a cluster"
    ),
    "import": Command(
        WRITE, "recipe_commands", "turn a DeepSpeed config and its launch command into a recipe"
    ),
    "schema": Command(
        WRITE, "recipe_commands", "print the JSON Schema of a recipe, with every default"
    ),
    "check": Command(WRITE, "recipe_commands", "check recipes and the files they name"),
    "models": Command(
        WRITE, "models_command", "list the model types and what is verified for each"
    ),
    "plan": Command(PLAN, "plan_command", "search the layouts of a recipe and rank them"),
    "estimate": Command(
        PLAN, "estimate_command", "predict the memory and step time of the pinned layout"
    ),
    "explain": Command(
        PLAN, "explain_command", "explain a plan, why it is not another layout, or a code"
    ),
    "diff": Command(
        PLAN, "diff_command", "compare two recipes or folders, and what the changes do"
    ),
    "verify": Command(
        PLAN, "compile_commands", "test the layout on a tiny copy of the model against one process"
    ),
    "compile": Command(LAUNCH, "compile_commands", "compile a recipe into a folder that can run"),
    "prepare": Command(
        LAUNCH, "compile_commands", "tokenize a compiled folder's data before the run"
    ),
    "doctor": Command(
        LAUNCH, "launch_commands", "check a compiled folder's hosts before anything starts"
    ),
    "run": Command(LAUNCH, "launch_commands", "train a compiled folder"),
    "outer-store": Command(
        LAUNCH, "launch_commands", "bring the islands of a compiled folder together"
    ),
    "stop": Command(LAUNCH, "launch_commands", "save a checkpoint and end a run"),
    "status": Command(LOOK, "monitor_commands", "show how a run is doing"),
    "logs": Command(LOOK, "monitor_commands", "show a run's output, or one rank's"),
    "autopsy": Command(
        LOOK, "monitor_commands", "explain why a run ended, what it cost and what to do"
    ),
    "report": Command(
        LOOK, "monitor_commands", "write a one-page HTML report of a compiled folder and its run"
    ),
    "score": Command(
        AFTER, "score_command", "write the log-probabilities that a model gives a recipe's data"
    ),
    "export": Command(AFTER, "checkpoint_commands", "export a checkpoint as a Hugging Face folder"),
    "generate": Command(AFTER, "checkpoint_commands", "generate text with a trained model"),
    "calibrate": Command(
        MEASURE, "calibrate_commands", "measure this machine for a recipe's plans"
    ),
    "tune": Command(
        MEASURE,
        "calibrate_commands",
        "run the best layouts and the ZeRO baselines for a few steps",
    ),
    "lint": Command(
        ANYONE, "lint_command", "check your own DeepSpeed configs and Megatron-LM arguments"
    ),
    "completion": Command(ANYONE, "main", "print a shell completion script"),
}


class _Parser(argparse.ArgumentParser):
    """Exits with 1 on a usage error, where argparse exits with 2: 2 is our fault."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say(message)
        raise SystemExit(REFUSED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Streams that the caller closed (`>&-`).
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks shall not end a command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _interrupt)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as leave:  # argparse: --help, a usage error
        return leave.code if isinstance(leave.code, int) else REFUSED if leave.code else DONE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has all it wanted. Python flushes once more at exit: give it
        # somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:
            # The file that standard output goes to. Nothing more shall be flushed into it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            say("standard output: no space left on the device")
            return REFUSED
        from shardwright.diagnostics.file_errors import file_error_refusal

        return _failed(file_error_refusal(error) or error)
    except ModuleNotFoundError as error:
        from shardwright.utils.installation import missing_import

        return _failed(missing_import(error, f"`{arguments[0]}`") or error)
    except Exception as error:
        return _failed(error)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt as soon as no module is half imported: libraries swallow what is
    raised within their imports, and C++ that torch's imports call ends the process by it."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    again = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
    again.daemon = True
    again.start()


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help(), file=sys.stderr)
        return REFUSED
    first, rest = arguments[0], arguments[1:]
    if first in ("-h", "--help", "help"):
        print(_help())
        return DONE
    if first in ("-V", "--version"):
        print(f"shardwright {__version__}")
        return DONE
    if first not in COMMANDS:
        import difflib

        kind = "unknown option {}" if first.startswith("-") else "there is no command `{}`"
        close = difflib.get_close_matches(first, COMMANDS, n=1)
        help = f"did you mean `{close[0]}`?" if close else "`shardwright --help` lists the commands"
        say(f"{kind.format(first)}; {help}")
        return REFUSED
    from shardwright.utils.installation import silence_torchao

    silence_torchao()
    command = COMMANDS[first]
    add_arguments, run = command.functions(first)
    parser = _Parser(
        prog=f"shardwright {first}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        allow_abbrev=False,
    )
    add_arguments(parser)
    return run(parser.parse_args(rest))


def _help() -> str:
    version = "-V, --version"  # the widest cell of the left column
    width = len(version)
    lines, group = [], ""
    for name, command in COMMANDS.items():
        lines += [] if command.group == group else ["", f"{command.group}:"]
        lines.append(f"  {name:<{width}}  {command.help}")
        group = command.group
    rows = "\n".join(lines)
    return (
        "usage: shardwright COMMAND ...\n\n"
        "A recipe (a Hugging Face model, a cluster, a training run) goes in;\n"
        "a verified parallel run on DeepSpeed or Megatron-Core comes out.\n\n"
        f"{rows[1:]}\n\n"
        "options:\n"
        f"  {'-h, --help':<{width}}  this page; `shardwright COMMAND --help` for one command\n"
        f"  {version}  the version"
    )


def _failed(error: Exception) -> int:
    from shardwright.diagnostics import Refusal

    if isinstance(error, Refusal):
        print_refusal(error)
        return REFUSED
    import tempfile
    import traceback

    text = f"shardwright {__version__}, Python {sys.version}\narguments: {sys.argv[1:]!r}\n\n"
    text += "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile(
        "wb", prefix="shardwright-", suffix=".txt", delete=False
    ) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    say(
        f"this is our fault, not yours: {type(error).__name__} inside shardwright. The details are "
        f"in {file.name}; please report them together with the recipe. Nothing of your input needs "
        "to change."
    )
    return OUR_FAULT


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run_completion(args: argparse.Namespace) -> int:
    """Print the script that completes commands, options, GPU and model names, for
    `eval "$(shardwright completion bash)"`. Raises Refusal: SW1441."""
    try:
        import shtab
    except ImportError:
        from shardwright.diagnostics import refusal
        from shardwright.utils.installation import install_command

        raise refusal(
            "SW1441",
            "completion needs the package shtab, which is not installed",
            f"Run `pip install shtab` (or `{install_command('shtab')}`) and try again.",
        ) from None
    print(shtab.complete(completion_parser(shtab.FILE, shtab.DIRECTORY), shell=args.shell))
    return 0


def completion_parser(file: dict[str, str], directory: dict[str, str]) -> argparse.ArgumentParser:
    """Build one parser of every command, which the command line itself never does. file,
    directory: shtab's markers."""
    from shardwright.layout.gpu_cluster import catalogue

    parser = argparse.ArgumentParser(prog="shardwright")
    commands = parser.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        add_arguments, _ = command.functions(name)
        add_arguments(subparser)
        for action in subparser._actions:
            if "--gpu" in action.option_strings:
                action.choices = [*catalogue()["gpus"]]
            elif action.choices is None and action.nargs != 0:
                action.complete = directory if action.metavar == "DIR" else file  # type: ignore[attr-defined]
    return parser
