"""Test what pods of a JobSet read of each other, how many of them train, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.supervise import jobset_pods
from shardwright.supervise.jobset_pods import Members, Pod, PodFiles, choose_count
from tests.parity.harness import must, shardwright


def pod(index: int, start: int = 1) -> Pod:
    return Pod(index=index, uid=f"uid-{start}-{index}", address=f"10.0.0.{index}")


@pytest.mark.parametrize(
    ("present", "waited", "can_plan", "count"),
    [
        (4, False, lambda _: True, 4),
        (3, False, lambda _: True, None),  # the others may still come
        (3, True, lambda _: True, 3),
        (3, True, lambda count: count == 2, 2),  # the batch does not divide over 3
        (3, True, lambda _: False, None),
        (1, True, lambda _: True, None),  # fewer than min_nodes
    ],
)
def test_how_many_pods_train(
    present: int, waited: bool, can_plan: Callable[[int], bool], count: int | None
) -> None:
    assert choose_count(present, 4, 2, waited, can_plan) == count


def test_a_pod_is_there_while_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    earlier = PodFiles(tmp_path, pod(2, start=0))
    earlier.beat()  # the pod of the start before, which has gone
    first, second = PodFiles(tmp_path, pod(0)), PodFiles(tmp_path, pod(1))
    second.beat()
    assert first.present() == [pod(0)]  # neither file has changed since it was first seen
    second.beat()
    assert first.present() == [pod(0), pod(1)]
    assert second.present() == [pod(1)]  # the other has written nothing
    now += jobset_pods.LOST_SECONDS + 1
    assert first.present() == [pod(0)]
    second.beat()
    assert first.present() == [pod(0), pod(1)]


def test_members_of_an_earlier_start_are_others(tmp_path: Path) -> None:
    files = PodFiles(tmp_path, pod(1))
    assert files.read_members() is None
    files.write_members(Members(pods=(pod(1), pod(2)), folder="run/plans/nodes-2"))
    members = PodFiles(tmp_path, pod(2)).read_members()
    assert members is not None and members.folder == "run/plans/nodes-2"
    assert [members.rank_of(each.uid) for each in (pod(1), pod(2))] == [0, 1]
    assert members.rank_of(pod(1, start=2).uid) is None
    (files.folder / jobset_pods.MEMBERS_FILE).write_text('{"pods": [')  # half of a file
    assert files.read_members() is None


def test_a_member_has_failed_once_it_says_so(tmp_path: Path) -> None:
    first, second = PodFiles(tmp_path, pod(0)), PodFiles(tmp_path, pod(1))
    members = Members(pods=(pod(0), pod(1)), folder=".")
    assert first.find_failed_member(members) is None  # nor has one that has written nothing
    PodFiles(tmp_path, pod(1, start=0)).write_failure()
    assert first.find_failed_member(members) is None  # of an earlier start
    second.write_failure()
    assert first.find_failed_member(members) == pod(1)


@pytest.mark.prove
def test_ranks_do_not_wait_for_a_pod_that_has_failed(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    """Two pods train; the ranks of one fail, those of the other would wait for ever."""
    kubernetes = {"image": "i", "volume_claim": "v", "directory": "/shared/x", "kind": "jobset"}
    changes = {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "launch": {"kubernetes": kubernetes, "recovery": {"min_nodes": 1}},
    }
    out = tmp_path / "out"
    must(shardwright("compile", write_recipe(changes), "-o", out))
    (out / "launch/node.sh").write_text(
        "if ((JOB_COMPLETION_INDEX)); then sleep 4; exit 3; fi\nsleep 600 & wait\n"
    )
    begun = time.monotonic()
    pods = [
        subprocess.Popen(
            [sys.executable, "-m", "shardwright.supervise.jobset_pods"],
            cwd=out,
            env={
                **os.environ,
                "JOB_COMPLETION_INDEX": str(index),
                "POD_UID": f"uid-{index}",
                "POD_IP": "127.0.0.1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    texts = [each.communicate(timeout=120)[0] for each in pods]
    assert [each.returncode for each in pods] == [1, 3], texts
    assert "pod 1: its ranks have failed; the ranks of this pod are ended" in texts[0]
    assert time.monotonic() - begun < 60
