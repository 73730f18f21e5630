"""Under the `deepspeed` launcher: validation of held-out rows, fewer, as many and more than the
accumulation takes, and the training behind it. A case whose folder's name ends in "packed" holds
out packed documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from deepspeed import comm as dist

from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.checkpoint.run_history import RunHistory
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.data.sequences import SubsetSequences
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.micro_batches import TrainingBatches, ValidationBatches
from shardwright.parallel.tensor_parallel_collectives import seed_dropout
from shardwright.plan.plan import Plan
from shardwright.train.run_attempt import Attempt
from shardwright.train.training_session import Session
from shardwright.train.training_worker import train_steps
from shardwright.utils.numeric_difference import max_series_diff
from tests.parity.cases_worker import compiled, main, train
from tests.parity.engine_groups import from_rank_0
from tests.parity.harness import LENGTH, SEED, STEPS, Case, reference
from tests.parity.models import MODELS
from tests.parity.reference import initial_model
from tests.parity.test_evaluation import FAILING

DROPOUT = "dropout"
"""What the names of models that drop out end in."""
BETWEEN = 3
"""The step behind which one of the two runs evaluates, and goes on."""


def row_counts(case: Case) -> list[int]:
    """Held-out rows that fill less than one micro-batch of each data rank, just the accumulation's,
    and more."""
    return [1, case.batch, 2 * case.batch + 1]


def write_held_out(case: Case, folder: Path) -> tuple[dict[str, object], list[list[list[int]]]]:
    """(the recipe's section, the pieces of each row, which see nothing of each other)."""
    random, count = np.random.default_rng(3), max(row_counts(case))
    if not folder.name.endswith("packed"):
        tokens = random.integers(
            0, MODELS[case.model]["vocab_size"], (count, LENGTH), dtype=np.int32
        )
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / "held-out.npy", tokens)
        return {"kind": "tokens", "path": "held-out.npy"}, [[row.tolist()] for row in tokens]
    lengths = random.integers(1, 40, count * LENGTH // 15)
    documents = [random.integers(32, 127, length).tolist() for length in lengths]
    if dist.get_rank() == 0:
        (folder / "held-out").mkdir(parents=True, exist_ok=True)
        for number, document in enumerate(documents):
            (folder / "held-out" / f"{number:05d}.txt").write_bytes(bytes(document))
    rows: list[list[list[int]]] = []
    stream, borders = np.concatenate(documents).tolist(), set(np.cumsum(lengths).tolist())
    for row in range(count):
        cuts = [i for i in range(row * LENGTH + 1, (row + 1) * LENGTH) if i in borders]
        edges = zip([row * LENGTH, *cuts], [*cuts, (row + 1) * LENGTH], strict=True)
        rows.append([stream[first:last] for first, last in edges])
    return {"kind": "text", "path": "held-out/*.txt", "tokenizer": "byte", "packing": True}, rows


def plain_loss(
    weights: dict[str, torch.Tensor], case: Case, rows: list[list[list[int]]]
) -> tuple[float, int]:
    """(mean over the predicted tokens, their number) of pieces that each go through the plain model
    alone."""
    model = initial_model(MODELS[case.model], SEED).eval()
    model.load_state_dict(weights, strict=False)
    total, count = 0.0, 0
    for piece in (piece for row in rows for piece in row if len(piece) > 1):
        ids = torch.tensor([piece])
        with torch.no_grad(), CONTEXT_PARALLEL.aside():
            total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * (
                len(piece) - 1
            )
        count += len(piece) - 1
    return total / count, count


def evaluations(plan: Plan, folder: Path, trainer: Trainer, case: Case) -> list[tuple[float, int]]:
    rows = open_dataset(plan, folder).validation
    assert rows is not None
    data_rank = plan.ranks[dist.get_rank()].data
    found = []
    for count in row_counts(case):
        held_out = ValidationBatches(plan, SubsetSequences(rows, np.arange(count)), data_rank)
        found.append(trainer.evaluate(held_out))
    return found


class _Watch:
    def at(self, phase: str, step: int) -> None: ...


class _NoStop:
    def agreed(self, device: torch.device) -> bool:
        return False


def failing(case: Case, folder: Path) -> dict[str, float]:
    """Validations that fail, in the middle and at the end: the step is saved, and whoever goes on
    from there makes the line that is missing, once."""
    section, _ = write_held_out(case, folder)
    every = STEPS // 2
    plan = compiled(
        case,
        folder,
        validation={**section, "every_steps": every},
        checkpoint={"every_steps": every},
    )
    attempt, evaluated = Attempt(number=1, resume=None, step=0, line=RunHistory(run="one")), []
    for saved in (every, STEPS, STEPS):
        session = Session(plan, folder, dist.get_rank(), attempt)
        plain = session._trainer.evaluate

        def fail_once(
            held_out: ValidationBatches,
            plain: Any = plain,
            at: int = session.done,
            session: Session = session,
        ) -> Any:
            if session.done > at:
                raise ArithmeticError("planted")
            return plain(held_out)

        watch: Any = _Watch()
        stop: Any = _NoStop()
        with patch.object(session._trainer, "evaluate", fail_once):
            if attempt.number < 3:
                with pytest.raises(ArithmeticError):
                    train_steps(session, watch, stop)
            else:
                assert train_steps(session, watch, stop) == "done"
        steps = published_steps(folder / "checkpoints")
        assert steps[-1][0] == saved, steps
        attempt = replace(attempt, number=attempt.number + 1, resume=str(steps[-1][1]), step=saved)
        dist.barrier()
        evaluated.append(
            [json.loads(line)["step"] for line in (folder / "run/evaluation.jsonl").open()]
        )
        dist.barrier()
    assert evaluated == [[], [every], [every, STEPS]], evaluated
    return {"loss": 0.0, "tokens": 0, "steps": 0}


def measure(case: Case, folder: Path) -> dict[str, float]:
    """loss: from the plain model. tokens, steps: how many counts of labels are wrong, how many
    steps another."""
    if folder.name == FAILING:
        return failing(case, folder)
    section, rows = write_held_out(case, folder)
    plan = compiled(case, folder, validation={**section, "every_steps": STEPS})
    if dist.get_rank() == 0:
        prepare(plan, folder, limit_bytes=2**30)
    dist.barrier()
    trainer = build_trainer(plan, folder)
    seed_dropout(plan, dist.get_rank())
    plain = train(plan, folder, trainer, 1, STEPS)
    trainer = build_trainer(plan, folder)
    seed_dropout(plan, dist.get_rank())
    between = train(plan, folder, trainer, 1, BETWEEN)
    evaluations(plan, folder, trainer, case)
    between += train(plan, folder, trainer, BETWEEN + 1, STEPS)
    steps = sum(a != b for a, b in zip(plain, between, strict=True))
    if case.model.endswith(DROPOUT):
        return {**beside_dropout(plan, folder, case, rows), "steps": steps}
    trained = from_rank_0(lambda: reference(case, np.load(folder / "tokens.npy")).weights)
    return {**evaluated(plan, folder, trainer, case, rows, trained), "steps": steps}


def evaluated(
    plan: Plan,
    folder: Path,
    trainer: Trainer,
    case: Case,
    rows: list[list[list[int]]],
    weights: dict[str, torch.Tensor],
) -> dict[str, float]:
    wanted = [plain_loss(weights, case, rows[:count]) for count in row_counts(case)]
    found = evaluations(plan, folder, trainer, case)
    return {
        "loss": max_series_diff([loss for loss, _ in found], [loss for loss, _ in wanted]),
        "tokens": sum(f != w for (_, f), (_, w) in zip(found, wanted, strict=True)),
    }


def beside_dropout(
    plan: Plan, folder: Path, case: Case, rows: list[list[list[int]]]
) -> dict[str, float]:
    """One process would draw other numbers, so that the weights stay what they were: before the
    first step, and behind steps whose rate is 0."""
    trainer, initial = (
        build_trainer(plan, folder),
        initial_model(MODELS[case.model], SEED).state_dict(),
    )
    before = evaluated(plan, folder, trainer, case, rows, initial)
    batches = TrainingBatches(plan, open_dataset(plan, folder))
    for step in (1, 2):
        trainer.step(batches.micro_batches(step, plan.ranks[dist.get_rank()].data), 0.0)
    behind = evaluated(plan, folder, trainer, case, rows, initial)
    return {name: max(before[name], behind[name]) for name in before}


if __name__ == "__main__":
    main(measure)
