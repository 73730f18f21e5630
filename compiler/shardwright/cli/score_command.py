"""`shardwright score`: the log-probabilities that a model gives to a recipe's data, token by
token."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_hostfile, add_overrides, positive
from shardwright.cli.terminal import error, print_diagnostics
from shardwright.diagnostics import refusal

if TYPE_CHECKING:
    from shardwright.recipe.recipe_types import Recipe

NOT_FINISHED = 3
PINS = "parallelism."
TASKS_WITH_LABELS = ("causal-lm", "image-text-to-text")


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE|DIR", type=Path, help="a recipe, or a compiled folder"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the score file to write"
    )
    parser.add_argument(
        "--top",
        type=positive,
        default=0,
        metavar="K",
        help="write the K most likely tokens of each label's place too, and the normalizer",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="a step folder of a run or a Hugging Face model folder (default: a compiled folder's "
        "newest checkpoint, a recipe's own weights)",
    )
    parser.add_argument(
        "--block",
        type=positive,
        metavar="N",
        help="examples of a block: what an interruption loses at most (default: 16 M numbers)",
    )
    add_overrides(parser)
    add_hostfile(parser, "score on")


def run_score(args: argparse.Namespace) -> int:
    """Compile the recipe for a forward pass into FILE.parts, run it there, and print where the
    scores are. Raises Refusal: SW1240, SW1241, SW6272."""
    output: Path = args.output.absolute()
    _check_output(output)
    parts = output.with_name(f"{output.name}.parts")
    from shardwright.compile.compiled_folder import check_output_folder, write_folder
    from shardwright.compile.forward_only_recipe import forward_only_recipe, with_files_of_folder
    from shardwright.plan.folder_paths import SCORE_FILE
    from shardwright.plan.plan import load_plan
    from shardwright.recipe.recipe_loader import load_recipe

    is_compiled = args.recipe.is_dir()
    path = args.recipe / "recipe.resolved.json" if is_compiled else args.recipe
    recipe = load_recipe(path, args.overrides)
    if is_compiled:
        recipe = with_files_of_folder(recipe, load_plan(args.recipe), args.recipe)
    check_output_folder(parts)
    weights = _weights(args, recipe, output)
    named = [text.partition("=")[0] for text in args.overrides]
    own = recipe.document["parallelism"]
    assert isinstance(own, dict), "the schema says so"
    pinned = {
        key: value
        for key, value in own.items()
        if f"{PINS}{key}" in named or PINS.rstrip(".") in named
    }
    derived = forward_only_recipe(recipe, weights=weights, pinned=pinned)

    from shardwright.compile.recipe_compiler import compile_recipe

    compiled = compile_recipe(derived)
    plan = compiled.plan
    if plan.model.task not in TASKS_WITH_LABELS:
        raise refusal(
            "SW1242",
            f"{plan.model.architecture}, of task {plan.model.task}, has no tokens to score",
            "Give a recipe of a causal language model or a vision-language model.",
        )
    if args.top > plan.model.vocabulary_size:
        raise refusal(
            "SW1241",
            f"--top {args.top} is more than the vocabulary's {plan.model.vocabulary_size} tokens",
            "Give a smaller K.",
        )
    write_folder(parts, compiled.files)
    print_diagnostics(compiled.warnings, recipe.source)
    if is_compiled and (args.recipe / "run" / "data").is_dir():
        _share_data(args.recipe.absolute() / "run" / "data", parts / "run" / "data")
    request = {"output": str(output), "top": args.top, "block_examples": args.block}
    (parts / SCORE_FILE).write_text(json.dumps(request), encoding="utf-8")
    from shardwright.data.data_preparation import prepare
    from shardwright.launch.launcher_process import run_folder
    from shardwright.launch.launchers.launcher_table import LAUNCHERS

    print(f"layout       {plan.strategy.describe()}", flush=True)
    launcher = LAUNCHERS[plan.launch.launcher]
    if not launcher.has_separate_filesystem:
        prepare(plan, parts, limit_bytes=None)
    code = run_folder(parts, args.hostfile, "never")
    if launcher.submits:
        print(f"the job writes {output} when it is done; delete {parts} then")
        return code
    if code == 0 and not output.exists():
        error(f"stopped: run the same command again to go on from the blocks in {parts}")
        return NOT_FINISHED
    if code == 0:
        print(f"scores       {output}")
        shutil.rmtree(parts, ignore_errors=True)
        if weights is not None and weights.name.startswith(f"{output.name}.weights-"):
            shutil.rmtree(weights, ignore_errors=True)
    return code


def _check_output(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise refusal(
            "SW1240",
            f"{str(output)!r} exists, and a score file is never replaced",
            "Give -o another name, or delete it.",
        )


def _weights(args: argparse.Namespace, recipe: Recipe, output: Path) -> Path | None:
    """Return the Hugging Face folder of the weights to score, exported where they are a run's
    checkpoint; None for the recipe's own."""
    from shardwright.checkpoint.checkpoint_manifest import CHECKSUMS, MANIFEST

    chosen: Path | None = args.weights
    source = recipe.model.source
    if chosen is None and args.recipe.is_dir():
        from shardwright.checkpoint.resume_checkpoint import choose_checkpoint
        from shardwright.plan.plan import load_plan

        found = choose_checkpoint(load_plan(args.recipe), args.recipe, "auto")
        chosen = None if found is None else Path(found.path)
    if chosen is None and source is not None and (Path(source) / MANIFEST).is_file():
        chosen = Path(source)
    if chosen is None:
        return None
    chosen = chosen.absolute()
    if not (chosen / MANIFEST).is_file():
        return chosen
    from shardwright.checkpoint.huggingface_export import export_checkpoint
    from shardwright.checkpoint.model_folder_checks import check_step_folder

    check_step_folder(chosen)
    digest = hashlib.sha256((chosen / CHECKSUMS).read_bytes()).hexdigest()[:16]
    exported = output.with_name(f"{output.name}.weights-{digest}")
    if not exported.is_dir():  # export leaves no partial folder
        print(f"exports      {chosen}", flush=True)
        export_checkpoint(chosen, exported, merge=True)
    return exported


def _share_data(prepared: Path, place: Path) -> None:
    """Let both folders use the data that is prepared already."""
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(prepared, target_is_directory=True)
