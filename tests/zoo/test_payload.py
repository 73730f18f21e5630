"""Types through whose layers more passes than the hidden states, in the layouts where that could go
wrong.

Three stages: the payload crosses one that does not make it. Recomputation: a micro-batch comes back
when the next one has passed. DualPipeV: a rank has two stages, in turns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.launch import run_types, verdict

pytestmark = pytest.mark.launch

# Arguments from the embedding's side (floating and token ids), a layer's output, shared parameters,
# shared state.
TYPES = ["deepseek_v4", "gemma3n_text", "hy_v4", "zamba", "zaya"]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param(
            "pipeline=3,activation_checkpointing=full,micro_batch_size=1",
            3,
            marks=pytest.mark.prove,
        ),
        pytest.param(
            "pipeline=2,schedule=dualpipev,micro_batch_size=1", 2, marks=pytest.mark.prove
        ),
    ],
    ids=["recompute", "dualpipev"],
)
def test_payload(layout: str, ranks: int, tmp_path: Path) -> None:
    found = run_types(TYPES, layout, ranks, tmp_path / "zoo")
    assert {t: verdict(f) for t, f in found.items()} == dict.fromkeys(TYPES, "proved"), found
    for t, figures in found.items():
        assert figures["payload"] or figures["together"], t
