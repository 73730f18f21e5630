"""The model in a checkpoint: verified, trusted, and read parameter by parameter. What `export` and `generate` share."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwright.checkpoint.manifest import CHECKSUMS, damages, read_checksums
from shardwright.checkpoint.read import CheckpointReader
from shardwright.checkpoint.trust import require_trust
from shardwright.data.sources import every_part
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.weights import TOKENIZER_PATTERNS
from shardwright.modules.lora import adapter_names, merged
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import read_plan

GENERATION = "generation_config.json"


def open_checkpoint(checkpoint: Path, trust_code: str | None) -> Plan:
    """Every byte that is read of it is what the run wrote, and code that came with the model is trusted by its
    fingerprint.

    Raises Refusal: SW6201 with each file that is not, SW2014.
    """
    wrong = list(damages(checkpoint, contents=True))
    if not wrong:
        try:
            plan = read_plan(checkpoint)
        except (OSError, ValueError) as error:
            wrong = [f"its plan.json cannot be read ({str(error).splitlines()[0]})"]
        else:
            wrong = [f"{CHECKSUMS} does not name {name}" for name in _unsummed(checkpoint, plan)]
    if wrong:
        raise Refusal(*(_not_whole(checkpoint, why) for why in wrong))
    require_trust(plan.model.own_code, (checkpoint / plan.model.config_file).parent, trust_code)
    return plan


def whole_parameter(plan: Plan, reader: CheckpointReader, name: str) -> torch.Tensor:
    """The parameter, with its adapter where it has one."""
    saved = reader.saved(name)
    tensor = reader.whole(name, saved.states[0])
    a, b = adapter_names(name.removesuffix(".weight"))
    if plan.lora is None or a not in reader.manifest.tensors:
        return tensor
    return merged(tensor, reader.whole(a, "fp32"), reader.whole(b, "fp32"), plan.lora, turned=saved.transposed)


def is_byte_level(plan: Plan) -> bool:
    return any(part.tokenizer == "byte" for part in every_part(plan))


def tokenizer_files(checkpoint: Path) -> list[Path]:
    """The model's own, then the data's: of the same name the last one counts."""
    folders = (checkpoint / "model", checkpoint / "tokenizer")
    found = [path for folder in folders for pattern in TOKENIZER_PATTERNS for path in sorted(folder.glob(pattern))]
    return [path for path in found if path.is_file() and path.suffix != ".py"]


def _unsummed(checkpoint: Path, plan: Plan) -> list[str]:
    """What is read beside the manifest's own files, and has no checksum."""
    code = () if plan.model.own_code is None else plan.model.own_code.files
    beside = [checkpoint / plan.model.config_file, *(checkpoint / "model" / name for name, _ in code)]
    generation = [path for path in (checkpoint / "model" / GENERATION,) if path.is_file()]
    paths = [checkpoint / "plan.json", *beside, *generation, *tokenizer_files(checkpoint)]
    sums = read_checksums(checkpoint)
    return [name for name in (path.relative_to(checkpoint).as_posix() for path in paths) if name not in sums]


def _not_whole(checkpoint: Path, why: str) -> Diagnostic:
    return Diagnostic(
        code="SW6201",
        message=f"{str(checkpoint)!r} is not a whole checkpoint: {why}",
        help="Give one `step-XXXXXXXX` folder under the compiled folder's checkpoint directory.",
    )
