"""Islands through `compile` and `run`, against the same islands in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.ir.apart import weights_apart
from tests.parity.harness import LOSS_ABSOLUTE, Case, must, shardwright
from tests.parity.islands import (
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
LAYOUTS: dict[str, tuple[int, Case]] = {
    "zero-0": (2, one_island(zero_stage=0)),
    "zero-1": (2, one_island()),
    "zero-2": (2, one_island(zero_stage=2)),
    "zero-3": (2, one_island(zero_stage=3)),
    "pipeline": (2, one_island(data=1, pipeline=2)),
    "tensor": (2, one_island(data=1, tensor=2)),
    "pipeline-tensor": (2, one_island(data=1, pipeline=2, tensor=2)),
    "tied-pipeline": (2, one_island(data=1, pipeline=2, model="llama-tied")),
    "expert": (2, one_island(expert=2, model="mixtral")),
    "three-islands": (3, one_island(data=1)),
}
"""Islands, and what each of them is."""
QUICK = ("zero-1", "average")


def compare(layout: str, outer: str, folder: Path) -> dict[str, float]:
    """The largest differences from the simulation. The islands' weights are the same, bit for bit."""
    islands, case = LAYOUTS[layout]
    tokens = write_inputs(case, folder, OUTER[outer], islands=islands)
    out = folder / "out"
    must(shardwright("run", out, "--island", "all", timeout=500))
    wanted = simulate(case, tokens, OUTER[outer], islands=islands)
    everyone = list(range(islands))
    assert [(r["step"], r["members"]) for r in rounds(out)] == [(4, everyone), (8, everyone), (12, everyone)]
    trained = [weights(out, island, folder / f"hf-{island}") for island in everyone]
    assert all(torch.equal(p, each[name]) for each in trained[1:] for name, p in trained[0].items())
    found = [island_losses(out, island) for island in everyone]
    assert all(list(losses) == list(range(1, STEPS + 1)) for losses in found)
    loss = max(abs(found[k][step] - loss) for k in everyone for step, loss in wanted.losses[k].items())
    return {"loss": loss, "weight": weights_apart(trained[0], wanted.weights)}


def check(found: dict[str, float]) -> None:
    assert found["loss"] <= LOSS_ABSOLUTE and found["weight"] <= WEIGHT_ABSOLUTE, found


def test_islands_are_the_simulation(tmp_path: Path) -> None:
    check(compare(*QUICK, tmp_path))


@pytest.mark.prove
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(
    tmp_path: Path, layout: str, outer: str, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    found = compare(layout, outer, tmp_path)
    check(found)
    proved("islands", f"{layout}-{outer}", {**found, "islands": LAYOUTS[layout][0], "verdict": "proved"})
