"""Under the `deepspeed` launcher: cases under `kernels: compile`, and how many graphs torch.compile
made for them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._dynamo.utils import counters

from tests.parity import cases_worker
from tests.parity.cases_worker import main
from tests.parity.harness import Case


def measure(case: Case, folder: Path) -> dict[str, float]:
    torch._dynamo.reset()
    counters.clear()
    found = cases_worker.measure(case, folder)
    graphs = counters["stats"]["unique_graphs"]
    assert bool(graphs) == (case.kernels == "compile"), counters
    # All layers of one kind share a graph.
    assert graphs <= 2, counters
    return found


if __name__ == "__main__":
    main(measure)
