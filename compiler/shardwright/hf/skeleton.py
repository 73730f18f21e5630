"""A Hugging Face model cut into pipeline pieces with no code per family: context capture.

Every stage keeps the whole model as a skeleton in which only its own modules own storage. What Hugging Face would hand
a decoder layer (masks, rotary tables, positions) is found by running the model's own forward once with pass-through
layers; the embedding is that forward stopped at layer 0, the head is that forward with the last layer returning the
received hidden states. Shapes: B micro-batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.ir.cut import Cut

Context = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a decoder layer, the hidden states' own place included."""


class _Reached(Exception):
    """A layer was reached at which the forward is to stop: carries the hidden states that it was handed."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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

    lookup_is_collective: the input embedding here is cut over tensor ranks; runs with dummy ids skip its all-reduce.
    """

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self.model, self.cut = model, cut
        self.layers: list[nn.Module] = list(model.get_submodule(cut.stack).children())
        self.lookup_is_collective = False
        self._contexts: list[tuple[tuple[Any, ...], torch.Tensor | None, list[Context]]] = []

    def embed(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S) ids -> (B, S, H): the model's own forward, stopped where layer 0 would begin."""

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(self._hidden(args, kwargs))

        with forward_replaced(self.layers[0], stop):
            try:
                self._run(input_ids, position_ids)
            except _Reached as reached:
                return reached.hidden
        raise RuntimeError("the model's forward never reached its first decoder layer")

    def decode(self, index: int, hidden: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Decoder layer `index` on (B, S, H), with the arguments that Hugging Face would give it."""
        args, kwargs = self._context(hidden, position_ids)[index]
        if self.cut.hidden_position is not None:
            at = self.cut.hidden_position
            args = (*args[:at], hidden, *args[at + 1 :])
        else:
            kwargs = {**kwargs, str(self.cut.hidden_keyword): hidden}
        output = self.layers[index](*args, **kwargs)
        return output[0] if self.cut.output_length else output  # type: ignore[no-any-return]

    def head(self, hidden: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S, H) -> logits (B, S, V or this tensor rank's slice of V): final norm, head, scaling, soft caps."""

        def passing(*args: Any, **kwargs: Any) -> Any:
            return self._output(self._hidden(args, kwargs))

        def finish(*args: Any, **kwargs: Any) -> Any:
            return self._output(hidden)

        with ExitStack() as stack:
            self._skip_collective_lookup(stack)
            for layer in self.layers[:-1]:
                stack.enter_context(forward_replaced(layer, passing))
            stack.enter_context(forward_replaced(self.layers[-1], finish))
            return self._run(self._dummy_ids(hidden), position_ids).logits  # type: ignore[no-any-return]

    def release(self, owned: set[int], device: torch.device, dtype: torch.dtype) -> None:
        """Frees every parameter whose id is not in `owned`; moves the model-level buffers to `device`.

        The stubs have the right shape, device and the compute dtype, and one element of storage.
        """
        for module in self.model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in owned:
                    stub = torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)
                    module._parameters[name] = nn.Parameter(stub, requires_grad=False)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def _run(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> Any:
        positions = {} if position_ids is None else {"position_ids": position_ids}
        return self.model(input_ids=input_ids, use_cache=False, **positions)

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self.cut.hidden_position is not None:
            return args[self.cut.hidden_position]  # type: ignore[no-any-return]
        return kwargs[str(self.cut.hidden_keyword)]  # type: ignore[no-any-return]

    def _output(self, hidden: torch.Tensor) -> Any:
        """`hidden` as a decoder layer would return it."""
        return (hidden, *[None] * (self.cut.output_length - 1)) if self.cut.output_length else hidden

    def _dummy_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)

    def _skip_collective_lookup(self, stack: ExitStack) -> None:
        if not self.lookup_is_collective:
            return
        table: nn.Module = getattr(self.model, "get_input_embeddings")()  # noqa: B009
        weight = table.weight
        assert isinstance(weight, torch.Tensor)

        def shape_only(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(*ids.shape, weight.shape[1])

        stack.enter_context(forward_replaced(table, shape_only))

    def _context(self, hidden: torch.Tensor, position_ids: torch.Tensor | None) -> list[Context]:
        """Depends on shape and positions only. Two entries: recomputation comes back to an older micro-batch."""
        key = (tuple(hidden.shape), hidden.dtype, hidden.device)
        for known, positions, contexts in self._contexts:
            if known == key and (
                positions is position_ids
                or (positions is not None and position_ids is not None and torch.equal(positions, position_ids))
            ):
                return contexts
        contexts = self._capture(hidden, position_ids)
        self._contexts = [(key, position_ids, contexts), *self._contexts[:1]]
        return contexts

    @torch.no_grad()
    def _capture(self, hidden: torch.Tensor, position_ids: torch.Tensor | None) -> list[Context]:
        contexts: list[Context] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            contexts.append((args, kwargs))
            if len(contexts) == len(self.layers):
                raise _Reached(self._hidden(args, kwargs))  # the head may be stubs: go no further
            return self._output(self._hidden(args, kwargs))

        with ExitStack() as stack:
            self._skip_collective_lookup(stack)
            for layer in self.layers:
                stack.enter_context(forward_replaced(layer, record))
            try:
                self._run(self._dummy_ids(hidden), position_ids)
            except _Reached:
                return contexts
        raise RuntimeError(f"{len(contexts)} of {len(self.layers)} decoder layers ran once, in order")
