"""Islands through `compile` and `run`, against the same islands in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.ir.apart import weights_apart
from tests.parity.harness import LOSS_ABSOLUTE, Case, must, shardwright
from tests.parity.islands import (
    ISLANDS,
    OUTER,
    STEPS,
    island_losses,
    one_island,
    rounds,
    simulate,
    weights,
    write_inputs,
)

pytestmark = pytest.mark.launch
WEIGHT_ABSOLUTE = 1e-5
LAYOUTS: dict[str, Case] = {
    "zero-0": one_island(zero_stage=0),
    "zero-1": one_island(),
    "zero-2": one_island(zero_stage=2),
    "zero-3": one_island(zero_stage=3),
    "pipeline": one_island(data=1, pipeline=2),
    "tensor": one_island(data=1, tensor=2),
    "pipeline-tensor": one_island(data=1, pipeline=2, tensor=2),
    "tied-pipeline": one_island(data=1, pipeline=2, model="llama-tied"),
}
QUICK = [("zero-1", "average"), ("zero-0", "nesterov")]


def cases() -> list[object]:
    every = [(layout, outer) for layout in LAYOUTS for outer in OUTER]
    return [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.prove) for each in every]


@pytest.mark.parametrize(("layout", "outer"), cases())
def test_islands_are_the_simulation(tmp_path: Path, layout: str, outer: str) -> None:
    case = LAYOUTS[layout]
    tokens = write_inputs(case, tmp_path, OUTER[outer])
    out = tmp_path / "out"
    must(shardwright("run", out, "--island", "all", timeout=300))
    wanted = simulate(case, tokens, OUTER[outer])
    assert [(r["step"], r["members"]) for r in rounds(out)] == [(4, [0, 1]), (8, [0, 1]), (12, [0, 1])]
    trained = [weights(out, island, tmp_path / f"hf-{island}") for island in range(ISLANDS)]
    assert all(torch.equal(p, trained[1][name]) for name, p in trained[0].items())
    for island in range(ISLANDS):
        found = island_losses(out, island)
        assert list(found) == list(range(1, STEPS + 1))
        assert max(abs(found[step] - loss) for step, loss in wanted.losses[island].items()) <= LOSS_ABSOLUTE
    assert weights_apart(trained[0], wanted.weights) <= WEIGHT_ABSOLUTE
