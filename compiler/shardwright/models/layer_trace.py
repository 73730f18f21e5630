"""Measure what each layer computes and saves by running the model's modules on fake tensors.

Contexts (masks, rotary tables, positions) are captured by models/model_skeleton.py with small real
tensors and one-element parameters: a causal mask needs values, which fake tensors lack. Then each
distinct layer runs forward and backward with fake parameters of full size. Shape letters: S
sequence length (one sequence), H hidden size.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from transformers import PretrainedConfig, PreTrainedModel

from shardwright.models.hf_config import first_size
from shardwright.models.model_graph import PipelineSplit, SavedActivations
from shardwright.models.model_skeleton import Arguments, Skeleton, State
from shardwright.models.trace_meter import PieceTrace, ShardedBytes, measure_piece, tensors_in
from shardwright.recipe.literal_types import CHECKPOINTING, Checkpointing

BASE_LENGTH = 128
"""Layers are traced at this length and twice this length: two lengths determine a S + b S^2."""
LOOP_LENGTH = 16
"""The base length for recurrences, which run operator by operator over the sequence."""

MOST_CHARACTERS = 200
"""Longest reason why a layer could not be traced."""

_WINDOWS = ("sliding_window", "attention_chunk_size")
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
)
TRACED_DTYPES = {
    4: torch.float32,
    2: torch.bfloat16,
}  # FLOPs are counted in the first: some types cannot run in half precision


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """Hold what one layer computes and saves; FLOPs of a sequence are per_token S + per_pair S^2.

    forward, backward: (per_token, per_pair).
    attention_module_per_token: forward FLOPs inside the attention module.
    kept: saved activations.
    """

    forward: tuple[int, int]
    attention_module_per_token: int
    backward: tuple[int, int]
    kept: tuple[SavedActivations, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTrace:
    """Hold the traces of all layers.

    layers: embedding, decoder layers, head; a reason where the layer's code needs values, which
        fake tensors lack.
    context: bytes of the arguments handed to all decoder layers, once per micro-batch on each
        stage.
    """

    layers: tuple[LayerTrace | str, ...]
    context: tuple[SavedActivations, ...]


def trace_model(model: PreTrainedModel, cut: PipelineSplit, attention_module: str) -> ModelTrace:
    """Trace a model built on the meta device with the attention that will run; it cannot be used
    afterwards.

    No layer is traced where the embedding or the masks cannot run on stubs.
    """
    try:
        # torch also logs a stack for everything that it raises.
        with patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
            try:
                return _trace(model, cut, attention_module, 1)
            except IndexError:  # positions that start after a padding index exceed the table
                return _trace(model, cut, attention_module, 2)
    except Exception as error:  # a type's code may raise anything
        count = len(list(model.get_submodule(cut.stack).children())) + 2
        return ModelTrace(layers=(error_reason(error),) * count, context=())


def _trace(
    model: PreTrainedModel, cut: PipelineSplit, attention_module: str, shorter: int
) -> ModelTrace:
    """Trace at lengths divided by `shorter`."""
    model.train()
    text = model.config.get_text_config()
    stub_parameters(model, torch.float32)
    length = LOOP_LENGTH
    if not _loops(model, cut):
        # A multiple of state-space chunks, and within the model's positions.
        length = max([BASE_LENGTH, *(size for name in _CHUNKS if (size := _size(text, name)))])
        positions = (size for name in _POSITIONS if (size := _size(text, name)))
        length = max(1, min(length, min(positions, default=2 * length) // 2))
    base = length // shorter
    window = min((size for name in _WINDOWS if (size := _size(text, name))), default=0)
    # sdpa builds no mask up to the window's length, and one beyond it.
    regimes = ((0, 4 * base), (window + 1, base // 2)) if window else ((0, 0),)
    first: list[tuple[PieceTrace | str, PieceTrace | str]] = []
    kept: list[list[SavedActivations]] = [
        [] for _ in range(len(list(model.get_submodule(cut.stack).children())) + 2)
    ]
    context: list[SavedActivations] = []
    for element_bytes, dtype in TRACED_DTYPES.items():
        stub_parameters(model, dtype)
        for from_length, window_here in regimes:
            with _window(text, window_here):
                short, long = (
                    _Run(model, cut, attention_module, length, dtype, flops=not first)
                    for length in (base, 2 * base)
                )
            pairs = list(zip(short.pieces, long.pieces, strict=True))
            first = first or pairs
            for entries, (a, b) in zip(kept, pairs, strict=True):
                if isinstance(a, PieceTrace) and isinstance(b, PieceTrace):
                    for mode, (x, y) in zip(
                        CHECKPOINTING, zip(a.kept, b.kept, strict=True), strict=True
                    ):
                        _add(entries, _kept(base, x, y, mode, element_bytes, from_length))
            a_context, b_context = (
                ShardedBytes(whole=run.context_bytes, divided=0) for run in (short, long)
            )
            _add(context, _kept(base, a_context, b_context, "none", element_bytes, from_length))
    layers: list[LayerTrace | str] = []
    for (a, b), entries in zip(first, kept, strict=True):
        if isinstance(a, str) or isinstance(b, str):
            layers.append(a if isinstance(a, str) else str(b))
            continue
        attention = _fit(base, a.attention_forward_flops, b.attention_forward_flops)
        layers.append(
            LayerTrace(
                forward=_fit(base, a.forward_flops, b.forward_flops),
                attention_module_per_token=attention[0],
                backward=_fit(base, a.backward_flops, b.backward_flops),
                kept=tuple(entries),
            )
        )
    return ModelTrace(layers=tuple(layers), context=tuple(context))


def _loops(model: PreTrainedModel, cut: PipelineSplit) -> bool:
    """Return whether a longer sequence means more operators."""
    short, long = (
        _Run(model, cut, "", length, torch.float32, flops=False)
        for length in (LOOP_LENGTH, 2 * LOOP_LENGTH)
    )
    return any(
        isinstance(a, PieceTrace) and isinstance(b, PieceTrace) and a.saves != b.saves
        for a, b in zip(short.pieces, long.pieces, strict=True)
    )


class _Run:
    """Run the model's pieces on fake tensors, at one length and precision; layers of equal shapes
    run once."""

    def __init__(
        self,
        model: PreTrainedModel,
        cut: PipelineSplit,
        attention_module: str,
        length: int,
        dtype: torch.dtype,
        *,
        flops: bool,
    ) -> None:
        """Capture the contexts and trace all pieces.

        flops: whether to count them.
        """
        self.attention_module, self.flops = attention_module, flops
        self.skeleton = Skeleton(model, cut, tokens=(1, length))
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.ids = torch.zeros(1, length, dtype=torch.long)
        with torch.no_grad():
            real = self.skeleton.embed(self.ids, None)
        self.contexts, self.slots = self.skeleton.context(real.hidden, None)
        own_hidden = {id(self.skeleton._hidden(*call)) for call in self.contexts.values()}
        handed = [
            *(
                t
                for call in self.contexts.values()
                for t in tensors_in(call)
                if id(t) not in own_hidden
            ),
            *tensors_in(real.payload),
        ]
        # The converter is memoized: a layer that gets the real tensor works on this fake one.
        self.shared = [*handed, *(self.fake.from_tensor(t) for t in handed)]
        self.payload = list(real.payload) or [None] * len(self.slots)
        with self.fake:
            self.hidden = torch.empty(
                real.hidden.shape, dtype=real.hidden.dtype, requires_grad=True
            )
        self.outside = [
            m for name, m in model.named_modules() if not f"{name}.".startswith(f"{cut.stack}.")
        ]

        self.context_bytes = sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in handed}.values()
        )
        layers = self.skeleton.layers

        def embed(_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            state = self.skeleton.embed(self.ids, None)
            return state.hidden, *state.payload

        def head(hidden: torch.Tensor) -> torch.Tensor:
            return self.skeleton.head(State(hidden=hidden))

        pieces: list[PieceTrace | str] = [self._piece(self.outside, embed, None, layer=None)]
        known: dict[str, PieceTrace | str] = {}
        for index, layer in enumerate(layers):
            key = shape_signature(layer, self.contexts.get(index))
            if key not in known:
                known[key] = self._piece(
                    list(layer.modules()), partial(self._decode, index), self.hidden, layer=layer
                )
            pieces.append(known[key])
        pieces.append(
            self._piece(self.outside, head, self.hidden, layer=None, starts_after=layers[-1])
        )
        self.pieces = pieces

    def _piece(
        self,
        modules: list[nn.Module],
        run: Any,
        given: torch.Tensor | None,
        *,
        layer: nn.Module | None,
        **options: Any,
    ) -> PieceTrace | str:
        """Measure one piece; return the reason where it cannot be measured."""
        attention = "" if layer is None else self.attention_module
        with fake_parameters(modules, self.fake) as parameters:
            known, width = [*parameters, *self.shared, self.ids], self.hidden.numel()
            options |= {
                "layer": layer,
                "attention_module": attention,
                "known": known,
                "width": width,
            }
            try:
                return measure_piece(run, given, count_flops=self.flops, **options)
            except Exception as error:  # a type's code may need values
                return error_reason(error)

    def _decode(self, index: int, given: torch.Tensor | None) -> torch.Tensor:
        assert given is not None
        for shared_state in self.skeleton._memo.values():  # what earlier layers left in it
            for key in (
                range(len(shared_state)) if isinstance(shared_state, list) else list(shared_state)
            ):
                shared_state[key] = pytree.tree_map_only(torch.Tensor, _detach, shared_state[key])
        with self.fake:
            after = self.skeleton.decode(index, State(hidden=given, payload=tuple(self.payload)))
        for place, slot in enumerate(self.slots):
            if slot.source and slot.source[0] == index:
                self.payload[place] = _detach(after.payload[place])
        return after.hidden


def error_reason(error: Exception) -> str:
    """Describe an exception in one short line without addresses, so that it is the same each
    time."""
    lines = str(error).splitlines() or [""]
    return re.sub(r"0x[0-9a-f]+", "0x...", f"{type(error).__name__}: {lines[0]}")[:MOST_CHARACTERS]


def _detach(made: torch.Tensor | None) -> torch.Tensor | None:
    """Detach what one layer hands another: a backward pass frees its graph."""
    return made if made is None or made.grad_fn is None else made.detach().requires_grad_()


def shape_signature(layer: nn.Module, arguments: Arguments | None) -> str:
    """Return a string that is equal for layers with equal classes, switches, parameter shapes and
    arguments."""
    parts = [
        (
            type(m).__name__,
            m.extra_repr(),
            [(n, v) for n, v in vars(m).items() if isinstance(v, bool | str)],
            [(n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)],
        )
        for m in layer.modules()
    ]
    leaves = [
        (
            str(path),
            tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__,
            getattr(v, "dtype", v is True),
        )
        for path, v in pytree.tree_leaves_with_path(arguments)
    ]
    return repr((parts, leaves))


def stub_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters by one-element stubs on the CPU, and unfilled (meta) buffers by zeros."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            stub = torch.zeros((), dtype=dtype).expand(parameter.shape)
            module._parameters[name] = nn.Parameter(stub, requires_grad=False)
        for store in (module._buffers, vars(module)):
            for name, value in list(store.items()):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    store[name] = torch.zeros(value.shape, dtype=value.dtype)


@contextmanager
def fake_parameters(modules: list[nn.Module], fake: FakeTensorMode) -> Iterator[list[torch.Tensor]]:
    """Replace the modules' parameters by fake ones of full size within the context; yield them."""
    before = [(m, n, p) for m in modules for n, p in m.named_parameters(recurse=False)]
    made: list[torch.Tensor] = []
    try:
        for module, name, stub in before:
            with fake:
                module._parameters[name] = nn.Parameter(torch.empty(stub.shape, dtype=stub.dtype))
            made.append(module._parameters[name])  # type: ignore[arg-type]
        yield made
    finally:
        for module, name, stub in before:
            module._parameters[name] = stub


@contextmanager
def _window(config: PretrainedConfig, size: int) -> Iterator[None]:
    """Set the model's attention windows to `size` within the context, where it has one and size is
    not 0."""
    before = {name: value for name in _WINDOWS if size and (value := _size(config, name))}
    try:
        for name in before:
            setattr(config, name, size)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _size(config: PretrainedConfig, name: str) -> int:
    """Return a positive size, 0 where there is none."""
    return max(0, first_size(config, name) or 0)


def _fit(base: int, short: int, long: int) -> tuple[int, int]:
    """Return (a, b) with a S + b S^2 = short at S = base, and = long at S = 2 base."""
    per_pair = max(0, round((long - 2 * short) / (2 * base * base)))
    return max(0, round((long - 4 * base * base * per_pair) / (2 * base))), per_pair


def _kept(
    base: int,
    short: ShardedBytes,
    long: ShardedBytes,
    checkpointing: Checkpointing,
    element_bytes: int,
    from_length: int,
) -> SavedActivations:
    whole, divided = _fit(base, short.whole, long.whole), _fit(base, short.divided, long.divided)
    return SavedActivations(
        checkpointing=checkpointing,
        element_bytes=element_bytes,
        from_length=from_length,
        unsharded_bytes_per_token=whole[0],
        unsharded_bytes_per_token_pair=whole[1],
        sharded_bytes_per_token=divided[0],
        sharded_bytes_per_token_pair=divided[1],
    )


def _add(entries: list[SavedActivations], entry: SavedActivations) -> None:
    """Add an entry unless a shorter regime has the same one."""
    if replace(entry, from_length=0) not in entries:
        entries.append(entry)
