"""`shardwright export STEP_FOLDER -o HF_FOLDER`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="STEP_FOLDER", type=Path, help="one `step-XXXXXXXX` folder")
    parser.add_argument(
        "-o", "--output", metavar="HF_FOLDER", type=Path, required=True, help="folder to write; must not exist"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="of the written weights (default: the training's; the checkpoint has fp32)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a LoRA run: the whole model, its adapters merged in",
    )
    parser.add_argument(
        "--trust-code",
        metavar="SHA256",
        help="run the Python code that came with the model; the refusal without it says which, and their fingerprint",
    )


def run(args: argparse.Namespace) -> int:
    from shardwright.checkpoint.export import export_checkpoint

    if export_checkpoint(args.checkpoint, args.output, args.precision, merge=args.merge, trust_code=args.trust_code):
        print(f"wrote {args.output}: adapters; load them with peft's AutoPeftModelForCausalLM.from_pretrained")
    else:
        print(f"wrote {args.output}: load it with AutoModelForCausalLM.from_pretrained")
    return 0
