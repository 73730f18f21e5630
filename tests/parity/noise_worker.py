"""Under the `deepspeed` launcher: the cases of tests/parity/test_noise_scale.py of one world size,
in one launch. What the hooks add up, against the gradient of every row of a plain model in one
process, on the same weights and rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.reference.reference_optimizer import ReferenceOptimizer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import MicroBatch, TrainingBatches
from shardwright.parallel.model_loading import DTYPES
from shardwright.plan.plan import Plan
from shardwright.train.noise_scale_meter import NoiseScaleMeasurement, build_noise_scale_meter
from shardwright.utils.numeric_difference import largest_difference
from tests.parity.cases_worker import compiled, main
from tests.parity.harness import BETAS, DECAY, EPS, SEED, STEPS, with_adapters
from tests.parity.models import MODELS
from tests.parity.noise import MEASURED, NoiseCase
from tests.parity.reference import initial_model, next_token_loss

SOURCES = ("ast.py", "calendar.py", "random.py", "statistics.py", "textwrap.py")
"""Of the Python standard library: real text."""


def measure(case: NoiseCase, folder: Path) -> dict[str, float]:
    plan = with_text(case, folder)
    batches = TrainingBatches(plan, open_dataset(plan, folder))
    plain = trained(plan, folder, batches, None)
    trainer, results, found = trained(plan, folder, batches, case)
    figures = {"path": float(results != plain[1] or not same(plain[0], trainer))}
    told: list[Any] = [brute(case, plan, batches, found) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return {**figures, **told[0]}


def with_text(case: NoiseCase, folder: Path) -> Plan:
    if dist.get_rank() == 0:
        (folder / "text").mkdir(parents=True, exist_ok=True)
        for name in SOURCES:
            text = (Path(os.__file__).parent / name).read_text(encoding="utf-8")
            (folder / "text" / name).write_text("".join(c for c in text if c.isascii()))
    dist.barrier()
    data = {
        "kind": "text",
        "path": "text/*.py",
        "tokenizer": "byte",
        "packing": case.packed,
        "shuffle": True,
    }
    plan = compiled(
        case, folder, data=data, tracking={"noise_scale": {"every_steps": 1, "rows": case.rows}}
    )
    if dist.get_rank() == 0:
        prepare(plan, folder, limit_bytes=2**30)
    dist.barrier()
    return plan


def trained(
    plan: Plan, folder: Path, batches: TrainingBatches, measured: NoiseCase | None
) -> tuple[Trainer, list[Any], list[NoiseScaleMeasurement]]:
    """MEASURED steps, with the hooks or without."""
    trainer, rank = build_trainer(plan, folder), dist.get_rank()
    meter = build_noise_scale_meter(plan, rank, trainer, [])
    assert meter is not None
    results, found = [], []
    for step in range(1, MEASURED + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, step)
        mine = batches.micro_batches(step, plan.ranks[rank].data)
        if measured is None:
            results.append(trainer.step(mine, rate))
            continue
        result, noise = meter.measure(step, partial(trainer.step, mine, rate), mine)
        assert noise is not None, f"step {step} gave no figure"
        results.append(result)
        found.append(noise)
    return trainer, results, found


def same(one: Trainer, other: Trainer) -> bool:
    """Bit for bit, the optimizer's states too."""
    pairs = list(zip(one.owned_shards(), other.owned_shards(), strict=True))
    return all(
        a.name == b.name and all(torch.equal(a.states[k], b.states[k]) for k in a.states)
        for a, b in pairs
    )


def brute(
    case: NoiseCase, plan: Plan, batches: TrainingBatches, found: list[NoiseScaleMeasurement]
) -> dict[str, float]:
    """squares, whole: the largest relative differences of the sum over micro-batches and of the
    whole gradient. variance, square: those of the two estimates, where rows are micro-batches with
    as many labels each: from the rows' gradients less their mean."""
    model = initial_model(MODELS[case.model], SEED)
    if case.lora_rank:
        model = with_adapters(model, case)
    optimizer = ReferenceOptimizer(
        model,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        clipping=case.clipping,
        dtype=DTYPES[case.precision],
    )
    steps = []
    for step, noise in enumerate(found, 1):
        groups = in_order(plan, batches, step)
        rows = [[gradient(model, piece) for piece in pieces(m)] for m in groups]
        sums = [torch.stack(group).sum(dim=0) for group in rows]
        labels = [m.predicted for m in groups]
        whole, n = torch.stack(sums).sum(dim=0), sum(labels)
        taken = -(-case.rows // case.micro)
        squares = sum(float(h.square().sum()) for h in sums[:taken]) / n**2
        counted = (sum(labels[:taken]), sum(k * k for k in labels[:taken]), n)
        length = float(whole.square().sum()) / n**2
        measured_length = noise.noise.square + noise.noise.variance / case.batch
        apart = {
            "squares": abs(noise.sums.squares / squares - 1),
            "whole": abs(measured_length / length - 1),
            "labels": float(counted != noise.sums[1:]),
        }
        if case.rows_are_comparable:
            each = torch.stack(sums) / labels[0]
            variance = float((each - each.mean(dim=0)).square().sum()) / (case.batch - 1)
            apart["variance"] = abs(noise.noise.variance / variance - 1)
            apart["square"] = abs(noise.noise.square - (length - variance / case.batch)) / length
        steps.append(apart)
        give(optimizer, whole / n)
        optimizer.step(learning_rate(plan.optimizer, plan.scheduler, STEPS, step))
    assert len(steps) == MEASURED
    return {key: largest_difference(apart[key] for apart in steps) for key in steps[0]}


def in_order(plan: Plan, batches: TrainingBatches, step: int) -> list[MicroBatch]:
    """Return the micro-batches of all data ranks, in order."""
    ranks = [batches.micro_batches(step, d) for d in range(plan.strategy.data)]
    return [m for together in zip(*ranks, strict=True) for m in together]


def pieces(m: MicroBatch) -> Iterator[torch.Tensor]:
    """Yield the documents of packed rows, else the rows, each (1, length)."""
    for row in range(len(m.input_ids)):
        ids, starts = m.input_ids[row], [0]
        if m.position_ids is not None:
            starts += [i for i in range(1, len(ids)) if m.position_ids[row, i] == 0]
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            yield ids[first:last].unsqueeze(0)


def gradient(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the summed losses over all trained parameters, in double."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if ids.shape[1] < 2:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    with CONTEXT_PARALLEL.aside():
        loss = next_token_loss(model, ids, input_ids=ids)
    of = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).double().flatten()
            for p, g in zip(parameters, of, strict=True)
        ]
    )


def give(optimizer: ReferenceOptimizer, flat: torch.Tensor) -> None:
    at = 0
    for master in optimizer.masters.values():
        master.grad = flat[at : at + master.numel()].view_as(master).float()
        at += master.numel()


if __name__ == "__main__":
    main(measure, NoiseCase)
