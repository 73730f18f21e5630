"""Islands through `compile` and `run`, against the same islands in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.utils.numeric_difference import state_dict_max_abs_diff
from tests.parity.harness import LOSS_ABSOLUTE, Case, must, shardwright
from tests.parity.islands import (
    OUTER,
    STEPS,
    island_losses,
    masters,
    one_island,
    rounds,
    simulate,
    weights,
    write_inputs,
)

pytestmark = pytest.mark.launch
WEIGHT_ABSOLUTE = 1e-5
FROZEN = ("model.embed_tokens.weight", "model.layers.0.*", "*norm*")
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
    "pipeline-data": (2, one_island(data=2, pipeline=2)),
    "frozen-zero-0": (2, one_island(zero_stage=0, freeze=FROZEN)),
    "frozen-zero-1": (2, one_island(freeze=FROZEN)),
    "frozen-zero-3": (2, one_island(zero_stage=3, freeze=FROZEN)),
    "frozen-pipeline": (2, one_island(data=1, pipeline=2, freeze=FROZEN)),
    "frozen-tensor": (2, one_island(data=1, tensor=2, freeze=FROZEN)),
}
"""Islands, and what each of them is."""
QUICK = [("zero-1", "overlap-2")]
TABLE = [
    *((layout, outer) for layout in LAYOUTS for outer in ("average", "nesterov", "overlap-2")),
    *((layout, "overlap-1") for layout in ("zero-0", "zero-3", "pipeline")),
    *((layout, "bf16") for layout in ("zero-0", "zero-1", "pipeline-tensor", "three-islands")),
    ("zero-1", "bf16-overlap-2"),
]


def compare(layout: str, outer: str, folder: Path) -> dict[str, float]:
    """The largest differences from the simulation. The islands' weights are the same, bit for bit.
    Of deltas in bf16, also those of losses from a simulation in fp32, as shares; and how far
    weights are on average from the one that rounds, as a share of how far they are from the one in
    fp32."""
    islands, case = LAYOUTS[layout]
    tokens = write_inputs(case, folder, OUTER[outer], islands=islands)
    out = folder / "out"
    must(shardwright("run", out, "--island", "all", timeout=500))
    wanted = simulate(case, tokens, OUTER[outer], islands=islands)
    everyone = list(range(islands))
    assert [(r["step"], r["members"]) for r in rounds(out)] == [
        (4, everyone),
        (8, everyone),
        (12, everyone),
    ]
    first, *others = (masters(out, island) for island in everyone)
    assert first and all(torch.equal(p, each[name]) for each in others for name, p in first.items())
    trained = weights(out, 0, folder / "hf")
    found = [island_losses(out, island) for island in everyone]
    assert all(list(losses) == list(range(1, STEPS + 1)) for losses in found)
    loss = max(
        abs(found[k][step] - loss) for k in everyone for step, loss in wanted.losses[k].items()
    )
    apart = {"loss": loss, "weight": state_dict_max_abs_diff(trained, wanted.weights)}
    if OUTER[outer].get("precision") == "bf16":
        exact = simulate(case, tokens, {**OUTER[outer], "precision": "fp32"}, islands=islands)
        shares = (
            abs(found[k][step] / loss - 1)
            for k in everyone
            for step, loss in exact.losses[k].items()
        )
        rounded, plain = (_mean_apart(trained, each.weights) for each in (wanted, exact))
        apart |= {"loss_share_from_fp32": max(shares), "rounding_unexplained": rounded / plain}
    return apart


@torch.no_grad()
def _mean_apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the mean absolute difference of all weights."""
    sums = sum(float((found[name] - p).abs().sum()) for name, p in wanted.items())
    return sums / sum(p.numel() for p in wanted.values())


def check(found: dict[str, float]) -> None:
    assert found["loss"] <= LOSS_ABSOLUTE and found["weight"] <= WEIGHT_ABSOLUTE, found
    if "rounding_unexplained" in found:
        assert found["loss_share_from_fp32"] <= 0.02 and found["rounding_unexplained"] <= 0.1, found


@pytest.mark.parametrize(("layout", "outer"), QUICK)
def test_islands_are_the_simulation(tmp_path: Path, layout: str, outer: str) -> None:
    check(compare(layout, outer, tmp_path))


@pytest.mark.prove
@pytest.mark.parametrize(("layout", "outer"), TABLE)
def test_every_layout(
    tmp_path: Path, layout: str, outer: str, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    found = compare(layout, outer, tmp_path)
    check(found)
    proved(
        "islands",
        f"{layout}-{outer}",
        {**found, "islands": LAYOUTS[layout][0], "verdict": "proved"},
    )
