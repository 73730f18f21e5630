"""`model.freeze`: it must name something, and leave something."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.models.frozen_parameters import (
    MODEL_PARTS,
    frozen_parameter_names,
    parameters_matching,
)


def freeze_names_exist(x: Candidate) -> Diagnostic | None:
    entry = next((e for e in x.recipe.model.freeze if not parameters_matching(x.graph, e)), None)
    if entry is None:
        return None
    vision = x.graph.vision
    why = (
        f": {vision.untraced}"
        if vision is not None and entry in MODEL_PARTS and vision.untraced
        else ""
    )
    return found(
        "SW1435",
        "model.freeze",
        f"{entry!r} names no parameter of a {x.graph.model_type!r}{why}",
        (
            "Name a part of a model that sees, or a pattern of parameters' names "
            "(`model.visual.blocks.*`)."
        ),
        MODEL_PARTS if x.graph.is_vision_language else (),
    )


def freeze_leaves_trainable(x: Candidate) -> Diagnostic | None:
    frozen = frozen_parameter_names(x.graph, x.recipe.model.freeze)
    if not frozen or x.recipe.lora is not None:
        return None
    all_names = {p.name for layer in x.graph.layers for p in layer.parameters}
    if any(name not in frozen and name not in x.graph.cut.untrained for name in all_names):
        return None
    return found(
        "SW1436", "model.freeze", "nothing is left to train", "Take a part out of `freeze`."
    )


def freeze_without_lora(x: Candidate) -> Diagnostic | None:
    if not x.recipe.model.freeze or x.recipe.lora is None:
        return None
    return found(
        "SW1437",
        "model.freeze",
        "LoRA freezes every parameter of the model already",
        "Remove `freeze`, or the `lora` section.",
    )
