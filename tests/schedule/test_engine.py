"""The simulation against DeepSpeed's own engines on sleeping stages: a sample here, all of it under
`make prove`."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.schedule.engine import (
    MODELS,
    case,
    errors,
    fitted_per_call_seconds,
    layout_of,
    measured,
    partitions,
)
from tools import bench_pipeline_schedule as bench


@pytest.mark.prove
@pytest.mark.launch
def test_the_engine_takes_as_long_as_simulated(tmp_path: Path) -> None:
    """Generous: other work on the machine lengthens what is measured."""
    uneven = [0.04, 0.05, 0.03, 0.07]
    cases = [
        case("even", "1f1b", 8, [0.05] * 4),
        case("heavy last", "1f1b", 4, [0.04, 0.04, 0.04, 0.09]),
        case("heavy first", "1f1b", 4, [0.09, 0.04, 0.04, 0.04]),
        case("uneven", "1f1b", 8, uneven),
        case("dualpipev", "dualpipev", 8, [*uneven, *uneven]),
    ]
    seconds = [min(s) for s in measured(cases, tmp_path, 2, 300)]
    found = errors(cases, seconds, fitted_per_call_seconds(cases, seconds))
    assert largest_difference(map(abs, found)) < 0.10, dict(
        zip((c.name for c in cases), found, strict=True)
    )


@pytest.mark.parametrize("model", MODELS)
def test_partitions_differ_from_deepspeeds(model: str) -> None:
    """What the bench compares is not the same cut four times."""
    cuts = partitions(layout_of(model, 8, 8))
    assert cuts["ours"] not in [cut for method, cut in cuts.items() if method != "ours"]


@pytest.mark.prove
def test_the_whole_bench() -> None:
    result = bench.main()
    assert result["steps"]["largest_error"] <= 0.03
    noise = result["partitions"]["noise"]
    for model, methods in result["partitions"]["models"].items():
        for method, row in methods.items():
            assert row["slower"] >= -max(noise, 0.005), (model, method, row)
        assert methods["type:decoder"]["slower"] >= 0.08, model
