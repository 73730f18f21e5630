"""Whether a recipe's data and its model agree on pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_types import ImagesSection, Recipe

_PAIR_EXAMPLE = "images: {per_row: 1, max_pixels: 1048576}"
PAIR_KINDS = ("jsonl", "parquet")
_EXAMPLE = "images: {per_row: 4, max_pixels: 1048576}"


def image_data_errors(recipe: Recipe, graph: ModelGraph) -> Iterator[Diagnostic]:
    """SW1403 to SW1408."""
    parts = recipe.dataset_sections()
    if not graph.is_vision_language:
        for key, part in parts:
            if part.images is not None:
                what = f"a {graph.model_type!r} is trained for {graph.task}, and takes no pictures"
                help = (
                    "Remove `images`, or write `task: image-text-to-text` for a type that "
                    "transformers has it of."
                )
                yield found("SW1404", (*key, "images"), f"data.images: {what}", help)
        return
    own = "byte" if recipe.model.source is None else recipe.model.source
    if graph.contrastive:
        yield from _pair_errors(recipe, graph)
    for key, part in parts if not graph.contrastive else ():
        if part.kind != "chat" or part.images is None:
            what = f"{part.kind} data" if part.kind != "chat" else "chat data without `images`"
            yield found(
                "SW1403",
                key,
                f"{what} is not for a {graph.model_type!r} that sees ({graph.task})",
                f"Write `kind: chat` with for example `{_EXAMPLE}`; `task: causal-lm` trains on "
                "text alone where the type has such a model.",
            )
        elif _without_folder(part.images) != _without_folder(parts[0][1].images):
            yield _different_images_error(key)
    for key, part in parts:
        if part.images is not None and part.tokenizer not in (None, own):
            yield found(
                "SW1406",
                (*key, "tokenizer"),
                f"the tokenizer {part.tokenizer!r} is not the one of the model's processor",
                f"Write `tokenizer: {own}`, or leave it out.",
                (own,),
            )


def _pair_errors(recipe: Recipe, graph: ModelGraph) -> Iterator[Diagnostic]:
    parts = recipe.dataset_sections()
    for key, part in parts:
        if part.kind not in PAIR_KINDS or part.images is None:
            what = (
                f"{part.kind} data"
                if part.kind not in PAIR_KINDS
                else f"{part.kind} data without `images`"
            )
            yield found(
                "SW1407",
                key,
                f"{what} is not for a {graph.model_type!r} that learns from pairs ({graph.task})",
                f"Write `kind: jsonl` (or parquet), `field: caption` and `{_PAIR_EXAMPLE}`: a "
                "record has its caption under that field and its picture under `image`.",
                PAIR_KINDS,
            )
        elif part.images.per_row != 1:
            yield found(
                "SW1408",
                (*key, "images"),
                f"data.images: per_row {part.images.per_row}, and a pair has one picture",
                "Write `per_row: 1`.",
                (1,),
            )
        elif _without_folder(part.images) != _without_folder(parts[0][1].images):
            yield _different_images_error(key)


def _without_folder(images: ImagesSection | None) -> ImagesSection | None:
    """Parts may have their pictures in folders of their own."""
    return images and dataclasses.replace(images, folder=None)


def _different_images_error(key: KeyPath) -> Diagnostic:
    help = "Give all parts the largest of each."
    return found(
        "SW1405",
        (*key, "images"),
        "every part of the data has the same `images`: the processor is one",
        help,
    )
