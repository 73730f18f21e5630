"""One owner of a folder at a time: on this machine by its process, from elsewhere by what it
touches."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.utils import run_lease as module
from shardwright.utils.run_lease import (
    Lease,
    LeaseHeldError,
    LeaseOwner,
    current_process_owner,
    lease_owner,
    live_owner,
)

DAY_SECONDS = 86400.0
HOLD = """
import sys, time
from pathlib import Path
from shardwright.utils.run_lease import Lease, current_process_owner
lease = Lease([Path(sys.argv[1])], current_process_owner("ranks", Path(sys.argv[1]).parent))
lease.take()
print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a lease, in a time that passes a hundred times as fast."""
    for name, seconds in {
        "LEASE_HEARTBEAT": 0.03,
        "LEASE_EXPIRY": 0.6,
        "EXPIRY_CONFIRMATION": 0.2,
        "_LOOK": 0.02,
    }.items():
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)
    return tmp_path / "lease"


def elsewhere(path: Path) -> LeaseOwner:
    """A process that cannot be seen from here."""
    return dataclasses.replace(
        current_process_owner("ranks", path.parent), boot="another", host="b", pid=7
    )


def left_by(owner: LeaseOwner, path: Path, age_seconds: float) -> None:
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    os.utime(path, (time.time() - age_seconds,) * 2)


@pytest.fixture
def beating(path: Path) -> Iterator[Lease]:
    lease = Lease([path], elsewhere(path))
    lease.take()
    yield lease
    lease.release()


def test_one_at_a_time(path: Path) -> None:
    first, second = (
        Lease([path, path.with_name("other")], current_process_owner("ranks", path.parent))
        for _ in range(2)
    )
    assert first.take() == []
    with pytest.raises(LeaseHeldError) as held:
        second.take()
    assert held.value.owner == first.owner == live_owner(path)
    first.release()
    assert live_owner(path) is None and not path.exists()
    assert second.take() == []
    second.release()


def test_what_cannot_be_taken_whole_is_not_taken(path: Path) -> None:
    other = path.with_name("other")
    mine = Lease([other], current_process_owner("ranks", path.parent))
    mine.take()
    with pytest.raises(LeaseHeldError):
        Lease([path, other], current_process_owner("ranks", path.parent)).take()
    assert not path.exists() and lease_owner(other) == mine.owner
    mine.release()


def test_a_killed_owner_is_known_at_once(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "taken\n"
    owner = live_owner(path)
    assert owner is not None and owner.pid == process.pid
    process.kill()
    while owner.lives():  # a zombie is dead, too: nobody has waited for it
        time.sleep(0.01)
    mine = Lease([path], current_process_owner("ranks", path.parent))
    assert mine.take() == [owner]
    mine.release()
    process.wait()


def test_the_number_of_a_process_that_was_given_again(path: Path) -> None:
    owner = current_process_owner("ranks", path.parent)
    left_by(dataclasses.replace(owner, started=owner.started - 1), path, 0)
    assert live_owner(path) is None


@pytest.mark.parametrize("jump_seconds", [0.0, DAY_SECONDS, -DAY_SECONDS])
def test_an_owner_on_another_host_lives_while_it_beats(
    jump_seconds: float, path: Path, beating: Lease
) -> None:
    """However far the clock that its beats are told by has jumped."""
    os.utime(path, (time.time() - jump_seconds,) * 2)
    assert live_owner(path) == beating.owner
    with pytest.raises(LeaseHeldError):
        Lease([path], current_process_owner("ranks", path.parent)).take()
    assert beating.lost is None


@pytest.mark.parametrize("age_seconds", [0.0, 0.3, 5.0, DAY_SECONDS, -DAY_SECONDS])
def test_one_that_is_silent_is_gone(age_seconds: float, path: Path) -> None:
    """Also where its last beat lies a day ahead."""
    left_by(elsewhere(path), path, age_seconds)
    said: list[str] = []
    mine, began = Lease([path], current_process_owner("ranks", path.parent)), time.monotonic()
    (dead,) = mine.take(say=said.append)
    assert time.monotonic() - began < 10 and (dead.host, dead.pid) == ("b", 7)
    assert said[0].endswith("for a heartbeat of the run on host b, process 7")
    mine.release()


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000, '{"token": 1}'])
def test_what_is_no_lease_holds_nothing(text: str, path: Path) -> None:
    path.write_text(text)
    assert live_owner(path) is None
    mine = Lease([path], current_process_owner("ranks", path.parent))
    assert mine.take() == []
    mine.release()


def test_it_is_handed_over(path: Path) -> None:
    run = Lease([path], current_process_owner("run", path.parent))
    run.take()
    ranks = Lease([path], current_process_owner("ranks", path.parent))
    assert ranks.take(handed_over_token=run.owner.token) == []
    time.sleep(0.1)
    run.release()  # it is not its own any more
    assert live_owner(path) == ranks.owner and ranks.lost is None
    ranks.release()


def test_who_was_away_too_long_hears_of_it(path: Path, beating: Lease) -> None:
    """A machine that was suspended comes back to a folder that another run has taken over."""
    thief = elsewhere(path)
    left_by(thief, path, 0)
    for _ in range(100):
        if beating.lost:
            break
        time.sleep(0.02)
    assert beating.lost == thief
    beating.release()
    assert lease_owner(path) == thief


def test_a_lease_that_somebody_deletes_comes_back(path: Path, beating: Lease) -> None:
    path.unlink()
    for _ in range(100):
        if path.exists():
            break
        time.sleep(0.02)
    assert live_owner(path) == beating.owner and beating.lost is None


def test_many_at_once(path: Path) -> None:
    """Of twenty that find a dead owner's lease one has it."""
    left_by(
        dataclasses.replace(current_process_owner("ranks", path.parent), pid=2**22 + 1), path, 0
    )
    leases = [Lease([path], current_process_owner("ranks", path.parent)) for _ in range(20)]
    held: list[LeaseHeldError] = []

    def take(lease: Lease) -> None:
        try:
            lease.take()
        except LeaseHeldError as error:
            held.append(error)

    threads = [threading.Thread(target=take, args=[lease]) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (owner,) = [lease for lease in leases if lease.taken]
    assert len(held) == 19 and all(error.owner == owner.owner for error in held)
    owner.release()
