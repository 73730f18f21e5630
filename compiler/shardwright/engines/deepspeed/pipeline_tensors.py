"""What crosses stages, as DeepSpeed's PipelineEngine takes it: a tensor or a tuple of tensors of
constant shapes.

Hidden states alone, or with the position ids where documents are packed. Where the model has a
payload, everything is packed into two flat tensors, one floating and one integer: the engine asks a
gradient for every floating tensor and runs one backward pass for each (pipe/engine.py,
_exec_backward_pass), and the payload's rotary tables have none.
"""

from __future__ import annotations

import itertools
import math

import torch

from shardwright.models.model_skeleton import State

StageTensors = torch.Tensor | tuple[torch.Tensor, ...]
STATE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)


class StatePacker:
    """Of one way into a stage, or out of one: shapes are read from the first micro-batch and
    kept."""

    def __init__(self) -> None:
        self._header: torch.Tensor | None = None
        self._layout: list[tuple[torch.dtype, tuple[int, ...]] | None] | None = None

    def pack(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """The floating tensor in the widest dtype of its parts, so that none loses a bit; the
        integer one begins with the header: its length, and per part its dtype, number of dimensions
        and shape (dtype -1: there is none)."""
        parts = (state.hidden, state.position_ids, *state.payload)
        if self._header is None:
            numbers = [n for part in parts for n in _description(part)]
            self._header = torch.tensor([len(numbers) + 1, *numbers], device=state.hidden.device)
        there = [part for part in parts if part is not None]
        floating = [part for part in there if part.is_floating_point()]
        widest = max((part.dtype for part in floating), key=lambda dtype: torch.finfo(dtype).bits)
        integers = [part.reshape(-1).long() for part in there if not part.is_floating_point()]
        return (
            torch.cat([part.reshape(-1).to(widest) for part in floating]),
            torch.cat([self._header, *integers]),
        )

    def unpack(self, floating: torch.Tensor, integers: torch.Tensor) -> State:
        if self._layout is None:
            numbers = integers[: int(integers[0])].tolist()
            self._length, self._layout = len(numbers), _layout(numbers[1:])
        at = {True: 0, False: self._length}
        parts: list[torch.Tensor | None] = []
        for part in self._layout:
            if part is None:
                parts.append(None)
                continue
            dtype, shape = part
            flat, first = (
                (floating if dtype.is_floating_point else integers),
                at[dtype.is_floating_point],
            )
            at[dtype.is_floating_point] = first + math.prod(shape)
            parts.append(flat[first : first + math.prod(shape)].view(shape).to(dtype))
        hidden, position_ids, *payload = parts
        assert hidden is not None
        return State(hidden=hidden, position_ids=position_ids, payload=tuple(payload))


def _description(part: torch.Tensor | None) -> tuple[int, ...]:
    return (-1,) if part is None else (STATE_DTYPES.index(part.dtype), part.ndim, *part.shape)


def _layout(numbers: list[int]) -> list[tuple[torch.dtype, tuple[int, ...]] | None]:
    rest, layout = iter(numbers), []
    for dtype in rest:
        shape = () if dtype < 0 else tuple(itertools.islice(rest, next(rest)))
        layout.append(None if dtype < 0 else (STATE_DTYPES[dtype], shape))
    return layout
