"""Patch torch so that Megatron-Core runs without a GPU, once a process, before megatron is
imported.

Megatron names "cuda" in many places; each of them gets the CPU here. Only ranks of a CPU plan and
the compile's own check processes call this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_NAMED = ("torch.", "torch.cuda.")


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


# A tensor is pinned in host memory alone: HybridDeviceOptimizer's masters, which are copies of it,
# are those that its optimizer on the host updates.
_KEEPS_PINNED = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "shardwright_pinned", False)


def _as_pinned(tensor: Any) -> Any:
    tensor.shardwright_pinned = True
    return tensor


class _CudaToCpuMode(TorchFunctionMode):
    """Replace CUDA devices by the CPU in every call of torch.

    Tensors report that they are on a GPU, where Megatron chooses a code path by that.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # A getter is a new object each time that it is looked up: `==`, not `is`.
        if function == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not _is_pinned(args[0])
        if function == torch.Tensor.pin_memory:
            return _as_pinned(args[0])
        if function == torch.Tensor.cuda:
            return args[0]
        if function in _KEEPS_PINNED and _is_pinned(args[0]):
            return _as_pinned(function(*args, **kwargs))
        if function == torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace(*_NAMED)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if any(_is_cuda(value) for value in args[1:]):
            args = (args[0], *(_CPU if _is_cuda(value) else value for value in args[1:]))
        return function(*args, **kwargs)


class _NoOpStream:
    """Stand in for a stream or an event: work on a CPU is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoOpStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _done

    def record_event(self, event: _NoOpStream | None = None) -> _NoOpStream:
        return event or _NoOpStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Generators(dict[Any, torch.Generator]):
    """Return the CPU's generator for every device."""

    def __missing__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def _nothing() -> Callable[..., None]:
    """Return a new no-op function; torch.compile's tables know functions by identity."""
    return lambda *args, **kwargs: None


def _skip_compile(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Stand in for torch.compile, whose C++ compiler would start for each elementwise chain."""
    return function if function is not None else lambda f: f


def _gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return gloo's all-gather for pieces of different length, padded to the longest."""

    def all_gather(
        pieces: list[torch.Tensor], own: torch.Tensor, group: Any = None, **more: Any
    ) -> Any:
        longest = max(len(piece) for piece in pieces)
        if all(len(piece) == longest for piece in pieces):
            return gather(pieces, own, group=group, **more)
        rows = own.shape[1:]
        full = [own.new_empty(longest, *rows) for _ in pieces]
        gather(full, torch.cat((own, own.new_zeros(longest - len(own), *rows))), group=group)
        for piece, padded in zip(pieces, full, strict=True):
            piece.copy_(padded[: len(piece)])
        return None

    return all_gather


def _scatter_uneven(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return gloo's reduce-scatter for pieces of different length, as an all-reduce."""

    def reduce_scatter(
        own: torch.Tensor, pieces: list[torch.Tensor], group: Any = None, **more: Any
    ) -> Any:
        if all(len(piece) == len(own) for piece in pieces):
            return scatter(own, pieces, group=group, **more)
        whole = torch.cat(list(pieces))
        torch.distributed.all_reduce(whole, group=group)
        own.copy_(whole.split([len(piece) for piece in pieces])[torch.distributed.get_rank(group)])
        return None

    return reduce_scatter


def _within(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, called with the mode on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def set_megatron_device(device: torch.device) -> None:
    """Set the device on which Megatron's modules allocate memory; `meta` allocates none."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: device


def patch_torch_for_cpu() -> None:
    """Patch torch for the rest of the process."""
    torch.Tensor.record_stream = _nothing()  # type: ignore[method-assign]  # it looks at the stream's type first
    torch.compile = _skip_compile  # type: ignore[assignment]
    cuda: Any = torch.cuda
    if getattr(cuda, "shardwright_on_cpu", False):
        return
    cuda.shardwright_on_cpu = True
    cuda.current_device = lambda: _CPU
    for owner, names in (
        (cuda, ("set_device", "synchronize", "empty_cache", "_lazy_init")),
        (cuda.nvtx, ("range_push", "range_pop")),
    ):
        for name in names:
            setattr(owner, name, _nothing())
    ranks: Any = torch.distributed
    ranks.all_gather, ranks.reduce_scatter = (
        _gather_uneven(ranks.all_gather),
        _scatter_uneven(ranks.reduce_scatter),
    )
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.Stream = cuda.Event = _NoOpStream
    cuda.current_stream = cuda.default_stream = _NoOpStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.default_generators = _Generators()
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device="cuda": torch.get_rng_state()
        module.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    here = _CudaToCpuMode()
    # torch sets a mode aside for the length of a call that it sees, which a backward pass is: what
    # is recomputed inside of it needs the mode, too.
    autograd: Any = torch.autograd
    autograd._engine_run_backward = _within(here, autograd._engine_run_backward)
    ExitStack().enter_context(here)
