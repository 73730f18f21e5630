"""Read a CUDA memory snapshot (torch.cuda.memory._dump_snapshot) and split its peak by kind.

The file is a pickle. A stranger's pickle can run code as it is read, so nothing but plain
containers, numbers and text is taken from it: the first name of a class or function in it is
refused.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from shardwright.diagnostics import Refusal, refusal
from shardwright.trace.trace_events import cut_short, open_profile_file

MemoryKind = Literal[
    "parameters", "gradients", "optimizer", "activations", "working", "unknown", "allocator"
]
MEMORY_KINDS: tuple[MemoryKind, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "working",
    "unknown",
    "allocator",
)
SNAPSHOT_HELP = (
    "Record one with torch.cuda.memory._record_memory_history(stacks='python') before the model "
    "is built, run a few steps, then torch.cuda.memory._dump_snapshot(FILE)."
)
PICKLE_MAGIC = b"\x80"
ZIP_MAGIC = b"PK"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Hold the bytes of one device at the moment when most was allocated.

    kinds: they add up to reserved_bytes; allocator is what is reserved and not allocated, unknown
        what was allocated before the recording began or without a Python stack that tells
    has_history: the snapshot recorded events; else it is the moment of the dump
    """

    file: str
    device: int
    kinds: Mapping[MemoryKind, int]
    allocated_bytes: int
    reserved_bytes: int
    has_history: bool


def is_memory_snapshot(path: Path) -> bool:
    """Return whether a file is a pickle or an archive of torch.save, not a trace. Raises Refusal:
    SW3311."""
    with open_profile_file(path) as file:
        return file.read(2).startswith((PICKLE_MAGIC, ZIP_MAGIC))


def read_memory_peak(path: Path) -> MemoryPeak:
    """Raises Refusal: SW3311 (not readable), SW3313 (cut short), SW3314 (no snapshot)."""
    snapshot = _read(path)
    segments, traces = snapshot.get("segments"), snapshot.get("device_traces", [])
    if not isinstance(segments, list) or not isinstance(traces, list):
        raise _no_snapshot(path, "it has no list `segments` and `device_traces`")
    try:
        devices = {int(segment["device"]) for segment in segments}
        peaks = [
            _peak_of_device(
                path,
                device,
                [segment for segment in segments if segment["device"] == device],
                traces[device] if device < len(traces) else [],
            )
            for device in sorted(devices)
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _no_snapshot(path, f"an entry is not as torch writes it ({error!r})") from None
    if not peaks:
        raise _no_snapshot(path, "it holds no memory of any GPU")
    return max(peaks, key=lambda peak: peak.allocated_bytes)


class _DataUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers and text, and no object of any class."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _CodeInPickleError(f"{module}.{name}"[:200])

    def persistent_load(self, pid: object) -> NoReturn:
        raise _CodeInPickleError("a persistent object")


class _CodeInPickleError(Exception):
    pass


def _no_snapshot(path: Path, reason: str) -> Refusal:
    return refusal("SW3314", f"{str(path)!r} is no CUDA memory snapshot: {reason}", SNAPSHOT_HELP)


def _read(path: Path) -> Mapping[str, Any]:
    with open_profile_file(path) as file:
        head = file.read(2)
        file.seek(0)
        if head.startswith(ZIP_MAGIC):
            raise _no_snapshot(path, "torch.save wrote it")
        try:
            with _errors_of_pickle(path):
                snapshot = _DataUnpickler(file).load()
        except _CodeInPickleError as error:
            raise refusal(
                "SW3314",
                f"{str(path)!r} holds more than data: it names {error}, which could run code; it "
                "was not loaded",
                SNAPSHOT_HELP,
            ) from None
    if not isinstance(snapshot, dict):
        raise _no_snapshot(path, f"it holds a {type(snapshot).__name__}, not a dict")
    return snapshot


@contextlib.contextmanager
def _errors_of_pickle(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise cut_short(path, "the pickle has no end") from None
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise cut_short(path, "the pickle has no end") from None
        raise _no_snapshot(path, f"its pickle is damaged ({error})") from None
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        MemoryError,
        RecursionError,
        AssertionError,
    ) as error:
        raise _no_snapshot(path, f"its pickle is damaged ({type(error).__name__})") from None


Allocation = tuple[int, MemoryKind]
"""Bytes and kind."""


def _peak_of_device(
    path: Path,
    device: int,
    segments: Sequence[Mapping[str, Any]],
    trace: Sequence[Mapping[str, Any]],
) -> MemoryPeak:
    live: dict[int, Allocation] = {}
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            here = int(block.get("address", address))
            if str(block["state"]).startswith("active"):
                size = int(block.get("requested_size") or block["size"])
                live[here] = (size, kind_of_frames(block.get("frames") or ()))
            address += int(block["size"])
    reserved = sum(int(segment["total_size"]) for segment in segments)
    kinds_of_event = _kinds_of_allocations(trace)
    # Backwards from what is there now to what was there when the recording began.
    for event in reversed(trace):
        action, size = event["action"], int(event.get("size") or 0)
        if action == "free_completed":
            live[int(event["addr"])] = (size, "unknown")
        elif action == "alloc":
            live.pop(int(event["addr"]), None)
        elif action in _RESERVED:
            reserved -= _RESERVED[action] * size
    allocated = sum(size for size, _ in live.values())
    sums: Counter[MemoryKind] = Counter()
    for size, kind in live.values():
        sums[kind] += size
    peak = (allocated, max(reserved, allocated), dict(sums))
    # Forwards again: the moment of the peak.
    for at, event in enumerate(trace):
        action, size = event["action"], int(event.get("size") or 0)
        if action == "alloc":
            kind = kinds_of_event[at]
            live[int(event["addr"])] = (size, kind)
            sums[kind] += size
            allocated += size
        elif action == "free_completed":
            freed, kind = live.pop(int(event["addr"]), (size, "unknown"))
            sums[kind] -= freed
            allocated -= freed
        elif action in _RESERVED:
            reserved += _RESERVED[action] * size
        if allocated > peak[0]:
            peak = (allocated, max(reserved, allocated), dict(sums))
    kinds: dict[MemoryKind, int] = {kind: peak[2].get(kind, 0) for kind in MEMORY_KINDS}
    kinds["allocator"] = peak[1] - peak[0]
    return MemoryPeak(
        file=str(path),
        device=device,
        kinds=kinds,
        allocated_bytes=peak[0],
        reserved_bytes=peak[1],
        has_history=bool(trace),
    )


_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

# (kind, file, function), as patterns; the first row that any frame matches counts. Sources: the
# stacks of torch.optim, autograd, DeepSpeed's ZeRO and Megatron-Core.
_FRAMES: tuple[tuple[MemoryKind, str, str], ...] = (
    ("optimizer", r"/optim/|megatron/core/optimizer|deepspeed/ops/(adam|lamb|lion)", ""),
    ("optimizer", r"deepspeed/runtime/zero/", r"^__init__$|^initialize_optimizer_states$"),
    ("working", "", r"torch::autograd::|^_engine_run_backward$|^unpack_hook$|^recompute_fn$"),
    ("working", r"torch/autograd/|torch/_tensor\.py", r"^backward$|^apply$"),
    ("working", r"clip_grad", ""),
    ("parameters", r"torch/nn/modules/module\.py", r"^(_apply|convert|to|cuda|to_empty)$"),
    (
        "parameters",
        "",
        r"^(from_pretrained|from_config|load_state_dict|reset_parameters|_init_weights)$",
    ),
    ("parameters", r"torch/nn/", r"^__init__$"),
    ("activations", "", r"^forward$"),
    ("activations", r"torch/nn/", r"^_call_impl$"),
)


def kind_of_frames(frames: Sequence[Mapping[str, Any]]) -> MemoryKind:
    """Return what a stack allocated for; what the backward pass allocates is working memory
    here."""
    names = [(str(frame.get("filename", "")), str(frame.get("name", ""))) for frame in frames]
    for kind, file, function in _FRAMES:
        if any(re.search(file, where) and re.search(function, name) for where, name in names):
            return kind
    return "unknown"


def _kinds_of_allocations(trace: Sequence[Mapping[str, Any]]) -> dict[int, MemoryKind]:
    """Return the kind of each `alloc` event, by its place. A gradient is what the backward pass
    allocated and what is still there when the optimizer's step allocates or frees."""
    kinds: dict[int, MemoryKind] = {}
    freed_at: dict[int, int] = {}
    begun: dict[int, int] = {}
    optimizer_at: list[int] = []
    for at, event in enumerate(trace):
        action = event["action"]
        if action == "alloc":
            frames = event.get("frames")
            # Autograd's own threads have no Python stack.
            kinds[at] = kind_of_frames(frames) if frames else "working"
            begun[int(event["addr"])] = at
        elif action == "free_completed" and int(event["addr"]) in begun:
            freed_at[begun.pop(int(event["addr"]))] = at
        if action in ("alloc", "free_requested") and (
            kind_of_frames(event.get("frames") or ()) == "optimizer"
        ):
            optimizer_at.append(at)
    next_update: dict[int, int] = defaultdict(lambda: len(trace))
    pending = iter(optimizer_at)
    coming = next(pending, len(trace))
    for at in sorted(kinds):
        while coming < at:
            coming = next(pending, len(trace))
        next_update[at] = coming
    return {
        at: "gradients"
        if kind == "working" and freed_at.get(at, len(trace)) >= next_update[at]
        else kind
        for at, kind in kinds.items()
    }
