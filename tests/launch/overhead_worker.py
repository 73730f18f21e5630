"""train.py of a compiled folder, with a plain DeepSpeed step before each of its own:
run/overhead-RANK.json has the seconds of both. Ours last from the call of Session.train to its next
call, so that all that a run does between two steps counts."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardwright.train import training_worker
from shardwright.train.training_session import Session
from tests.launch.plain_deepspeed import Step, plain_pipeline, plain_zero3

plain_train = Session.train
theirs: Step | None = None
seconds: dict[str, list[float]] = {"plain": [], "ours": []}
began = 0.0


def plain_step(session: Session) -> Step:
    s, model = session.plan.strategy, json.loads(os.environ["PLAIN_MODEL"])
    if s.pipeline == 1:
        return plain_zero3(model, s.micro_batch_size, s.gradient_accumulation_steps)
    length = session.plan.training.sequence_length
    return plain_pipeline(model, s.micro_batch_size, s.gradient_accumulation_steps, length)


def train(session: Session, step: int, *rest: Any) -> Any:
    global theirs, began
    if began:
        seconds["ours"].append(time.perf_counter() - began)
    theirs = theirs or plain_step(session)
    rows = [(m.input_ids, m.labels) for m in session.micro_batches(step)]
    torch.distributed.barrier()
    start = time.perf_counter()
    theirs(rows)
    torch.distributed.barrier()
    seconds["plain"].append(time.perf_counter() - start)
    path = Path(sys.argv[0]).with_name("run") / f"overhead-{os.environ['RANK']}.json"
    path.write_text(json.dumps(seconds))
    torch.distributed.barrier()
    began = time.perf_counter()
    return plain_train(session, step, *rest)


def main() -> int:
    with patch.object(Session, "train", train):
        return training_worker.main()
