"""Under the `deepspeed` launcher: cases that recompute some layers of each stage, and how often
each layer ran."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from deepspeed import comm as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.parallel.layer_compile_and_recompute import checkpointed_layers
from shardwright.plan.plan import Plan
from tests.parity.cases_worker import compiled, difference, main, train
from tests.parity.harness import STEPS, Case


def measure(case: Case, folder: Path) -> dict[str, float]:
    plan = compiled(case, folder)
    ran: Counter[str] = Counter()

    def count(module: nn.Module, _: object) -> None:
        """A checkpoint calls a layer's forward pass past its hooks, and the attention inside with
        them."""
        if type(module).__name__ in ("LlamaAttention", "GPT2Attention"):
            ran[f"{plan.model.cut.stack}.{module.layer_idx}"] += 1

    trainer = build_trainer(plan, folder)
    hook = register_module_forward_pre_hook(count)
    results = train(plan, folder, trainer, 1, STEPS)
    hook.remove()
    check_counts(case, plan, ran)
    return difference(case, folder, results)


def check_counts(case: Case, plan: Plan, ran: Counter[str]) -> None:
    here = plan.ranks[dist.get_rank()].pipeline
    layers = [name for stage in plan.stages if stage.pipeline_rank == here for name in stage.layers]
    decoders = [name for name in layers if name not in ("embedding", "head")]
    again = set(checkpointed_layers(plan))
    passes = STEPS * case.accumulation
    assert dict(ran) == {name: passes * (1 + (name in again)) for name in decoders}, ran
    # As many of each stage as the recipe names, and not all of the rank's: the search may give a
    # stage of DualPipeV a single layer.
    assert isinstance(case.checkpointing, dict)
    full = case.checkpointing["full"]
    for stage in plan.stages:
        mine = [name for name in stage.layers if name in decoders]
        assert len(again & set(mine)) == min(full, len(mine)), (stage, again)
    assert 0 < len(again & set(decoders)) < len(decoders), (here, again)


if __name__ == "__main__":
    main(measure)
