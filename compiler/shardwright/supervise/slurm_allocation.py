"""Ask the nodes of a Slurm allocation whether they answer, and choose those of the next attempt. No
torch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shardwright.launch.launchers.job_scheduler import run_scheduler_command
from shardwright.launch.launchers.launcher_table import RANKS_STEP
from shardwright.launch.launchers.slurm_launcher import host_names
from shardwright.utils.child_processes import program_path

ALL_ANSWER_SECONDS, ONE_ANSWERS_SECONDS = 20.0, 20.0
"""Limit the question to all nodes at once, and to those by themselves that did not answer it."""
STEPS_END_SECONDS = 10.0
"""Limits the wait for the end of the ranks. They are killed at once on nodes that answer; a step
with a lost node stays in the list."""
_ANSWER = re.compile(r"shardwright-node (\S+) ([^|]*)\|(.*)")
_ASK = 'answer=$(bash launch/preflight.sh) && printf "%s|%s\\n" "$answer" "$(hostname)"'


class SlurmAllocation:
    """Holds the nodes of the Slurm job that this process is in. A node that Slurm takes out of the
    job does not come back (sbatch --no-kill)."""

    poll_seconds = 60.0
    exit_code_without_hosts = 75

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, os.environ["SLURM_JOB_ID"]
        self._names = host_names(os.environ.get("SLURM_JOB_NODELIST", ""))
        # Of srun: the next attempt need not wait for the last one's steps on a lost node, and
        # ends where a node is lost.
        os.environ["SLURM_OVERLAP"] = "1"
        os.environ.pop("SLURM_NO_KILL", None)

    def names(self) -> list[str]:
        """Return the nodes that are still the job's, in Slurm's order."""
        answer = run_scheduler_command(
            "squeue", "--noheader", f"--jobs={self.job}", "--format=%N"
        ).out.strip()
        if answer and (names := host_names(answer)):
            self._names = names
        return list(self._names)

    def reach(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes that launch/preflight.sh finds fit to train, in order, each with its own
        host name. Says of the others on stderr what is wrong."""
        answers = self._ask([list(hosts)], ALL_ANSWER_SECONDS) if hosts else {}
        # One node that does not answer can end the question to all.
        silent = [host for host in hosts if host not in answers]
        if silent:
            answers |= self._ask([[host] for host in silent], ONE_ANSWERS_SECONDS)
        for host in hosts:
            text, _ = answers.get(host, ("no answer", ""))
            if text != "ok":
                print(f"recovery     node {host}: {text}", file=sys.stderr, flush=True)
        return {host: answers[host][1] for host in hosts if answers.get(host, ("",))[0] == "ok"}

    def bind(self, hosts: Sequence[str]) -> None:
        """Let launch.sh start the ranks on these nodes of the allocation."""
        os.environ["SLURM_JOB_NODELIST"] = ",".join(hosts)
        os.environ["SLURM_JOB_NUM_NODES"] = str(len(hosts))

    def end_attempt(self) -> None:
        """End the ranks that the last attempt left, stopped ones too, on nodes that answer."""
        end = time.monotonic() + STEPS_END_SECONDS
        while steps := self._rank_steps():
            run_scheduler_command("scancel", *steps)
            if time.monotonic() > end:
                return  # of a lost node, most likely
            time.sleep(1)

    def kill_rank(self, host: str, pid: int, folder: Path) -> None:
        """Do nothing: `end_attempt` has ended the step of the rank."""

    def is_preempted(self) -> bool:
        """Return whether Slurm ends this job for another one."""
        told = run_scheduler_command("scontrol", "show", "job", self.job).out
        return re.search(r"\bPreemptTime=\d", told) is not None

    def _rank_steps(self) -> list[str]:
        listed = run_scheduler_command(
            "squeue", "--steps", "--noheader", f"--jobs={self.job}", "--format=%i|%j"
        ).out
        rows = (row.strip().partition("|") for row in listed.splitlines())
        return [step for step, _, name in rows if name == RANKS_STEP]

    def _ask(self, groups: list[list[str]], seconds: float) -> dict[str, tuple[str, str]]:
        """Ask groups of nodes, each by one srun, all at once. Returns each answer: ok or what is
        wrong, and the node's own host name."""
        asked = [(hosts, self._srun(hosts)) for hosts in groups]
        end, found = time.monotonic() + seconds, dict[str, tuple[str, str]]()
        for hosts, process in asked:
            try:
                text, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                text, _ = process.communicate()
            for line in text.splitlines():
                if (match := _ANSWER.fullmatch(line.strip())) and match[1] in hosts:
                    found[match[1]] = (match[2].strip(), match[3].strip())
        return found

    def _srun(self, hosts: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *("srun", "--job-name=preflight", "--overlap", "--cpu-bind=none"),
                *(f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", "--ntasks-per-node=1"),
                *(f"--nodelist={','.join(hosts)}", "bash", "-c", _ASK),
            ],
            cwd=self.folder,
            env={**os.environ, "PATH": program_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
