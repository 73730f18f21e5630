"""Where LoRA runs: on whole layers, without a pipeline."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.models.lora_targets import adapted_modules, default_target_modules


def lora_without_pipeline(x: Candidate) -> Diagnostic | None:
    """A stage of frozen layers has no gradient to send back before its first adapter, and
    DeepSpeed's pipeline engine waits for one."""
    if x.recipe.lora is None or x.strategy.pipeline == 1:
        return None
    return found(
        "SW1432",
        "parallelism.pipeline",
        (
            f"LoRA runs without a pipeline, not at pipeline {x.strategy.pipeline}: its stages are "
            "not proved"
        ),
        "Write `pipeline: 1`; zero_stage: 3 shares out the frozen parameters instead.",
        (1,),
    )


def lora_without_tensor_parallel(x: Candidate) -> Diagnostic | None:
    """An adapter on a cut linear would have to be cut with it."""
    if x.recipe.lora is None or x.strategy.tensor == 1:
        return None
    return found(
        "SW1433",
        "parallelism.tensor",
        f"LoRA adapts whole linears, which tensor {x.strategy.tensor} cuts",
        "Write `tensor: 1`; zero_stage: 3 shares out the frozen parameters instead.",
        (1,),
    )


def lora_target_modules_exist(x: Candidate) -> Diagnostic | None:
    lora = x.recipe.lora
    if lora is None:
        return None
    known = default_target_modules(x.graph)
    missing = [name for name in adapted_modules(x.graph, lora) if name not in known]
    if known and not missing:
        return None
    what = (
        f"has no linear {missing[0]!r} in its decoder layers"
        if missing
        else "has no linear in its decoder layers"
    )
    return found(
        "SW1434",
        "lora.target_modules",
        f"model_type {x.graph.model_type!r} {what}",
        "Name some of the valid ones, or write `target_modules: auto` for all of them."
        if known
        else "Remove the `lora` section: this type can be trained in full.",
        known,
    )
