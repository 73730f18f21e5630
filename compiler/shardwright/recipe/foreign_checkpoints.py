"""Identifies checkpoints of other programs by their file names. No file is opened, no pickle is
read."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from shardwright.diagnostics import Diagnostic, KeyPath, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """Describes a checkpoint format. name: the program that writes it. files: globs relative to the
    folder, of which one match is enough. help: with {path} for the folder and {out} for a new one.
    """

    name: str
    files: tuple[str, ...]
    help: str


_AS_MODEL = (
    "Then put config.json and the tokenizer's files into {out} and start from its weights: `model: "
    "{{source: {out}}}`."
)
_KINDS = (
    ForeignCheckpoint(
        name="the Hugging Face Trainer, with weights",
        files=(
            "trainer_state.json+model.safetensors",
            "trainer_state.json+model.safetensors.index.json",
        ),
        help=(
            "It is a model folder, too: `model: {{source: {path}}}` starts from its weights, with "
            "a new optimizer."
        ),
    ),
    ForeignCheckpoint(
        name="the Hugging Face Trainer, with peft adapters",
        files=("trainer_state.json+adapter_model.safetensors",),
        help=(
            "Merge the adapters with peft (merge_and_unload, save_pretrained) and start from that "
            "folder's weights."
        ),
    ),
    ForeignCheckpoint(
        name="DeepSpeed, in the universal format",
        files=("latest_universal", "zero/*/fp32.pt", "*/zero/*/fp32.pt"),
        help=(
            "zero_to_fp32.py of the checkpoint that it was made from writes a model folder of "
            "that one."
        ),
    ),
    ForeignCheckpoint(
        name="DeepSpeed, of a pipeline",
        files=("layer_*-model_*states.pt", "*/layer_*-model_*states.pt"),
        help=(
            "Save the model from the program that wrote it, as safetensors under Hugging "
            "Face's names."
        ),
    ),
    ForeignCheckpoint(
        name="DeepSpeed, ZeRO",
        files=("zero_to_fp32.py", "*zero_pp_rank_*_states.pt", "*/*zero_pp_rank_*_states.pt"),
        help="Trust it first: its files are pickles. `python -m deepspeed.utils.zero_to_fp32 "
        "{path} {out} "
        "--safe_serialization` writes its weights.\n" + _AS_MODEL,
    ),
    ForeignCheckpoint(
        name="DeepSpeed",
        files=("mp_rank_*_model_states.pt", "*/mp_rank_*_model_states.pt"),
        help=(
            "Save the model from the program that wrote it: `save_pretrained`, or "
            "`save_16bit_model` of the engine."
        ),
    ),
    ForeignCheckpoint(
        name="Megatron-Core",
        files=(
            "latest_checkpointed_iteration.txt",
            "common.pt+metadata.json",
            "mp_rank_*/model_optim_rng.pt",
        ),
        help=(
            "Megatron-Bridge's AutoBridge (export_ckpt) writes a Hugging Face folder of it; start "
            "from its weights."
        ),
    ),
    ForeignCheckpoint(
        name="Accelerate (save_state)",
        files=("random_states_*.pkl",),
        help="Where it holds model.safetensors, put config.json and the tokenizer's files "
        "beside it: "
        "`model: {{source: {path}}}` starts from its weights. `accelerate merge-weights` makes "
        "that file of "
        "pytorch_model_fsdp_0.",
    ),
    ForeignCheckpoint(
        name="PyTorch's distributed checkpoints (FSDP, torchtitan)",
        files=(".metadata", "*/.metadata"),
        help=(
            "Convert it with the program that wrote it into safetensors under Hugging Face's "
            "names.\n"
        )
        + _AS_MODEL,
    ),
    ForeignCheckpoint(
        name="the Hugging Face Trainer",
        files=("trainer_state.json", "checkpoint-*/trainer_state.json"),
        help="Give its newest checkpoint-N folder where it holds model.safetensors: "
        "`model: {{source: FOLDER}}` starts from its weights.",
    ),
    ForeignCheckpoint(
        name="peft (adapters alone)",
        files=("adapter_config.json",),
        help=(
            "Load it with peft, merge_and_unload(), save_pretrained, and start from that folder's "
            "weights."
        ),
    ),
    ForeignCheckpoint(
        name="save_pretrained: a Hugging Face model",
        files=("config.json+model.safetensors", "config.json+model.safetensors.index.json"),
        help=(
            "It has no optimizer states to resume: `model: {{source: {path}}}` starts from its "
            "weights."
        ),
    ),
)
"""Lists the formats, special before general: the first match counts."""


def identify_checkpoint(folder: Path) -> ForeignCheckpoint | None:
    """Return the format of a folder; None where it is no known checkpoint of another program."""
    for kind in _KINDS:
        for files in kind.files:  # all that + separates have to match
            with contextlib.suppress(OSError):
                if all(next(folder.glob(pattern), None) for pattern in files.split("+")):
                    return kind
    return None


def foreign_checkpoint_error(folder: Path, key: KeyPath | None = None) -> Diagnostic | None:
    """Return SW6220 for a checkpoint of another program, None for anything else. key: the recipe's
    key that names the folder."""
    kind = identify_checkpoint(folder)
    if kind is None:
        return None
    # DeepSpeed's global_step folders lie in the checkpoint.
    root = folder.parent if (folder.parent / "latest").is_file() else folder
    help = kind.help.format(path=shlex.quote(str(root)), out=shlex.quote(f"{root}-weights"))
    return found(
        "SW6220", key, f"{str(folder)!r} is a checkpoint of another program: {kind.name}", help
    )
