"""A checkpoint as a run leaves it, written by hand: for the readers' tests."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardwright.checkpoint.checkpoint_loader import cut
from shardwright.checkpoint.checkpoint_manifest import (
    CHECKSUMS,
    MANIFEST,
    Fragment,
    Manifest,
    SavedFile,
    SavedTensor,
    checksum,
    checksums_text,
    write_manifest,
)
from shardwright.checkpoint.run_history import RunHistory, write_run_history
from shardwright.layout.parameter_sharding import ParameterSharding

WHOLE = ParameterSharding(name="w", shape=(6, 4), dimension=None, blocks=(), sizes=())


def write_checkpoint(
    folder: Path,
    *,
    step: int = 4,
    split: ParameterSharding = WHOLE,
    whole: torch.Tensor | None = None,
    ranks: int = 1,
    experts: int = 1,
    line: RunHistory | None = None,
    finite: bool = True,
) -> Path:
    """One parameter in the three states of training, `ranks` data ranks x the split's tensor ranks,
    each of so many parts of `experts`; the compiled `folder`'s own plan beside it. line: None for a
    checkpoint without run.json."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    whole = torch.arange(24.0).view(6, 4) if whole is None else whole
    shards: list[tuple[Fragment, ...]] = []
    files: list[SavedFile] = []
    places = range(max(1, len(split.sizes) // split.copies))
    for part, shard in itertools.product(whole.chunk(experts), places):
        flat = cut(split, part, shard * split.copies).reshape(-1)
        fragments, start = [], 0
        for piece in flat.tensor_split(ranks):
            name = f"rank-{len(files):05d}-000.safetensors"
            save_file(
                {
                    f"{state}/w": piece + i
                    for i, state in enumerate(("fp32", "exp_avg", "exp_avg_sq"))
                },
                path / name,
            )
            fragments.append(Fragment(file=len(files), start=start, numel=piece.numel(), at=0))
            files.append(SavedFile(name=name, size_bytes=(path / name).stat().st_size))
            start += piece.numel()
        shards.append(tuple(fragments))
    saved = SavedTensor(
        split=split,
        transposed=False,
        states=("fp32", "exp_avg", "exp_avg_sq"),
        shards=tuple(shards),
        experts=experts,
    )
    manifest = Manifest(
        version=1,
        step=step,
        optimizer_step=step,
        loss_scale=None,
        tensors={"w": saved},
        files=tuple(files),
        rows=(),
        finite=finite,
        data={},
    )
    write_manifest(path, manifest)
    if line is not None:
        write_run_history(path, line)
    return _with_companions(folder, path)


def write_model_checkpoint(folder: Path, state: dict[str, torch.Tensor], *, step: int = 4) -> Path:
    """A whole model's, as one rank leaves it: fp32 masters, and moments of zero."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    name, states = "rank-00000-000.safetensors", ("fp32", "exp_avg", "exp_avg_sq")
    flat = {key: tensor.detach().float().reshape(-1) for key, tensor in state.items()}
    save_file(
        {f"{s}/{key}": t * (s == "fp32") for key, t in flat.items() for s in states}, path / name
    )
    tensors = {
        key: SavedTensor(
            split=ParameterSharding(
                name=key, shape=tuple(tensor.shape), dimension=None, blocks=(), sizes=()
            ),
            transposed=False,
            states=states,
            shards=((Fragment(file=0, start=0, numel=tensor.numel(), at=0),),),
            experts=1,
        )
        for key, tensor in state.items()
    }
    file = SavedFile(name=name, size_bytes=(path / name).stat().st_size)
    manifest = Manifest(
        version=1,
        step=step,
        optimizer_step=step,
        loss_scale=None,
        tensors=tensors,
        files=(file,),
        rows=(),
        finite=True,
        data={},
    )
    write_manifest(path, manifest)
    return _with_companions(folder, path)


def _with_companions(folder: Path, path: Path) -> Path:
    if (folder / "plan.json").exists():
        shutil.copyfile(folder / "plan.json", path / "plan.json")
    for part in ("model", "tokenizer"):
        if (folder / part).exists():
            shutil.copytree(folder / part, path / part)
    assert (path / MANIFEST).is_file()
    sum_up(path)
    return path


def sum_up(path: Path) -> None:
    """SHA256SUMS of what is there now."""
    names = [
        str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.name != CHECKSUMS
    ]
    (path / CHECKSUMS).write_text(checksums_text({name: checksum(path / name) for name in names}))
