"""What the proofs stand on: each harness sees a NaN that does not come first, a value that is
missing, a rank that is silent. The harnesses' own comparisons, on results that were planted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.verify.reference_run import Reference
from tests.figures import as_json, lines_apart, same, training_apart, worst_of_cases, worst_of_ranks
from tests.launch import resume, resume_matrix, test_autotp, test_roundtrip
from tests.lint import probes
from tests.parity import (
    case_launches,
    cases_worker,
    harness,
    hpz_worker,
    test_chunked,
    test_hpz,
    test_lora,
    traps_worker,
)
from tests.parity.harness import Case
from tests.zoo import launch as zoo

NAN, INF = math.nan, math.inf
GOOD = [4.0, 3.0, 2.0]
WEIGHTS = {"first": torch.ones(2, 3), "second": torch.full((4,), 2.0)}


def plain() -> Reference:
    return Reference(
        list(GOOD), list(GOOD), list(GOOD), {n: w.clone() for n, w in WEIGHTS.items()}, frozenset()
    )


def lines(losses: list[Any] = GOOD, norms: list[Any] = GOOD) -> list[dict[str, Any]]:
    return [
        {"step": i, "loss": a, "grad_norm": b}
        for i, (a, b) in enumerate(zip(losses, norms, strict=True), 1)
    ]


def planted_weights(name: str, value: float) -> dict[str, torch.Tensor]:
    weights = {n: w.clone() for n, w in WEIGHTS.items()}
    weights[name].view(-1)[-1] = value
    return weights


BAD_SERIES = {"nan": [4.0, NAN, 2.0], "null": [4.0, None, 2.0], "infinity": [4.0, 3.0, INF]}


@pytest.mark.parametrize("bad", BAD_SERIES.values(), ids=BAD_SERIES)
def test_losses_and_norms(bad: list[Any]) -> None:
    assert lines_apart(lines(), plain()) == {"loss": 0, "norm": 0}
    assert lines_apart(lines(losses=bad), plain()) == {"loss": INF, "norm": 0}
    assert lines_apart(lines(norms=bad), plain()) == {"loss": 0, "norm": INF}
    assert lines_apart(lines()[:2], plain()) == {"loss": INF, "norm": INF}
    assert training_apart(GOOD, bad, plain()) == {"loss": 0, "norm": INF}


@pytest.mark.parametrize("bad", BAD_SERIES.values(), ids=BAD_SERIES)
def test_parity(bad: list[Any]) -> None:
    assert dataclasses.astuple(harness.difference_of(lines(), WEIGHTS, plain())) == (0, 0, 0)
    assert harness.difference_of(lines(losses=bad), WEIGHTS, plain()).loss_absolute == INF
    assert harness.difference_of(lines(norms=bad), WEIGHTS, plain()).norm_relative == INF
    harness.check_half_precision(lines(), plain(), plain())
    for planted in (lines(losses=bad), lines(norms=bad)):
        with pytest.raises(AssertionError):
            harness.check_half_precision(planted, plain(), plain())


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_weight(name: str, value: float) -> None:
    """The last element, of the first and of the second weight."""
    assert (
        harness.difference_of(lines(), planted_weights(name, value), plain()).weight_absolute == INF
    )
    other = next(n for n in WEIGHTS if n != name)
    assert harness.difference_of(lines(), {other: WEIGHTS[other]}, plain()).weight_absolute == INF
    assert (
        harness.difference_of(lines(), {**WEIGHTS, "third": torch.ones(1)}, plain()).weight_absolute
        == INF
    )


def results(losses: list[float], norms: list[float]) -> list[Any]:
    return [SimpleNamespace(loss=a, grad_norm=b) for a, b in zip(losses, norms, strict=True)]


def test_many_cases_in_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_worker, "reference", lambda case, tokens, dtype: plain())
    monkeypatch.setattr(cases_worker, "from_rank_0", lambda make: make())  # no ranks here
    np.save(tmp_path / "tokens.npy", np.zeros(1))
    case, bad = Case(model="llama"), [4.0, NAN, 2.0]
    assert cases_worker.difference(case, tmp_path, results(GOOD, GOOD)) == {"loss": 0, "norm": 0}
    assert cases_worker.difference(case, tmp_path, results(bad, GOOD)) == {"loss": INF, "norm": 0}
    assert cases_worker.difference(case, tmp_path, results(GOOD, bad)) == {"loss": 0, "norm": INF}


CHECKS: dict[str, tuple[Callable[[str, dict[str, Any]], None], str, dict[str, Any]]] = {
    "lora": (test_lora.check, "llama zero1", {}),
    "chunked": (test_chunked.check, "llama pp2", {"positions": 4}),
    "hpz": (test_hpz.check, "llama-plain", {"weight": 0.0, "hpz": 2, "far": 1.0, "near": 2.0}),
}


@pytest.mark.parametrize("harness_name", CHECKS)
def test_one_rank_of_a_launch(harness_name: str, tmp_path: Path) -> None:
    """The second rank's NaN; a figure that it does not have; a second rank that says nothing."""
    check, name, others = CHECKS[harness_name]
    cases = {name: Case(model="llama", data=2)}
    good = {"loss": 0.0, "norm": 0.0, **others}

    def told(*ranks: dict[str, Any]) -> dict[str, Any]:
        for rank in (0, 1):
            text = "".join(
                json.dumps({"case": name, **figures}) for figures in ranks[rank : rank + 1]
            )
            (tmp_path / f"rank-{rank}.jsonl").write_text(text)
        return case_launches.read(cases, tmp_path)[name]

    check(name, told(good, good))
    for key in {"loss", "norm", "weight"} & good.keys():
        with pytest.raises(AssertionError):
            check(name, told(good, {**good, key: NAN}))
        with pytest.raises(AssertionError):
            told(good, {k: v for k, v in good.items() if k != key})
    with pytest.raises(AssertionError):
        told(good)


def test_worst_of_ranks() -> None:
    assert worst_of_ranks([{"a": 1.0}, {"a": 2.0}], 2) == {"a": 2.0}
    assert worst_of_ranks([{"a": 1.0}, {"a": NAN}], 2) == {"a": INF}


def test_hpz_fragments() -> None:
    def off(mine: torch.Tensor) -> float:
        last = SimpleNamespace(name="second", start=2, states={"fp32": mine})
        first = SimpleNamespace(
            name="first", start=0, states={"fp32": WEIGHTS["first"].t().reshape(-1)}
        )
        fragments: Any = [first, last]
        return hpz_worker.fragments_apart(fragments, {"first"}, WEIGHTS)

    assert off(torch.full((2,), 2.0)) == 0
    assert off(torch.tensor([2.0, NAN])) == off(torch.full((3,), 2.0)) == INF


def zoo_rank(out: Path, rank: int, *found: dict[str, Any]) -> None:
    (out / f"rank-{rank}.jsonl").write_text(
        "".join(json.dumps(figures) + "\n" for figures in found)
    )


def test_the_zoo(tmp_path: Path) -> None:
    good = {"type": "llama", "loss": 0.0, "norm": 0.0, "weights": 0.0, "sharded": 1.0}
    for first, second, wanted in (
        (good, good, "proved"),
        (good, {**good, "loss": NAN}, "wrong"),
        (good, {**good, "norm": NAN}, "wrong"),
        (good, {**good, "weights": NAN}, "wrong"),
        (good, {**good, "weights": INF}, "wrong"),
        (good, {"type": "llama", "refused": "SW2016", "reason": "why"}, "error"),
        (good, {"type": "llama", "error": "ValueError: no"}, "error"),
    ):
        for ranks in ((first, second), (second, first)):
            for rank, found in enumerate(ranks):
                zoo_rank(tmp_path, rank, found)
            assert zoo.verdict(zoo.read(tmp_path, 2)["llama"]) == wanted, ranks
    zoo_rank(tmp_path, 0, good)
    zoo_rank(tmp_path, 1, {**good, "sharded": 0.5})
    assert zoo.read(tmp_path, 2)["llama"]["sharded"] == 0.5
    (tmp_path / "rank-1.jsonl").unlink()
    assert zoo.read(tmp_path, 2) == {}, "a rank that died has proved nothing"


def test_zoo_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_ZOO_LAYOUT", "tensor=2")
    from tests.zoo import pipeline_worker

    weights = plain().weights
    assert pipeline_worker.nearest(WEIGHTS["first"], weights["first"]) == 0
    assert pipeline_worker.nearest(WEIGHTS["first"].t(), weights["first"]) == 0
    assert pipeline_worker.nearest(planted_weights("first", NAN)["first"], weights["first"]) == INF
    assert pipeline_worker.nearest(torch.ones(2, 2), weights["first"]) == INF


def test_resumes() -> None:
    losses = {"a": GOOD, "a -> b": list(GOOD)}
    assert resume_matrix.differences(losses, [("a", "b")]) == {("a", "b"): 0}
    for bad in ([4.0, NAN, 2.0], GOOD[:2]):
        assert resume_matrix.differences({**losses, "a -> b": bad}, [("a", "b")]) == {
            ("a", "b"): INF
        }
    # Both runs diverged alike: Python's == takes the NaN that json reads for equal to itself.
    diverged = json.loads(json.dumps(lines(losses=[4.0, NAN, 2.0])))
    assert resume.same_numbers(lines(), lines()) and not resume.same_numbers(diverged, diverged)
    assert not resume.same_numbers(lines(losses=[4.0, None, 2.0]), lines(losses=[4.0, None, 2.0]))


def test_same() -> None:
    assert same({"a": [1.0, "x"]}, {"a": [1.0, "x"]}) and not same([1.0], [2.0])
    assert (
        not same({"a": [1.0, NAN]}, {"a": [1.0, NAN]})
        and not same([None], [None])
        and not same([INF], [INF])
    )


def test_roundtrips() -> None:
    good = {"same_bytes": True, "logits": 0.0}
    test_roundtrip.check({"a": good, "b": good})
    for bad in (NAN, INF):
        with pytest.raises(AssertionError):
            test_roundtrip.check({"a": good, "b": {**good, "logits": bad}})


def test_autotp_in_a_users_script(tmp_path: Path) -> None:
    split = SimpleNamespace(name="layers.0.w", shard_shape=lambda rank: (2, 4))
    module = SimpleNamespace(style="colwise", parameters=[split])
    plan = SimpleNamespace(
        tensor_parallel=SimpleNamespace(modules=[module]),
        model=SimpleNamespace(cut=SimpleNamespace(stack="layers")),
    )
    compiled: Any = SimpleNamespace(plan=plan)
    shapes = {"shapes": {"layers.0.w": [2, 4]}, "whole": {"layers.0.w": [4, 4]}}
    for losses, wanted in ((GOOD, 0), ([4.0, NAN, 2.0], INF), (GOOD[:2], INF)):
        (tmp_path / "result-0.json").write_text(
            json.dumps({"losses": GOOD, "plain": GOOD, **shapes})
        )
        (tmp_path / "result-1.json").write_text(
            json.dumps({"losses": losses, "plain": GOOD, **shapes})
        )
        assert test_autotp.measure(tmp_path, compiled) == {"loss": wanted, "sharded": 1.0}


def test_probes_of_lint() -> None:
    assert probes.near({"losses": GOOD, "plain": GOOD})
    assert not probes.near({"losses": [4.0, NAN, 2.0], "plain": GOOD})


def test_traps(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(plain: torch.nn.Linear, group: object) -> Any:
        return lambda x: plain(x) * torch.tensor([1.0] * 7 + [NAN])

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda group: 0)
    linear = torch.nn.Linear(8, 8)
    kind: Any = layer
    group: Any = None
    monkeypatch.setattr(traps_worker, "strided", lambda x: x)
    narrow: Any = lambda plain, group: lambda x: linear(torch.zeros(3, 5, 8)) * NAN  # noqa: E731
    assert traps_worker.column_backward_error(group, kind, linear) == INF
    assert traps_worker.row_forward_error(group, narrow, linear) == INF


def test_published_figures_are_json() -> None:
    document = as_json(
        {"cases": {"a": {"loss": NAN, "norm": [1.0, -INF], "kind": "x", "good": True}}}
    )
    assert document == {
        "cases": {"a": {"loss": None, "norm": [1.0, None], "kind": "x", "good": True}}
    }
    json.dumps(document, allow_nan=False)
    assert worst_of_cases([{"loss": 1.0}, {"loss": None}, {"loss": 0.5}], "loss") == INF
    assert worst_of_cases([{"loss": 1.0}, {"loss": NAN}, {"loss": 0.5}], "loss") == INF
