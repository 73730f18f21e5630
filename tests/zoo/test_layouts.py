"""Model types that nobody wrote a line for train in a pipeline, and over tensor ranks, as one plain
process does.

Tiny configurations with multipliers, soft caps, windows, partial rotary and biases that are not the
defaults; three steps of two micro-batches on DeepSpeed's real engines.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.models.graph_builder import build_model_graph
from tests.unit.models.factory import model_section
from tests.zoo.configs import RUNNABLE, base_type
from tests.zoo.launch import run_types, verdict
from tests.zoo.overrides import IMPOSSIBLE, VARIANTS

pytestmark = pytest.mark.launch

Recorder = Callable[[str, str, dict[str, Any]], None]

WELL_SHARDED = 0.95
"""Of the decoder layers' parameters of two and more dimensions, read from the live ranks."""

NOT_CUT = {"dory", "hrm_text", "inkling2_loop_text", "reformer", "xlm"}
"""Types whose structure no cut reproduces, each refused with its reason."""

MODEL = Path(__file__).resolve().parents[2] / "compiler" / "shardwright" / "models"
TABLE: dict[str, Any] = json.loads((MODEL / "tensor_verified.json").read_text())
SHARDED = sorted(t for t, v in TABLE.items() if v == "sharded")
FALLBACK = sorted(t for t, v in TABLE.items() if v == "fallback")

SEED = 7
PIPELINE_SAMPLE = sorted(random.Random(SEED).sample(RUNNABLE, 14))
TENSOR_SAMPLE = sorted(
    {*random.Random(SEED).sample(SHARDED, 5), "qwen3", "olmo2", "falcon/multi_query", "mixtral"}
)
# camembert: its output matrix shares a bias that is listed under another module.
FALLBACK_SAMPLE = sorted({*random.Random(SEED).sample(FALLBACK, 3), "camembert"})


@pytest.mark.parametrize(
    ("types", "layout", "ranks"),
    [(PIPELINE_SAMPLE, "pipeline=2", 2), (TENSOR_SAMPLE + FALLBACK_SAMPLE, "tensor=2", 2)],
    ids=["pipeline", "tensor"],
)
def test_a_sample_of_types(types: list[str], layout: str, ranks: int, tmp_path: Path) -> None:
    found = run_types(types, layout, ranks, tmp_path / "zoo")
    verdicts = {t: verdict(found[t]) for t in types}
    assert set(verdicts.values()) <= {"proved", "refused"}, {
        t: found[t] for t, v in verdicts.items() if v != "refused"
    }
    if layout.startswith("tensor"):
        assert set(verdicts.values()) == {"proved"}
        assert all(
            figures["sharded"] >= WELL_SHARDED for t, figures in found.items() if t in TENSOR_SAMPLE
        )
    else:
        assert {t for t, v in verdicts.items() if v == "refused"} <= NOT_CUT


@pytest.mark.prove
def test_key_value_heads_are_copied_where_there_are_fewer_than_ranks(tmp_path: Path) -> None:
    """Two key/value heads over four tensor ranks: each is held by two."""
    types = ["llama", "gemma2", "stablelm/plain"]
    found = run_types(types, "tensor=4", 4, tmp_path / "zoo")
    assert {t: verdict(found[t]) for t in types} == dict.fromkeys(types, "proved"), found


@pytest.mark.prove
def test_every_type_over_data_ranks(tmp_path: Path, proved: Recorder) -> None:
    found = run_types(list(RUNNABLE), "data=2,zero_stage=2,micro_batch_size=1", 2, tmp_path / "zoo")
    assert record("zoo-zero", found, proved) >= 181


@pytest.mark.prove
def test_every_type_in_a_pipeline(tmp_path: Path, proved: Recorder) -> None:
    found = run_types(list(RUNNABLE), "pipeline=2", 2, tmp_path / "zoo")
    assert record("zoo-pipeline", found, proved) >= 181


@pytest.mark.prove
def test_what_every_type_gets_of_tensor_parallelism(tmp_path: Path, proved: Recorder) -> None:
    """Tries the plan and the fallback; `python -m tools.generate support_matrix` writes the tables
    that the compiler reads."""
    everything = [*RUNNABLE, *VARIANTS]
    planned = run_types(everything, "tensor=2", 2, tmp_path / "sharded", kind="sharded")
    planned = {t: without_plan(figures) for t, figures in planned.items()}
    gathered = run_types(list(RUNNABLE), "tensor=2", 2, tmp_path / "fallback", kind="fallback")
    gathered = {
        t: as_refusal(f) if verdict(f) in ("wrong", "error") else f for t, f in gathered.items()
    }
    sharded = record("zoo-tensor", planned, proved)
    record("zoo-tensor-fallback", gathered, proved)
    assert sharded >= 102
    well = {base_type(t) for t, f in planned.items() if verdict(f) == "proved"}
    assert len(well | {t for t, f in gathered.items() if verdict(f) == "proved"}) >= 170


@pytest.mark.prove
def test_every_type_in_a_pipeline_of_tensor_ranks(tmp_path: Path, proved: Recorder) -> None:
    found = run_types(list(RUNNABLE), "pipeline=2,tensor=2", 4, tmp_path / "zoo")
    assert record("zoo-pipeline-tensor", found, proved) >= 170


@pytest.mark.prove
def test_every_mixture_over_expert_ranks(tmp_path: Path, proved: Recorder) -> None:
    found = run_types(list(RUNNABLE), "data=2,expert=2,micro_batch_size=1", 2, tmp_path / "zoo")
    assert record("zoo-expert", found, proved) >= 55


@pytest.mark.prove
def test_every_mixture_in_a_pipeline_of_expert_ranks(tmp_path: Path, proved: Recorder) -> None:
    """Every one of them that pipelines at all."""
    found = run_types(
        list(RUNNABLE), "pipeline=2,data=2,expert=2,micro_batch_size=1", 4, tmp_path / "zoo"
    )
    assert record("zoo-pipeline-expert", found, proved) >= 50


@pytest.mark.prove
def test_every_type_over_context_ranks(tmp_path: Path, proved: Recorder) -> None:
    found = run_types(list(RUNNABLE), "context=2", 2, tmp_path / "zoo")
    assert record("zoo-context", found, proved) >= 104


@pytest.mark.prove
def test_every_type_in_a_pipeline_of_context_ranks(tmp_path: Path, proved: Recorder) -> None:
    found = run_types(list(RUNNABLE), "pipeline=2,context=2", 4, tmp_path / "zoo")
    assert record("zoo-pipeline-context", found, proved) >= 100


def without_plan(figures: dict[str, Any]) -> dict[str, Any]:
    """What a type's plan is worth: proved, or refused where there is none, or where it does not
    train as one process does. The compiler never takes such a plan."""
    if "refused" in figures:
        return figures
    if verdict(figures) == "proved" and figures["sharded"] >= WELL_SHARDED:
        return figures
    return as_refusal(figures)


def as_refusal(figures: dict[str, Any]) -> dict[str, Any]:
    if verdict(figures) == "proved":
        return {
            "refused": "SW3123",
            "reason": f"its plan cuts only {figures['sharded']:.0%} of the layers' matrices",
        }
    cause = figures.get("error", "").strip().splitlines()[-1:] or [
        f"loss {figures.get('loss', 0):.1e}, gradient norm {figures.get('norm', 0):.1e}, weights "
        f"{figures.get('weights', 0):.1e} off"
    ]
    return {
        "refused": "SW3123",
        "reason": f"cut this way it does not train as one process does: {cause[0][:200]}",
    }


def refusal(model_type: str) -> dict[str, Any]:
    """What a recipe hears of a type that no tiny copy can be made of."""
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section({"model_type": model_type}))
    return {
        "refused": caught.value.diagnostics[0].code,
        "reason": caught.value.diagnostics[0].message,
    }


def record(area: str, found: dict[str, dict[str, Any]], proved: Recorder) -> int:
    """Keep the figures. Returns the number of types that are proved; none may be wrong."""
    found = {**found, **{t: refusal(t) for t in IMPOSSIBLE}}
    verdicts = {t: verdict(figures) for t, figures in found.items()}
    for t, figures in found.items():
        proved(
            area,
            t,
            {
                "verdict": verdicts[t],
                **{k: v for k, v in figures.items() if k != "error"},
            },
        )
    assert not {t: found[t] for t, v in verdicts.items() if v in ("wrong", "error")}
    return sum(verdicts[t] == "proved" for t in RUNNABLE)
