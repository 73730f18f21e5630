"""`shardwright completion bash|zsh|fish`: the script that completes commands, options, GPU and
model names."""

from __future__ import annotations

import argparse

from shardwright.diagnostics import refusal

SHELLS = ("bash", "zsh", "fish")
LIBRARY = "shtab"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    """Prints the script, for `eval "$(shardwright completion bash)"`. Raises Refusal: SW1441."""
    try:
        import shtab
    except ImportError:
        raise refusal(
            "SW1441",
            f"completion needs the package {LIBRARY}, which is not installed",
            (
                f"Run `pip install {LIBRARY}` (or `pip install 'shardwright[completion]'`) and "
                "try again."
            ),
        ) from None
    print(shtab.complete(completion_parser(shtab.FILE, shtab.DIRECTORY), shell=args.shell))
    return 0


def completion_parser(file: dict[str, str], directory: dict[str, str]) -> argparse.ArgumentParser:
    """Every command in one parser, which the command line itself never builds. file, directory:
    shtab's markers."""
    import importlib
    from typing import cast

    from shardwright.cli.main import COMMANDS, CommandModule
    from shardwright.cluster.gpu_catalogue import catalogue

    parser = argparse.ArgumentParser(prog="shardwright")
    commands = parser.add_subparsers(dest="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        cast(CommandModule, importlib.import_module(module)).add_arguments(command)
        for action in command._actions:
            if "--gpu" in action.option_strings:
                action.choices = [*catalogue()["gpus"]]
            elif action.choices is None and action.nargs != 0:
                action.complete = directory if action.metavar == "DIR" else file  # type: ignore[attr-defined]
    return parser
