"""Models that see: every type that transformers maps to AutoModelForImageTextToText comes apart bit
for bit, trains in a pipeline and over data ranks as one plain process does, or is refused with a
code.

Rows hold no, one or two pictures, of several sizes where a type's may differ; one micro-batch holds
none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardwright.diagnostics import Refusal
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_probe import probe_config
from shardwright.models.tasks.task_registry import IMAGE_TEXT
from tests.unit.models.factory import model_section
from tests.zoo.launch import run_types, verdict
from tests.zoo.vision_language_configs import IMAGE_TASKS, VLM_TYPES, vlm_config
from tests.zoo.vision_language_overrides import (
    BY_NATURE,
    NOT_AT_ZERO_3,
    NOT_IN_A_PIPELINE,
    NOT_PROVED,
)

Recorder = Callable[[str, str, dict[str, Any]], None]
APART = tuple(t for t in IMAGE_TASKS if t not in NOT_PROVED)
PARTS = 8
"""A run of `make prove` that is cut off goes on behind the parts that have passed."""
SAMPLE = sorted(random.Random(4).sample(APART, 6))


def apart(model_type: str, document: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline needs of it, or why it is refused."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = probe_config(
            AutoConfig.for_model(model_type, **document), IMAGE_TEXT, "auto", ("model", "config")
        )
    except Refusal as refusal:
        return {
            "verdict": "not proved",
            "refused": refusal.diagnostics[0].code,
            "reason": refusal.diagnostics[0].message,
        }
    finally:
        torch.set_num_threads(threads)
    payload = [*found.cut.payload, *(f"output {place}" for place in found.cut.carried)]
    return {
        "verdict": "proved",
        "stack": found.cut.stack,
        "payload": payload,
        "untrained": len(found.cut.untrained),
    }


def tiny(model_type: str) -> dict[str, Any]:
    return {name: value for name, value in vlm_config(model_type).items() if name != "model_type"}


@cache
def refused(model_type: str) -> dict[str, Any]:
    """What a recipe hears of a type that is none for this task."""
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section({"model_type": model_type}, task="image-text-to-text"))
    found = caught.value.diagnostics[0]
    return {
        "verdict": "refused",
        "refused": found.code,
        "reason": found.message,
        "why": BY_NATURE[model_type],
    }


def ran(types: Iterable[str], layout: str, out: Path) -> dict[str, dict[str, Any]]:
    found = run_types(list(types), layout, 2, out, worker="vision_language_worker.py")
    named = {"refused": "not proved"}  # a type that sees, in a layout that is not for it
    return {t: {"verdict": named.get(verdict(f), verdict(f)), **f} for t, f in found.items()}


def record(area: str, found: dict[str, dict[str, Any]], proved: Recorder) -> dict[str, str]:
    """Writes figures to benchmarks/. Type -> its verdict."""
    for t, figures in found.items():
        proved(area, t, {k: v for k, v in figures.items() if k != "error"})
    return {t: figures["verdict"] for t, figures in found.items()}


def record_the_others(area: str, refused_here: dict[str, str], proved: Recorder) -> None:
    """Of the types that are not run: those that are none for this task, and those that are not
    taken apart."""
    others = {t: {"verdict": "not proved", "reason": why} for t, why in NOT_PROVED.items()}
    record(area, others | {t: refused(t) for t in BY_NATURE}, proved)
    assert len(APART) - len(refused_here) >= 50


def test_every_type_is_here_once() -> None:
    assert {*IMAGE_TASKS, *BY_NATURE} == set(VLM_TYPES) and len(IMAGE_TASKS) + len(
        BY_NATURE
    ) == len(VLM_TYPES)
    assert set(NOT_PROVED) <= set(IMAGE_TASKS)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_comes_apart(model_type: str) -> None:
    assert apart(model_type, tiny(model_type))["verdict"] == "proved"


@pytest.mark.launch
def test_a_sample_trains_in_a_pipeline(tmp_path: Path) -> None:
    found = ran(SAMPLE[:2], "pipeline=2", tmp_path / "zoo")
    assert {f["verdict"] for f in found.values()} == {"proved"}, found


@pytest.mark.prove
def test_every_type_comes_apart(proved: Recorder) -> None:
    found = {t: apart(t, tiny(t)) for t in APART}
    assert set(record("zoo-vlm", found, proved).values()) == {"proved"}, found
    record_the_others("zoo-vlm", {}, proved)
    assert len(found) >= 66


@pytest.mark.prove
@pytest.mark.parametrize("model_type", sorted(NOT_PROVED))
def test_what_is_not_proved_is_refused(model_type: str) -> None:
    """Its default configuration, with a code and a reason: nothing is guessed."""
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section({"model_type": model_type}, task="image-text-to-text"))
    assert caught.value.diagnostics[0].code in ("SW2007", "SW2016")


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("part", range(PARTS))
def test_every_type_in_a_pipeline(part: int, tmp_path: Path, proved: Recorder) -> None:
    found = ran(APART[part::PARTS], "pipeline=2", tmp_path / "zoo")
    verdicts = record("zoo-vlm-pipeline", found, proved)
    assert verdicts == {
        t: "not proved" if t in NOT_IN_A_PIPELINE else "proved" for t in verdicts
    }, found
    if part == 0:
        record_the_others("zoo-vlm-pipeline", NOT_IN_A_PIPELINE, proved)


@pytest.mark.prove
@pytest.mark.launch
@pytest.mark.parametrize("part", range(PARTS))
def test_every_type_over_data_ranks(part: int, tmp_path: Path, proved: Recorder) -> None:
    found = ran(APART[part::PARTS], "data=2,zero_stage=3", tmp_path / "zoo")
    verdicts = record("zoo-vlm-zero", found, proved)
    assert verdicts == {t: "not proved" if t in NOT_AT_ZERO_3 else "proved" for t in verdicts}, (
        found
    )
    if part == 0:
        record_the_others("zoo-vlm-zero", NOT_AT_ZERO_3, proved)
