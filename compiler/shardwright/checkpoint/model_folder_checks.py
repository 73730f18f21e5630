"""Check the folders that `export` and `generate` are given, so that a wrong one is refused before
torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.checkpoint.checkpoint_compatibility import incomplete_checkpoint
from shardwright.checkpoint.checkpoint_manifest import MANIFEST, damages
from shardwright.diagnostics import Refusal, refusal
from shardwright.recipe.foreign_checkpoints import foreign_checkpoint_error
from shardwright.utils.file_io import parse_json, read_regular_text_file


def check_step_folder(checkpoint: Path) -> None:
    """Compare the files' sizes with the manifest. Raises SW6201, SW6220."""
    if wrong := list(damages(checkpoint, contents=False)):
        raise damaged_checkpoint(checkpoint, wrong)


def damaged_checkpoint(checkpoint: Path, reasons: Sequence[str]) -> Refusal:
    """Build SW6201, one for each reason, or SW6220 for a checkpoint of another program."""
    help = "Name a `step-XXXXXXXX` folder in the compiled folder's checkpoint directory."
    found = (d for why in reasons for d in incomplete_checkpoint(checkpoint, why, help).diagnostics)
    return Refusal(*dict.fromkeys(found))


def check_output_folder(output: Path) -> None:
    """Raise SW6401 where the folder that `export` would write is there already."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise refusal(
            "SW6401",
            f"{str(output)!r} exists and is not an empty folder",
            "Name a folder that does not exist yet.",
        )


def check_model_folder(folder: Path) -> None:
    """Check that text can be generated from the folder: a step folder, or one of Hugging Face.

    Raises SW6201, SW6220, SW6402.
    """
    if (folder / MANIFEST).is_file():
        check_step_folder(folder)
    else:
        read_model_config(folder)


def read_model_config(folder: Path) -> Any:
    """Return config.json of a Hugging Face folder. Raises SW6220, SW6402."""
    try:
        return parse_json(read_regular_text_file(folder / "config.json"))
    except ValueError as error:
        why = f"config.json cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})"
        raise cannot_generate(folder, why) from None
    except OSError:
        if (folder / "adapter_config.json").is_file():
            help = "Export the step folder again with --merge, or name the step folder itself."
            raise cannot_generate(folder, "it holds only adapters", help) from None
        if (other := foreign_checkpoint_error(folder)) is not None:
            raise Refusal(other) from None
        steps = sorted(str(path.parent) for path in folder.glob(f"*/step-*/{MANIFEST}"))
        help = (
            f"Name the run's newest checkpoint, {steps[-1]}"
            if steps
            else "Name a `step-XXXXXXXX` folder of a run, or a folder with config.json and "
            "safetensors files."
        )
        why = "it is neither a checkpoint nor a Hugging Face model"
        raise cannot_generate(folder, why, help) from None


def cannot_generate(folder: Path, why: str, help: str = "") -> Refusal:
    """Build SW6402."""
    return refusal(
        "SW6402",
        f"no text can be generated from {str(folder)!r}: {why}",
        help or "Transformers' AutoModelForCausalLM and AutoTokenizer must load the folder.",
    )
