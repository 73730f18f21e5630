"""Islands of two ranks, each in a thread, and a store to meet at."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.diloco.outer_store_channel import CHUNK_BYTES, FrameKind
from shardwright.diloco.outer_store_client import Link
from shardwright.diloco.outer_store_server import OuterStore
from shardwright.diloco.round_membership import IslandRank

SECRET, WORLD = b"k" * 32, 2
SIZE = 3 * CHUNK_BYTES + 400  # bytes of a rank's deltas


@dataclass
class Running:
    address: str
    store: OuterStore
    told: list[str] = field(default_factory=list)

    @property
    def members(self) -> list[list[int]]:
        return [each["members"] for each in self.store.membership.rounds]


class Island:
    """Both ranks of it, each in a thread when something is asked of them."""

    def __init__(
        self,
        running: Running,
        number: int,
        *,
        attempt: int = 1,
        deadline: float = 5.0,
        **changes: Any,
    ) -> None:
        fields = {
            "world": WORLD,
            "attempt": attempt,
            "run": f"run {attempt}",
            "connection": 0,
            "plan": "plan",
            "data": "data",
            **changes,
        }
        places = [IslandRank(island=number, rank=rank, **fields) for rank in range(WORLD)]
        self.number = number
        self.links = [Link(running.address, SECRET, place, deadline) for place in places]
        self.pool = ThreadPoolExecutor(WORLD)

    def arrive(
        self, base: int, step: int, *, is_due: bool = False, size: int = 0
    ) -> Future[list[Any]]:
        return self._ask(
            lambda link: link.arrive(base=base, step=step, is_due=is_due, size=size, check=base)
        )

    def outer(self, base: int, step: int, value: float, size: int = SIZE) -> Future[list[Any]]:
        """A whole outer step: each rank's mean of the values, or what it has to take."""

        def run(link: Link) -> Any:
            deltas, means = np.full(size // 4, value, np.float32), np.empty(size // 4, np.float32)
            while True:
                answer = link.arrive(base=base, step=step, is_due=True, size=size, check=base)
                if answer.kind == FrameKind.RECEIVE:
                    return self._take(link)
                receivers = link.exchange(
                    answer.attempt, deltas.data.cast("B"), means.data.cast("B")
                )
                if receivers is not None:
                    assert (means == means[0]).all()
                    if receivers:
                        link.send_state(iter([means.data.cast("B")]), 17)
                    return float(means[0])

        return self._ask(run)

    def join(self, base: int, step: int) -> Future[list[Any]]:
        """Of an island that is behind: the state that each rank takes."""

        def run(link: Link) -> Any:
            answer = link.arrive(base=base, step=step, is_due=False, size=0, check=base)
            return self._take(link) if answer.kind == FrameKind.RECEIVE else answer.kind

        return self._ask(run)

    @staticmethod
    def _take(link: Link) -> tuple[float, int]:
        state = np.empty(SIZE // 4, np.float32)
        updates = link.receive_state(iter([state.data.cast("B")]))
        assert (state == state[0]).all()
        return float(state[0]), updates

    def _ask(self, work: Callable[[Link], Any]) -> Future[list[Any]]:
        asked = [self.pool.submit(work, link) for link in self.links]
        return ThreadPoolExecutor(1).submit(lambda: [each.result(20) for each in asked])

    def kill(self) -> None:
        for link in self.links:
            link.close()


def begun(running: Running, *islands: Island, base: int = 0) -> None:
    for asked in [island.arrive(base, base) for island in islands]:
        assert [answer.kind for answer in asked.result(20)] == [FrameKind.GO] * WORLD
