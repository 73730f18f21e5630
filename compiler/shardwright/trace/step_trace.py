"""Measure a training step from one rank's torch profiler trace: seconds by line, collectives,
layers.

Every instant of the step belongs to one line. Kernels that compute come first, and share an instant
evenly where several run. Then copies to the host and collectives, whose seconds are thereby the
exposed ones. The rest is idle: the device waits for the host. A CPU has no kernels: there an
operator's own time, without that of the operators that it calls, is what computes.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.diagnostics import refusal
from shardwright.trace.kernel_classes import (
    ATTENTION_HELPER,
    BACKWARD,
    COLLECTIVE_LINES,
    COMPUTE_LINES,
    LINES,
    Line,
    is_collective_call,
    line_of_collective,
    line_of_kernel,
    line_of_operator,
)
from shardwright.trace.trace_events import (
    PROFILE_HELP,
    TraceEvent,
    TraceReader,
    open_profile_file,
)

Floats = NDArray[np.float64]
MICROSECOND = 1e-6
STEP_MARK = re.compile(r"^ProfilerStep#(\d+)$")
OPTIMIZER_MARK = "Optimizer.step#"
MODULE_MARK = re.compile(r"^nn\.Module: (\w+?)_(\d+)$")
LAYER_MARK = re.compile(r"^(.*(?:layer|block).*?)(\d+)$", re.IGNORECASE)
DATA_MARK = "enumerate(DataLoader)"
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LONGEST_NAMES = 3
# Bytes of an element, by the last word of its name in record_param_comms and record_shapes.
ELEMENT_BYTES = {
    **dict.fromkeys(("double", "float64", "long", "int64", "complexfloat"), 8),
    **dict.fromkeys(("float", "float32", "int", "int32"), 4),
    **dict.fromkeys(("bfloat16", "half", "float16", "short", "int16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTime:
    """Hold one line of a step.

    seconds: the line's share of the step, which add up to the step
    busy_seconds: the sum of its events' durations, overlapped ones included
    calls: events a step
    longest: names of its longest events, with their busy seconds
    """

    seconds: float
    busy_seconds: float
    calls: float
    longest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """Hold one collective of one rank.

    group: the process group's name and description
    ranks: its members, where the trace lists them
    size: how many members; None where the trace does not tell
    message_bytes: the whole buffer: what an all-gather ends with, what the others start with
    step: which of the trace's steps
    """

    line: Line
    group: str
    ranks: tuple[int, ...]
    size: int | None
    message_bytes: float | None
    step: int
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def bus_bytes(self) -> float | None:
        """Return the bytes through one rank's link; nccl-tests divides them by the seconds for its
        bus bandwidth."""
        if self.message_bytes is None or self.line == "other_collectives":
            return None
        if self.line == "send_recv":
            return self.message_bytes
        if not self.size or self.size < 2:
            return None
        share = (self.size - 1) / self.size
        return self.message_bytes * share * (2 if self.line == "all_reduce" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """Hold the seconds of a step between two marks of neighbouring layers, or of a named layer."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Hold when an attention kernel or operator began, and of which pass."""

    start: float
    is_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Hold what one rank's trace tells of a step; seconds are of one step.

    rank, world_size: None where torch.distributed was not initialized
    host: the host's name; "" where the trace has none
    device: the GPU's name; "" for a CPU's trace
    steps: how many steps the trace has
    has_step_marks: the profiler's own marks told the steps; else the whole trace counts as `steps`
    step_times: of each step, by the profiler's marks
    layers: by module or by the user's own marks; () where the trace has none
    attention: all calls, in order of time
    peak_bytes: the most that the allocator had handed out; None without profile_memory
    unread_events: events without a usable time, left out
    optimizer_marks: how often an optimizer's step began
    data_loading_seconds: the loop waited for torch's DataLoader
    """

    file: str
    rank: int | None
    world_size: int | None
    host: str
    device: str
    is_cpu: bool
    steps: int
    has_step_marks: bool
    step_seconds: float
    step_times: tuple[float, ...]
    lines: Mapping[Line, LineTime]
    collectives: tuple[CollectiveCall, ...]
    layers: tuple[LayerSpan, ...]
    attention: tuple[AttentionCall, ...]
    peak_bytes: int | None
    unread_events: int
    optimizer_marks: int
    data_loading_seconds: float

    @property
    def has_optimizer(self) -> bool:
        return self.lines["optimizer"].calls > 0

    def overlapped_seconds(self, line: Line) -> float:
        """Return a line's seconds in which something else counts, most often computing."""
        found = self.lines[line]
        return max(0.0, found.busy_seconds - found.seconds)


@dataclass(slots=True)
class _Spans:
    """Gathers events as columns: start and end (microseconds), line, name."""

    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    lines: array[int] = field(default_factory=lambda: array("b"))
    names: array[int] = field(default_factory=lambda: array("l"))

    def add(self, start: float, end: float, line: Line, name: int) -> None:
        self.starts.append(start)
        self.ends.append(end)
        self.lines.append(LINES.index(line))
        self.names.append(name)


@dataclass(slots=True)
class _Events:
    """Gathers one pass over a trace's events."""

    gpu: _Spans = field(default_factory=_Spans)
    operators: dict[Any, _Spans] = field(default_factory=lambda: defaultdict(_Spans))
    names: dict[str, int] = field(default_factory=dict)
    collectives: list[CollectiveCall] = field(default_factory=list)
    calls: list[CollectiveCall] = field(default_factory=list)
    step_marks: dict[int, tuple[float, float]] = field(default_factory=dict)
    optimizer: list[tuple[float, float]] = field(default_factory=list)
    gpu_optimizer: list[tuple[float, float]] = field(default_factory=list)
    data_loading: list[tuple[float, float]] = field(default_factory=list)
    marks: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    gpu_marks: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    modules: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    first: float = math.inf
    last: float = -math.inf
    peak_bytes: int | None = None
    unread: int = 0

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))


def read_step_trace(path: Path, steps: int | None = None) -> RankTrace:
    """Read a rank's trace.

    steps: how many steps it holds, where the profiler did not mark them
    Raises Refusal: SW3311 (not readable), SW3312 (no trace), SW3313 (cut short), SW3316 (no step).
    """
    events = _Events()
    with open_profile_file(path) as file:
        reader = TraceReader(file, path)
        for event in reader.events():
            _take(events, event)
    return _rank_trace(path, reader.entries, events, steps)


def _number(value: object) -> float | None:
    if isinstance(value, str):  # some exporters write times as text
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e18 else None


def _take(events: _Events, event: TraceEvent) -> None:
    phase, category, name = event.get("ph"), event.get("cat"), event.get("name")
    if not isinstance(name, str):
        return
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    if phase == "i" and name == "[memory]":
        _take_memory(events, arguments)
    if phase != "X" or not isinstance(category, str):
        return
    start, duration = _number(event.get("ts")), _number(event.get("dur"))
    if start is None or duration is None or duration < 0:
        events.unread += 1
        return
    end = start + duration
    if category in GPU_CATEGORIES:
        _take_kernel(events, category, name, arguments, start, end)
    elif category == "cpu_op":
        thread = (str(event.get("pid")), str(event.get("tid")))
        events.operators[thread].add(start, end, line_of_operator(name), events.name(name))
        events.first, events.last = min(events.first, start), max(events.last, end)
    elif category in ("user_annotation", "gpu_user_annotation"):
        _take_annotation(events, category == "gpu_user_annotation", name, arguments, start, end)
    elif category == "python_function" and MODULE_MARK.match(name):
        events.modules[name].append((start, end))


def _take_memory(events: _Events, arguments: Mapping[str, Any]) -> None:
    total = _number(arguments.get("Total Allocated"))
    if total is not None and arguments.get("Device Type") == 1:
        events.peak_bytes = max(events.peak_bytes or 0, int(total))


def _take_kernel(
    events: _Events,
    category: str,
    name: str,
    arguments: Mapping[str, Any],
    start: float,
    end: float,
) -> None:
    line = line_of_kernel(category, name)
    if line in COLLECTIVE_LINES:
        call = _collective(name, arguments, start, end)
        events.collectives.append(call)
        line = call.line
    events.gpu.add(start, end, line, events.name(name))


def _take_annotation(
    events: _Events,
    is_gpu: bool,
    name: str,
    arguments: Mapping[str, Any],
    start: float,
    end: float,
) -> None:
    mark = STEP_MARK.match(name)
    if mark is not None:
        if not is_gpu:
            events.step_marks[int(mark[1]) % 2**53] = (start, end)
    elif name.startswith(OPTIMIZER_MARK):
        (events.gpu_optimizer if is_gpu else events.optimizer).append((start, end))
    elif is_collective_call(name):
        if not is_gpu:
            events.calls.append(_collective(name, arguments, start, end))
    elif name.startswith(DATA_MARK):
        events.data_loading.append((start, end))
    elif LAYER_MARK.match(name):
        (events.gpu_marks if is_gpu else events.marks)[name].append((start, end))


def _collective(
    name: str, arguments: Mapping[str, Any], start: float, end: float
) -> CollectiveCall:
    """Read a collective's arguments: those of record_param_comms on an NCCL kernel, or the shapes
    of a gloo record."""
    named = arguments.get("Collective name")
    line = line_of_collective(named if isinstance(named, str) and named else name)
    group = ": ".join(
        str(arguments[key])
        for key in ("Process Group Name", "Process Group Description")
        if arguments.get(key) not in (None, "")
    )
    size = _number(arguments.get("Group size"))
    return CollectiveCall(
        line=line,
        group=group,
        ranks=_ranks(arguments.get("Process Group Ranks")),
        size=None if size is None else int(size),
        message_bytes=_message_bytes(line, arguments),
        step=0,
        start=start * MICROSECOND,
        seconds=(end - start) * MICROSECOND,
    )


def _ranks(text: object) -> tuple[int, ...]:
    """Return the ranks of a list as text; () where it is abbreviated or absent."""
    if not isinstance(text, str):
        return ()
    try:
        listed = json.loads(text)
    except ValueError:
        return ()
    if not isinstance(listed, list) or not all(type(rank) is int for rank in listed):
        return ()
    return tuple(listed)


def _message_bytes(line: Line, arguments: Mapping[str, Any]) -> float | None:
    given, taken = (_number(arguments.get(f"{way} msg nelems")) for way in ("In", "Out"))
    if given is not None or taken is not None:
        element = _element_bytes(arguments.get("dtype"))
        counts = (taken, given) if line == "all_gather" else (given, taken)
        elements = next((count for count in counts if count), None)
        return None if element is None or elements is None else elements * element
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    total = 0.0
    for shape, kind in zip(shapes, types, strict=False):
        element = _element_bytes(kind)
        if element is None or not isinstance(shape, list):
            continue
        if all(isinstance(width, int) and 0 <= width < 2**53 for width in shape):
            total += element * math.prod(float(width) for width in shape)
    return total or None


def _element_bytes(name: object) -> int | None:
    if not isinstance(name, str) or not name:
        return None
    words = name.lower().replace("c10::", "").split()
    return None if not words else 8 if words[0] == "long" else ELEMENT_BYTES.get(words[-1])


def _rank_trace(
    path: Path, entries: Mapping[str, Any], events: _Events, steps: int | None
) -> RankTrace:
    is_cpu = not events.gpu.starts
    if is_cpu and not events.operators:
        raise refusal(
            "SW3316",
            f"{str(path)!r} has neither GPU kernels nor CPU operators",
            PROFILE_HELP,
        )
    marks = [events.step_marks[number] for number in sorted(events.step_marks)]
    spans = _cpu_spans(events) if is_cpu else _gpu_spans(events)
    starts, ends, lines, names = spans
    window = _window(events, marks, starts, ends)
    count = len(marks) or steps or 1
    if window[1] <= window[0]:
        raise refusal("SW3316", f"{str(path)!r} has no event that takes time", PROFILE_HELP)
    inside = (starts < window[1]) & (ends > window[0])
    starts, ends = np.maximum(starts[inside], window[0]), np.minimum(ends[inside], window[1])
    lines, names = lines[inside], names[inside]
    seconds = _shares(starts, ends, lines, window) * MICROSECOND / count
    of_name = {number: name for name, number in events.names.items()}
    calls = _numbered(events.calls if is_cpu else events.collectives, marks, window)
    found = {
        line: _line_time(at, float(seconds[at]), starts, ends, lines, names, of_name, count)
        for at, line in enumerate(LINES)
    }
    distributed = entries.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    world = _integer(distributed.get("world_size"))
    return RankTrace(
        file=str(path),
        rank=_integer(distributed.get("rank")),
        world_size=world,
        host=host if isinstance(host := entries.get("host_name"), str) else "",
        device="" if is_cpu else _device_name(entries),
        is_cpu=is_cpu,
        steps=count,
        has_step_marks=bool(marks),
        step_seconds=(window[1] - window[0]) * MICROSECOND / count,
        step_times=tuple((end - start) * MICROSECOND for start, end in marks),
        lines=found,
        collectives=_with_sizes(calls, distributed, world),
        layers=_layers(events, is_cpu, window, count),
        attention=_attention(events, is_cpu, window),
        peak_bytes=events.peak_bytes,
        unread_events=events.unread,
        optimizer_marks=len(events.optimizer),
        data_loading_seconds=sum(
            min(end, window[1]) - max(start, window[0])
            for start, end in events.data_loading
            if start < window[1] and end > window[0]
        )
        * MICROSECOND
        / count,
    )


def _integer(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


def _device_name(entries: Mapping[str, Any]) -> str:
    listed = entries.get("deviceProperties")
    first = listed[0] if isinstance(listed, list) and listed else {}
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) and name else "a GPU"


Columns = tuple[Floats, Floats, NDArray[np.int8], NDArray[np.int64]]
"""Holds starts, ends (microseconds), lines and names of events."""


def _only(columns: Columns, chosen: NDArray[np.bool_]) -> Columns:
    starts, ends, lines, names = columns
    return starts[chosen], ends[chosen], lines[chosen], names[chosen]


def _columns(spans: _Spans) -> Columns:
    return (
        np.array(spans.starts, dtype=np.float64),
        np.array(spans.ends, dtype=np.float64),
        np.array(spans.lines, dtype=np.int8),
        np.array(spans.names, dtype=np.int64),
    )


def _gpu_spans(events: _Events) -> Columns:
    """Return the GPU's events; kernels that the optimizer's step launched are the optimizer's."""
    starts, ends, lines, names = _columns(events.gpu)
    computes = np.isin(lines, [LINES.index(line) for line in COMPUTE_LINES])
    for start, end in events.gpu_optimizer:
        lines[computes & (starts >= start) & (ends <= end)] = LINES.index("optimizer")
    return starts, ends, lines, names


def _cpu_spans(events: _Events) -> Columns:
    """Return the operators' own time, the optimizer's steps whole, and the collectives that other
    threads carry out; without those, the calls to them."""
    found = _Spans()
    for spans in events.operators.values():
        _add_own_time(found, spans)
    own = _columns(found)
    if events.calls:
        own = _only(own, ~np.isin(own[2], [LINES.index(line) for line in COLLECTIVE_LINES]))
    for start, end in events.optimizer:
        own = _only(own, (own[1] <= start) | (own[0] >= end))
    rest = _Spans()
    label = events.name("optimizer.step()")
    for start, end in events.optimizer:
        rest.add(start, end, "optimizer", label)
    for call in events.calls:
        start = call.start / MICROSECOND
        rest.add(start, start + call.seconds / MICROSECOND, call.line, events.name("gloo"))
    more = _columns(rest)
    return (
        np.concatenate((own[0], more[0])),
        np.concatenate((own[1], more[1])),
        np.concatenate((own[2], more[2])),
        np.concatenate((own[3], more[3])),
    )


def _add_own_time(found: _Spans, spans: _Spans) -> None:
    """Cut the operators that call others of one thread into the spans that are their own."""
    starts, ends, lines, names = _columns(spans)
    idle = LINES.index("idle")
    open_at: list[int] = []  # operators that are still running, the innermost last
    reached = 0.0

    def close(until: float) -> None:
        """End every operator that ends before `until`, with its own time up to there."""
        nonlocal reached
        while open_at and ends[open_at[-1]] <= until:
            take(open_at.pop(), float("inf"))

    def take(at: int, until: float) -> None:
        nonlocal reached
        end = min(float(ends[at]), until)
        if lines[at] != idle and end > reached:
            found.add(reached, end, LINES[lines[at]], int(names[at]))
        reached = max(reached, end)

    for at in np.lexsort((-ends, starts)).tolist():
        start = float(starts[at])
        close(start)
        if open_at:
            take(open_at[-1], start)
        reached = max(reached, start)
        open_at.append(at)
    close(math.inf)


def _window(
    events: _Events, marks: Sequence[tuple[float, float]], starts: Floats, ends: Floats
) -> tuple[float, float]:
    """Return when the trace's steps begin and end. A GPU may work on after the host's mark."""
    last = float(ends.max()) if len(ends) else events.last
    if marks:
        end = max(end for _, end in marks)
        return min(start for start, _ in marks), end if not events.gpu.starts else max(end, last)
    first = min(events.first, float(starts.min()) if len(starts) else math.inf)
    return first, last if events.gpu.starts else max(last, events.last)


def _shares(
    starts: Floats, ends: Floats, lines: NDArray[np.int8], window: tuple[float, float]
) -> Floats:
    """Return each line's microseconds of the window; see the module's docstring."""
    bounds = np.unique(np.concatenate((np.array(window), starts, ends)))
    lengths = np.diff(bounds)

    def running(at: int) -> NDArray[np.int32]:
        """Count the line's events in each span between two bounds."""
        mine, changes = lines == at, np.zeros(len(bounds), dtype=np.int32)
        if mine.any():
            np.add.at(changes, np.searchsorted(bounds, starts[mine]), 1)
            np.add.at(changes, np.searchsorted(bounds, ends[mine]), -1)
        return np.cumsum(changes, dtype=np.int32)[:-1]

    computing, moving = range(len(COMPUTE_LINES)), range(len(COMPUTE_LINES), len(LINES) - 1)
    zeros = np.zeros(len(lengths), dtype=np.int32)
    compute, moved = (sum(map(running, group), zeros) for group in (computing, moving))
    shares = np.zeros(len(LINES))
    for at in computing:
        shares[at] = (running(at) * lengths / np.maximum(compute, 1)).sum()
    exposed = np.where(compute == 0, lengths / np.maximum(moved, 1), 0.0)
    for at in moving:
        shares[at] = (running(at) * exposed).sum()
    shares[-1] = lengths[(compute == 0) & (moved == 0)].sum()
    return shares


def _line_time(
    at: int,
    seconds: float,
    starts: Floats,
    ends: Floats,
    lines: NDArray[np.int8],
    names: NDArray[np.int64],
    of_name: Mapping[int, str],
    steps: int,
) -> LineTime:
    mine = lines == at
    durations = (ends - starts)[mine] * MICROSECOND / steps
    total: Counter[int] = Counter()
    own, which = np.unique(names[mine], return_inverse=True)
    if len(own):
        sums = np.bincount(which, weights=durations)
        total.update(dict(zip(own.tolist(), sums.tolist(), strict=True)))
    return LineTime(
        seconds=seconds,
        busy_seconds=float(durations.sum()) if LINES[at] != "idle" else seconds,
        calls=int(mine.sum()) / steps,
        longest=tuple((of_name[name], float(s)) for name, s in total.most_common(LONGEST_NAMES)),
    )


def _numbered(
    calls: Sequence[CollectiveCall],
    marks: Sequence[tuple[float, float]],
    window: tuple[float, float],
) -> list[CollectiveCall]:
    """Return the window's collectives in order of time, each with the number of its step."""
    begins = np.array([start for start, _ in marks]) * MICROSECOND
    low, high = window[0] * MICROSECOND, window[1] * MICROSECOND
    inside = sorted((c for c in calls if low <= c.start < high), key=lambda c: c.start)
    return [
        replace(c, step=max(0, int(np.searchsorted(begins, c.start, side="right")) - 1))
        if len(begins)
        else c
        for c in inside
    ]


def _with_sizes(
    calls: Iterable[CollectiveCall], distributed: Mapping[str, Any], world: int | None
) -> tuple[CollectiveCall, ...]:
    """Add the members of each group from distributedInfo. A gloo record names no group: there it is
    the only one, or unknown."""
    listed = distributed.get("pg_config")
    groups: dict[str, tuple[int, ...]] = {}
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, dict):
            ranks = each.get("ranks")
            text = ranks if isinstance(ranks, str) else json.dumps(ranks)
            groups[str(each.get("pg_name"))] = _ranks(text)
    found = []
    for call in calls:
        ranks = call.ranks or groups.get(call.group.partition(":")[0], ())
        if not call.group and len(groups) == 1:
            ranks = next(iter(groups.values()))
        size = call.size or len(ranks) or (world if not call.group and len(groups) <= 1 else None)
        moved = call.message_bytes
        if call.line == "all_gather" and not call.size and moved and size:
            moved *= size  # a gloo record has the input's shape
        found.append(replace(call, ranks=ranks, size=size, message_bytes=moved))
    return tuple(found)


def _layers(
    events: _Events, is_cpu: bool, window: tuple[float, float], steps: int
) -> tuple[LayerSpan, ...]:
    """Return the seconds of each layer from marks: torch's of modules (with_stack), or the user's
    (`record_function("layer 3")`), the family of marks with the most seconds."""
    families: dict[str, dict[int, LayerSpan]] = defaultdict(dict)
    sources = [(MODULE_MARK, events.modules)] if is_cpu else []
    sources.append((LAYER_MARK, events.marks if is_cpu else events.gpu_marks))
    for pattern, marks in sources:
        for name, spans in marks.items():
            match = pattern.match(name)
            assert match is not None, "only such marks were gathered"
            inside = [(s, e) for s, e in spans if s >= window[0] and e <= window[1]]
            seconds = sum(end - start for start, end in inside) * MICROSECOND / steps
            family, number = match[1].strip(), match[2]
            if seconds and len(number) < 7:
                layer = LayerSpan(name=f"{family} {int(number)}", seconds=seconds)
                families[family][int(number)] = layer
    several = [found for found in families.values() if len(found) > 1]
    if not several:
        return ()
    chosen = max(several, key=lambda found: sum(each.seconds for each in found.values()))
    return tuple(chosen[number] for number in sorted(chosen))


def _attention(
    events: _Events, is_cpu: bool, window: tuple[float, float]
) -> tuple[AttentionCall, ...]:
    """Return attention's own kernels or outermost operators, in order of time."""
    attention = LINES.index("attention")
    of_name = {number: name for name, number in events.names.items()}
    found: list[AttentionCall] = []
    for spans in events.operators.values() if is_cpu else (events.gpu,):
        starts, ends, lines, names = _columns(spans)
        reached = -math.inf
        mine = np.flatnonzero(lines == attention)
        for at in mine[np.argsort(starts[mine], kind="stable")].tolist():
            name, start = of_name[int(names[at])], float(starts[at])
            inside = window[0] <= start < window[1]
            if start < reached or not inside or ATTENTION_HELPER.search(name):
                continue
            reached = float(ends[at])
            is_backward = BACKWARD.search(name) is not None
            found.append(AttentionCall(start=start * MICROSECOND, is_backward=is_backward))
    return tuple(sorted(found, key=lambda call: call.start))
