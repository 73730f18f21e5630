"""A user's own script: the plain Hugging Face model, deepspeed.initialize with
ds_config.autotp.json, nothing of ours.

Under the `deepspeed` launcher. AUTOTP_CASES: folders, each with config.json, ds_config.json (the
file under test) and tokens.npy; every rank writes result-RANK.json there.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import ops
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 3


def build(folder: Path) -> torch.nn.Module:
    document = json.loads((folder / "config.json").read_text())
    torch.manual_seed(3)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(document.pop("model_type"), **document), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():  # no bias all zero, no norm weight all one
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def batches(folder: Path, config: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Per step, the micro-batches: the same on every rank, since all of them are one tensor
    group."""
    ids = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int64))
    return [list(step.chunk(config["gradient_accumulation_steps"])) for step in ids.chunk(STEPS)]


def plain(folder: Path, config: dict[str, Any]) -> tuple[list[float], dict[str, list[int]]]:
    """Losses of one process, and the whole shapes."""
    model, options = build(folder), config["optimizer"]["params"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options["lr"],
        betas=options["betas"],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
    )
    losses = []
    for step in batches(folder, config):
        total = 0.0
        for ids in step:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(step)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: list(p.shape) for name, p in model.named_parameters()}


def measure(folder: Path, rank: int) -> None:
    config = json.loads((folder / "ds_config.json").read_text())
    model = build(folder)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    losses = []
    for step in batches(folder, config):
        total = 0.0
        for ids in step:
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(step)
        losses.append(total)
    wanted, whole = plain(folder, config)
    shapes = {name: list(p.shape) for name, p in engine.module.named_parameters()}
    result = {"losses": losses, "plain": wanted, "shapes": shapes, "whole": whole}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    for case in os.environ["AUTOTP_CASES"].split(os.pathsep):
        try:
            measure(Path(case), int(os.environ["RANK"]))
        except Exception:  # of the model's code or DeepSpeed's: the same on every rank
            error = {"error": traceback.format_exc()}
            (Path(case) / f"result-{os.environ['RANK']}.json").write_text(json.dumps(error))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
