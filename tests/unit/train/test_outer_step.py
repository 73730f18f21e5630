"""Outer steps that overlap the steps that follow, in one process: an island of one rank beside one
that sends numbers.

Weights are five equal numbers, all of them multiples of a power of two: what comes out is exact.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import distributed

from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.diloco import outer_step
from shardwright.diloco import outer_step as outer_module
from shardwright.diloco.outer_step import DiLoCoOuterStep, OuterStepResult
from shardwright.diloco.outer_store_channel import distribute_secret
from shardwright.diloco.outer_store_client import Link
from shardwright.diloco.outer_store_server import OuterStore
from shardwright.diloco.round_membership import IslandRank, IslandStart, Membership
from shardwright.engines.trainer_protocol import OptimizerCounters, OwnedShard
from shardwright.plan.island_plans import plan_digest
from shardwright.plan.plan import Plan, PlanDiLoCo, read_plan

STEPS, EVERY, OVERLAP, MIXING, COUNT = 10, 4, 3, 0.25, 5
LANDS = {4: 7, 8: 10}  # the outer step of 8 arrives with the last one
PATIENCE = 20.0


def gain(island: int, step: int) -> float:
    """Of each weight in a step."""
    return (1 + island) * step / 4


class Wanted:
    """The same, written out. first: island 0's weight after each step. sent, anchors: by outer
    step, what island 1 sends, and what both had before it."""

    def __init__(self) -> None:
        weights, anchor, on_its_way = [0.0, 0.0], 0.0, 0.0
        self.first, self.sent, self.anchors = {0: 0.0}, dict[int, float](), dict[int, float]()
        for step in range(1, STEPS + 1):
            weights = [w + gain(k, step) for k, w in enumerate(weights)]
            if step in LANDS.values():
                anchor -= on_its_way
                weights = [MIXING * anchor + (1 - MIXING) * w for w in weights]
            if step % EVERY == 0 or step == STEPS:
                self.anchors[step], self.sent[step] = anchor, anchor - weights[1]
                on_its_way = sum(anchor - w for w in weights) / 2
            if step == STEPS:
                anchor -= on_its_way
                weights = [anchor, anchor]
            self.first[step] = weights[0]


WANTED = Wanted()


class Toy:
    """A trainer. more: states that a checkpoint of it has beside the master."""

    def __init__(self, value: float = 0.0, more: dict[str, torch.Tensor] | None = None) -> None:
        self.master, self.more = torch.full((COUNT,), value), more or {}

    def owned_shards(self) -> Iterator[OwnedShard]:
        yield OwnedShard(
            name="w",
            shard_shape=(COUNT,),
            start=0,
            states={"fp32": self.master},
            live=self.master,
            partitioned=True,
        )

    def counters(self) -> OptimizerCounters:
        return OptimizerCounters(updates=0, loss_scale=None)

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        pass


def read_toy(plan: Plan, trainer: Any, checkpoint: Path, names: tuple[str, ...]) -> set[str]:
    [fragment] = trainer.owned_shards()
    for name in names:
        fragment.states[name].copy_(trainer.more[name])
    return set(names)


class Neighbour:
    """Island 1. It brings its deltas of an outer step once its gate is open."""

    def __init__(self, address: str, secret: bytes, plan: Plan) -> None:
        place = IslandRank(
            island=1,
            rank=0,
            world=1,
            attempt=1,
            run="a",
            connection=0,
            plan=plan_digest(plan),
            data="data",
        )
        self.link = Link(address, secret, place, PATIENCE)
        self.gates = {step: threading.Event() for step in WANTED.sent}
        self.done: Future[None] = ThreadPoolExecutor(1).submit(self._run)

    def _run(self) -> None:
        self.link.arrive(base=0, step=0, is_due=False, size=0, check=0)
        base = 0
        for step, delta in WANTED.sent.items():
            assert self.gates[step].wait(PATIENCE)
            sent, means = np.full(COUNT, delta, np.float32), np.empty(COUNT, np.float32)
            bits = np.full(COUNT, WANTED.anchors[step], np.float32).view(np.int32)
            answer = self.link.arrive(
                base=base, step=step, is_due=True, size=sent.nbytes, check=int(bits.sum())
            )
            assert (
                self.link.exchange(answer.attempt, sent.data.cast("B"), means.data.cast("B")) == []
            )
            base = step
        self.link.leave(done=True)


@dataclasses.dataclass
class Place0:
    """Where island 0 trains. members: the store's. began: island 0's first start. attempt: its
    newest one."""

    plan: Plan
    folder: Path
    neighbour: Neighbour
    members: Membership
    began: IslandStart | None = None
    attempt: int = 0

    def island(self, toy: Toy, monkeypatch: pytest.MonkeyPatch | None = None) -> DiLoCoOuterStep:
        """monkeypatch: of one that goes on from what the toy has more."""
        if monkeypatch is not None:
            held = SimpleNamespace(tensors={"w": SimpleNamespace(states=tuple(toy.more))})
            monkeypatch.setattr(outer_step, "read_manifest", lambda path: held)
        self.attempt += 1
        return DiLoCoOuterStep(self.plan, self.folder, cast(Any, toy), 0, self.attempt, "data")

    def open_once_it_is_back(self) -> None:
        """The neighbour waits for island 0, which it would else go on without."""
        end = time.monotonic() + PATIENCE
        while not self.is_back:
            assert time.monotonic() < end
            time.sleep(0.01)
        for gate in self.neighbour.gates.values():
            gate.set()

    @property
    def is_back(self) -> bool:
        found = self.members.islands.get(0)
        return (
            found is not None
            and found.start != self.began
            and (found.current or bool(found.arrivals))
        )

    @property
    def committed(self) -> list[int]:
        return [each["step"] for each in self.members.rounds]


@pytest.fixture
def place(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Place0]]:
    recipe = write_recipe(
        {"cluster.gpus_per_node": 1, "parallelism": {"zero_stage": 0}, "training.steps": STEPS}
    )
    assert cli.main(["compile", str(recipe), "-o", str(tmp_path / "out")]) == 0
    monkeypatch.setattr(outer_step, "read_states", read_toy)
    monkeypatch.setattr(outer_module, "read_plan", lambda path: written[-1])
    written: list[Plan] = []
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    listener, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def made(overlap: int = OVERLAP) -> Place0:
        outer = PlanDiLoCo(
            every_steps=EVERY,
            optimizer="average",
            lr=None,
            momentum=None,
            precision="fp32",
            overlap_steps=overlap,
            mixing=MIXING if overlap else None,
            deadline_seconds=PATIENCE,
            islands=2,
            island=0,
        )
        plan, address = read_plan(tmp_path / "out"), f"127.0.0.1:{listener.getsockname()[1]}"
        plan = dataclasses.replace(
            plan, outer=outer, launch=dataclasses.replace(plan.launch, outer_store=address)
        )
        written.append(plan)
        secret = distribute_secret(tmp_path / "out", [])
        members = Membership(2, 1, PATIENCE, "fp32")
        store = OuterStore(members, secret, plan_digest(plan), lambda line: None, lambda line: None)
        threading.Thread(target=store.serve, args=(listener,), daemon=True).start()
        threading.Thread(target=store.watch, args=(ended,), daemon=True).start()
        return Place0(plan, tmp_path / "out", Neighbour(address, secret, plan), members)

    yield made
    ended.set()
    listener.close()
    distributed.destroy_process_group()


def train(
    outer: DiLoCoOuterStep, toy: Toy, done: int, until: int = STEPS, seconds: float = 0.0
) -> list[OuterStepResult]:
    results: list[OuterStepResult] = []
    for step in range(done + 1, until + 1):
        time.sleep(seconds)
        toy.master += gain(0, step)
        results.extend(outer.after(step))
        assert (toy.master == WANTED.first[step]).all(), (step, toy.master, WANTED.first)
    return results


def test_the_result_is_mixed_in_later(place: Callable[..., Place0]) -> None:
    here, toy = place(), Toy()
    outer = here.island(toy)
    for gate in here.neighbour.gates.values():
        gate.set()
    assert outer.begin(0, None) == []
    results = train(outer, toy, 0)
    assert [(r.step, r.done, r.members) for r in results] == [
        (4, 7, (0, 1)),
        (8, 10, (0, 1)),
        (10, 10, (0, 1)),
    ]
    outer.leave(done=True)
    here.neighbour.done.result(PATIENCE)


@pytest.mark.parametrize("has_left", [True, False])
def test_a_clock_that_runs_backwards_locks_no_island_out(
    has_left: bool, place: Callable[..., Place0], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour for each look at it, so that the second start is before the first one. Where the
    first one has not left, the store takes the later of the two."""
    hours = itertools.count()
    monkeypatch.setattr(time, "time_ns", lambda: (10**6 - next(hours)) * 3600 * 10**9)
    monkeypatch.setattr(time, "time", lambda: (10**6 - next(hours)) * 3600.0)
    here, toy = place(), Toy()
    first = here.island(toy)
    first.begin(0, None)
    if has_left:
        first.leave(done=False)
        end = time.monotonic() + PATIENCE
        while 0 in here.members.islands:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert here.island(toy).begin(0, None) == []


@pytest.mark.parametrize(
    ("at", "has_arrived"),
    [(2, False), (7, False), *((at, has) for at in (4, 5, 6, 8, 9) for has in (False, True))],
)
def test_a_checkpoint_loses_nothing(
    place: Callable[..., Place0], at: int, has_arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that stops with an outer step on its way, or here and not mixed in, or with
    neither."""
    here, toy, newest = place(), Toy(), at // EVERY * EVERY
    gates, on_its_way = here.neighbour.gates, newest > 0 and at < LANDS[newest]
    if at >= LANDS[4] or has_arrived:
        gates[4].set()
    outer = here.island(toy)
    outer.begin(0, None)
    train(outer, toy, 0, at)
    told = None
    if has_arrived:
        gates[newest].set()
        end = time.monotonic() + PATIENCE
        while told is None:
            told = outer.before_save(at)
            assert time.monotonic() < end, "it does not arrive"
        assert (told.step, told.done) == (newest, at)
    else:
        assert outer.before_save(at) is None
    [fragment] = outer.trainer_with_states(at).owned_shards()
    states = {name: values.clone() for name, values in fragment.states.items()}
    here.began = here.members.islands[0].start
    outer.leave(done=False)
    again = Toy(float(states.pop("fp32")[0]), states)
    resumed = here.island(again, monkeypatch)
    threading.Thread(target=here.open_once_it_is_back, daemon=True).start()
    made = resumed.begin(at, Path("somewhere"))
    assert [r.step for r in made] == ([] if told or not on_its_way else [newest])
    results = train(resumed, again, at)
    resumed.leave(done=True)
    here.neighbour.done.result(PATIENCE)
    assert here.committed == [4, 8, 10]
    assert all(r["members"] == [0, 1] for r in here.members.rounds)
    assert results[-1].step == STEPS


@pytest.mark.parametrize(
    ("at", "states"),
    [(4, ("outer_arrived",)), (5, ("outer_anchor",)), (7, ("outer_anchor", "outer_sent"))],
)
def test_what_is_on_its_way_is_not_taken_for_something_else(
    place: Callable[..., Place0], at: int, states: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = place()
    assert here.plan.outer is not None
    other = dataclasses.replace(here.plan.outer, overlap_steps=0, mixing=None)
    toy = Toy(0.0, {name: torch.zeros(COUNT) for name in states})
    here.plan = dataclasses.replace(here.plan, outer=other)
    with pytest.raises(Refusal, match=r"SW6218.*every_steps 4, overlap_steps 3"):
        here.island(toy, monkeypatch).begin(at, Path("somewhere"))


@pytest.mark.prove
def test_training_waits_for_what_the_steps_do_not_cover(place: Callable[..., Place0]) -> None:
    here, toy = place(), Toy()
    outer = here.island(toy)
    outer.begin(0, None)
    gates = here.neighbour.gates
    train(outer, toy, 0, EVERY)

    def open_gates() -> None:
        for gate in gates.values():
            gate.set()

    threading.Timer(1.0, open_gates).start()  # 1 s of 3 x 0.7 s of training
    [first] = train(outer, toy, EVERY, LANDS[4], seconds=0.7)
    assert first.seconds < 0.5
    train(outer, toy, LANDS[4])
    outer.leave(done=True)
    here.neighbour.done.result(PATIENCE)
