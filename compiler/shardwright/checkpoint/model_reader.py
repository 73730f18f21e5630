"""The model in a checkpoint: verified, trusted, and read parameter by parameter. What `export` and
`generate` share."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from shardwright.checkpoint.checkpoint_compatibility import incomplete_checkpoint
from shardwright.checkpoint.checkpoint_manifest import CHECKSUMS, damages, read_checksums
from shardwright.checkpoint.checkpoint_reader import CheckpointReader
from shardwright.data.data_sources import all_data_sections
from shardwright.diagnostics import Refusal, refusal
from shardwright.models.lora_target_paths import adapter_names
from shardwright.models.remote_code_files import RemoteCode
from shardwright.models.weights_location import TOKENIZER_PATTERNS
from shardwright.parallel.lora_adapters import merge_adapter
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import read_plan

GENERATION_CONFIG = "generation_config.json"


def open_checkpoint(checkpoint: Path, trust_code: str | None) -> Plan:
    """Every byte that is read of it is what the run wrote, and code that came with the model is
    trusted by its fingerprint.

    Raises Refusal: SW6201 with each file that is not, SW2014.
    """
    wrong = list(damages(checkpoint, contents=True))
    if not wrong:
        try:
            plan = read_plan(checkpoint)
        except (OSError, ValueError) as error:
            wrong = [f"its plan.json cannot be read ({str(error).splitlines()[0]})"]
        else:
            wrong = [
                f"{CHECKSUMS} does not name {name}"
                for name in _files_without_checksum(checkpoint, plan)
            ]
    if wrong:
        help = "Give one `step-XXXXXXXX` folder under the compiled folder's checkpoint directory."
        raise Refusal(
            *(d for why in wrong for d in incomplete_checkpoint(checkpoint, why, help).diagnostics)
        )
    require_trust(plan.model.remote_code, (checkpoint / plan.model.config_file).parent, trust_code)
    return plan


def require_trust(code: RemoteCode | None, folder: Path, given: str | None) -> None:
    """The folder itself cannot say that it is trusted: whoever wrote the code wrote the rest of it
    too.

    folder: that of the files. given: --trust-code. Raises Refusal: SW2014.
    """
    if code is None or given == code.fingerprint:
        return
    # names are theirs too
    look = f"cd {shlex.quote(str(folder))} && less {shlex.join(name for name, _ in code.files)}"
    message = (
        f"the model in {str(folder)!r} runs on Python code that came with it"
        if given is None
        else f"--trust-code is not the fingerprint of the Python code in {str(folder)!r}"
    )
    raise refusal(
        "SW2014",
        message,
        f"Nothing was run. Read the files first: `{look}`.\n"
        "If you trust them, name them by the SHA-256 over their names and contents:\n"
        f"--trust-code {code.fingerprint}",
    )


def merged_parameter(plan: Plan, reader: CheckpointReader, name: str) -> torch.Tensor:
    """The parameter, with its adapter where it has one."""
    saved = reader.saved(name)
    tensor = reader.whole(name, saved.states[0])
    a, b = adapter_names(name.removesuffix(".weight"))
    if plan.lora is None or a not in reader.manifest.tensors:
        return tensor
    return merge_adapter(
        tensor,
        reader.whole(a, "fp32"),
        reader.whole(b, "fp32"),
        plan.lora,
        is_transposed=saved.transposed,
    )


def is_byte_level(plan: Plan) -> bool:
    return any(part.tokenizer == "byte" for part in all_data_sections(plan))


def tokenizer_files(checkpoint: Path) -> list[Path]:
    """The model's own, then the data's: of the same name the last one counts."""
    folders = (checkpoint / "model", checkpoint / "tokenizer")
    found = [
        path
        for folder in folders
        for pattern in TOKENIZER_PATTERNS
        for path in sorted(folder.glob(pattern))
    ]
    return [path for path in found if path.is_file() and path.suffix != ".py"]


def _files_without_checksum(checkpoint: Path, plan: Plan) -> list[str]:
    """What is read beside the manifest's own files, and has no checksum."""
    code = () if plan.model.remote_code is None else plan.model.remote_code.files
    beside = [
        checkpoint / plan.model.config_file,
        *(checkpoint / "model" / name for name, _ in code),
    ]
    generation = [path for path in (checkpoint / "model" / GENERATION_CONFIG,) if path.is_file()]
    paths = [checkpoint / "plan.json", *beside, *generation, *tokenizer_files(checkpoint)]
    sums = read_checksums(checkpoint)
    return [
        name
        for name in (path.relative_to(checkpoint).as_posix() for path in paths)
        if name not in sums
    ]
