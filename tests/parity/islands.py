"""Islands in one process: a plain model and optimizer each, and an outer step every few steps."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shardwright.checkpoint.checkpoint_loader import CheckpointReader
from shardwright.diloco.island_metrics import effective_rounds, read_rounds
from shardwright.engines.reference.reference_optimizer import ReferenceOptimizer
from shardwright.utils.child_processes import free_port
from shardwright.verify.reference_run import cosine, mean_loss
from tests.parity import harness
from tests.parity.harness import (
    BETAS,
    DECAY,
    EPS,
    LR,
    SEED,
    WARMUP,
    Case,
    must,
    shardwright,
)
from tests.parity.models import MODELS
from tests.parity.reference import initial_model, token_rows

EVERY, STEPS, ISLANDS = 4, 12, 2
OUTER: dict[str, dict[str, Any]] = {
    "average": {"optimizer": "average"},
    "nesterov": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
    "overlap-1": {"optimizer": "average", "overlap_steps": 1, "mixing": 0.25},
    "overlap-2": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9, "overlap_steps": 2},
    "bf16": {"optimizer": "average", "precision": "bf16"},
    "bf16-overlap-2": {"optimizer": "average", "precision": "bf16", "overlap_steps": 2},
}


@dataclass(frozen=True)
class Simulation:
    """losses: of each island, by step. weights: after the last outer step."""

    losses: list[dict[int, float]]
    weights: dict[str, torch.Tensor]


def write_inputs(
    case: Case,
    folder: Path,
    outer: dict[str, Any],
    *,
    islands: int = ISLANDS,
    deadline: float = 60.0,
    save_every: int | None = EVERY,
    **changes: dict[str, Any],
) -> np.ndarray:
    """case: of one island. changes: to sections of the recipe. Returns the tokens of all."""
    tokens = harness.write_inputs(case, folder)
    rows = STEPS * case.batch * islands
    tokens = np.random.default_rng(SEED).integers(
        0, MODELS[case.model]["vocab_size"], (rows, tokens.shape[1]), dtype=np.int32
    )
    np.save(folder / "tokens.npy", tokens)
    recipe = json.loads((folder / "recipe.yaml").read_text())
    recipe["cluster"] |= {
        "nodes": case.nodes * islands,
        "islands": islands,
        "inter_island_gbits_per_second": 1,
    }
    recipe["training"] |= {"global_batch_size": case.batch * islands, "steps": STEPS}
    recipe["training"]["outer"] = {
        "every_steps": EVERY,
        "precision": "fp32",
        "deadline_seconds": deadline,
        **outer,
    }
    recipe["launch"]["outer_store"] = f"127.0.0.1:{free_port()}"
    recipe["checkpoint"] = {"every_steps": save_every}
    for section, values in changes.items():
        recipe[section] |= values
    (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=1))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    return tokens


@dataclass
class _Round:
    """deltas: of each member. lands: the step after which its result is mixed in."""

    members: list[int]
    deltas: list[dict[str, torch.Tensor]]
    lands: int


def simulate(
    case: Case,
    tokens: np.ndarray,
    outer: dict[str, Any],
    members: Sequence[Sequence[int]] | None = None,
    *,
    islands: int = ISLANDS,
) -> Simulation:
    """members: of each outer step, as the store wrote them down; others take the first member's
    state when it is through. None: all of them in each."""
    models = [initial_model(MODELS[case.model], SEED) for _ in range(islands)]
    for name, parameter in (each for model in models for each in model.named_parameters()):
        parameter.requires_grad_(not any(fnmatchcase(name, each) for each in case.freeze))
    optimizers = [plain(model, case) for model in models]
    anchor = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in anchor.items()}
    losses: list[dict[int, float]] = [{} for _ in models]
    recorded = iter(members or [range(islands)] * (STEPS // EVERY))
    on_its_way: _Round | None = None
    for step in range(1, STEPS + 1):
        [block] = token_rows(tokens, step, case.batch * islands)
        rate = LR * step / WARMUP if step <= WARMUP else cosine(LR, step, WARMUP, STEPS)
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = {k: v[island * case.batch : (island + 1) * case.batch] for k, v in block.items()}
            loss = mean_loss(model, [rows], own_loss=True)
            loss.backward()
            optimizer.accumulate_master_gradients()
            optimizer.step(rate)
            losses[island][step] = float(loss.detach())
        if step % EVERY == 0:
            taking = list(next(recorded))
            deltas = [moved(models[k], anchor, outer) for k in taking]
            last = step == STEPS
            on_its_way = _Round(
                taking, deltas, step if last else step + outer.get("overlap_steps", 0)
            )
        if on_its_way is not None and step == on_its_way.lands:
            outer_step(on_its_way.deltas, anchor, momentum, outer)
            taking, share = on_its_way.members, 1.0
            if outer.get("overlap_steps") and step != STEPS:
                share = outer.get("mixing", 0.5)
            for k in taking:
                mix(models[k], anchor, share)
            for k in set(range(islands)) - set(taking):
                models[k].load_state_dict(models[taking[0]].state_dict())
                optimizers[k] = plain(models[k], case)
                # A copy: load_state_dict would let both islands go on with the same moments.
                optimizers[k].base.load_state_dict(
                    copy.deepcopy(optimizers[taking[0]].base.state_dict())
                )
    return Simulation(losses, anchor)


@torch.no_grad()
def moved(
    model: nn.Module, anchor: dict[str, torch.Tensor], outer: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """An island's deltas, as they are sent."""
    return {name: as_sent(anchor[name] - p, outer) for name, p in model.named_parameters()}


def as_sent(values: torch.Tensor, outer: dict[str, Any]) -> torch.Tensor:
    return values.bfloat16().float() if outer.get("precision") == "bf16" else values


@torch.no_grad()
def mix(model: nn.Module, anchor: dict[str, torch.Tensor], share: float) -> None:
    for name, p in model.named_parameters():
        p.copy_(share * anchor[name] + (1 - share) * p)


def plain(model: nn.Module, case: Case) -> ReferenceOptimizer:
    return ReferenceOptimizer(
        model, betas=BETAS, eps=EPS, weight_decay=DECAY, clipping=case.clipping
    )


@torch.no_grad()
def outer_step(
    deltas: list[dict[str, torch.Tensor]],
    anchor: dict[str, torch.Tensor],
    momentum: dict[str, torch.Tensor],
    outer: dict[str, Any],
) -> None:
    """Update the anchor as torch.optim.SGD does."""
    mean = {
        name: as_sent(torch.stack([each[name] for each in deltas]).sum(0) / len(deltas), outer)
        for name in anchor
    }
    if outer["optimizer"] == "average":
        for name, p in anchor.items():
            p -= mean[name]
        return
    parameters = [nn.Parameter(p.clone()) for p in anchor.values()]
    sgd = torch.optim.SGD(parameters, lr=outer["lr"], momentum=outer["momentum"], nesterov=True)
    for parameter, name in zip(parameters, anchor, strict=True):
        parameter.grad = mean[name]
        sgd.state[parameter]["momentum_buffer"] = momentum[name]
    sgd.step()
    for parameter, name in zip(parameters, anchor, strict=True):
        anchor[name].copy_(parameter.detach())


def island_losses(folder: Path, island: int) -> dict[int, float]:
    lines = harness.metrics(folder / f"island-{island}")
    return {line["step"]: line["loss"] for line in lines}


def rounds(folder: Path) -> list[dict[str, Any]]:
    """The outer steps behind the weights as they are."""
    return effective_rounds(read_rounds(folder))


def weights(folder: Path, island: int, into: Path) -> dict[str, torch.Tensor]:
    must(shardwright("export", harness.newest_checkpoint(folder / f"island-{island}"), "-o", into))
    return dict(AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).named_parameters())


def masters(folder: Path, island: int) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of an island's newest checkpoint."""
    with CheckpointReader(harness.newest_checkpoint(folder / f"island-{island}")) as reader:
        trained = [
            name for name, tensor in reader.manifest.tensors.items() if "fp32" in tensor.states
        ]
        return {name: reader.whole(name, "fp32") for name in trained}


def one_island(**changes: Any) -> Case:
    """Two ranks unless said otherwise."""
    return dataclasses.replace(
        Case(model="llama", tensor=1, pipeline=1, data=2, zero_stage=1, micro=1, accumulation=2),
        **changes,
    )
