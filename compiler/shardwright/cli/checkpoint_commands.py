"""`shardwright export` and `generate`: use the checkpoints of a run."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

from shardwright.cli.command_options import add_json, add_trust_code, positive
from shardwright.cli.terminal import error
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="STEP_FOLDER", type=Path, help="a checkpoint's `step-XXXXXXXX` folder"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="HF_FOLDER",
        type=Path,
        required=True,
        help="the folder to write; it must not exist",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help=(
            "precision of the exported weights (default: the training precision; the checkpoint "
            "holds fp32)"
        ),
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="for a LoRA run: export the whole model with the adapters merged in",
    )
    add_trust_code(parser)


def run_export(args: argparse.Namespace) -> int:
    from shardwright.checkpoint.model_folder_checks import check_output_folder, check_step_folder

    check_step_folder(args.checkpoint)
    check_output_folder(args.output)
    from shardwright.checkpoint.huggingface_export import export_checkpoint  # imports torch
    from shardwright.models.tasks.task_registry import task_named
    from shardwright.plan.plan import read_plan

    if export_checkpoint(
        args.checkpoint, args.output, args.precision, merge=args.merge, trust_code=args.trust_code
    ):
        print(
            f"wrote {args.output}: adapters; load them with peft's "
            "AutoPeftModelForCausalLM.from_pretrained"
        )
    else:
        auto_class = task_named(read_plan(args.checkpoint).model.task).auto_class.__name__
        print(f"wrote {args.output}: load it with {auto_class}.from_pretrained")
    return 0


# `shardwright generate STEP_FOLDER|HF_FOLDER --prompt TEXT`: what a trained model writes.


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="a `step-XXXXXXXX` folder, or one that `export` wrote",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        required=True,
        help="the text to continue; - reads standard input",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help=(
            "an image for a vision-language model; the prompt is then asked about it as a "
            "user's message. May be repeated"
        ),
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=64,
        metavar="N",
        help="the most tokens to generate (default 64)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="sampling temperature (default 0: greedy)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed for sampling (default 0)"
    )
    add_trust_code(parser)
    add_json(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Prints the prompt and what follows it. Raises Refusal: SW2014, SW6201, SW6402."""
    try:
        prompt = sys.stdin.buffer.read().decode("utf-8") if args.prompt == "-" else args.prompt
        prompt.encode("utf-8")
    except UnicodeError:
        error("the prompt is not UTF-8 text")
        return 1
    from shardwright.checkpoint.model_folder_checks import check_model_folder

    check_model_folder(args.folder)
    from shardwright.checkpoint.text_generation import GenerationRequest, generate  # imports torch

    wish = GenerationRequest(
        prompt=prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        seed=args.seed,
        images=tuple(args.image),
    )
    made = generate(args.folder, wish, args.trust_code)
    if args.json:
        print(strict_json({"prompt": prompt, **dataclasses.asdict(made)}))
    else:
        # A model's text about an image is an answer, not the rest of the prompt.
        print(_shown(made.text if args.image else prompt + made.text))
    return 0


def _shown(text: str) -> str:
    """Escape control characters on a terminal, where a model's text could move the cursor."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(
        "\t".join(escape_control_characters(part) for part in line.split("\t"))
        for line in text.split("\n")
    )


def _temperature(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError("0 or more")
    return number
