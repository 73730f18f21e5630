"""Hold a folder for one run: the owner touches a small file there every few seconds.

File locks do not hold across hosts on every file system, so the lease needs none. One process alone
creates the file, and its age is told by the file system's own clock. A lease that looks too old is
watched before it is taken over. On the owner's own machine its process is inspected instead. No two
hosts' clocks are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LEASE_HEARTBEAT_SECONDS = 5.0
LEASE_EXPIRY_SECONDS = 60.0
"""An owner that was silent for so long is gone: a shared file system can hang for tens of
seconds."""
EXPIRY_CONFIRMATION_SECONDS = 15.0
"""Limits how long an owner that looks gone is watched: the file system's clock may have jumped."""
_LOOK_SECONDS = 0.5
_MAX_BYTES = 65536

MessageCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner:
    """A process. token: of this lease alone. role: `run` prepares, ranks train. folder: the
    compiled one.

    boot, namespace: of the kernel and of the numbers of processes: within both, a process can be
    looked at. started: in ticks since that boot. parent: what started it.
    """

    token: str
    role: str
    folder: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    parent: int

    def lives(self) -> bool | None:
        """Return whether the process runs; None where it cannot be seen from here."""
        if (self.boot, self.namespace) != _this_machine() or not self.boot:
            return None
        return _start_ticks(self.pid) == self.started

    @property
    def place(self) -> str:
        return f"host {self.host}, process {self.pid}"


def current_process_owner(role: str, folder: Path) -> LeaseOwner:
    boot, namespace = _this_machine()
    return LeaseOwner(
        token=secrets.token_hex(8),
        role=role,
        folder=str(folder.resolve()),
        host=socket.gethostname(),
        boot=boot,
        namespace=namespace,
        pid=os.getpid(),
        started=_start_ticks(os.getpid()) or 0,
        parent=os.getppid(),
    )


def _this_machine() -> tuple[str, str]:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return "", ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks; None where it has ended, also where its exit code
    was not fetched."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeaseState:
    """owner: None where the file is empty or no lease. beat: another one each time it is
    touched."""

    owner: LeaseOwner | None
    heartbeat: tuple[str, int]
    age_seconds: float


def _read_lease(path: Path) -> _LeaseState | None:
    """Return the lease; None where there is none. Opening it makes a network file system ask its
    server."""
    try:
        with path.open("rb") as file:
            text, touched = file.read(_MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        owner = LeaseOwner(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        owner = None
    token = "" if owner is None else str(owner.token)
    return _LeaseState(
        owner=owner, heartbeat=(token, touched), age_seconds=(_now_ns(path.parent) - touched) / 1e9
    )


def _now_ns(folder: Path) -> int:
    """Return the time by the file system's clock."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".now-", dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:  # not to be written by this user
        return time.time_ns()


def is_locked_by_run(folder: Path) -> bool:
    """Return whether `run` or its launcher lives in a compiled folder on this host: they hold a
    file lock."""
    try:
        with (folder / "run" / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # never started by `run`
    return False


def lease_owner(path: Path) -> LeaseOwner | None:
    """Whoever wrote the lease, alive or not."""
    state = _read_lease(path)
    return state.owner if state else None


def live_owner(path: Path, say: MessageCallback | None = None) -> LeaseOwner | None:
    """Return the owner of the lease if it lives. An owner that cannot be seen from here is watched
    for LEASE_EXPIRY_SECONDS at most, which `say` is told."""
    state = _read_lease(path)
    for _ in range(4):  # it is created empty, and written at once
        if state is None or state.owner is not None:
            break
        time.sleep(_LOOK_SECONDS)
        state = _read_lease(path)
    if state is None or state.owner is None:
        return None
    lives = state.owner.lives()
    return (
        _wait_for_heartbeat(path, state, say) if lives is None else state.owner if lives else None
    )


def _wait_for_heartbeat(
    path: Path, state: _LeaseState, say: MessageCallback | None
) -> LeaseOwner | None:
    assert state.owner is not None
    age = max(0.0, state.age_seconds)
    seconds = (
        EXPIRY_CONFIRMATION_SECONDS if age >= LEASE_EXPIRY_SECONDS else LEASE_EXPIRY_SECONDS - age
    )
    if say is not None:
        say(f"waiting up to {seconds:.0f} s for a heartbeat of the run on {state.owner.place}")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        now = _read_lease(path)
        if now is None:
            return None
        if now.heartbeat != state.heartbeat:
            return now.owner
    return None


class LeaseHeldError(Exception):
    """Somebody else holds the lease at `path`."""

    def __init__(self, path: Path, owner: LeaseOwner) -> None:
        super().__init__(f"{path} is held by {owner.place}")
        self.path, self.owner = path, owner


class Lease:
    """Holds leases of several places at once. taken: whether take() was called. lost: who has taken
    a place over since."""

    def __init__(self, paths: Sequence[Path], owner: LeaseOwner) -> None:
        self.paths, self.owner = tuple(paths), owner
        self.taken = False
        self.lost: LeaseOwner | None = None
        self._stop_event = threading.Event()

    def take(
        self, handed_over_token: str | None = None, say: MessageCallback | None = None
    ) -> list[LeaseOwner]:
        """handed: token of an owner that gives it to this one. Returns the dead owners whose leases
        these were.

        Raises Held, or OSError.
        """
        dead_owners: list[LeaseOwner] = []
        try:
            for path in self.paths:
                before = _take(path, self.owner, handed_over_token, say)
                dead_owners += (
                    [before] if before is not None and before.token != handed_over_token else []
                )
        except BaseException:
            self.release()
            raise
        self.taken = True
        threading.Thread(target=self._heartbeat_loop, name="lease", daemon=True).start()
        return dead_owners

    def _heartbeat_loop(self) -> None:
        while not self._stop_event.wait(LEASE_HEARTBEAT_SECONDS):
            for path in self.paths:
                with contextlib.suppress(OSError):  # the file system may come back
                    state = _read_lease(path)
                    if state is None:
                        with contextlib.suppress(FileExistsError):
                            _create(path, self.owner)
                    elif state.owner is not None and state.owner.token != self.owner.token:
                        self.lost = state.owner
                    else:
                        os.utime(path)  # without a time: the server's

    def release(self) -> None:
        self._stop_event.set()
        for path in self.paths:
            with contextlib.suppress(OSError):
                state = _read_lease(path)
                if (
                    state is not None
                    and state.owner is not None
                    and state.owner.token == self.owner.token
                ):
                    path.unlink()


def _take(
    path: Path, owner: LeaseOwner, handed_over_token: str | None, say: MessageCallback | None
) -> LeaseOwner | None:
    """Whose it was, where it was somebody's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            _create(path, owner)
            return None
        except FileExistsError:
            pass
        state = _read_lease(path)
        if state is None:
            continue
        is_handed_over = handed_over_token is not None and state.heartbeat[0] == handed_over_token
        if not is_handed_over and (alive := live_owner(path, say)) is not None:
            raise LeaseHeldError(path, alive)
        with _folder_lock(path.parent):
            current = _read_lease(path)
            if current is None or (current.heartbeat != state.heartbeat and not is_handed_over):
                continue  # somebody else was faster
            temporary = path.with_name(f".{path.name.lstrip('.')}-{owner.token}")
            _create(temporary, owner)
            os.replace(temporary, path)
            return current.owner


def _create(path: Path, owner: LeaseOwner) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(json.dumps(asdict(owner)).encode("utf-8"))


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder between this machine's processes. Where two hosts take a lease over at once,
    the loser sees it at its next heartbeat."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
