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

Context = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a decoder layer after the hidden states."""


class _Reached(Exception):
    """Layer 0 was reached: carries what it was handed."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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
    """The model of one stage. Not an nn.Module, so that nothing here is registered with an engine."""

    def __init__(self, model: nn.Module, layers_module: str) -> None:
        self.model = model
        self.layers: list[nn.Module] = list(model.get_submodule(layers_module).children())
        self._contexts: list[tuple[tuple[Any, ...], torch.Tensor | None, list[Context]]] = []

    def embed(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S) ids -> (B, S, H): the model's own forward, stopped where layer 0 would begin."""

        def stop(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise _Reached(hidden)

        with _forward_replaced(self.layers[0], stop):
            try:
                self._run(input_ids, position_ids)
            except _Reached as reached:
                return reached.hidden
        raise RuntimeError("the model's forward never reached its first decoder layer")

    def decode(self, index: int, hidden: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Decoder layer `index` on (B, S, H), with the arguments that Hugging Face would give it."""
        args, kwargs = self._context(hidden, position_ids)[index]
        return self.layers[index](hidden, *args, **kwargs)  # type: ignore[no-any-return]

    def head(self, hidden: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """(B, S, H) -> logits (B, S, V or this tensor rank's slice of V): final norm, head, scaling, soft caps."""

        def finish(_: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return hidden

        with ExitStack() as stack:
            self._skip_embedding(stack, hidden)
            for layer in self.layers[:-1]:
                stack.enter_context(_forward_replaced(layer, lambda h, *a, **k: h))
            stack.enter_context(_forward_replaced(self.layers[-1], finish))
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
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)

    def _edge(self, getter: str) -> nn.Module:
        """Hugging Face's own accessor of the input or output embedding."""
        return getattr(self.model, getter)()  # type: ignore[no-any-return]

    def _dummy_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)

    def _skip_embedding(self, stack: ExitStack, hidden: torch.Tensor) -> None:
        """The lookup of dummy ids is nothing but shape: no gather, and no all-reduce where it is cut."""
        zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand(hidden.shape)
        stack.enter_context(_forward_replaced(self._edge("get_input_embeddings"), lambda *a, **k: zero))

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

        def record(h: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            contexts.append((args, kwargs))
            return h

        with ExitStack() as stack:
            self._skip_embedding(stack, hidden)
            for layer in self.layers:
                stack.enter_context(_forward_replaced(layer, record))
            # The skeleton's forward goes on to the head: stop before it, where there may be stubs only.
            stack.enter_context(_forward_replaced(self._edge("get_output_embeddings"), lambda h, *a, **k: h))
            self._run(self._dummy_ids(hidden), position_ids)
        if len(contexts) != len(self.layers):
            raise RuntimeError(f"{len(contexts)} of {len(self.layers)} decoder layers ran once, in order")
        return contexts
