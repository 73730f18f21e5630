"""Under the `deepspeed` launcher: conversations of many lengths, a row each or packed, with a
balance loss. The plain process takes each row alone, its padding cut off (cases_worker.py tells how
cases come in)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.data.sequences import SequenceBatch
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.plan.plan import Plan
from tests.figures import training_apart
from tests.parity.cases_worker import compiled, main, train
from tests.parity.engine_groups import from_rank_0
from tests.parity.harness import LENGTH, SEED, STEPS, Case, train_in_one_process
from tests.parity.models import MODELS
from tests.parity.reference import Reference, initial_model
from tests.parity.router_aux_loss import add_balance

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] + '\n' }}{% endfor %}"


def measure(case: Case, folder: Path) -> dict[str, float]:
    """Measure a case; rows hold several conversations where its name ends in "packed"."""
    packed = folder.name.endswith("packed")
    data = {
        "kind": "chat",
        "path": "talks.jsonl",
        "tokenizer": "byte",
        "template": TEMPLATE,
        "train_on": "all",
    }
    if dist.get_rank() == 0:
        # None so short that two, or three, fill a row to its end.
        write_talks(folder, 4 * STEPS * case.batch, LENGTH // 3 if packed else 1)
    dist.barrier()
    plan = compiled(case, folder, data={**data, "packing": packed, "shuffle": False})
    if dist.get_rank() == 0:
        prepare(plan, folder, limit_bytes=2**30)
    dist.barrier()
    results = train(plan, folder, build_trainer(plan, folder), 1, STEPS)
    wanted = from_rank_0(lambda: plain_run(plan, folder, case))
    return training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)


def plain_run(plan: Plan, folder: Path, case: Case) -> Reference:
    opened = open_dataset(plan, folder)
    model = initial_model(MODELS[case.model], SEED)
    add_balance(model, case.balance / case.batch)
    return train_in_one_process(
        model,
        [list(rows(opened.train.read(opened.order.indices(k)))) for k in range(1, STEPS + 1)],
        case.clipping,
    )


def write_talks(folder: Path, number: int, shortest: int) -> None:
    """Write conversations of `shortest` letters up to a row."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    with (folder / "talks.jsonl").open("w") as file:
        for size in random.integers(shortest, LENGTH - 2, number):
            said = "".join(map(chr, random.integers(65, 91, size)))
            file.write(json.dumps({"messages": [{"role": "assistant", "content": said}]}) + "\n")


def rows(block: SequenceBatch) -> Iterator[dict[str, Any]]:
    assert block.lengths is not None and block.loss_mask is not None
    assert block.lengths.min() < block.tokens.shape[1]
    for row, length in enumerate(block.lengths):
        ids = torch.from_numpy(block.tokens[row, :length].astype(np.int64))[None]
        if block.starts is None:
            yield {"input_ids": ids, "labels": ids}
            continue
        starts = torch.from_numpy(block.starts[row, :length])
        places = torch.arange(int(length))
        begins = torch.where(starts, places, 0).cummax(dim=0).values
        yield {
            "input_ids": ids,
            "labels": torch.where(starts, -100, ids),
            "position_ids": (places - begins)[None],
        }


if __name__ == "__main__":
    main(measure)
