"""A pod of a JobSet with `launch.recovery`: agree with the other pods on those that train, plan
again where they are fewer than planned, and start this node's ranks
(compiler/decisions/057-pods-agree-on-a-plan.md). No torch in this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.checkpoint.resume_checkpoint import checkpoint_root
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan, load_plan
from shardwright.supervise.fewer_nodes import FewerNodes
from shardwright.utils.child_processes import kill_tree
from shardwright.utils.file_io import write_atomically
from shardwright.utils.json_values import strict_json

PODS_FOLDER = "run/pods"
MEMBERS_FILE = "members.json"
BEAT_SECONDS = 3.0
LOST_SECONDS = 45.0
"""A pod whose file does not change for so long is gone. Shared file systems may show a change
late."""
WAIT_SECONDS = 300.0
"""Limits the wait for all pods. SHARDWRIGHT_POD_WAIT_SECONDS has another limit."""
FAILED_FILE = "failed.json"
FAILED_SECONDS = 5.0
"""How long ranks may take to end by themselves once those of another pod have failed."""
STOPPED_EXIT = 75
"""The exit code of a pod that was told to stop; the JobSet starts all pods again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """index: its number in the Job. uid: Kubernetes' own, of this pod and no later one."""

    index: int
    uid: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The pods that train, in the order of their node ranks. folder: of their plan, relative to the
    compiled folder."""

    pods: tuple[Pod, ...]
    folder: str

    def rank_of(self, uid: str) -> int | None:
        return next((rank for rank, pod in enumerate(self.pods) if pod.uid == uid), None)


def choose_count(
    present: int, nodes: int, fewest: int, waited: bool, can_plan: Callable[[int], bool]
) -> int | None:
    """Return how many pods train: all of the plan at once, fewer after the wait, None for more
    waiting."""
    if present >= nodes:
        return nodes
    if not waited:
        return None
    return next((count for count in range(present, fewest - 1, -1) if can_plan(count)), None)


class PodFiles:
    """The files by which pods see each other, on the volume that all of them mount.

    A pod is present while its file changes, by the clock of the pod that looks. So neither clocks
    nor files of earlier pods count.
    """

    def __init__(self, folder: Path, own: Pod) -> None:
        self.folder, self.own = folder / PODS_FOLDER, own
        self.folder.mkdir(parents=True, exist_ok=True)
        self._beats: dict[str, tuple[int, float | None]] = {}
        self._beat = 0

    def beat(self) -> None:
        self._beat += 1
        text = strict_json({**asdict(self.own), "beat": self._beat}) + "\n"
        write_atomically(self.folder / f"pod-{self.own.index}.json", text)

    def present(self) -> list[Pod]:
        """Return the pods whose file changed lately, this one included, by their index."""
        now, found = time.monotonic(), [self.own]
        for path in self.folder.glob("pod-*.json"):
            document = _read(path)
            if document is None or document["uid"] == self.own.uid:
                continue
            beat = int(document.pop("beat"))
            pod = Pod(**document)
            last, changed = self._beats.get(pod.uid, (beat, None))
            if beat != last:
                changed = now
            self._beats[pod.uid] = (beat, changed)
            if changed is not None and now - changed < LOST_SECONDS:
                found.append(pod)
        return sorted(found, key=lambda pod: pod.index)

    def read_members(self) -> Members | None:
        document = _read(self.folder / MEMBERS_FILE)
        if document is None:
            return None
        pods = tuple(Pod(**pod) for pod in document["pods"])
        return Members(pods=pods, folder=str(document["folder"]))

    def write_members(self, members: Members) -> None:
        write_atomically(self.folder / MEMBERS_FILE, strict_json(asdict(members)) + "\n")

    def write_failure(self) -> None:
        """Tell the other members that this pod's ranks have failed."""
        write_atomically(self.folder / FAILED_FILE, strict_json(asdict(self.own)) + "\n")

    def find_failed_member(self, members: Members) -> Pod | None:
        """Return the member whose ranks have failed. One that is silent is no failed one: it may
        have ended well while the others still save, or the file system stands still."""
        document = _read(self.folder / FAILED_FILE)
        rank = None if document is None else members.rank_of(str(document["uid"]))
        return None if rank is None else members.pods[rank]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # absent, or replaced at this moment
    return document if isinstance(document, dict) else None


class _PodSupervisor:
    """Holds the state of one pod, from the wait for the others to the end of its ranks."""

    def __init__(self, plan: Plan, folder: Path, own: Pod) -> None:
        self.plan, self.folder, self.files = plan, folder, PodFiles(folder, own)
        self.stop = folder / "run" / "stop"
        self.fewer = FewerNodes(plan, folder)
        recovery = plan.launch.recovery
        fewest = None if recovery is None else recovery.min_nodes
        self.fewest = plan.nodes if fewest is None else fewest
        self.ended = threading.Event()
        self.told_to_stop = threading.Event()

    def run(self) -> int:
        beats = threading.Thread(target=self._keep_beating, daemon=True)
        beats.start()
        signal.signal(signal.SIGTERM, lambda *_: self.told_to_stop.set())
        members = self._agree()
        return STOPPED_EXIT if members is None else self._train(members)

    def _keep_beating(self) -> None:
        while not self.ended.is_set():
            try:
                self.files.beat()
            except OSError as error:
                print(f"recovery     pod file: {error.strerror}", file=sys.stderr, flush=True)
            self.ended.wait(BEAT_SECONDS)

    def _agree(self) -> Members | None:
        """Wait until this pod is a member. Returns None where it is told to stop before."""
        own = self.files.own
        limit = float(os.environ.get("SHARDWRIGHT_POD_WAIT_SECONDS", WAIT_SECONDS))
        begun, stop_was_there = time.monotonic(), self.stop.exists()
        said, seen, since = "", None, 0.0
        while not self.told_to_stop.wait(1):
            stop_was_there = stop_was_there and self.stop.exists()
            if self.stop.exists() and not stop_was_there:
                return None  # the members end
            members, present = self.files.read_members(), self.files.present()
            if members != seen:
                seen, since = members, time.monotonic()
            if members is not None and members.rank_of(own.uid) is not None:
                # Another pod may have chosen too: what stays is followed.
                if time.monotonic() - since > BEAT_SECONDS:
                    return members
                continue
            uids = {pod.uid for pod in present}
            if members is not None and any(pod.uid in uids for pod in members.pods):
                text = "the others train without this pod; it waits for their next checkpoint"
            elif present[0] != own:
                text = f"pod {present[0].index} chooses"
            else:
                waited = time.monotonic() - begun > limit
                text = f"{len(present)} of {self.plan.nodes} pods are there"
                if (chosen := self._choose(present, waited=waited)) is not None:
                    self.files.write_members(chosen)
            if text != said:
                print(f"recovery     {text}", flush=True)
                said = text
        return None

    def _choose(self, present: Sequence[Pod], *, waited: bool) -> Members | None:
        count = choose_count(
            len(present), self.plan.nodes, self.fewest, waited, self.fewer.can_plan
        )
        if count is None:
            return None
        folder = "."
        if count < self.plan.nodes:
            print(f"recovery     planned again for {count} nodes", flush=True)
            folder = str(self.fewer.compile(count).relative_to(self.folder))
        return Members(pods=tuple(present[:count]), folder=folder)

    def _train(self, members: Members) -> int:
        """Run this node's ranks; return their exit code."""
        rank = members.rank_of(self.files.own.uid)
        env = {
            **os.environ,
            "JOB_COMPLETION_INDEX": str(rank),
            "MASTER_ADDR": members.pods[0].address,
        }
        script = self.folder / members.folder / "launch" / "node.sh"
        child = subprocess.Popen(["bash", str(script)], env=env)
        is_watched = rank == 0 and len(members.pods) < self.plan.nodes
        complete_at: int | None = None
        is_told = False
        failed_at: float | None = None
        while True:
            try:
                code = child.wait(timeout=1)
                if code not in (0, STOPPED_EXIT):
                    with contextlib.suppress(OSError):  # its own end matters more
                        self.files.write_failure()
                return code
            except subprocess.TimeoutExpired:
                pass
            failed = self.files.find_failed_member(members)
            if failed is not None:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > FAILED_SECONDS:
                    text = "its ranks have failed; the ranks of this pod are ended"
                    print(f"recovery     pod {failed.index}: {text}", flush=True)
                    kill_tree(child)
                    child.wait()
                    return 1
            if self.told_to_stop.is_set() and not is_told:
                is_told = True
                child.terminate()
            if is_watched and not is_told:
                if len(self.files.present()) < self.plan.nodes:
                    complete_at = None
                elif complete_at is None:
                    complete_at = self._newest_checkpoint()
                elif self._newest_checkpoint() > complete_at:
                    print("recovery     all pods are there: all start again", flush=True)
                    self.stop.touch()
                    is_told = True

    def _newest_checkpoint(self) -> int:
        steps = published_steps(checkpoint_root(self.plan, self.folder))
        return steps[-1][0] if steps else 0


def own_pod(environment: Mapping[str, str]) -> Pod:
    """Return this pod, by what its manifest passes on."""
    return Pod(
        index=int(environment["JOB_COMPLETION_INDEX"]),
        uid=environment["POD_UID"],
        address=environment["POD_IP"],
    )


def main() -> int:
    folder = Path.cwd()
    try:
        return _PodSupervisor(load_plan(folder), folder, own_pod(os.environ)).run()
    except Refusal as refused:
        print("\n".join(str(each) for each in refused.diagnostics), file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
