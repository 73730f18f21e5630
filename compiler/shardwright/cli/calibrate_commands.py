"""`shardwright calibrate` and `tune`: measure this machine for a recipe, whose `cluster.measured`
then names the file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json, add_overrides, positive
from shardwright.cli.terminal import error, labelled_lines, shell_quoted, table_lines

if TYPE_CHECKING:
    from shardwright.calibrate.layout_trials import TuningResult


CPU_MINUTES, GPU_MINUTES = 0.5, 5.0
MEASURED_FILE = "measured.json"


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="whose shapes, precision and slots are measured"
    )
    add_overrides(parser)
    help = (
        f"how long to measure, beside building the copies (default {CPU_MINUTES:g} on a CPU, "
        f"{GPU_MINUTES:g} on a GPU)"
    )
    parser.add_argument("--minutes", type=minutes, metavar="N", help=help)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(MEASURED_FILE),
        metavar="FILE",
        help=f"the file to write (default {MEASURED_FILE})",
    )
    add_json(parser, "print the figures as one JSON object, as the file has them")


def minutes(text: str) -> float:
    """Parse an option that is a time in minutes."""
    value = float(text)
    if not 0.01 <= value <= 1440:
        raise argparse.ArgumentTypeError("must be between 0.01 and 1440")
    return value


def run_calibrate(args: argparse.Namespace) -> int:
    from shardwright.recipe.recipe_loader import load_recipe

    if not args.output.parent.is_dir():
        error(f"-o: {args.output.parent} is not a folder")
        return 1
    recipe = load_recipe(args.recipe, args.overrides)
    from shardwright.calibrate.calibration import calibrate
    from shardwright.cli.estimate_command import measurement_lines
    from shardwright.utils.child_processes import sigterm_as_interrupt
    from shardwright.utils.file_io import write_atomically
    from shardwright.utils.json_values import strict_json

    limit = args.minutes or (CPU_MINUTES if recipe.cluster.gpu == "cpu" else GPU_MINUTES)
    with sigterm_as_interrupt():
        done = calibrate(recipe, 60 * limit, lambda text: print(text, file=sys.stderr, flush=True))
    text = strict_json(done.found)
    write_atomically(args.output, text + "\n")
    if args.json:
        print(text)
        return 0
    print("\n".join(measurement_lines(done.found)))
    for each in done.skipped:
        print(f"not measured: {each}", file=sys.stderr)
    print("\n".join(_written_lines(args.output)))
    return 0


def _written_lines(output: Path) -> list[str]:
    measured = f"cluster.measured: {shell_quoted(str(output))} in the recipe"
    rows = [("written", str(output)), ("next", f"{measured}, then `shardwright plan`")]
    return labelled_lines(rows, 13)


# `shardwright tune RECIPE`: run the best layouts and the ZeRO baselines for a few steps, and show
# measured beside predicted step times.


TUNED_FILE = "tuned.json"


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", type=Path, metavar="RECIPE", help="its data, launcher and cluster are the runs'"
    )
    add_overrides(parser)
    parser.add_argument(
        "--top",
        type=positive,
        default=3,
        metavar="N",
        help="how many of the best layouts (default 3)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=10,
        metavar="N",
        help="steps of each, after three that warm up (default 10)",
    )
    parser.add_argument("--pin", action="store_true", help="pin the fastest one in the recipe")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(TUNED_FILE),
        metavar="FILE",
        help=f"the file to write (default {TUNED_FILE})",
    )
    help = (
        "where the runs' folders are made, and removed again; several nodes must all see it "
        "(default: a temporary one)"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help=help)
    add_json(parser)


def run_tune(args: argparse.Namespace) -> int:
    """Exit 1 where no layout ran."""
    from shardwright.recipe.recipe_loader import load_recipe

    wrong = ""
    if args.pin and args.overrides:
        wrong = (
            "--pin and --set: the pinned recipe would lack what --set changes; write it into "
            "the recipe first"
        )
    elif args.pin and str(args.recipe) == "-":
        wrong = "--pin: a recipe from standard input has no file to write to"
    elif not args.output.parent.is_dir():
        wrong = f"-o: {args.output.parent} is not a folder"
    elif args.folder is not None and not args.folder.is_dir():
        wrong = f"--folder: {args.folder} is not a folder"
    if wrong:
        error(wrong)
        return 1
    recipe = load_recipe(args.recipe, args.overrides)
    from shardwright.utils.installation import missing_modules

    if absent := missing_modules("`tune`", "torch", "transformers"):
        raise absent  # once, where each layout's own process would find it
    from shardwright.calibrate.layout_trials import tune
    from shardwright.utils.child_processes import sigterm_as_interrupt
    from shardwright.utils.file_io import write_atomically
    from shardwright.utils.json_values import strict_json

    parent = None if args.folder is None else args.folder.resolve()
    with sigterm_as_interrupt():
        done = tune(
            recipe,
            args.top,
            args.steps,
            lambda text: print(text, file=sys.stderr, flush=True),
            parent,
        )
    write_atomically(args.output, strict_json(done.found) + "\n")
    if args.json:
        runs = [
            {
                "strategy": trial.strategy,
                "predicted_step_seconds": trial.predicted_seconds,
                "measured": trial.run,
                "is_baseline": trial.is_baseline,
                "why_not": trial.why or None,
            }
            for trial in done.trials
        ]
        document = {"recipe": str(args.recipe), "file": str(args.output), "runs": runs}
        print(strict_json(document))
    else:
        print("\n".join([*table(done), "", *_written_lines(args.output)]))
    if args.pin:
        from shardwright.cli.recipe_writer import write_pinned_recipe

        write_pinned_recipe(
            recipe.source.texts[recipe.source.file],
            args.recipe,
            done.winner.strategy,
            done.problem.recipe,
        )
        print(f"pinned in {args.recipe}: {done.winner.strategy.describe()}", file=sys.stderr)
    return 0


def table(done: TuningResult) -> list[str]:
    """Return a table of measured beside predicted step times, the fastest one marked."""
    rows = []
    for place, each in enumerate(done.trials, start=1):
        run, predicted = each.run, each.predicted_seconds
        notes = ["fastest"] * (each is done.winner)
        notes += [f"ZeRO-{each.strategy.zero_stage} baseline"] * each.is_baseline
        figures = ("-", "-", "-", "-")
        if run is None:
            notes.append(each.why)
        else:
            seconds = run.step_seconds
            figures = (
                f"{seconds.value:.4g}",
                f"{predicted / seconds.value - 1:+.1%}",
                str(seconds.n),
                f"{seconds.spread:.0%}",
            )
        layout = each.strategy.describe()
        rows.append((str(place), layout, f"{predicted:.4g}", *figures, ", ".join(notes)))
    header = ("#", "layout", "predicted s", "measured s", "off", "n", "spread", "")
    fastest = [i for i, each in enumerate(done.trials) if each is done.winner]
    return table_lines(header, rows, text=(1, 7), bold=fastest)
