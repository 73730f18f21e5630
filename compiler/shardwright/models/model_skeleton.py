"""A Hugging Face model cut into pipeline pieces with no code per family: context capture.

Every stage keeps the whole model as a skeleton in which only its own modules own storage. What
Hugging Face would hand a decoder layer (masks, rotary tables, positions) is found by running the
model's own forward once with pass-through layers; the embedding is that forward stopped at the
layers, the head is that forward with the layers returning the received hidden states. What such a
run on dummy ids cannot give is the payload: it crosses stages with the hidden states. Shapes: B
micro-batch, S sequence, H hidden.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from shardwright.models.model_graph import PipelineSplit
from shardwright.models.packed_attention import packed_attention_arguments, packed_document_masks

# The arguments of a call as one tree: positional ones by number, keywords by name, containers
# inside by path.
#
# A path is "2", "attention_mask" or "position_embeddings.0"; tuples, lists and dictionaries are
# walked, nothing else.


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


def leaves(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its path, in order."""
    args, kwargs = arguments
    yield from _leaves(args, "")
    yield from _leaves(kwargs, "")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple | list):
        items: Iterator[tuple[Any, Any]] = iter(enumerate(value))
    elif isinstance(value, dict):
        items = iter(value.items())
    else:
        yield path, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def replace_arguments(arguments: Arguments, values: Mapping[str, Any]) -> Arguments:
    """The same arguments with the values at these paths; containers beside a path are kept as they
    are."""
    args, kwargs = arguments
    for path, new in values.items():
        parts = path.split(".")
        if parts[0].isdecimal():
            args = _with(args, parts, new)
        else:
            kwargs = _with(kwargs, parts, new)
    return args, kwargs


def _with(container: Any, parts: list[str], new: Any) -> Any:
    head, rest = parts[0], parts[1:]
    if isinstance(container, dict):
        key = next(k for k in container if str(k) == head)
        return {**container, key: _with(container[key], rest, new) if rest else new}
    at = int(head)
    inner = _with(container[at], rest, new) if rest else new
    items = [*container[:at], inner, *container[at + 1 :]]
    if isinstance(container, list):
        return items
    return type(container)(*items) if hasattr(container, "_fields") else tuple(items)


def copy_containers(value: Any, memo: dict[int, Any]) -> Any:
    """A copy in which every mutable container is new, tensors and all else the same.

    memo: by id, so that one container handed to several layers stays one: that is how layers share
    state.
    """
    if isinstance(value, tuple):
        items = [copy_containers(v, memo) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list | MutableMapping):
        if id(value) not in memo:
            new = copy.copy(value)
            memo[id(value)] = new
            for key in range(len(new)) if isinstance(new, list) else list(new):
                new[key] = copy_containers(new[key], memo)
        return memo[id(value)]
    return value


Batch = Mapping[str, torch.Tensor]
"""What the forward of a model that sees takes, by name: `input_ids` (B, S) and the integers that
tell where a row holds pictures and how large they are. The first piece gets the pictures' values
beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What one piece hands the next.

    hidden: mostly (B, S, H). position_ids: (B, S) where documents are packed. payload: a value per
    Slot of the model,
        None where it is not there yet or no longer needed. batch: of a model that sees, what every
        piece is shown of the micro-batch; None where its shape is enough.
    """

    hidden: torch.Tensor
    position_ids: torch.Tensor | None = None
    payload: tuple[torch.Tensor | None, ...] = ()
    batch: Batch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor of the payload. source: (layer, place in its output tuple), or None where the
    embedding's side makes it. uses: the (layer, path of the argument) that are this tensor, in
    order."""

    source: tuple[int, int] | None
    uses: tuple[tuple[int, str], ...]


Context = tuple[dict[int, Arguments], tuple[Slot, ...]]
"""Per decoder layer that runs its arguments, the hidden states' own place included; and the payload
of the model.

A layer may stand in the list and not run: cross-attention to an image where there is none.
"""


Keywords = Callable[[str | None, torch.Tensor, torch.Tensor | None], dict[str, Any]]
"""(attention, ids (B, S), position ids where documents are packed) -> arguments of the model's
forward."""


class _Reached(Exception):
    """A layer was reached at which the forward is to stop."""


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Overrides one instance's forward; attributes and isinstance checks stay intact."""
    had = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if had is None:
            del module.forward
        else:
            module.forward = had


class Skeleton:
    """The model of one stage. Not an nn.Module, so that nothing here is registered with an engine.

    embedding_is_vocabulary_parallel: the input embedding here is cut over tensor ranks; runs with
    dummy ids skip its all-reduce. keywords: what the model's forward takes beside the ids. tokens:
    (B, S) of a micro-batch, or None where the hidden states begin with them.
    """

    def __init__(
        self, model: nn.Module, cut: PipelineSplit, tokens: tuple[int, int] | None = None
    ) -> None:
        self.model, self.cut, self.tokens = model, cut, tokens
        self.layers: list[nn.Module] = list(model.get_submodule(cut.stack).children())
        self.embedding_is_vocabulary_parallel = False
        self.keywords: Keywords = lambda attention, input_ids, position_ids: (
            packed_attention_arguments(attention, position_ids)
        )
        self._attention: str | None = getattr(
            getattr(model, "config", None), "_attn_implementation", None
        )
        self._contexts: list[
            tuple[tuple[Any, ...], torch.Tensor | None, Batch | None, Context]
        ] = []
        self._memo: dict[int, Any] = {}

    def begin(self) -> None:
        """A micro-batch enters the stage: state that layers share through an argument starts
        anew."""
        self._memo = {}

    def embed(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        beside: Batch | None = None,
    ) -> State:
        """(B, S) ids -> what layer 0 takes: the model's own forward, stopped where the layers would
        run.

        beside: what the forward of a model that sees takes beside the ids, pictures included; None
        for other models.
        """
        crossing = bool(self.cut.payload or self.cut.carried)
        calls, slots = self._pass_through(
            input_ids, position_ids, beside or {}, all_layers=crossing
        )
        hidden = self._hidden(*next(iter(calls.values())))
        values = {index: dict(leaves(call)) for index, call in calls.items()}
        payload = tuple(None if s.source else values[s.uses[0][0]][s.uses[0][1]] for s in slots)
        batch = None if beside is None else {"input_ids": input_ids, **without_images(beside)}
        return State(hidden=hidden, position_ids=position_ids, payload=payload, batch=batch)

    def decode(self, index: int, state: State) -> State:
        """Decoder layer `index`, with the arguments that Hugging Face would give it."""
        contexts, slots = self._context(state.hidden, state.position_ids, state.batch)
        if index not in contexts:
            return state
        values: dict[str, Any] = {self._hidden_path: state.hidden}
        for slot, value in zip(slots, state.payload, strict=True):
            values |= {path: value for layer, path in slot.uses if layer == index}
        args, kwargs = replace_arguments(copy_containers(contexts[index], self._memo), values)
        output = self.layers[index](*args, **kwargs)
        payload = tuple(
            output[slot.source[1]] if slot.source and slot.source[0] == index else value
            for slot, value in zip(slots, state.payload, strict=True)
        )
        needed = tuple(
            v if s.uses[-1][0] > index else None for s, v in zip(slots, payload, strict=True)
        )
        return replace(
            state, hidden=output[0] if self.cut.output_length else output, payload=needed
        )

    def head(self, state: State) -> torch.Tensor:
        """-> logits (B, S, V or this tensor rank's slice of V): final norm, head, scaling, soft
        caps."""
        with ExitStack() as stack:
            self._skip_collective_lookup(stack)
            for layer in self.layers:
                stack.enter_context(
                    replace_forward(layer, lambda *_, **__: self._output(state.hidden))
                )
            ids, beside = self._shown(state.hidden, state.batch)
            return self._run(ids, state.position_ids, beside).logits  # type: ignore[no-any-return]

    def release(self, owned: set[int], device: torch.device, dtype: torch.dtype) -> None:
        """Frees every parameter whose id is not in `owned`; moves the model-level buffers to
        `device`.

        The stubs have the right shape, device and the compute dtype, and one element of storage.
        """
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in owned:
                    stub = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
                    module._parameters[name] = nn.Parameter(stub, requires_grad=False)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def _run(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, beside: Batch
    ) -> Any:
        given = self.keywords(self._attention, input_ids, position_ids)
        with packed_document_masks(
            self.model, None if position_ids is None else given["position_ids"]
        ):
            return self.model(input_ids=input_ids, use_cache=False, **given, **beside)

    @property
    def _hidden_path(self) -> str:
        return str(
            self.cut.hidden_keyword
            if self.cut.hidden_position is None
            else self.cut.hidden_position
        )

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        position = self.cut.hidden_position
        return kwargs[self._hidden_path] if position is None else args[position]  # type: ignore[no-any-return]

    def _output(self, hidden: torch.Tensor, carried: dict[int, torch.Tensor] | None = None) -> Any:
        """`hidden` as a decoder layer would return it."""
        if not self.cut.output_length:
            return hidden
        return (hidden, *[(carried or {}).get(place) for place in range(1, self.cut.output_length)])

    def _shown(self, hidden: torch.Tensor, batch: Batch | None) -> tuple[torch.Tensor, Batch]:
        """The ids, and what stands beside them, of a forward that is to give a context: zeros where
        the shape is all that it depends on."""
        if batch is None:
            return torch.zeros(
                self.tokens or hidden.shape[:2], dtype=torch.long, device=hidden.device
            ), {}
        return batch["input_ids"], {
            name: value for name, value in batch.items() if name != "input_ids"
        }

    def _skip_collective_lookup(self, stack: ExitStack) -> None:
        if not self.embedding_is_vocabulary_parallel:
            return
        table: nn.Module = getattr(self.model, "get_input_embeddings")()  # noqa: B009
        weight = table.weight
        assert isinstance(weight, torch.Tensor)

        def shape_only(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(
                *ids.shape, weight.shape[1], dtype=weight.dtype, device=weight.device
            )

        stack.enter_context(replace_forward(table, shape_only))

    def _context(
        self, hidden: torch.Tensor, position_ids: torch.Tensor | None, batch: Batch | None = None
    ) -> Context:
        """Depends on shape, positions, the batch and the mode only. Two entries: recomputation
        comes back to an older micro-batch."""
        key = (
            self.tokens or tuple(hidden.shape[:2]),
            hidden.dtype,
            hidden.device,
            self.model.training,
        )
        for known, positions, shown, context in self._contexts:
            if known == key and _equal(positions, position_ids) and _equal_batches(shown, batch):
                return context
        with ExitStack() as stack, torch.no_grad():
            # A resumed run captures again where the first one had its context: neither may draw
            # from the stream.
            stack.enter_context(torch.random.fork_rng([hidden.device] if hidden.is_cuda else []))
            self._skip_collective_lookup(stack)
            ids, beside = self._shown(hidden, batch)
            context = self._pass_through(ids, position_ids, beside, all_layers=True)
        self._contexts = [(key, position_ids, batch, context), *self._contexts[:1]]
        return context

    def _pass_through(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        beside: Batch,
        *,
        all_layers: bool,
    ) -> Context:
        """Runs the model up to its first decoder layer, or the last one; none of them computes
        anything."""
        calls: dict[int, Arguments] = {}
        markers: dict[
            int, tuple[int, int]
        ] = {}  # id of a stand-in for a carried output -> where it came from
        kept: list[torch.Tensor] = []

        def record(index: int, /, *args: Any, **kwargs: Any) -> Any:
            if index in calls:
                raise RuntimeError(f"decoder layer {index} ran twice")
            calls[index] = (args, kwargs)
            if not all_layers or index == len(self.layers) - 1:
                raise _Reached  # the head may be stubs: go no further
            carried = {place: torch.empty(0) for place in self.cut.carried}
            kept.extend(carried.values())
            markers.update({id(marker): (index, place) for place, marker in carried.items()})
            return self._output(self._hidden(args, kwargs), carried)

        with ExitStack() as stack, suppress(_Reached):
            for index, layer in enumerate(self.layers):
                stack.enter_context(replace_forward(layer, partial(record, index)))
            self._run(input_ids, position_ids, beside)
        return calls, _slots(calls, markers, self.cut, self._hidden_path)


def without_images(inputs: Batch) -> dict[str, torch.Tensor]:
    """Their values are the floating ones, and the embedding's piece alone takes them."""
    return {name: value for name, value in inputs.items() if not value.is_floating_point()}


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _equal_batches(a: Batch | None, b: Batch | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(_equal(value, b[name]) for name, value in a.items())


def _slots(
    calls: dict[int, Arguments],
    markers: dict[int, tuple[int, int]],
    cut: PipelineSplit,
    hidden_path: str,
) -> tuple[Slot, ...]:
    """One slot a tensor, however many layers take it. The same in every run: it depends on the
    model's code only."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for layer, call in calls.items():
        for path, value in leaves(call):
            if path != hidden_path and (
                id(value) in markers or (path in cut.payload and torch.is_tensor(value))
            ):
                uses.setdefault(id(value), []).append((layer, path))
    return tuple(Slot(source=markers.get(at), uses=tuple(where)) for at, where in uses.items())


# What a model does behind its base model - head, scaling, soft caps - for some of the tokens at a
# time.


class OutputHead:
    """The model's own forward with its base model's answer put in place, so that no family needs
    code of its own.

    Shapes: B micro-batch, S sequence, C tokens of a chunk, H hidden, V vocabulary (or this tensor
    rank's slice).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Not `base_model` alone: an OPT's head calls its model's decoder.
        self._bases = [
            m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model
        ]
        self._base: nn.Module = model
        self._output: type[ModelOutput] = ModelOutput

    def hidden(self, run: Callable[[], Any]) -> torch.Tensor:
        """`run` calls the model -> the base model's last hidden states (B, S, H). The tail sees no
        token of them."""
        running: list[nn.Module] = []
        found: list[torch.Tensor] = []

        def without_tokens(
            base: nn.Module, inner: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            running.append(base)
            output = inner(*args, **kwargs)
            running.pop()
            if running:  # the outermost is what the head's module calls
                return output
            found.append(output.last_hidden_state)
            self._base, self._output = base, type(output)
            return self._with(output.last_hidden_state[:, :0])

        with ExitStack() as stack:
            for base in self._bases:
                stack.enter_context(
                    replace_forward(base, partial(without_tokens, base, base.forward))
                )
            run()
        if len(found) != 1:
            raise ValueError("its head is behind no module of its own")
        return found[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, C, H) -> (B, C, V). Each token's logits depend on its own hidden state alone:
        tests/zoo/chunks.py."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with replace_forward(self._base, lambda *_, **__: self._with(hidden)):
            # The class's own: an engine's model may have its instance's forward replaced by what
            # calls this.
            return type(self.model).forward(self.model, input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    def _with(self, hidden: torch.Tensor) -> ModelOutput:
        return self._output(last_hidden_state=hidden)


# Model types whose own loop computes something between the layers that no argument shows: one
# small adapter each.
#
# An adapter changes the forward of module instances, in place, so that the hidden states carry what
# the loop keeps; the model computes the same bits before and after. Everything else is found by the
# probe. New forwards are bound methods: a closure over a module would still mean the original in a
# copy of the model.


def _inkling2(model: Any) -> None:
    """The loop collects hidden states of earlier layers in `block_states`, which later layers and
    the final norm read. Here they travel in front of the hidden states: (B, S, blocks + 1, H)."""
    for layer in model.model.layers:
        layer.collects, layer.is_block_boundary = (
            layer.is_block_boundary,
            False,
        )  # the loop itself collects nothing
        layer.forward = MethodType(_inkling2_layer, layer)
    model.model.final_input.forward = MethodType(_inkling2_final, model.model.final_input)


def _inkling2_layer(
    layer: Any, hidden: torch.Tensor, _: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    carried = hidden if hidden.ndim == 4 else hidden.unsqueeze(-2)  # the embedding's has no blocks
    layer.is_block_boundary = layer.collects
    out = type(layer).forward(layer, carried[..., -1, :], carried[..., :-1, :], **kwargs)
    layer.is_block_boundary = False
    return torch.cat(
        [carried if layer.collects else carried[..., :-1, :], out.unsqueeze(-2)], dim=-2
    )


def _inkling2_final(module: Any, _: torch.Tensor, hidden: torch.Tensor) -> Any:
    carried = hidden if hidden.ndim == 4 else hidden.unsqueeze(-2)
    return type(module).forward(module, carried[..., :-1, :], carried[..., -1, :])


ADAPTERS: dict[str, Callable[[nn.Module], None]] = {
    "inkling2_text": _inkling2,
}


def _deepstack(decoder: Any, features: int) -> None:
    """The loop adds a tower's features behind each of its first layers, at the places of pictures.
    Here they travel beside the hidden states, each scattered over the row, (B, S, 1 + those not
    added yet, H): of one shape, however many pictures a row holds."""
    decoder.deepstack_features = features
    for index, layer in enumerate(decoder.layers[:features]):
        layer.deepstack_left = features - index
        layer.forward = MethodType(_deepstack_layer, layer)
    decoder.forward = MethodType(_deepstack_forward, decoder)


def _deepstack_forward(decoder: Any, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
    places, added = (
        kwargs.pop("visual_pos_masks", None),
        kwargs.pop("deepstack_visual_embeds", None),
    )
    rows = [torch.zeros_like(inputs_embeds)] * decoder.deepstack_features
    if added is not None:
        rows = [
            row.masked_scatter(places.unsqueeze(-1), each.to(row))
            for row, each in zip(rows, added, strict=True)
        ]
    carried = torch.stack([inputs_embeds, *rows], dim=-2)
    return type(decoder).forward(decoder, *args, inputs_embeds=carried, **kwargs)


def _deepstack_layer(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = type(layer).forward(layer, hidden[..., 0, :], *args, **kwargs) + hidden[..., 1, :]
    if layer.deepstack_left == 1:
        return out  # type: ignore[no-any-return]
    return torch.cat([out.unsqueeze(-2), hidden[..., 2:, :]], dim=-2)


def patch_forwards(model: Any) -> bool:
    """Before the model is probed, and before a pipeline is built of it. Whether its type has an
    adapter."""
    adapter = ADAPTERS.get(model.config.model_type)
    if adapter is not None:
        adapter(model)
    adapted = adapter is not None
    tower = getattr(model.config, "vision_config", None)
    features = len(getattr(tower, "deepstack_visual_indexes", None) or ())
    for module in list(model.modules()) if features else ():
        if "deepstack_visual_embeds" in inspect.signature(type(module).forward).parameters:
            _deepstack(module, features)
            adapted = True
    return adapted
