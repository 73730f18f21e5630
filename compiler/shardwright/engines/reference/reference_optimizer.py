"""Update fp32 masters by each optimizer with one gradient norm, on one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.layout.fused_weights import JoinedMatrices
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.parallel.lion import Lion
from shardwright.parallel.newton_schulz import orthogonalized
from shardwright.recipe.recipe_types import OptimizerSection

OptimizerOfGroups = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMuon:
    """Update matrices by name (https://kellerjordan.github.io/posts/muon).

    matrices: returns the matrices that a weight joins; None where AdamW has it
    transposed: names of weights that are stored as (in, out)
    """

    matrices: Callable[[str], JoinedMatrices | None]
    transposed: frozenset[str]
    momentum: float
    steps: int
    weight_decay: float
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        return self.matrices(name) is not None

    @torch.no_grad()
    def update(self, name: str, weight: torch.Tensor, rate: float) -> None:
        """Apply Nesterov's momentum, Newton-Schulz and decoupled weight decay."""
        gradient = weight.grad
        assert gradient is not None
        buffer = self._buffers.setdefault(name, torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - self.momentum)
        update = gradient.lerp(buffer, self.momentum)
        is_transposed = name in self.transposed
        matrix = update.t().contiguous() if is_transposed else update
        joined = self.matrices(name)
        assert joined is not None
        matrix = orthogonalized(matrix, joined, self.steps)
        weight.mul_(1 - rate * self.weight_decay)
        weight.sub_(matrix.t() if is_transposed else matrix, alpha=rate)


def optimizer_builder(optimizer: OptimizerSection) -> OptimizerOfGroups | None:
    """Return what builds a plan's optimizer of parameter groups; None for AdamW."""
    builders: dict[str, OptimizerOfGroups] = {
        "lion": partial(Lion, lr=optimizer.lr, betas=optimizer.betas),
        "adafactor": partial(
            torch.optim.Adafactor,
            beta2_decay=optimizer.beta2_decay or 0.0,
            eps=(optimizer.eps, optimizer.scale_eps or 0.0),
            d=optimizer.clip_threshold or 1.0,
        ),
    }
    return builders.get(optimizer.name)


class ReferenceOptimizer:
    """Update a model's trained parameters by name; matrices decay, vectors do not.

    live: the weights that the model computes with
    masters: their fp32 copies; the same tensors where the model computes in fp32
    unused: parameters that had no gradient in the last step and were left unchanged
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clipping: float,
        dtype: torch.dtype = torch.float32,
        muon: ReferenceMuon | None = None,
        build: OptimizerOfGroups | None = None,
        moments: tuple[str, ...] = OPTIMIZERS["adamw"].moments,
    ) -> None:
        """Cast the fp32 model to `dtype`; buffers keep theirs.

        clipping: maximum gradient norm; 0 turns clipping off
        muon: updates its matrices in AdamW's place
        build: builds the optimizer of parameter groups; None for AdamW
        moments: names of its states
        """
        self.live = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {p: name for name, p in self.live.items()}
        whole = dtype == torch.float32
        self.masters = {name: p if whole else p.detach().clone() for name, p in self.live.items()}
        for p in model.parameters():
            p.data = p.data.to(dtype)
        decay = [p for p in self.masters.values() if p.ndim >= 2]
        rest = [p for p in self.masters.values() if p.ndim < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        adamw = partial(torch.optim.AdamW, betas=betas, eps=eps)
        self.base = (build or adamw)([g for g in groups if g["params"]])
        self._moments = moments
        self.clipping = clipping
        self.muon = muon
        self.unused: frozenset[str] = frozenset()

    def accumulate_master_gradients(self) -> None:
        """Add half-precision gradients to their masters' fp32 gradients, after a backward pass."""
        for name, master in self.masters.items():
            p = self.live[name]
            if p is not master and p.grad is not None:
                gradient = p.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                p.grad = None

    def step(self, rate: float) -> float:
        """Update the weights once and clear the gradients. Return the gradient norm before
        clipping."""
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        if self.clipping:
            nn.utils.clip_grad_norm_(list(self.masters.values()), self.clipping)
        for group in self.base.param_groups:
            group["lr"] = rate
        self.unused = frozenset(name for name, p in self.masters.items() if p.grad is None)
        for name, p in self.masters.items():
            if self.muon is not None and p.grad is not None and self.muon.takes(name):
                self.muon.update(name, p, rate)
                p.grad = None
        self.base.step()
        self.base.zero_grad()
        self.copy_masters_to_model()
        return norm

    def states(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return a trained parameter's fp32 master and moments, by the optimizer's names."""
        master = self.masters[self._names[parameter]]
        state = self._state(master)
        return {"fp32": master, **{moment: state[moment] for moment in self._moments}}

    @property
    def updates(self) -> int:
        """Return the number of updates so far."""
        return max(
            (int(self._state(master)["step"]) for master in self.masters.values()), default=0
        )

    @updates.setter
    def updates(self, count: int) -> None:
        for master in self.masters.values():
            self._state(master)["step"].fill_(count)

    def _state(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a master's state, created here where the first update has not made it yet."""
        state: dict[str, torch.Tensor] = self.base.state[master]
        if not state:
            state["step"] = torch.tensor(0.0)
            for moment in self._moments:
                state[moment] = torch.zeros_like(master, requires_grad=False)
        return state

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Copy the masters' values to the weights that the model computes with."""
        for name, p in self.live.items():
            if p is not self.masters[name]:
                p.copy_(self.masters[name])
