"""Where a Hugging Face model can be cut into pipeline pieces: found by running it, never written by
hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

LayerRange = tuple[int, int]
"""First and last number of neighbouring decoder layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSplit:
    """stack: dotted path of the ModuleList whose children run once each, in order.

    hidden_position, hidden_keyword: which argument of a decoder layer is the hidden states; one of
    the two. output_length: 0 where a layer returns the hidden states alone, else the length of the
    tuple that starts with them. payload: paths of the decoder layers' arguments that the
    embedding's side computes and that cross stages with the
        hidden states: "2" is the third positional one, "position_embeddings.0" lies inside a
        keyword's tuple.
    carried: places in a layer's output tuple that come back as a later layer's argument, and so
    cross stages too. together: decoder layers that share parameters or state, and so stay on one
    stage. untrained: parameters that the logits have no gradient for, with * for numbers: constant
    tables, towers that text
        does not pass, a router's correction; by their own names the blocks of a tower behind the
        one that its model takes. An optimizer must leave them alone, weight decay included.
    loss: what the model computes itself from labels: "next_token" (labels = inputs, as the trainer
    does), "given" (it
        expects labels that are shifted already) or "other". The trainer's is next-token
        cross-entropy in any case.
    causal: whether no logit sees a later token.
    """

    stack: str
    hidden_position: int | None
    hidden_keyword: str | None
    output_length: int
    payload: tuple[str, ...] = ()
    carried: tuple[int, ...] = ()
    together: tuple[LayerRange, ...] = ()
    untrained: tuple[str, ...] = ()
    loss: str = "next_token"
    causal: bool = True

    def blocks(self, decoder_layers: int) -> tuple[int, ...]:
        """Numbers of pipeline layers (embedding, decoder layers, head) that no stage boundary may
        part, in order."""
        sizes, at = [1], 0
        for first, last in self.together:
            sizes += [1] * (first - at) + [last - first + 1]
            at = last + 1
        return (*sizes, *[1] * (decoder_layers - at), 1)


def merge_overlapping_ranges(ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Ranges that have a layer in common are one; in order."""
    out: list[LayerRange] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        elif first < last:
            out.append((first, last))
    return tuple(out)


def layers_that_share_parameters(
    names: Iterable[tuple[str, ...]], stack: str
) -> tuple[LayerRange, ...]:
    """Decoder layers that share a parameter. names: per parameter, every name that it has in the
    whole model."""
    prefix = stack + "."
    layers = [
        [int(n[len(prefix) :].split(".")[0]) for n in group if n.startswith(prefix)]
        for group in names
    ]
    return merge_overlapping_ranges((min(group), max(group)) for group in layers if group)


def boundaries_in_layers(boundaries: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Stage boundaries counted in blocks -> counted in layers."""
    starts = (0, *itertools.accumulate(blocks))
    return tuple(starts[b] for b in boundaries)
