"""A probe on every host at once, over ssh, each with a limit. No torch here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

from shardwright.launch.host_probe import ANSWER_PREFIX
from shardwright.launch.probe_messages import (
    HostFacts,
    ProbeRequest,
    RendezvousRequest,
    RendezvousResult,
    message_from_json,
    rendezvous_result_from_json,
)

LIMIT_SECONDS = 18.0
"""From the first ssh to the last answer."""
CONNECT_SECONDS = 5
_SSH_NOISE = re.compile(r"Warning: Permanently added|^\s*$")


@dataclass(slots=True)
class ProbedHost:
    """One host's answers. received: time.time() of its facts, 0 until then. problem: why there are
    none."""

    host: str
    facts: HostFacts = field(default_factory=HostFacts)
    received: float = 0.0
    met: RendezvousResult = field(default_factory=RendezvousResult)
    problem: str = ""


TRANSPORTS = ("local", "ssh", "srun")
"""How a host is reached: local is this machine, srun a node of the Slurm allocation that this
process is in."""


def _srun(host: str) -> list[str]:
    """A step beside others on that node, with what the allocation has there."""
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--overlap",
        "--cpu-bind=none",
        "--quiet",
    ]


class Probe:
    """A running probe."""

    def __init__(self, host: str, *, reach: str) -> None:
        self.result = ProbedHost(host=host)
        # As DeepSpeed forwards them. The other variables go through the pipe: a command line can be
        # read by all.
        values = [
            f"{name}={value}" for name, value in os.environ.items() if name.startswith("PYTHON")
        ]
        remote = ["env", *values, sys.executable, "-P", "-m", "shardwright.launch.host_probe"]
        ssh = ["ssh", *shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", "")), "-oBatchMode=yes"]
        ssh += [f"-oConnectTimeout={CONNECT_SECONDS}", host, "exec " + shlex.join(remote)]
        self._process = subprocess.Popen(
            {"local": remote, "ssh": ssh, "srun": [*_srun(host), *remote]}[reach],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._errors: list[str] = []
        self._answered = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def ask(self, message: ProbeRequest | RendezvousRequest) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(message)) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it ended; what it said last tells why

    def wait(self, kind: str, deadline: float) -> None:
        """Until it has answered with `kind`, has ended, or time.monotonic() is past `deadline`."""
        with self._answered:
            self._answered.wait_for(
                lambda: self._has(kind) or self._ended,
                timeout=max(0.0, deadline - time.monotonic()),
            )
        if not self._has(kind) and not self.result.problem:
            self.result.problem = self._end_cause() if self._ended else "no answer within the limit"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _has(self, kind: str) -> bool:
        return (
            self.result.received > 0 if kind == "facts" else self.result.met != RendezvousResult()
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER_PREFIX):
                message = json.loads(line.removeprefix(ANSWER_PREFIX))
                with self._answered:
                    if message["kind"] == "facts":
                        self.result.facts, self.result.received = (
                            message_from_json(HostFacts, message),
                            time.time(),
                        )
                    else:
                        self.result.met = rendezvous_result_from_json(message)
                    self._answered.notify_all()
        self._process.wait()
        time.sleep(0.1)  # what it says last on standard error
        with self._answered:
            self._ended = True
            self._answered.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(
            line.rstrip() for line in self._process.stderr if not _SSH_NOISE.search(line)
        )

    def _end_cause(self) -> str:
        return self._errors[-1] if self._errors else f"ended with code {self._process.returncode}"
