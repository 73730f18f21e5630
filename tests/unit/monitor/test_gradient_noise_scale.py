"""The noise scale of a run, from its measured steps: gradients that are drawn with a noise scale
that is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwright.monitor.gradient_noise_scale import (
    MIN_STEPS_FOR_INTERVAL,
    WINDOW,
    NoiseScale,
    StepNoise,
    noise_scale_of_recent_steps,
    noise_scale_text,
    ratio_of_means,
    run_noise_scale,
)
from shardwright.train.noise_scale_meter import GradientNormSums, estimate_step_noise

Steps = list[tuple[int, StepNoise]]
SIZE, MEAN, NOISE = 400, 0.5, 1.0
TRUE = SIZE * NOISE**2 / (SIZE * MEAN**2)
"""tr(Sigma) / |G|^2: 4 rows."""


def step_of(random: np.random.Generator, labels: list[int], taken: int) -> StepNoise:
    """labels: of each micro-batch of a step; a row has 10. A label's gradient is the mean and noise
    of 10 times a row's variance."""
    parts = [n * MEAN + np.sqrt(10 * n) * NOISE * random.standard_normal(SIZE) for n in labels]
    total, measured = sum(labels), labels[:taken]
    sums = GradientNormSums(
        squares=sum(float(part @ part) for part in parts[:taken]) / total**2,
        labels=sum(measured),
        labels_squared=sum(n * n for n in measured),
        all_labels=total,
    )
    whole = np.sum(parts, axis=0)
    noise = estimate_step_noise(
        float(np.linalg.norm(whole)) / total, sums, batch=total // 10, rows=taken
    )
    assert noise is not None
    return noise


def drawn(seed: int, steps: int, labels: list[int], taken: int) -> Steps:
    random = np.random.default_rng(seed)
    return [(50 * k, step_of(random, labels, taken)) for k in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("labels", "taken"),
    [
        ([10] * 8, 8),
        ([10] * 64, 4),
        ([40] * 8, 8),
        ([10, 30, 20, 60] * 4, 16),
        ([10, 30, 20, 60, 0] * 4, 3),
    ],
    ids=["rows", "some-rows", "larger", "uneven", "some-uneven"],
)
def test_both_estimates_are_without_bias(labels: list[int], taken: int) -> None:
    steps = [noise for _, noise in drawn(0, 2000, labels, taken)]
    for name, true in (("square", SIZE * MEAN**2), ("variance", SIZE * NOISE**2)):
        values = np.array([getattr(noise, name) for noise in steps])
        assert abs(values.mean() - true) <= 4 * values.std() / np.sqrt(len(values)), (
            name,
            values.mean(),
            true,
        )


def test_nine_intervals_of_ten_hold_it() -> None:
    """They are of 95 %, and the smallest number of steps has a quantile of t that is 1 % low."""
    for steps in (MIN_STEPS_FOR_INTERVAL, 12, WINDOW):
        found = [ratio_of_means(drawn(seed, steps, [10] * 8, 8), batch=8) for seed in range(300)]
        inside = [s.low is not None and s.low <= TRUE <= (s.high or np.inf) for s in found]
        assert np.mean(inside) >= 0.9, steps
        assert np.mean([s.high is not None for s in found]) >= 0.9, steps


def test_nothing_is_known_of_too_few_steps_or_of_noise_alone() -> None:
    scale = ratio_of_means(drawn(1, MIN_STEPS_FOR_INTERVAL - 1, [10] * 8, 8), batch=8)
    assert scale.value is not None and (scale.low, scale.high) == (None, None)
    assert "too few" in noise_scale_text(scale)
    random = np.random.default_rng(2)
    alone = [
        (k, StepNoise(square=float(x), variance=100.0, rows=8))
        for k, x in enumerate(random.normal(0, 5, 20))
    ]
    scale = ratio_of_means(alone, batch=8)
    assert scale.high is None and scale.low is not None and scale.low > 10
    assert (
        "to more" in noise_scale_text(scale)
        if scale.value
        else "cannot be told from the noise" in noise_scale_text(scale)
    )


def test_only_the_newest_steps_count() -> None:
    steps = drawn(3, 2 * WINDOW + 20, [10] * 8, 8)
    assert noise_scale_of_recent_steps(steps, batch=8) == ratio_of_means(steps[-WINDOW:], batch=8)
    assert noise_scale_of_recent_steps(steps[:9], batch=8) == ratio_of_means(
        steps[4:9], batch=8
    )  # of steps 50 to 450, those behind 225
    assert noise_scale_of_recent_steps(steps[:1], batch=8) == ratio_of_means(steps[:1], batch=8)


def test_nothing_to_compare() -> None:
    one = GradientNormSums(squares=1.0, labels=10, labels_squared=100, all_labels=10)
    assert estimate_step_noise(1.0, one, batch=1, rows=1) is None
    none = GradientNormSums(squares=0.0, labels=0, labels_squared=0, all_labels=80)
    assert estimate_step_noise(1.0, none, batch=8, rows=1) is None
    fine = GradientNormSums(squares=0.3, labels=80, labels_squared=800, all_labels=80)
    assert estimate_step_noise(1.0, fine, batch=8, rows=8) is not None
    assert estimate_step_noise(float("inf"), fine, batch=8, rows=8) is None


def test_words_say_no_more_than_was_measured() -> None:
    scale = NoiseScale(value=50.0, low=40.0, high=66.0, steps=40, rows=32, batch=20, step=2000)
    assert noise_scale_text(scale) == (
        "your batch is 0.3 to 0.5 of the noise scale: noise scale 50 rows, 95 % interval 40 to 66, "
        "over 40 steps of 32 rows; a proxy, not the critical batch size"
    )


def test_what_a_run_left(tmp_path: Path) -> None:
    assert run_noise_scale(tmp_path, 8) is None
    of = {"gradient_square": 2.0, "row_variance": 8.0, "rows": 8}
    lines = [
        {"step": k, "loss": 1.0, **({"noise_scale": of} if k % 2 == 0 else {})} for k in range(1, 9)
    ]
    lines += [
        {"step": 10, "noise_scale": {"gradient_square": None, "row_variance": 1.0, "rows": 8}}
    ]
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 12, "noise_scale": {"gra'
    )
    found = run_noise_scale(tmp_path, 8)
    assert found is not None and (found.value, found.steps, found.step) == (4.0, 2, 8)
