"""Each trap of DeepSpeed that the runtime works around: the workaround holds, and without it things
go wrong.

The second half of each test runs DeepSpeed's own code; when it stops failing there, the workaround
can go.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.parallel.layer_compile_and_recompute import recompute_forward
from shardwright.parallel.learning_rate import learning_rate
from shardwright.plan.plan import PlanScheduler
from shardwright.recipe.recipe_types import OptimizerSection
from tests.worker_launch import launch_worker


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """traps_worker.py under the real launcher, once: every figure of rank 0 by name."""
    out = tmp_path_factory.mktemp("traps") / "figures.json"
    worker = Path(__file__).with_name("traps_worker.py")
    result = launch_worker(worker, 2, seconds=300, SHARDWRIGHT_TRAPS_OUT=str(out))
    assert out.exists(), result.stdout[-2000:] + result.stderr[-2000:]
    found: dict[str, list[float]] = json.loads(out.read_text())
    return found


@pytest.mark.launch
def test_column_parallel_backward_keeps_its_all_reduce_for_strided_gradients(
    two_ranks: dict[str, list[float]],
) -> None:
    ours, deepspeed = two_ranks["column_backward_error"]
    assert ours < 1e-6
    assert 1e-3 < deepspeed < math.inf


@pytest.mark.launch
def test_row_parallel_forward_keeps_its_all_reduce_for_strided_outputs(
    two_ranks: dict[str, list[float]],
) -> None:
    ours, deepspeed = two_ranks["row_forward_error"]
    assert ours < 1e-6
    assert 1e-3 < deepspeed < math.inf


@pytest.mark.launch
def test_parallel_layers_train_whatever_deepspeeds_mode(two_ranks: dict[str, list[float]]) -> None:
    ours, deepspeed = two_ranks["requires_grad"]
    assert ours == 1.0
    assert deepspeed == 0.0


@pytest.mark.launch
def test_gradient_norm_counts_every_shard(two_ranks: dict[str, list[float]]) -> None:
    wanted, ours, unmarked = two_ranks["gradient_norm"]
    assert ours == pytest.approx(wanted, rel=1e-5)
    assert unmarked < wanted * (1 - 1e-3)


@pytest.mark.launch
def test_zero0_norm_is_partial_in_a_pipeline(two_ranks: dict[str, list[float]]) -> None:
    """Why the rules refuse pipeline x ZeRO-0: DeepSpeed clips by a norm that misses the later
    stages."""
    whole, partial = two_ranks["pipeline_zero0_norm"]
    assert partial < whole * (1 - 1e-3)


def test_recomputation_needs_no_gradient_at_its_input() -> None:
    """The embedding stage: ids ask for no gradient, so re-entrant checkpointing detaches everything
    behind them."""
    table, ids = nn.Embedding(8, 4), torch.arange(4)
    recompute_forward(table)
    table(ids).sum().backward()
    assert table.weight.grad is not None
    table = nn.Embedding(8, 4)
    with pytest.warns(UserWarning, match="requires_grad"):
        lost = checkpoint(table, ids, use_reentrant=True)
    assert not lost.requires_grad


def test_recomputation_passes_keyword_arguments() -> None:
    """Hugging Face layers call their attention with keywords; re-entrant checkpointing refuses
    them."""
    bilinear = nn.Bilinear(3, 3, 2)
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    wanted = torch.autograd.grad(bilinear(input1=a, input2=b).sum(), a)[0]
    with pytest.raises(ValueError, match="keyword"):
        checkpoint(bilinear, input1=a, input2=b, use_reentrant=True)
    recompute_forward(bilinear)
    assert torch.equal(torch.autograd.grad(bilinear(input1=a, input2=b).sum(), a)[0], wanted)


def test_warm_up_is_linear() -> None:
    """DeepSpeed's WarmupLR warms up on a log curve unless told otherwise."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    optimizer = OptimizerSection(
        name="adamw", lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    scheduler = PlanScheduler(name="constant", warmup_steps=10, min_lr=0.0, decay_steps=None)
    assert [learning_rate(optimizer, scheduler, 100, k) for k in (1, 5, 10, 11)] == [
        0.1,
        0.5,
        1.0,
        1.0,
    ]
    theirs = WarmupLR(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        warmup_max_lr=1.0,
        warmup_num_steps=10,
    )
    for _ in range(5):
        theirs.step()
    assert abs(theirs.get_last_lr()[0] - 0.5) > 0.1
