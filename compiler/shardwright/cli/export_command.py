"""`shardwright export STEP_FOLDER -o HF_FOLDER`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwright.cli.command_options import add_trust_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    from shardwright.checkpoint.huggingface_export import export_checkpoint

    if export_checkpoint(
        args.checkpoint, args.output, args.precision, merge=args.merge, trust_code=args.trust_code
    ):
        print(
            f"wrote {args.output}: adapters; load them with peft's "
            "AutoPeftModelForCausalLM.from_pretrained"
        )
    else:
        print(f"wrote {args.output}: load it with AutoModelForCausalLM.from_pretrained")
    return 0
