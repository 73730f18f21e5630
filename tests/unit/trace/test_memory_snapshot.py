"""A CUDA memory snapshot by kind at its peak; and a pickle with code in it is never loaded."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.trace.memory_snapshot import (
    MemoryPeak,
    is_memory_snapshot,
    kind_of_frames,
    read_memory_peak,
)
from tests.unit.trace.trace_files import kernel, write_trace


def stack(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    """The innermost frame first, as torch records them."""
    return [{"filename": file, "name": name, "line": 1} for file, name in frames]


SITE = "/venv/lib/python3.12/site-packages/"
LINEAR = (f"{SITE}torch/nn/modules/linear.py", "forward")
CALL = (f"{SITE}torch/nn/modules/module.py", "_call_impl")
STACKS = {
    "parameters": stack((f"{SITE}torch/nn/modules/module.py", "convert"), ("train.py", "main")),
    "optimizer": stack((f"{SITE}torch/optim/adamw.py", "_init_group"), ("train.py", "main")),
    "activations": stack(LINEAR, CALL, ("train.py", "main")),
    "working": stack((f"{SITE}torch/autograd/graph.py", "_engine_run_backward")),
    "unknown": stack(("train.py", "main")),
}


class Recorder:
    """Writes the events of an allocator as torch does, in one segment of 10,000 bytes."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, Any]] = {}
        self.next = 1000

    def alloc(self, size: int, frames: Any, *, recorded: bool = True) -> int:
        address, self.next = self.next, self.next + 512
        self.live[address] = (size, frames if recorded else [])
        if recorded:
            self._event("alloc", address, size, frames)
        return address

    def free(self, address: int, frames: Any = ()) -> None:
        size, _ = self.live.pop(address)
        self._event("free_requested", address, size, frames)
        self._event("free_completed", address, size, frames)

    def _event(self, action: str, address: int, size: int, frames: Any) -> None:
        self.events.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(frames)}
        )

    def snapshot(self, device: int = 0) -> dict[str, Any]:
        blocks = [
            {"address": a, "size": 512, "requested_size": size, "state": "active_allocated"}
            | {"frames": frames}
            for a, (size, frames) in self.live.items()
        ]
        blocks.append({"address": self.next, "size": 4000, "state": "inactive", "frames": []})
        segment = {"device": device, "address": 1000, "total_size": 10_000, "blocks": blocks}
        return {
            "segments": [segment],
            "device_traces": [*[[] for _ in range(device)], self.events],
            "allocator_settings": {"expandable_segments": False, "pool": (0, 0)},
        }


def write(path: Path, value: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def a_step(device: int = 0) -> dict[str, Any]:
    recorder = Recorder()
    recorder.alloc(70, None, recorded=False)
    recorder.alloc(400, STACKS["parameters"])
    first = recorder.alloc(100, STACKS["activations"])
    second = recorder.alloc(100, STACKS["activations"])
    gradient = recorder.alloc(300, [])  # autograd's thread has no Python stack
    temporary = recorder.alloc(50, [])  # the peak
    for address in (temporary, second, first):
        recorder.free(address)
    recorder.alloc(30, STACKS["optimizer"])
    recorder.free(gradient, STACKS["unknown"])
    return recorder.snapshot(device)


def test_the_peak_by_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle", a_step())
    assert is_memory_snapshot(path)
    found = read_memory_peak(path)
    assert {kind: size for kind, size in found.kinds.items() if size} == {
        "unknown": 70,
        "parameters": 400,
        "activations": 200,
        "gradients": 300,
        "working": 50,
        "allocator": 10_000 - 1020,
    }
    assert (found.allocated_bytes, found.reserved_bytes) == (1020, 10_000)
    assert found.has_history and sum(found.kinds.values()) == found.reserved_bytes


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols_gzip_and_devices(protocol: int, tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle", a_step(device=3), protocol)
    packed = tmp_path / "s.pickle.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for each in (path, packed):
        assert is_memory_snapshot(each)
        found = read_memory_peak(each)
        assert (found.device, found.allocated_bytes) == (3, 1020)


def test_a_snapshot_without_history_is_the_moment_of_the_dump(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.alloc(400, STACKS["parameters"])
    snapshot = recorder.snapshot() | {"device_traces": [[]]}
    found = read_memory_peak(write(tmp_path / "s.pickle", snapshot))
    assert not found.has_history and found.kinds["parameters"] == 400


def test_segments_of_the_history_count(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder._event("segment_alloc", 1, 6_000, [])
    kept = recorder.alloc(400, STACKS["activations"])
    recorder._event("segment_alloc", 2, 4_000, [])
    recorder.free(kept)
    found = read_memory_peak(write(tmp_path / "s.pickle", recorder.snapshot()))
    assert (found.allocated_bytes, found.reserved_bytes) == (400, 6_000)


@pytest.mark.parametrize("kind", sorted(STACKS))
def test_kinds_by_stack(kind: str) -> None:
    assert kind_of_frames(STACKS[kind]) == kind


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([LINEAR, CALL, (f"{SITE}torch/utils/checkpoint.py", "unpack_hook")], "working"),
        ([("??", "torch::autograd::Engine::evaluate_function(...)")], "working"),
        ([(f"{SITE}deepspeed/runtime/zero/stage_1_and_2.py", "__init__")], "optimizer"),
        ([(f"{SITE}transformers/modeling_utils.py", "from_pretrained")], "parameters"),
        ([("model.py", "forward")], "activations"),
    ],
)
def test_kinds_of_other_stacks(frames: list[tuple[str, str]], kind: str) -> None:
    assert kind_of_frames(stack(*frames)) == kind


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo it ran > ran",)


def pickles_with_code() -> dict[str, bytes]:
    own = b"cshardwright.trace.memory_snapshot\nread_memory_peak\n."
    return {
        "reduce": pickle.dumps(Evil()),
        "inside": pickle.dumps({"segments": [Evil()], "device_traces": []}),
        "old": pickle.dumps(Evil(), protocol=2),
        "class": pickle.dumps(OrderedDict(segments=[])),
        "builtins": pickle.dumps(eval),
        "object": b"\x80\x02" + own,
        "persistent": b"\x80\x02Pname\n.",
        "extension": b"\x80\x02\x82\x01.",
    }


@pytest.mark.parametrize("name", sorted(pickles_with_code()))
def test_a_pickle_with_code_is_not_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.pickle"
    path.write_bytes(pickles_with_code()[name])
    (found,) = refused(path).diagnostics
    assert found.code == "SW3314" and str(path) in found.message and found.help
    assert not (tmp_path / "ran").exists()


def refused(path: Path) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_memory_peak(path)
    return caught.value


def test_damaged_and_foreign_pickles(tmp_path: Path) -> None:
    good = pickle.dumps(a_step())
    archive = io.BytesIO(b"PK\x03\x04 of torch.save")
    deep: Any = []
    for _ in range(5):
        deep = [deep]
    files: dict[str, tuple[bytes, str]] = {
        "cut": (good[: len(good) // 2], "SW3313"),
        "cut-gzip": (gzip.compress(good)[:200], "SW3313"),
        "torch-save": (archive.getvalue(), "SW3314"),
        "opcode": (b"\x80\x04\xff.", "SW3314"),
        "stack": (b"\x80\x04ss.", "SW3314"),
        "number": (pickle.dumps(7), "SW3314"),
        "list": (pickle.dumps(deep), "SW3314"),
        "other-dict": (pickle.dumps({"weights": [1]}), "SW3314"),
        "no-segments": (pickle.dumps({"segments": [], "device_traces": []}), "SW3314"),
        "entries": (pickle.dumps({"segments": [3], "device_traces": []}), "SW3314"),
        "blocks": (pickle.dumps({"segments": [{"device": 0}], "device_traces": []}), "SW3314"),
        "text-sizes": (
            pickle.dumps(
                {
                    "segments": [
                        {"device": 0, "address": 0, "total_size": "x", "blocks": []},
                    ],
                    "device_traces": [],
                }
            ),
            "SW3314",
        ),
    }
    for name, (content, code) in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        assert [d.code for d in refused(path).diagnostics] == [code], name


def test_a_trace_is_no_snapshot(tmp_path: Path) -> None:
    assert not is_memory_snapshot(write_trace(tmp_path / "t.json", [kernel("attention", 0, 1)]))


def test_a_peak_of_two_devices_is_the_fuller_one(tmp_path: Path) -> None:
    one, two = a_step(), a_step(device=1)
    two["segments"] += Recorder().snapshot()["segments"]
    two["device_traces"][0] = []
    assert one["device_traces"]
    found: MemoryPeak = read_memory_peak(write(tmp_path / "s.pickle", two))
    assert found.device == 1
