"""Under the `deepspeed` launcher: optimizers on the real engines, many cases of one world size.

SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from deepspeed import comm as dist
from safetensors.torch import load_file

from shardwright.checkpoint.checkpoint_loader import cut, load_checkpoint, parameter_splits
from shardwright.checkpoint.checkpoint_saver import check_master_weights, save_checkpoint
from shardwright.checkpoint.huggingface_export import export_checkpoint
from shardwright.compile.recipe_compiler import read_problem
from shardwright.cost.peak_memory import estimate_memory
from shardwright.engines.deepspeed.deepspeed_optimizer_shards import base_optimizer
from shardwright.engines.deepspeed.deepspeed_trainers import DeepSpeedTrainer, build_trainer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.expert_parallel import local_expert_range
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff
from tests.figures import training_apart
from tests.parity.cases_worker import compiled, main, train
from tests.parity.engine_groups import from_rank_0
from tests.parity.harness import STEPS, Case, over_data_ranks, recipe
from tests.parity.plain_optimizers import PLAIN_OPTIMIZERS
from tests.parity.plain_training import plain_training
from tests.parity.reference import Reference

SAVED = 4
RESUMED = "resumed-"
"""Cases of this name are saved at a step under ZeRO-1, and go on under the case's layout."""


def measure(case: Case, folder: Path) -> dict[str, float]:
    results, first, exported = [], 1, 0.0
    if folder.name.startswith(RESUMED):
        writer = over_data_ranks(case)
        plan = _compiled(writer, folder / "writer")
        trainer = build_trainer(plan, folder / "writer")
        results, first = train(plan, folder / "writer", trainer, 1, SAVED), SAVED + 1
        save_checkpoint(plan, folder / "writer", trainer, SAVED)
        exported = _exported_difference(plan, folder / "writer", trainer)
    plan = _compiled(case, folder)
    trainer = build_trainer(plan, folder, resumes=first > 1)
    if first > 1:
        step = folder / "writer" / plan.checkpoint.directory / f"step-{SAVED:08d}"
        assert load_checkpoint(plan, trainer, step) == SAVED
    results += train(plan, folder, trainer, first, STEPS)
    check_master_weights(trainer.owned_shards())
    section, prepare = PLAIN_OPTIMIZERS[case.optimizer]
    tokens = np.load(folder / "tokens.npy")
    wanted = from_rank_0(lambda: plain_training(case, tokens, section["lr"], prepare))
    held, mean, counted = _state_bytes(plan, folder, trainer)
    return {
        "state bytes": held,
        "state bytes off": abs(held - counted),
        "mean state bytes off": abs(mean - counted),
        **training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted),
        "weight": weight_difference(plan, trainer, wanted),
        "undecided": _undecided_share(wanted),
        "exported": exported,
    }


def _compiled(case: Case, folder: Path) -> Plan:
    training = recipe(case, folder)["training"]
    return compiled(
        case, folder, training={**training, "optimizer": PLAIN_OPTIMIZERS[case.optimizer][0]}
    )


def _state_bytes(plan: Plan, folder: Path, trainer: Trainer) -> tuple[int, float, int]:
    """Return the bytes of fp32 weights and moments on the fullest rank of this stage, their mean
    over its ranks, and the planner's count of them."""
    assert isinstance(trainer, DeepSpeedTrainer)
    base = base_optimizer(trainer.engine)
    moments = [
        value
        for state in base.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor)
    ]
    moments += [s for w in getattr(base, "weights", {}).values() for s in w.states.values()]
    masters = list(base.state) if plan.strategy.zero_stage > 0 else []
    with CONTEXT_PARALLEL.aside():
        problem = read_problem(load_recipe(folder / "recipe.yaml"))
    layout, _ = price_planned_layout(problem, plan.strategy, plan.boundaries)
    stage = estimate_memory(layout).stages[plan.ranks[dist.get_rank()].pipeline]
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*moments, *masters))
    everyone: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
    here = plan.ranks[dist.get_rank()].pipeline
    dist.all_gather_object(everyone, (here, held))
    own = [each for pipeline, each in everyone if pipeline == here]
    return max(own), sum(own) / len(own), stage.optimizer_bytes


def weight_difference(plan: Plan, trainer: Trainer, wanted: Reference) -> float:
    """Largest, of the fp32 weights that this rank owns."""
    at, splits, off = plan.ranks[dist.get_rank()], parameter_splits(plan, trainer.transposed), []
    for f in trainer.owned_shards():
        if "fp32" not in f.states:
            continue
        whole = wanted.weights[f.name]
        part = local_expert_range(plan, at, f.name, whole.shape[0])
        whole = whole if part is None else whole.narrow(0, *part)
        if f.name in splits:  # adapters are on every rank
            whole = cut(splits[f.name], whole, at.tensor)
        whole = whole.t() if f.name in trainer.transposed else whole
        mine = f.states["fp32"]
        whole = whole.reshape(-1)[f.start : f.start + mine.numel()]
        off.append(max_abs_diff(mine, torch.where(whole.isnan(), mine, whole)))
    return largest_difference(off)


def _exported_difference(plan: Plan, folder: Path, trainer: Trainer) -> float:
    """Largest, of the exported checkpoint's weights that this rank owns. Collective."""
    step = folder / plan.checkpoint.directory / f"step-{SAVED:08d}"
    if dist.get_rank() == 0:
        export_checkpoint(step, folder / "hf")
    dist.barrier()
    written = load_file(folder / "hf" / "model.safetensors")
    assert not [name for name in written if "@" in name]
    off = []
    for f in trainer.owned_shards():
        if "fp32" in f.states and f.name in written:  # experts are exported one by one
            whole = written[f.name].t() if f.name in trainer.transposed else written[f.name]
            mine = f.states["fp32"]
            off.append(max_abs_diff(mine, whole.reshape(-1)[f.start : f.start + mine.numel()]))
    return largest_difference(off)


def _undecided_share(wanted: Reference) -> float:
    """Share of the weights that the plain process leaves undecided."""
    undecided = sum(int(w.isnan().sum()) for w in wanted.weights.values())
    return undecided / sum(w.numel() for w in wanted.weights.values())


if __name__ == "__main__":
    main(measure)
