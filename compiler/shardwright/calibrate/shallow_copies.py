"""Shallow copies of the recipe's model, compiled: what the measuring processes build. Widths, heads
and vocabulary are the model's own, so that a layer is the very layer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from shardwright.compile import compile_recipe
from shardwright.compiled_folder_writer import write_folder
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_types import JsonObject

MODEL = "model"
SHORT = 16
"""Tokens of a row where the engine's own time is wanted."""
ACCUMULATION = (1, 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """Of a copy that one process builds. rows: of the micro-batch. places: decoder layers of the
    whole model, as indices into its layers, the embedding being 0."""

    tensor: int = 1
    zero_stage: int = 0
    micro_batch: int = 1
    accumulation: int = 1
    length: int
    places: tuple[int, ...]
    checkpointing: Checkpointing = "none"


def shallow_model(graph: ModelGraph, places: Sequence[int], folder: Path) -> Path:
    """A folder with the configuration alone: random weights need no more."""
    from shardwright.models.layer_kinds import truncate_layers

    folder.mkdir(parents=True, exist_ok=True)
    config = {**graph.config, **truncate_layers(graph.config, tuple(place - 1 for place in places))}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def document_of(recipe: Recipe, shape: CopyShape, model: Path) -> JsonObject:
    """A recipe of the copy on one node: nothing of the data, the launcher or the checkpoints is in
    it."""
    document = recipe.document
    training: JsonObject = dict(document["training"])  # type: ignore[arg-type]
    cluster: JsonObject = dict(document["cluster"])  # type: ignore[arg-type]
    kept = ("gpu", "intra_node_gbytes_per_second", "inter_node_gbits_per_second")
    return {
        "version": 1,
        "name": "calibrate",
        "target": recipe.target,
        "model": {
            "source": str(model),
            "weights": "random",
            "attention": recipe.model.attention,
            "loss": "full",
        },
        "cluster": {
            "nodes": 1,
            "gpus_per_node": shape.tensor,
            **{key: cluster[key] for key in kept},
        },
        "training": {
            "sequence_length": shape.length,
            "global_batch_size": shape.micro_batch * shape.accumulation,
            "steps": 1,
            "precision": training["precision"],
            "gradient_accumulation_dtype": training["gradient_accumulation_dtype"],
            "optimizer": training["optimizer"],
            "gradient_clipping": training["gradient_clipping"],
        },
        "data": {"kind": "synthetic"},
        "parallelism": {
            "tensor": shape.tensor,
            "pipeline": 1,
            "data": 1,
            "zero_stage": shape.zero_stage,
            "micro_batch_size": shape.micro_batch,
            "activation_checkpointing": shape.checkpointing,
        },
    }


def compile_copy(recipe: Recipe, shape: CopyShape, model: Path, folder: Path) -> Path:
    """Raises Refusal as `compile` does: what does not fit here, or what the engine does not run on
    one rank."""
    folder.mkdir(parents=True)
    path = folder / "recipe.json"
    path.write_text(json.dumps(document_of(recipe, shape, model)), encoding="utf-8")
    write_folder(folder / "out", compile_recipe(load_recipe(path)).files)
    return folder / "out"
