"""Models that see: where they run, and what an estimate does not know of them yet."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.layout_rule import Candidate
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2


def vision_language_verified(x: Candidate) -> Diagnostic | None:
    """The first key that is not."""
    if not x.graph.is_vision_language:
        return None
    recipe, seeing = (
        x.recipe,
        [name for name, engine in ENGINES.items() if engine.is_vision_language],
    )
    asked = (
        ("target", f"target: {recipe.target}", seeing[0], recipe.target not in seeing),
        ("parallelism.schedule", "dualpipev", "1f1b", x.strategy.schedule == "dualpipev"),
        (
            "parallelism.offload",
            f"offload {x.strategy.offload}",
            "none",
            x.strategy.offload != "none",
        ),
        ("model.attention", FLASH_ATTENTION_2, "auto", x.graph.attention == FLASH_ATTENTION_2),
        ("model.loss", "the chunked loss", "full", recipe.model.loss == "chunked"),
        ("model.kernels", "compile", "hf", recipe.model.kernels == "compile"),
        ("training.precision", "fp16", "bf16", recipe.training.precision == "fp16"),
        # Ranks gather a module's weights when it runs: those with more pictures would wait for the
        # others.
        (
            "parallelism.zero_stage",
            (
                f"ZeRO-3, where {next(iter(x.graph.modules_run_per_image), '')} runs once for each "
                "picture,"
            ),
            "2",
            x.strategy.zero_stage == 3 and bool(x.graph.modules_run_per_image),
        ),
    )
    for key, what, instead, is_asked in asked:
        if is_asked:
            return found(
                "SW3171",
                key,
                f"{what} is not proved for a model that sees",
                f"Write `{key.rpartition('.')[2]}: {instead}`.",
                (instead,),
            )
    return None


def vision_encoder_not_counted(x: Candidate) -> Diagnostic | None:
    """Where the tower could not be run on fake tensors."""
    if not x.graph.is_vision_language or (x.graph.vision is not None and x.graph.vision.layers):
        return None
    why = "" if x.graph.vision is None else f" ({x.graph.vision.untraced})"
    return found(
        "SW3172",
        "model",
        (
            f"time and memory are counted without the tower's work on pictures{why}; its "
            "parameters are counted"
        ),
        "Leave room on the first stage, and measure a step.",
        severity="warning",
    )
