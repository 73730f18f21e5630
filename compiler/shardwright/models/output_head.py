"""What a model does behind its base model - head, scaling, soft caps - for some of the tokens at a
time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from shardwright.models.model_skeleton import replace_forward


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
