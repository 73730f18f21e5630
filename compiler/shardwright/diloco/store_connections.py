"""An island's connections to the outer store, one on each rank, made and lost together."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed as dist

from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.diloco.outer_store_channel import ChannelError
from shardwright.diloco.outer_store_client import IslandRank, Link, RefusedByStore
from shardwright.diloco.outer_store_secret import read_secret
from shardwright.plan.island_plans import plan_digest
from shardwright.plan.plan import Plan

T = TypeVar("T")
RETRY_SECONDS = 0.5


class OuterStoreUnreachable(Exception):
    """The store was not reached for the deadline, at the outer step after `step`."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


class OuterStoreConnections:
    """This rank's, and what the ranks have to know of each other's. A rank's part of a round raises
    Broken where its connection is lost: then the island connects anew on every rank."""

    def __init__(self, plan: Plan, folder: Path, rank: int, attempt: int, data_digest: str) -> None:
        """Collective. attempt: of the folder. Raises Refusal: SW6313 where this host has no
        secret."""
        assert plan.outer is not None and plan.outer.island is not None, "asked for before"
        assert plan.launch.outer_store is not None, "a plan with islands has one"
        self._address, self._deadline = plan.launch.outer_store, plan.outer.deadline_seconds
        self._secret = read_secret(folder)
        run: list[Any] = [secrets.token_hex(8)]
        dist.broadcast_object_list(run, src=0)
        self._island_rank = IslandRank(
            island=plan.outer.island,
            rank=rank,
            world=plan.strategy.world_size,
            attempt=attempt,
            run=run[0],
            connection=0,
            plan=plan_digest(plan),
            data=data_digest,
        )
        self._link: Link | None = None
        self._last_error = ""
        self._last_received = self._until = (
            0.0  # the store's last word, and when this island gives up
        )

    @property
    def link(self) -> Link:
        assert self._link is not None, "reached before"
        return self._link

    def run_on_all_ranks(self, step: int, part: Callable[[Link], T]) -> T:
        """Collective. This rank's part of a round, begun again until that of every rank has gone
        well. Raises Unreached on every rank, and Refusal."""
        if (
            self._link is not None or not self._last_received
        ):  # else since the loss that this is about
            self._last_received = time.monotonic()
        while True:
            self._connect_all_ranks(step)
            result = self._gather_outcome(lambda: part(self.link))
            if result is not None:
                return result
            self._disconnect()

    def start_in_thread(self, part: Callable[[Link], T]) -> Future[T]:
        """The same, once, in a thread of its own; `ended` is to follow."""
        future: Future[T] = Future()
        link = self.link

        def work() -> None:
            try:
                future.set_result(part(link))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def wait_for_thread(self, future: Future[T]) -> T | None:
        """Collective. Waits for what was begun. None on every rank where it has to be begun
        again."""
        result = self._gather_outcome(future.result)
        if result is None:
            self._disconnect()
        return result

    def leave(self, *, done: bool) -> None:
        """done: trained to the last step."""
        if self._link is not None:
            self._link.leave(done=done)

    def _connect_all_ranks(self, step: int) -> None:
        """Collective. A connection on every rank. Raises Unreached, or Refusal, on all: a deadline
        after the store's last word, or half of one where it was lost behind steps that overlap."""
        self._until = max(
            self._last_received + self._deadline, time.monotonic() + self._deadline / 2
        )
        while self._link is None:
            told = self._gather_outcome(self._connect)
            if told is not None:
                return
            self._disconnect()
            over: list[Any] = [time.monotonic() > self._until]
            dist.broadcast_object_list(over, src=0)
            if over[0]:
                raise OuterStoreUnreachable(step, self._last_error)
            time.sleep(RETRY_SECONDS)

    def _connect(self) -> bool:
        within = max(0.1, self._until - time.monotonic())
        self._link = Link(self._address, self._secret, self._island_rank, self._deadline, within)
        return True

    def _disconnect(self) -> None:
        if self._link is not None:
            self._last_received = max(self._last_received, self._link.heard)
            self._link.close()
        self._link = None
        self._island_rank = replace(self._island_rank, connection=self._island_rank.connection + 1)

    def _gather_outcome(self, work: Callable[[], T]) -> T | None:
        """Collective. What `work` gave this rank; None on every rank where the connection of one
        broke. Raises Refusal on all where the store does not take one."""
        mine: T | None = None
        error: tuple[str, str] | None = None
        try:
            mine = work()
        except RefusedByStore as refused:
            error = (refused.code, str(refused))
        except ChannelError as broken:
            error = ("", str(broken))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, error)
        failed = [each for each in everyone if each is not None]
        for code, why in failed:
            if code:
                raise Refusal(_store_refusal(code, why))
        self._last_error = failed[0][1] if failed else ""
        return None if failed else mine


_REFUSED = {
    "SW6313": (
        "Every island's folder has the same run/outer.secret: `outer-store` writes it, and "
        "you copy it."
    ),
    "SW6316": (
        "Copy the island's folder from the compiled one that the store was started with; "
        "bring the same data."
    ),
    "SW6320": (
        "Its weights lack the others' last outer steps. Take the newest checkpoint of an "
        "island that is done."
    ),
    "SW6319": "End the other run, or this one: an island is one run.",
}


def _store_refusal(code: str, why: str) -> Diagnostic:
    return found(
        code, None, f"the outer store does not take this island: {why}", _REFUSED.get(code, "")
    )
