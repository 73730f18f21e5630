"""Test what pods of a JobSet read of each other, and how many of them train."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.supervise import jobset_pods
from shardwright.supervise.jobset_pods import Members, Pod, PodFiles, choose_count


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
