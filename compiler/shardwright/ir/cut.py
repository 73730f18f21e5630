"""Where a Hugging Face model can be cut into pipeline pieces: found by running it, never written by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """stack: dotted path of the ModuleList whose children run once each, in order.

    hidden_position, hidden_keyword: which argument of a decoder layer is the hidden states; one of the two.
    output_length: 0 where a layer returns the hidden states alone, else the length of the tuple that starts with them.
    """

    stack: str
    hidden_position: int | None
    hidden_keyword: str | None
    output_length: int
