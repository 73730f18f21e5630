"""Train in one plain Hugging Face process: no plan, no DeepSpeed, nothing split. Every layout is
compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwright.engines.reference.reference_optimizer import (
    OptimizerOfGroups,
    ReferenceMuon,
    ReferenceOptimizer,
)
from shardwright.models.mixture_of_experts import AFFINITIES, find_routers
from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.models.tasks.task_registry import task_named, task_of
from shardwright.plan.plan import Plan
from shardwright.recipe.literal_types import TaskName

Rows = list[dict[str, Any]]
"""Sequences of one global batch as model inputs with "labels"; each entry is one forward.

Optional keys: "row", the sequence that a document is packed in, and "real", the tokens before
    padding. reference_objectives.py has those of other objectives.
"""
NOT_INPUTS = ("row", "real")
Measured = tuple[torch.Tensor, dict[str, float]]
"""(mean loss, metrics of the objective)."""


@dataclass(frozen=True)
class Reference:
    """Hold the results of a reference run.

    unused: parameters without a gradient: a plain optimizer skips them, ZeRO decays them.
    held_out: step -> held-out loss after it.
    metrics, held_out_metrics: of the objective, by step and name.
    """

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    weights: dict[str, torch.Tensor]
    unused: frozenset[str]
    held_out: dict[int, float] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    held_out_metrics: dict[int, dict[str, float]] = field(default_factory=dict)


def loaded(
    folder: Path, attention: str | None = None, task: TaskName | None = None
) -> PreTrainedModel:
    """Load a folder with safetensors in fp32, with the embedding as stored.

    task: None for the first one that trains the type

    For Youtu's types, from_pretrained zeroes the embedding's padding row and the tied head's.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    own = task_of(config.model_type) if task is None else task_named(task)
    model: PreTrainedModel = own.auto_class.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
    )
    embedding = model.get_input_embeddings()
    names = [
        name for name, p in model.named_parameters(remove_duplicate=False) if p is embedding.weight
    ]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors, torch.no_grad():
            for name in set(names) & set(tensors.keys()):
                embedding.weight.copy_(tensors.get_tensor(name))
    return model


def train(
    model: nn.Module,
    blocks: list[Rows],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    warmup: int,
    clipping: float,
    dtype: torch.dtype = torch.float32,
    own_loss: bool = True,
    held_out: Rows | None = None,
    every: int = 1,
    balance: ReferenceAuxLoss | None = None,
    muon: ReferenceMuon | None = None,
    build: OptimizerOfGroups | None = None,
    measure: Measure | None = None,
) -> Reference:
    """Train on `blocks`, one entry a step, with Hugging Face's loss: sum over predicted tokens /
    their number.

    own_loss: False takes next-token cross-entropy from the logits, where the model's own loss
        differs.
    held_out: sequences evaluated after each `every` steps and after the last.
    balance: the routers' auxiliary loss.
    muon: updates its matrices in AdamW's place, at the same rate.
    build: builds the optimizer of parameter groups; None for AdamW.
    measure: measures another objective than next tokens.
    """
    measure = measure or partial(next_token_measure, own_loss)
    model.train()
    optimizer = ReferenceOptimizer(
        model,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        clipping=clipping,
        dtype=dtype,
        muon=muon,
        build=build,
    )
    losses, norms, rates, metrics = [], [], [], []
    evaluations: dict[int, float] = {}
    held_out_metrics: dict[int, dict[str, float]] = {}
    for step, rows in enumerate(blocks, 1):
        loss, own = measure(model, rows, balance)
        metrics.append(own)
        loss.backward()
        optimizer.accumulate_master_gradients()
        rate = lr * step / warmup if step <= warmup else cosine(lr, step, warmup, len(blocks))
        norms.append(optimizer.step(rate))
        if held_out is not None and (step % every == 0 or step == len(blocks)):
            with torch.no_grad():
                evaluated, held_out_metrics[step] = measure(model.eval(), held_out, None)
            evaluations[step] = float(evaluated)
            model.train()
        losses.append(float(loss.detach()))
        rates.append(rate)
    weights = {
        name: optimizer.masters.get(name, p).detach() for name, p in model.named_parameters()
    }
    return Reference(
        losses, norms, rates, weights, optimizer.unused, evaluations, metrics, held_out_metrics
    )


def add_reference_lora(
    model: nn.Module,
    stack: str,
    names: tuple[str, ...] | None,
    *,
    rank: int,
    alpha: float,
    seed: int,
) -> None:
    """Freeze the model and add alpha / rank B A x to its linears by forward hooks: LoRA (arXiv
    2106.09685) without peft.

    names: last path parts of the adapted linears in decoder layers; None is every linear but
        routers. A and B have peft's names, and the values that peft draws from `seed`.
    """
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for path, module in list(model.named_modules()):
        leaf = path.rpartition(".")[2]
        auto = leaf != "gate" and not any(part in leaf for part in ("router", "norm", "embed"))
        if not (path.startswith(stack + ".") and (auto if names is None else leaf in names)):
            continue
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        into, out = (
            module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
        )
        a, b = nn.Linear(into, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        nn.init.zeros_(b.weight)
        module.register_forward_hook(
            lambda _m, inputs, output, a=a, b=b: output + alpha / rank * b(a(inputs[0]))
        )
        module.add_module("lora_A", nn.ModuleDict({"default": a}))
        module.add_module("lora_B", nn.ModuleDict({"default": b}))


def merge_reference_lora(
    model: nn.Module, weights: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """Return the weights of an adapted model with W + scale B A in place of each adapted W."""
    merged = dict(weights)
    for path, module in model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = (weights[f"{path}.lora_{x}.default.weight"] for x in "AB")
            change = scale * (b @ a)
            merged[f"{path}.weight"] = merged[f"{path}.weight"] + (
                change.t() if isinstance(module, Conv1D) else change
            )
    return merged


class ReferenceAuxLoss:
    """Compute DeepSeek-V3's auxiliary loss (arXiv 2412.19437, equations 17 to 20) by sequence and
    expert.

    It is independent of models/mixture_of_experts.py, which it is compared with.
    """

    def __init__(self, model: nn.Module, coefficient: float, affinity: str) -> None:
        self.coefficient, self._affinity = coefficient, AFFINITIES[affinity]
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sequences: dict[Any, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        for router in find_routers(model).values():
            router.register_forward_hook(
                lambda _m, _a, output: self._outputs.append((output[0], output[2]))
            )

    def begin(self) -> None:
        self._outputs, self._sequences = [], {}

    def take(self, entry: dict[str, Any]) -> None:
        """Assign the routers' outputs of the last forward to the sequences of `entry`."""
        outputs, self._outputs = self._outputs, []
        rows, length = entry["input_ids"].shape
        for row in range(rows):
            key = entry.get("row", (len(self._sequences), row))
            layers = self._sequences.setdefault(key, [[] for _ in outputs])
            for layer, tensors in zip(layers, outputs, strict=True):
                logits, chosen = (
                    x.view(rows, length, -1)[row, : entry.get("real", length)] for x in tensors
                )
                layer.append((logits, chosen))

    def loss(self) -> torch.Tensor:
        """Return the mean over layers and sequences."""
        every = []
        for documents in (each for layers in self._sequences.values() for each in layers):
            # One layer and one sequence, whose documents are in order.
            logits, chosen = (torch.cat(parts) for parts in zip(*documents, strict=True))
            tokens, experts = logits.shape
            share = self._affinity(logits.float())
            share = share / share.sum(dim=1, keepdim=True)
            by_expert = [
                experts
                / (chosen.shape[1] * tokens)
                * int((chosen == expert).sum())
                * share[:, expert].sum()
                / tokens
                for expert in range(experts)
            ]
            every.append(torch.stack(by_expert).sum())
        return self.coefficient * torch.stack(every).mean()


Measure = Callable[[nn.Module, Rows, ReferenceAuxLoss | None], Measured]
"""Measures a global batch; the auxiliary loss only adds to the gradients."""


def next_token_measure(
    own_loss: bool, model: nn.Module, rows: Rows, balance: ReferenceAuxLoss | None
) -> Measured:
    return mean_loss(model, rows, own_loss=own_loss, balance=balance), {}


def mean_loss(
    model: nn.Module, rows: Rows, *, own_loss: bool, balance: ReferenceAuxLoss | None = None
) -> torch.Tensor:
    """Return the mean loss over the predicted tokens of all sequences; the auxiliary loss only adds
    to the gradients."""
    items = sum(int((r["labels"][:, 1:] != IGNORE_INDEX).sum()) for r in rows)
    loss = torch.zeros(())
    if balance is not None:
        balance.begin()
    for r in rows:
        if balance is None and r["labels"].shape[1] < 2:
            continue  # one token predicts nothing
        inputs = {name: value for name, value in r.items() if name not in NOT_INPUTS}
        if own_loss:
            loss = loss + model(**inputs, use_cache=False, num_items_in_batch=items).loss
        else:
            loss = loss + next_token_loss(model, **inputs) / items
        if balance is not None:
            balance.take(r)
    if balance is None:
        return loss
    added = balance.loss()
    return loss + added - added.detach()


def next_token_loss(model: nn.Module, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the sum over the predicted tokens."""
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    target = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), target, ignore_index=IGNORE_INDEX, reduction="sum"
    )


def cosine(lr: float, step: int, warmup: int, steps: int) -> float:
    return lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def reference_muon(model: nn.Module, plan: Plan) -> ReferenceMuon | None:
    """Return the plan's Muon; None where AdamW has all parameters."""
    optimizer = plan.optimizer
    if optimizer.momentum is None or optimizer.ns_steps is None:
        return None
    transposed = (f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Conv1D))
    return ReferenceMuon(
        matrices=plan.muon_matrices,
        transposed=frozenset(transposed),
        momentum=optimizer.momentum,
        steps=optimizer.ns_steps,
        weight_decay=optimizer.weight_decay,
    )
