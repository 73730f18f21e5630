"""Whether a recipe's data and its model agree on pictures."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic, found
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe

_EXAMPLE = "images: {per_row: 4, max_pixels: 1048576}"


def picture_errors(recipe: Recipe, graph: ModelGraph) -> Iterator[Diagnostic]:
    """SW1403 to SW1406."""
    parts = recipe.data_parts()
    if not graph.sees:
        for key, part in parts:
            if part.images is not None:
                what = f"a {graph.model_type!r} is trained for {graph.task}, and takes no pictures"
                help = "Remove `images`, or write `task: image-text-to-text` for a type that transformers has it of."
                yield found("SW1404", (*key, "images"), f"data.images: {what}", help)
        return
    own = "byte" if recipe.model.source is None else recipe.model.source
    for key, part in parts:
        if part.kind != "chat" or part.images is None:
            what = f"{part.kind} data" if part.kind != "chat" else "chat data without `images`"
            yield found(
                "SW1403",
                key,
                f"{what} is not for a {graph.model_type!r} that sees ({graph.task})",
                f"Write `kind: chat` with for example `{_EXAMPLE}`; `task: causal-lm` trains on text alone where the "
                "type has such a model.",
            )
        elif part.images != parts[0][1].images:
            yield found(
                "SW1405",
                (*key, "images"),
                "every part of the data has the same `images`: the processor is one",
                "Give all parts the largest of each.",
            )
        if part.kind == "chat" and part.tokenizer not in (None, own):
            yield found(
                "SW1406",
                (*key, "tokenizer"),
                f"the tokenizer {part.tokenizer!r} is not the one of the model's processor",
                f"Write `tokenizer: {own}`, or leave it out.",
                (own,),
            )
