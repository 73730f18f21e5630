"""What reading the data costs: its share of real steps, and how many tokens a rank reads in a
second."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import resolve
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.plan.plan import read_plan
from tests.parity.harness import Case, metrics, must, recipe, shardwright
from tests.parity.models import LLAMA

pytestmark = [pytest.mark.launch, pytest.mark.prove]
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</>{% endfor %}"

TIMED = """
import json, os, sys, time
from pathlib import Path
from shardwright.parallel import micro_batches as batches
from shardwright.train import training_worker as worker

plain, spent = batches.TrainingBatches.micro_batches, []

def timed(self, step, data_rank):
    began = time.perf_counter()
    found = plain(self, step, data_rank)
    spent.append(time.perf_counter() - began)
    Path(sys.argv[0]).with_name("run").joinpath(f"spent-{os.environ['RANK']}.json").write_text(json.dumps(spent))
    return found

batches.TrainingBatches.micro_batches = timed
raise SystemExit(worker.main())
"""


def write_corpus(folder: Path) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(0)
    words = [
        bytes(random.integers(97, 123, n).tolist()).decode() for n in random.integers(2, 9, 2000)
    ]

    def text(count: int) -> str:
        return " ".join(words[i] for i in random.integers(0, len(words), count))

    with (folder / "a.jsonl").open("w") as file:
        for _ in range(20_000):
            file.write(json.dumps({"text": text(int(random.integers(5, 300)))}) + "\n")
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(5_000):
            said = [
                {"role": r, "content": text(int(random.integers(5, 120)))}
                for r in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": said}) + "\n")
    jsonl = {"kind": "jsonl", "path": "a.jsonl", "tokenizer": "byte"}
    chat = {"kind": "chat", "path": "chat.jsonl", "tokenizer": "byte", "template": TEMPLATE}
    return {
        "documents, packed": jsonl,
        "one stream": {**jsonl, "packing": False},
        "conversations, packed": chat,
        "mixture": {"mixture": [{**jsonl, "weight": 3}, {**chat, "weight": 1}]},
    }


def test_reading_costs_at_most_a_hundredth_of_a_step(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    kinds = write_corpus(tmp_path)
    model = {**LLAMA, "hidden_size": 256, "intermediate_size": 688, "max_position_embeddings": 1024}
    case = Case(model="llama", pipeline=2, micro=2, accumulation=4)
    for name, data in kinds.items():
        document = recipe(case, tmp_path) | {
            "data": data,
            "model": {"config": model, "weights": "random"},
        }
        document["training"] |= {"sequence_length": 512, "steps": 8}
        (tmp_path / "recipe.yaml").write_text(json.dumps(document))
        out = tmp_path / name.split(",")[0]
        must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
        figures = {"tokens_per_second_a_rank": tokens_per_second(out)}
        if name == "mixture":  # of all of them: two kinds of rows in each micro-batch
            (out / "train.py").write_text(TIMED)
            must(shardwright("run", out))
            step = float(np.median([m["step_seconds"] for m in metrics(out)][2:]))
            reading = float(np.median(json.loads((out / "run" / "spent-0.json").read_text())[2:]))
            figures |= {"step_seconds": step, "reading_seconds": reading, "share": reading / step}
            assert reading <= 0.01 * step, figures
        proved("data", f"{name}: 512 tokens, micro-batch 2 x 4, pipeline 2 on two cores", figures)


def tokens_per_second(folder: Path) -> float:
    """Read by one data rank, once the order of its epoch is made."""
    plan = read_plan(folder)
    prepare(plan, folder, limit_bytes=None)
    plan, data = resolve(plan, folder)
    batches = TrainingBatches(plan, data)
    batches.micro_batches(1, 0)
    best = 0.0
    for step in range(2, 12):
        began = time.perf_counter()
        found = batches.micro_batches(step, 0)
        seconds = time.perf_counter() - began
        best = max(best, sum(m.input_ids.numel() for m in found) / seconds)
    return best
