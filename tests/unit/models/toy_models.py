"""Toy language models, each with one way of handing something to its layers beside the hidden
states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCABULARY, LAYERS = 8, 40, 4
IDS = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, *others: Any, **named: Any) -> Any:
        return hidden + torch.tanh(self.linear(self.mix(hidden, *others, **named)))

    def mix(self, hidden: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """Looks back only: the mean of the tokens so far."""
        return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1).view(1, -1, 1)


class Body(nn.Module):
    """Holds what a toy has of these."""

    table: nn.Embedding
    layers: nn.ModuleList
    bias: nn.Embedding
    extra: nn.Embedding
    places: nn.Embedding
    scale: nn.Parameter


class Toy(nn.Module):
    """What a causal LM of transformers looks like from outside."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body()
        self.body.table = nn.Embedding(VOCABULARY, WIDTH)
        self.body.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, use_cache: bool = False) -> Any:
        hidden = self.run(self.body.table(input_ids), input_ids)
        logits = self.out(self.norm(hidden))
        return SimpleNamespace(
            logits=logits, loss=None if labels is None else self.loss(logits, labels)
        )

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(hidden.shape[:2])  # the same on any stage: no payload
        for layer in self.body.layers:
            hidden = layer(hidden, mask)
        return hidden

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class AddsLayer(Layer):
    def mix(self, hidden: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        mixed = super().mix(hidden)
        for other in (*others, *named.values()):
            mixed = mixed + other
        return mixed


class LearnedArgument(Toy):
    """A learned bias as the second argument, the ids' own embedding inside a keyword's tuple."""

    class layer(AddsLayer):
        def mix(
            self, hidden: torch.Tensor, bias: Any, pair: Any = None, **named: Any
        ) -> torch.Tensor:
            return super().mix(hidden, bias, pair[1])

    def __init__(self) -> None:
        super().__init__()
        self.body.bias = nn.Embedding(1, WIDTH)
        self.body.extra = nn.Embedding(VOCABULARY, WIDTH)

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        bias, extra = self.body.bias.weight.view(1, 1, -1) * 1, self.body.extra(input_ids)
        for layer in self.body.layers:
            hidden = layer(hidden, bias, pair=(torch.zeros(1), extra))
        return hidden


class LayersOwnInput(LearnedArgument):
    """Each layer has a part of the embedding of its own."""

    class layer(AddsLayer):
        pass

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        extra = self.body.extra(input_ids)
        for index, layer in enumerate(self.body.layers):
            hidden = layer(hidden, extra * (index + 1))
        return hidden


class Carried(Toy):
    """A layer returns what the next one takes; every other layer hands it on as it is."""

    class layer(Layer):
        def forward(self, hidden: torch.Tensor, _: Any, before: Any = None) -> Any:
            own = (
                hidden.mean(-1, keepdim=True)
                if before is None or int(before.numel()) % 2
                else before
            )
            out = super().forward(hidden)
            return (out + (0 if before is None else before), own, None)

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        before = None
        for layer in self.body.layers:
            hidden, before, _ = layer(hidden, None, before=before)
        return hidden


class SharedState(Toy):
    """Layer 1 leaves its input in a dictionary, layer 2 reads it."""

    class layer(Layer):
        def forward(self, hidden: torch.Tensor, shared: Any = None, index: int = 0) -> Any:
            if index == 1:
                shared["left"] = hidden
            return super().forward(hidden + shared["left"] if index == 2 else hidden)

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        shared: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.body.layers):
            hidden = layer(hidden, shared=shared, index=index)
        return hidden


class SharedParameters(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.body.layers[2].linear = self.body.layers[0].linear


class Remembers(Toy):
    """A layer adds what it saw in its last call: not a function of its arguments."""

    class layer(Layer):
        last: torch.Tensor | None = None

        def forward(self, hidden: torch.Tensor, mask: Any = None) -> Any:
            before, self.last = self.last, hidden.detach()
            return super().forward(hidden if before is None else hidden + before)


class LoopAdds(Toy):
    """The model's own loop adds an earlier layer's output to a later one's input."""

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for layer in self.body.layers:
            hidden = layer(hidden if len(outputs) < 3 else hidden + outputs[0])
            outputs.append(hidden)
        return hidden


class Loops(Toy):
    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        for layer in [*self.body.layers, *self.body.layers]:
            hidden = layer(hidden)
        return hidden


class Skips(Toy):
    """The last layer but one does not run."""

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.body.layers):
            hidden = hidden if index == 2 else layer(hidden)
        return hidden


class ConstantTable(Toy):
    """Positions from a table that is looked up without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body.places = nn.Embedding(16, WIDTH)
        self.body.places.weight.requires_grad_(False)

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            places = self.body.places(torch.arange(hidden.shape[1]))
        return super().run(hidden + places, input_ids)


class OwnParameter(Toy):
    """A parameter of the module that holds the decoder stack."""

    def __init__(self) -> None:
        super().__init__()
        self.body.scale = nn.Parameter(torch.rand(WIDTH))

    def run(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return super().run(hidden * self.body.scale, input_ids)


class SeesAll(Toy):
    class layer(Layer):
        def mix(self, hidden: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            return hidden.mean(1, keepdim=True) + hidden


class ShiftedLabels(Toy):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Smoothed(Toy):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits, labels) * 1.1
