"""Run a Hugging Face model as pipeline pieces with no code per family: context capture.

Each stage keeps the whole model as a skeleton in which only its own modules own storage. One run of
the model's forward with pass-through layers captures what each decoder layer is handed (masks,
rotary tables, positions). The embedding is that forward stopped at the layers; the head is that
forward with layers that return the received hidden states. The payload is what such a run on dummy
ids cannot give: it crosses stages with the hidden states. Shapes: B micro-batch, S sequence, H
hidden.
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

# The arguments of a call as one tree. A path is "2", "attention_mask" or "position_embeddings.0";
# only tuples, lists and dictionaries are walked.


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


def leaves(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every value that is not a container, in order."""
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
    """Return the arguments with the values at these paths replaced; other containers are kept."""
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
    """Copy every mutable container; tensors and other values are shared.

    memo: by id, so that one container handed to several layers stays one, as layers share state
        through it.
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
"""Inputs of a vision-language model's forward by name: `input_ids` (B, S) and the integers that
locate and size the images. The first piece also gets the pixel values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Hold what one piece hands to the next.

    hidden: hidden states, mostly (B, S, H).
    position_ids: (B, S) where documents are packed.
    payload: a value for each Slot of the model, None where it is not computed yet or no longer
        needed.
    batch: the micro-batch's integers for a vision-language model; None where its shape is enough.
    """

    hidden: torch.Tensor
    position_ids: torch.Tensor | None = None
    payload: tuple[torch.Tensor | None, ...] = ()
    batch: Batch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Describe one tensor of the payload.

    source: (layer, place in its output tuple), None where the embedding stage computes it.
    uses: (layer, argument path) of each argument that is this tensor, in order.
    """

    source: tuple[int, int] | None
    uses: tuple[tuple[int, str], ...]


Context = tuple[dict[int, Arguments], tuple[Slot, ...]]
"""Arguments of each decoder layer that runs (hidden states included), and the model's payload.

A listed layer may not run: cross-attention to an image without an image.
"""


Keywords = Callable[[str | None, torch.Tensor, torch.Tensor | None], dict[str, Any]]
"""(attention, ids (B, S), position ids where documents are packed) -> arguments of the model's
forward."""


class _Reached(Exception):
    """Stop the forward at the layer that was reached."""


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Override one instance's forward; attributes and isinstance checks stay intact."""
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
    """Hold the model of one stage. Not an nn.Module, so that no engine registers its parameters.

    embedding_is_vocabulary_parallel: whether tensor ranks split the input embedding; dummy runs
        skip its all-reduce.
    keywords: makes the forward's arguments beside the ids.
    tokens: (B, S) of a micro-batch, None where the hidden states start with them.
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
        """Start a micro-batch: state that layers share through an argument is reset."""
        self._memo = {}

    def embed(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        beside: Batch | None = None,
    ) -> State:
        """Return what layer 0 takes for ids (B, S): the model's forward, stopped at the layers.

        beside: other forward inputs of a vision-language model, images included.
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
        """Run decoder layer `index` with the arguments that Hugging Face would hand it."""
        contexts, slots = self.context(state.hidden, state.position_ids, state.batch)
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
        """Return logits (B, S, V or this tensor rank's slice): final norm, head, scaling, soft
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
        """Free every parameter whose id is not in `owned`; move the model-level buffers to
        `device`.

        Stubs keep shape, device and the compute dtype, with one element of storage.
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
        keywords = self.keywords(self._attention, input_ids, position_ids)
        with packed_document_masks(
            self.model, None if position_ids is None else keywords["position_ids"]
        ):
            return self.model(input_ids=input_ids, use_cache=False, **keywords, **beside)

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
        """Return `hidden` in the form of a decoder layer's output."""
        if not self.cut.output_length:
            return hidden
        return (hidden, *[(carried or {}).get(place) for place in range(1, self.cut.output_length)])

    def _shown(self, hidden: torch.Tensor, batch: Batch | None) -> tuple[torch.Tensor, Batch]:
        """Return ids and other inputs of a forward that captures a context: zeros where only the
        shape counts."""
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

    def context(
        self, hidden: torch.Tensor, position_ids: torch.Tensor | None, batch: Batch | None = None
    ) -> Context:
        """Capture or reuse the context, which depends only on shape, positions, batch and mode.

        Two entries are kept: recomputation returns to an older micro-batch.
        """
        key = (
            self.tokens or tuple(hidden.shape[:2]),
            hidden.dtype,
            hidden.device,
            self.model.training,
        )
        for known, positions, shown, context in self._contexts:
            if known == key and _equal(positions, position_ids) and _equal(shown, batch):
                return context
        with ExitStack() as stack, torch.no_grad():
            # A resumed run captures again: neither run may draw from the random stream.
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
        """Run the model up to its first or last decoder layer; no layer computes anything."""
        calls: dict[int, Arguments] = {}
        # id of a placeholder for a carried output -> where it came from
        markers: dict[int, tuple[int, int]] = {}
        placeholders: list[torch.Tensor] = []

        def record(index: int, /, *args: Any, **kwargs: Any) -> Any:
            if index in calls:
                raise RuntimeError(f"decoder layer {index} ran twice")
            calls[index] = (args, kwargs)
            if not all_layers or index == len(self.layers) - 1:
                raise _Reached  # the head may be stubs
            carried = {place: torch.empty(0) for place in self.cut.carried}
            placeholders.extend(carried.values())
            markers.update({id(marker): (index, place) for place, marker in carried.items()})
            return self._output(self._hidden(args, kwargs), carried)

        with ExitStack() as stack, suppress(_Reached):
            for index, layer in enumerate(self.layers):
                stack.enter_context(replace_forward(layer, partial(record, index)))
            self._run(input_ids, position_ids, beside)
        # One slot per tensor, however many layers take it; only the model's code decides them.
        uses: dict[int, list[tuple[int, str]]] = {}
        for layer_index, call in calls.items():
            for path, value in leaves(call):
                if path != self._hidden_path and (
                    id(value) in markers or (path in self.cut.payload and torch.is_tensor(value))
                ):
                    uses.setdefault(id(value), []).append((layer_index, path))
        slots = (Slot(source=markers.get(id_), uses=tuple(own)) for id_, own in uses.items())
        return calls, tuple(slots)


def parameter_aliases(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def without_images(inputs: Batch) -> dict[str, torch.Tensor]:
    """Drop the floating-point inputs (pixel values), which only the embedding stage takes."""
    return {name: value for name, value in inputs.items() if not value.is_floating_point()}


def _equal(a: torch.Tensor | Batch | None, b: torch.Tensor | Batch | None) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(value, b[name]) for name, value in a.items())
    return a is b


# The output head (final norm, head, scaling, soft caps) applied to some tokens at a time.


class OutputHead:
    """Run the model's own forward with given base-model outputs, so that no family needs its own
    code.

    Shapes: B micro-batch, S sequence, C tokens of a chunk, H hidden, V vocabulary (or this tensor
        rank's slice).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # Not only `base_model`: OPT's head calls its model's decoder.
        self._bases = [
            m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model
        ]
        self._base: nn.Module = model
        self._output: type[ModelOutput] = ModelOutput

    def hidden(self, run: Callable[[], Any]) -> torch.Tensor:
        """Return the base model's last hidden states (B, S, H) when `run` calls the model; the head
        gets no token."""
        running: list[nn.Module] = []
        hidden_states: list[torch.Tensor] = []

        def without_tokens(
            base: nn.Module, inner: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            running.append(base)
            output = inner(*args, **kwargs)
            running.pop()
            if running:  # the head's module calls the outermost one
                return output
            hidden_states.append(output.last_hidden_state)
            self._base, self._output = base, type(output)
            return self._with(output.last_hidden_state[:, :0])

        with ExitStack() as stack:
            for base in self._bases:
                stack.enter_context(
                    replace_forward(base, partial(without_tokens, base, base.forward))
                )
            run()
        if len(hidden_states) != 1:
            raise ValueError("its head is behind no module of its own")
        return hidden_states[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (B, C, V) for hidden states (B, C, H); each token's depend on its own state
        only (tests/zoo/chunked_loss.py)."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with replace_forward(self._base, lambda *_, **__: self._with(hidden)):
            # The class's forward: an engine may have replaced the instance's by a caller of this.
            return type(self.model).forward(self.model, input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    def _with(self, hidden: torch.Tensor) -> ModelOutput:
        return self._output(last_hidden_state=hidden)


# Model types whose loop computes something between the layers that no argument shows: one adapter
# each, which makes the hidden states carry it. The model computes the same bits with its adapter.
# New forwards are bound methods: a closure over a module would refer to the original in a copy of
# the model.


def _inkling2(model: Any) -> None:
    """Carry the hidden states of earlier layers in front: (B, S, blocks + 1, H).

    The loop collects them in `block_states`, which later layers and the final norm read.
    """
    for layer in model.model.layers:
        # The loop itself collects nothing.
        layer.collects, layer.is_block_boundary = layer.is_block_boundary, False
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
    """Carry the vision encoder's features that the loop adds after the first layers: (B, S, 1 +
    features left, H).

    Each is scattered over the sequence, so that the shape does not depend on the number of images.
    """
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
    features = [torch.zeros_like(inputs_embeds)] * decoder.deepstack_features
    if added is not None:
        features = [
            zeros.masked_scatter(places.unsqueeze(-1), each.to(zeros))
            for zeros, each in zip(features, added, strict=True)
        ]
    carried = torch.stack([inputs_embeds, *features], dim=-2)
    return type(decoder).forward(decoder, *args, inputs_embeds=carried, **kwargs)


def _deepstack_layer(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out = type(layer).forward(layer, hidden[..., 0, :], *args, **kwargs) + hidden[..., 1, :]
    if layer.deepstack_left == 1:
        return out  # type: ignore[no-any-return]
    return torch.cat([out.unsqueeze(-2), hidden[..., 2:, :]], dim=-2)


def patch_forwards(model: Any) -> bool:
    """Apply the type's adapter, and return whether it has one; call it before probing or building a
    pipeline."""
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
