"""Keep each rank connected to rank 0 beside training, and end it when the run is over without it.

Nothing outside has to find and kill a rank: it ends when its launcher, the reader of its output or
rank 0 goes away.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from shardwright.diagnostics import Refusal, refusal
from shardwright.monitor import monitor_protocol
from shardwright.monitor.monitor_protocol import (
    TOKEN_IN_ENVIRONMENT,
    TOKEN_VARIABLE,
    find_token,
    make_token,
)
from shardwright.monitor.monitor_server import GRACE_SECONDS, MonitorServer, open_server
from shardwright.monitor.rank_events import (
    MAX_CAUSE_CHARACTERS,
    RankFailed,
    RankLost,
    RankStack,
    emit,
    thread_location,
)
from shardwright.monitor.run_files import read_status, write_status
from shardwright.plan.plan import Plan

RENDEZVOUS_SECONDS = 600.0
CONNECT_ATTEMPTS = 4
_ADDRESS = "shardwright/hub"
_PR_SET_PDEATHSIG = 1


class RankMonitor:
    """Holds one rank's connection to rank 0. output: descriptor of the launcher's output."""

    def __init__(self, plan: Plan, folder: Path, rank: int, attempt: int, output: int) -> None:
        self.plan, self.folder, self.rank, self.attempt, self.output = (
            plan,
            folder,
            rank,
            attempt,
            output,
        )
        self.phase, self.step = "starting", 0
        self._main = threading.get_ident()
        self._connection: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._is_finished = False
        self._server: MonitorServer | None = None
        self._server_host = ""
        # The launcher on this host may be killed where it cannot end its ranks.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.enable()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def join(self) -> None:
        """Finds rank 0 through torch's rendezvous store. Raises Refusal where it cannot be
        reached."""
        from torch.distributed import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.phase = f"waiting for rank 0 at {address}:{port}"
        try:
            # init_process_group opens the same store again: one server, as both say multi_tenant.
            self._store = TCPStore(
                address,
                port,
                int(os.environ["WORLD_SIZE"]),
                is_master=self.rank == 0,
                timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
            )
            token = self._start_server(address) if self.rank == 0 else None
            hub_port, where, self._server_host = self._store.get(_ADDRESS).decode().split()
            token = token or find_token(self.folder, where)
            if token is None:
                place = (
                    f"its environment ({TOKEN_VARIABLE})"
                    if where == TOKEN_IN_ENVIRONMENT
                    else "run/ of the folder as this host sees it"
                )
                raise self._authentication_refusal(f"has no token of this run in {place}")
            line = self._call(address, int(hub_port), token)
        except PermissionError as error:
            raise self._authentication_refusal(str(error)) from None
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # torch's network errors are RuntimeErrors
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self.rank == 0:
                message = f"rank 0 cannot listen on {address}:{port}: {first}"
                help = (
                    "Set launch.master_port to a free port of that host, and launch.master_addr to "
                    "an address of it."
                )
            else:
                message = (
                    f"rank {self.rank} on {socket.gethostname()} cannot reach rank 0 at "
                    f"{address}:{port}: {first}"
                )
                help = (
                    "`shardwright doctor` checks every host. Set launch.master_addr to an address "
                    "that every host reaches."
                )
            raise refusal("SW6302", message, help) from None
        self._connection = line

    def _start_server(self, address: str) -> str:
        """Rank 0: its ear, and where it can be found; returns the token."""
        token, where = make_token(self.folder)
        server = open_server(address)
        self._server = MonitorServer(
            self.plan, self.folder, self.attempt, self.output, server, token
        )
        self._server.start()
        self._store.set(_ADDRESS, f"{server.getsockname()[1]} {where} {socket.gethostname()}")
        return token

    def _call(self, address: str, port: int, token: str) -> socket.socket:
        """Rank 0 drops whom it does not know yet where strangers crowd it: then once more."""
        for tries_left in range(CONNECT_ATTEMPTS - 1, -1, -1):
            try:
                return monitor_protocol.connect_to_server(
                    address, port, token, self.rank, socket.gethostname(), os.getpid()
                )
            except OSError:
                if not tries_left:
                    raise
                time.sleep(1)
        raise AssertionError

    def begin(self, attempt: int) -> None:
        """Set the number of this start, which the ranks themselves count."""
        self.attempt = attempt
        if self._server is not None:
            self._server.attempt = attempt

    def _authentication_refusal(self, why: str) -> Refusal:
        return refusal(
            "SW6306",
            f"rank {self.rank} on {socket.gethostname()} {why}",
            (
                "Nodes that are started one by one without a shared folder need the same "
                f"{TOKEN_VARIABLE} in their environment. Use a new random text for each run, such "
                "as `openssl rand -hex 32` prints."
            ),
        )

    def at(self, phase: str, step: int) -> None:
        """step: the last one that is finished. Into the rank's own log but for the steps
        themselves."""
        if self.rank and step == self.step:
            print(f"{time.strftime('%H:%M:%S')} rank {self.rank}: {phase}", flush=True)
        self.phase = phase
        if step != self.step:
            self.step = step
            self._send(monitor_protocol.StepDone(step=step))

    def failed(self, event: RankFailed) -> None:
        """This rank's own error, to the launcher's output and to rank 0."""
        self._is_finished = True
        emit(self.output, event)
        self._send(monitor_protocol.Failed(cause=event.cause[:MAX_CAUSE_CHARACTERS]))

    def leave(self) -> None:
        """Training is over for all; the line may break now."""
        self._is_finished = True
        self._send(monitor_protocol.Bye())

    def _send(self, message: monitor_protocol.Message) -> None:
        if self._connection is not None:
            with self._send_lock, contextlib.suppress(OSError):
                self._connection.sendall(monitor_protocol.encode(message))

    def _watch(self) -> None:
        reader = select.poll()
        reader.register(self.output, 0)
        lines: monitor_protocol.LineReader | None = None
        while True:
            if any(flags & (select.POLLERR | select.POLLHUP) for _, flags in reader.poll(0)):
                self._on_output_closed()
            if self._connection is None:
                time.sleep(0.5)
                continue
            lines = lines or monitor_protocol.LineReader(self._connection)
            if not select.select([self._connection], [], [], 0.5)[0]:
                continue
            said = lines.read()
            if said is None:
                self._on_server_lost()
                return
            for line in said:
                match monitor_protocol.decode(line):
                    case monitor_protocol.End(cause=cause):
                        self._end(cause)
                    case monitor_protocol.Dump():
                        self._dump()

    def _on_output_closed(self) -> None:
        cause = (
            "the launcher's output has no reader: `run` was killed, or the connection to it broke"
        )
        if (
            self.rank == 0 and read_status(self.folder).status == "running"
        ):  # else `run` has said why
            with contextlib.suppress(OSError):  # a full disk, say
                write_status(self.folder, "failed", self.attempt, rank=None, cause=cause)
        self._end(cause)

    def _on_server_lost(self) -> None:
        """Rank 0 is dead, or about to be: its launcher may just have ended it because of another
        rank."""
        if self._is_finished:
            return
        host, stage = self._server_host, self.plan.ranks[0].pipeline
        emit(self.output, RankLost(rank=0, host=host, stage=stage))
        if self.rank == 1:  # where no `run` watches, somebody has to write it down
            cause = "lost without an error message"
            with contextlib.suppress(OSError):
                write_status(
                    self.folder, "failed", self.attempt, rank=0, host=host, stage=stage, cause=cause
                )
        time.sleep(GRACE_SECONDS)
        self._end("rank 0 is lost")

    def _dump(self) -> None:
        path = self.folder / "run" / "ranks" / f"rank-{self.rank:05d}.stack"
        with contextlib.suppress(OSError):  # a full disk, say
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        where, collective = thread_location(self._main)
        from torch.distributed import distributed_c10d

        counts: dict[str, int] = {}
        for group, name in list(distributed_c10d._world.pg_names.items()):
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                counts[str(name)] = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        stack = RankStack(
            step=self.step,
            phase=self.phase,
            where=where,
            current_collective=collective,
            counts=counts,
        )
        self._send(monitor_protocol.StackReport(stack=stack))

    def _end(self, cause: str) -> None:
        """Exit at once, without the interpreter's cleanup: the main thread may be in a collective
        for ever."""
        with contextlib.suppress(OSError):
            print(f"rank {self.rank} ends: {cause}", file=sys.stderr, flush=True)
        os._exit(1)
