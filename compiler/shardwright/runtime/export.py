"""A checkpoint of any layout -> a Hugging Face folder that from_pretrained loads. No process group, no GPU."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.own_code import OwnCode
from shardwright.ir.partition import ParameterSplit
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import read_plan
from shardwright.runtime.checkpoint_index import STATE
from shardwright.runtime.weights import load_config, transposed_weights

Shards = list[dict[str, torch.Tensor]]
"""Per tensor rank: Hugging Face name -> its shard, in the runtime's layout."""


def export_checkpoint(checkpoint: Path, output: Path) -> None:
    """Writes model weights, config and tokenizer. Raises Refusal; leaves no half-written folder."""
    plan = _read(checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Refusal(
            Diagnostic(
                code="SW6401",
                message=f"{str(output)!r} exists and is not an empty folder",
                help="Give a folder that does not exist yet.",
            )
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(plan, checkpoint))
    state = join_shards(plan, read_shards(plan, checkpoint), transposed_weights(model))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    if missing:
        raise Refusal(_not_whole(checkpoint, f"it holds no {missing[0]} (and {len(missing) - 1} more)"))
    model.config.dtype = next(iter(state.values())).dtype
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=_parent(output)))
    try:
        if plan.model.own_code is not None:
            _bring_own_code(plan.model.own_code, model, checkpoint / "model", temporary)
        model.save_pretrained(temporary)
        if (checkpoint / "tokenizer").is_dir():
            shutil.copytree(checkpoint / "tokenizer", temporary, dirs_exist_ok=True)
        if output.exists():
            output.rmdir()
        os.chmod(temporary, 0o755)
        os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _bring_own_code(code: OwnCode, model: PreTrainedModel, folder: Path, output: Path) -> None:
    """Loads with trust_remote_code=True, as the model did that training started from."""
    model.config.auto_map = {"AutoConfig": code.config_class, "AutoModelForCausalLM": code.model_class}
    for name, _ in code.files:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, output / name)


def _parent(output: Path) -> Path:
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(
            Diagnostic(
                code="SW6401",
                message=f"cannot create {str(parent)!r}: {error.strerror}",
                help="Give a writable folder.",
            )
        ) from None
    return parent


def _not_whole(checkpoint: Path, why: str) -> Diagnostic:
    return Diagnostic(
        code="SW6201",
        message=f"{str(checkpoint)!r} is not a whole checkpoint: {why}",
        help="Give one `step-XXXXXXXX` folder under the compiled folder's checkpoint directory.",
    )


def _read(checkpoint: Path) -> Plan:
    if not (checkpoint / "plan.json").is_file():
        raise Refusal(_not_whole(checkpoint, "there is no plan.json in it"))
    try:
        return read_plan(checkpoint)
    except ValueError as error:
        raise Refusal(_not_whole(checkpoint, f"its plan.json cannot be read ({str(error).splitlines()[0]})")) from None


def read_shards(plan: Plan, checkpoint: Path) -> Shards:
    """The three places where DeepSpeed leaves weights: layer files, whole-model files, ZeRO-3's flat partitions."""
    ranks, state = range(plan.strategy.tensor), checkpoint / STATE
    try:
        if plan.strategy.pipeline > 1:
            return [_from_layer_files(state, rank) for rank in ranks]
        if plan.strategy.zero_stage < 3:
            return [_load(state / f"mp_rank_{rank:02d}_model_states.pt")["module"] for rank in ranks]
        return [_from_zero3(state, rank) for rank in ranks]
    except FileNotFoundError as error:
        raise Refusal(_not_whole(checkpoint, f"{error.filename or error} is missing")) from None


def _load(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)  # type: ignore[no-any-return]


def _from_layer_files(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    files = sorted(folder.glob(f"layer_*-model_{rank:02d}-model_states.pt"))
    if not files:
        raise FileNotFoundError(2, "no layer file", f"layer_*-model_{rank:02d}-model_states.pt")
    for file in files:
        for name, tensor in torch.load(file, map_location="cpu", weights_only=False, mmap=True).items():
            weights.setdefault(name, tensor)  # a tied parameter is in two files, the same in both
    return weights


def _from_zero3(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """DeepSpeed's own merge of the data ranks' partitions, given one tensor rank's files at a time."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    ours = re.compile(rf".*mp_rank_{rank:02d}_(model|optim)_states\.pt")
    files = [f for f in folder.iterdir() if ours.fullmatch(f.name)]
    if not files:
        raise FileNotFoundError(2, "no partition", f"*mp_rank_{rank:02d}_optim_states.pt")
    with tempfile.TemporaryDirectory() as view:
        (Path(view) / "step").mkdir()
        for file in files:
            os.symlink(file.resolve(), Path(view) / "step" / file.name)
        return dict(get_fp32_state_dict_from_zero_checkpoint(view, tag="step"))


def join_shards(plan: Plan, shards: Shards, transposed: Iterable[str]) -> dict[str, torch.Tensor]:
    """Per-rank shards -> whole tensors in Hugging Face's layout, by the plan's map. Tied aliases drop out."""
    turned = frozenset(transposed)
    state: dict[str, torch.Tensor] = {}
    for module in plan.tensor_parallel.modules:
        for split in module.parameters:
            parts = [rank[split.name] for rank in shards if split.name in rank]
            if parts:
                state[split.name] = join(split, [p.t() if split.name in turned else p for p in parts])
    return state


def join(split: ParameterSplit, parts: list[torch.Tensor]) -> torch.Tensor:
    """Each rank's pieces to their places along the cut dimension; a replicated parameter is its first copy."""
    if split.dimension is None or len(parts) == 1:
        return parts[0].contiguous()
    whole = parts[0].new_empty(split.shape)
    for rank in range(0, len(parts), split.copies):
        pieces = split.pieces(rank)
        held = parts[rank].split([length for _, length in pieces], dim=split.dimension)
        for (start, length), part in zip(pieces, held, strict=True):
            whole.narrow(split.dimension, start, length).copy_(part)
    return whole
