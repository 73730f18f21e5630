"""What a session does around its steps, in one process (`target: reference`): the checks before the
first one, what a resumed run is told, and what a checkpoint is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch import distributed

from shardwright.checkpoint.checkpoint_manifest import is_finite
from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.engines.trainer_protocol import StepResult
from shardwright.plan.plan import read_plan
from shardwright.train import host_consistency
from shardwright.train.run_attempt import RANKS, new_run_lease, take
from shardwright.train.training_session import Session, open_session
from shardwright.train.training_worker import train_steps

ONE_RANK: dict[str, Any] = {
    "target": "reference",
    "cluster.gpus_per_node": 1,
    "parallelism": {"zero_stage": 0},
    "training.steps": 4,
    "data": {"kind": "text", "path": "corpus.txt", "tokenizer": "byte", "packing": False},
}


@pytest.fixture(autouse=True)
def rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    if distributed.is_initialized():  # a session that was refused
        distributed.destroy_process_group()


@pytest.fixture
def compiled(write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """compiled({...}) -> the compiled folder; the same one each time."""
    (tmp_path / "corpus.txt").write_text("one text " * 999)

    def compile(changes: dict[str, Any] | None = None) -> Path:
        recipe = write_recipe({**ONE_RANK, **(changes or {})})
        assert cli.main(["compile", str(recipe), "-o", str(tmp_path / "out")]) == 0
        return tmp_path / "out"

    return compile


def saved(out: Path) -> list[int]:
    return [step for step, _ in published_steps(out / "checkpoints")]


class Quiet:
    """A watch, and a stop request, of a run that nobody watches or stops."""

    def at(self, phase: str, step: int) -> None: ...

    def agreed(self, device: object) -> bool:
        return False


def test_a_due_step_is_saved_before_its_validation_which_may_fail(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = compiled(
        {"validation": {"fraction": 0.1, "every_steps": 2}, "checkpoint": {"every_steps": 2}}
    )

    def failing(session: Session) -> float:
        raise ArithmeticError("planted")

    monkeypatch.setattr(Session, "evaluate", failing)
    quiet = cast(Any, Quiet())
    with pytest.raises(ArithmeticError), open_session(out) as session:
        train_steps(session, quiet, quiet)
    assert saved(out) == [2]


def test_who_goes_on_is_told_of_other_data_and_of_another_schedule(
    compiled: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compiled()
    with open_session(out) as session:
        session.train(1)
    (tmp_path / "corpus.txt").write_text("one test " * 999)
    compiled({"training.steps": 8})
    capsys.readouterr()
    with open_session(out) as session:
        assert session.done == 1
    told = capsys.readouterr().out
    assert "warning[SW6207]" in told and "the content of" in told
    assert "warning[SW6217]" in told and "training.steps 4 -> 8" in told


def test_a_checkpoint_says_whether_its_loss_was_a_number(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = compiled()
    with open_session(out) as session:
        session.train(1)
        session.save()
        monkeypatch.setattr(
            session._trainer, "step", lambda *_: StepResult(loss=math.nan, grad_norm=1.0)
        )
        session.train(2)
    assert [is_finite(path) for _, path in published_steps(out / "checkpoints")] == [True, False]


def test_masters_that_are_not_the_trained_weights_are_not_saved(
    compiled: Callable[..., Path],
) -> None:
    out = compiled({"training.precision": "bf16"})
    with pytest.raises(Refusal) as refused, open_session(out) as session:
        session.train(1)
        next(f for f in session._trainer.owned_shards() if "fp32" in f.states).states["fp32"][
            0
        ] += 1.0
    assert [d.code for d in refused.value.diagnostics] == ["SW6210"] and not saved(out)


@pytest.mark.parametrize("other", ["plan.json", "corpus.txt"])
def test_hosts_with_other_plans_or_other_data_train_no_step(
    other: str, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, gather = compiled(), host_consistency._gather

    def with_a_second_host(
        mine: Callable[[], host_consistency.Digests],
    ) -> list[tuple[str, host_consistency.Digests]]:
        ((host, digests),) = gather(mine)
        return [
            (host, digests),
            ("b", {n: "0" * 64 if n.endswith(other) else d for n, d in digests.items()}),
        ]

    monkeypatch.setattr(host_consistency, "_gather", with_a_second_host)
    with pytest.raises(Refusal, match="host b has a different") as refused, open_session(out):
        pass
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "SW6011" and other in diagnostic.message
    assert not (out / "run" / "metrics.jsonl").exists()


def test_a_folder_that_another_run_holds_is_left_alone(compiled: Callable[..., Path]) -> None:
    out = compiled()
    other = new_run_lease(read_plan(out), out, RANKS)
    take(other, out)
    with pytest.raises(Refusal) as refused, open_session(out):
        pass
    assert [d.code for d in refused.value.diagnostics] == ["SW6006"]
    assert (
        not (out / "run" / "attempt.json").exists() and not (out / "run" / "metrics.jsonl").exists()
    )
    other.release()
