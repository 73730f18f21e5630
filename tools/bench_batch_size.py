"""`python -m tools.bench_batch_size`: what a larger batch buys, on recipes/tiny-llama-cpu.yaml,
made smaller.

Trains it over two ranks at four batch sizes, each at three learning rates, and writes to
benchmarks/batch-size.json how many steps the best of them took to one held-out loss, its curve, and
the noise scale on the way. docs/batch-size.md shows them. A quarter of an hour on two idle cores;
runs that are in the folder already are read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.monitor.gradient_noise_scale import ratio_of_means, read_step_noise
from tools.prove.proof_results import ROOT, stamp

FILE = ROOT / "benchmarks" / "batch-size.json"
TARGET = 2.0
"""Held-out loss. The model comes below it at every batch size within its steps."""
RATES = {
    4: (1e-3, 2e-3, 4e-3),
    16: (1e-3, 2e-3, 4e-3),
    64: (2e-3, 4e-3, 8e-3),
    256: (2.5e-3, 5e-3, 1e-2),
}
"""Of each batch size: the best rate grows with the batch."""
STEPS = {4: 1500, 16: 500, 64: 240, 256: 150}
EVALUATIONS = 30
NOISE_BATCH, NOISE_PARTS = 64, 4
"""The noise scale is told of the run with this batch, in so many parts of its steps."""
SMALLER: dict[str, Any] = {
    "cluster.gpus_per_node": 2,
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 176,
    "model.config.num_hidden_layers": 2,
    "training.sequence_length": 64,
    "training.scheduler": {"name": "constant", "warmup_steps": 10},
}


def settings(batch: int, rate: float) -> dict[str, Any]:
    """Of a run, for `--set`."""
    layout = {
        "tensor": 1,
        "pipeline": 1,
        "data": 2,
        "zero_stage": 1,
        "micro_batch_size": max(1, batch // 8),
    }
    return {
        **SMALLER,
        "parallelism": layout,
        "training.global_batch_size": batch,
        "training.steps": STEPS[batch],
        "training.optimizer.lr": rate,
        "validation": {"fraction": 0.0005, "every_steps": STEPS[batch] // EVALUATIONS},
        "tracking": {"noise_scale": {"every_steps": 2, "rows": batch}},
    }


def trained(folder: Path, batch: int, rate: float) -> Path:
    """The compiled folder of a run that is done."""
    out = folder / f"{batch}-{rate:g}"
    if (out / "run" / "summary.json").exists():
        return out
    sets = [
        word
        for key, value in settings(batch, rate).items()
        for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    start = [sys.executable, "-m", "shardwright"]
    recipe = str(ROOT / "recipes" / "tiny-llama-cpu.yaml")
    subprocess.run(
        [*start, "compile", recipe, "-o", str(out), *sets], check=True, stdout=subprocess.DEVNULL
    )
    subprocess.run(
        [*start, "run", str(out), "--resume", "never"], check=True, stdout=subprocess.DEVNULL
    )
    return out


def curve_of(out: Path) -> list[tuple[int, float]]:
    """(step, held-out loss)."""
    lines = (out / "run" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["step"], round(row["loss"], 4)) for row in map(json.loads, lines)]


def steps_to(curve: list[tuple[int, float]], loss: float) -> float | None:
    """The first step at it, on the straight line between two evaluations; None where it is not
    reached."""
    for (before, higher), (after, lower) in itertools.pairwise(curve):
        if higher > loss >= lower:
            return before + (after - before) * (higher - loss) / (higher - lower)
    return None


def estimate_step_noise(
    out: Path, batch: int, curve: list[tuple[int, float]]
) -> list[dict[str, Any]]:
    """In each part of the steps: the noise scale, and the held-out loss in its middle."""
    steps, last = read_step_noise(out), STEPS[batch]
    found = []
    for part in range(NOISE_PARTS):
        first, end = last * part // NOISE_PARTS, last * (part + 1) // NOISE_PARTS
        scale = ratio_of_means([(k, noise) for k, noise in steps if first < k <= end], batch)
        steps_measured, losses = zip(*curve, strict=True)
        loss = float(np.interp((first + end) / 2, steps_measured, losses))
        figures = {
            name: None if (v := getattr(scale, name)) is None else round(v, 1)
            for name in ("value", "low", "high")
        }
        found.append(
            {
                "first": first + 1,
                "last": end,
                "loss": round(loss, 2),
                "measured": scale.steps,
                **figures,
            }
        )
    return found


def both_bills(steps: dict[int, float]) -> tuple[float, float]:
    """(S_min, B) of S = S_min (1 + B / batch), the trade of arXiv 1812.06162, equation 2.11, by
    least squares of the relative differences: at a batch of B rows a run needs twice the fewest
    steps and twice the fewest rows."""
    batches, needed = np.array(list(steps)), np.array(list(steps.values()))
    left = np.stack([1 / needed, 1 / batches / needed], axis=1)
    (fewest, slope), *_ = np.linalg.lstsq(left, np.ones(len(batches)), rcond=None)
    return float(fewest), float(slope / fewest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "batch-size", help="where the runs are"
    )
    folder = parser.parse_args().folder
    runs, steps, noise = [], {}, []
    for batch, rates in RATES.items():
        curves = {rate: curve_of(trained(folder, batch, rate)) for rate in rates}
        needed = {
            rate: n for rate, curve in curves.items() if (n := steps_to(curve, TARGET)) is not None
        }
        rate = min(needed, key=lambda r: needed[r])
        steps[batch] = needed[rate]
        found = {"steps": round(needed[rate], 1), "curve": curves[rate]}
        runs.append({"batch": batch, "rate": rate, "rates": rates, **found})
        if batch == NOISE_BATCH:
            noise = estimate_step_noise(folder / f"{batch}-{rate:g}", batch, curves[rate])
    fewest, bills = both_bills(steps)
    document = {
        **stamp(),
        "command": "python -m tools.bench_batch_size",
        "target": TARGET,
        "runs": runs,
        "fewest_steps": round(fewest, 1),
        "both_bills_double": round(bills, 1),
        "noise_batch": NOISE_BATCH,
        "noise": noise,
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
