"""Experts over ranks compute what one process computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.models.mixture_of_experts import call_positionally, number_of_experts
from shardwright.parallel.expert_parallel import cut_experts
from shardwright.utils.child_processes import free_port
from shardwright.utils.numeric_difference import largest_difference
from tests.unit.parallel.expert_parallel_worker import CASES

RANKS = 2


class Experts(nn.Module):
    """As transformers' interface has them: E matrices that are scaled by a routing weight."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._is_expert_parallel = False
        self.num_experts = experts
        self.weight = nn.Parameter(torch.arange(experts * 4.0).view(experts, 2, 2))

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return (
            (self.weight[chosen] @ hidden[:, None, :, None])
            .squeeze(-1)
            .mul(weights[..., None])
            .sum(1)
        )


def test_a_module_keeps_its_own_experts_and_counts_them() -> None:
    module = Experts(6)
    whole = module.weight.detach().clone()
    assert cut_experts(module, rank=1, ranks=3) == 6 and module.num_experts == 2
    assert torch.equal(module.weight, whole[2:4])


def test_parameters_without_memory_get_none() -> None:
    module = Experts(4)
    module.weight = nn.Parameter(torch.zeros(()).expand(4, 2, 2))
    cut_experts(module, rank=0, ranks=2)
    assert module.weight.shape == (2, 2, 2) and module.weight.untyped_storage().nbytes() == 4


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RuntimeError, match="4 experts do not divide over 3 ranks"):
        cut_experts(Experts(4), rank=0, ranks=3)


def test_only_stacks_of_experts_are_counted() -> None:
    assert number_of_experts(Experts(4)) == 4
    assert number_of_experts(nn.Linear(2, 2)) == 0
    odd = Experts(4)
    odd.scale = nn.Parameter(torch.ones(3))
    assert number_of_experts(odd) == 0


def test_arguments_may_be_named_in_any_way() -> None:
    module, hidden = Experts(2), torch.ones(1, 2)
    chosen, weights = torch.tensor([[1]]), torch.tensor([[0.5]])
    wanted = module(hidden, chosen, weights)
    setattr(module, "forward", call_positionally(module.forward))  # noqa: B010
    assert torch.equal(module(hidden, router_indices=chosen, routing_weights=weights), wanted)


@pytest.mark.launch
def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    worker, port = Path(__file__).with_name("expert_parallel_worker.py"), free_port()
    root = str(Path(__file__).resolve().parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(RANKS), str(port), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    told = [process.communicate(timeout=900)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(
        text[-3000:] for text in told
    )
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert set(found) == set(CASES)
        assert all(case["cut"] >= 2 * case["modules"] > 0 for case in found.values()), found
        assert largest_difference(case["loss"] for case in found.values()) <= 1e-6, found
        assert largest_difference(case["gradient"] for case in found.values()) <= 1e-5, found
