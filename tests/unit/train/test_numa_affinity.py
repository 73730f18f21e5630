"""A rank is bound to the cores beside its GPU, where that is switched on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.train.numa_affinity import _cores, bind_to_numa_node


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """sysfs of a host whose GPU 1 is on NUMA node 1, with this process's last core."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in --id=1) echo 00000000:AF:00.0 ;; --id=5) echo 00000000:1B:00.0 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for bus, node in (("0000:af:00.0", "1"), ("0000:1b:00.0", "-1")):
        (tmp_path / "sys/bus/pci/devices" / bus).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n")
    (tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    last = max(os.sched_getaffinity(0))
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text(f"{last},9000-9001\n")
    return tmp_path / "sys"


def _bound(local_rank: int, system: Path) -> frozenset[int] | None:
    """Bind in a child process, and compare what it reports with its affinity."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        cores = bind_to_numa_node(local_rank, system)
        same = cores is None or cores == os.sched_getaffinity(0)
        os.write(write, ",".join(map(str, sorted(cores or ()))).encode() if same else b"wrong")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        text = file.read()
    return frozenset(map(int, text.split(","))) if text else None


def test_a_rank_is_bound_to_its_gpus_node(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _bound(1, system) is None  # not switched on
    monkeypatch.setenv("SHARDWRIGHT_BIND_NUMA", "1")
    last = frozenset({max(os.sched_getaffinity(0))})
    assert _bound(1, system) == last
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert _bound(0, system) == last  # the second GPU is its first


@pytest.mark.parametrize("device", [0, 5])
def test_a_gpu_of_an_unknown_node_binds_nothing(
    device: int, system: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_BIND_NUMA", "1")
    assert bind_to_numa_node(device, system) is None
    assert f"NUMA node of GPU {device} is unknown" in capsys.readouterr().out


def test_lists_of_cores() -> None:
    assert _cores("0-2,8\n") == [0, 1, 2, 8] and _cores("\n") == []
