"""The `shardwright` command: picks one command's module, runs it, and turns whatever happens into
an exit code.

0 done, 1 refused (bad input, usage), 2 our fault, 3 training did not finish, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from shardwright import __version__
from shardwright.cli.terminal import error as say
from shardwright.cli.terminal import print_refusal

DONE, REFUSED, OUR_FAULT, INTERRUPTED = 0, 1, 2, 130

# name -> (module, one line of help); only the chosen module is imported.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": (
        "shardwright.cli.init_command",
        "write a commented starter recipe for a model and a cluster",
    ),
    "import": (
        "shardwright.cli.import_command",
        "turn a DeepSpeed config and its launch command into a recipe",
    ),
    "schema": (
        "shardwright.cli.schema_command",
        "print the JSON Schema of a recipe, with every default",
    ),
    "check": ("shardwright.cli.check_command", "check recipes and the files they name"),
    "models": (
        "shardwright.cli.models_command",
        "list the model types and what has been proved for each",
    ),
    "lint": (
        "shardwright.cli.lint_command",
        "check DeepSpeed configs and Megatron-LM arguments that you already have",
    ),
    "explain": (
        "shardwright.cli.explain_command",
        "explain a plan, why it is not another layout, or a code",
    ),
    "plan": ("shardwright.cli.plan_command", "search the layouts of a recipe and rank them"),
    "estimate": (
        "shardwright.cli.estimate_command",
        "predict the memory and step time of the pinned layout",
    ),
    "diff": (
        "shardwright.cli.diff_command",
        "compare two recipes or compiled folders, and what the changes do",
    ),
    "compile": ("shardwright.cli.compile_command", "compile a recipe into a folder that can run"),
    "prepare": (
        "shardwright.cli.prepare_command",
        "tokenize a compiled folder's data before the run",
    ),
    "verify": (
        "shardwright.cli.verify_command",
        "test the layout on a tiny copy of the model against one process",
    ),
    "calibrate": ("shardwright.cli.calibrate_command", "measure this machine for a recipe's plans"),
    "tune": (
        "shardwright.cli.tune_command",
        "run the best layouts of a recipe, and today's, for a few steps",
    ),
    "report": (
        "shardwright.cli.report_command",
        "write a one-page HTML report of a compiled folder and its run",
    ),
    "run": ("shardwright.cli.run_command", "train a compiled folder"),
    "outer-store": (
        "shardwright.cli.outer_store_command",
        "bring the islands of a compiled folder together",
    ),
    "doctor": (
        "shardwright.cli.doctor_command",
        "check a compiled folder's hosts before anything starts",
    ),
    "status": ("shardwright.cli.status_command", "show how a run is doing"),
    "logs": ("shardwright.cli.logs_command", "show a run's output, or one rank's"),
    "stop": ("shardwright.cli.stop_command", "save a checkpoint and end a run"),
    "completion": ("shardwright.cli.completion_command", "print a shell completion script"),
    "export": ("shardwright.cli.export_command", "export a checkpoint as a Hugging Face folder"),
    "generate": ("shardwright.cli.generate_command", "generate text with a trained model"),
}


class CommandModule(Protocol):
    """What each module of cli/ has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on a usage error; 2 is ours, so it is 1 here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say(message)
        raise SystemExit(REFUSED)


def main(argv: Sequence[str] | None = None) -> int:
    """The console entry point. Never raises, whatever the command does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks shall not end a command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
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
        if error.errno != errno.ENOSPC:
            return _failed(error)
        # Often the file that standard output goes to. Nothing more shall be flushed into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"{error.filename or 'standard output'}: no space left on the device")
        return REFUSED
    except Exception as error:
        return _failed(error)


def _open_missing_streams() -> None:
    """A caller may have closed stdout or stderr (`>&-`); Python then has None there."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


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
        return _no_command(first)
    module, summary = COMMANDS[first]
    command = cast(CommandModule, importlib.import_module(module))
    parser = _Parser(
        prog=f"shardwright {first}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(rest))


def _help() -> str:
    rows = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: shardwright COMMAND ...\n\n"
        "A recipe (a Hugging Face model, a cluster, a training run) goes in;\n"
        "a verified parallel run on DeepSpeed or Megatron-Core comes out.\n\n"
        f"commands:\n{rows}\n\n"
        "options:\n"
        "  -h, --help     this page; `shardwright COMMAND --help` for one command\n"
        "  -V, --version  the version"
    )


def _no_command(name: str) -> int:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    what = f"unknown option {name}" if name.startswith("-") else f"there is no command `{name}`"
    say(
        f"{what}; did you mean `{close[0]}`?"
        if close
        else f"{what}; `shardwright --help` lists the commands"
    )
    return REFUSED


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
