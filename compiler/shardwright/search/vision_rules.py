"""Models that see: where they run, and what an estimate does not know of them yet."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import rank_axes
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2


def vision_language_verified(x: Candidate) -> Diagnostic | None:
    """The first key that is not."""
    if not x.graph.task_traits.has_images:
        return None
    recipe = x.recipe
    seeing = [name for name, engine in ENGINES.items() if "image-text-to-text" in engine.tasks]
    asked = (
        ("target", f"target: {recipe.target}", seeing[0], recipe.target not in seeing),
        (
            "parallelism.schedule",
            x.strategy.schedule,
            "1f1b",
            not x.strategy.pipeline_schedule.takes_images,
        ),
        (
            "parallelism.offload",
            f"offload {x.strategy.offload}",
            "none",
            x.strategy.offload != "none",
        ),
        ("model.attention", FLASH_ATTENTION_2, "auto", x.graph.attention == FLASH_ATTENTION_2),
        ("model.loss", "the chunked loss", "full", recipe.model.loss == "chunked"),
        ("model.kernels", "compile", "hf", recipe.model.kernels == "compile"),
        (
            "training.precision",
            recipe.training.precision,
            "bf16",
            FORMATS[recipe.training.precision].scales_loss,
        ),
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
    """Warn where the vision encoder's cost is not counted because it does not run on fake
    tensors."""
    if not x.graph.task_traits.has_images or (x.graph.vision is not None and x.graph.vision.layers):
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


# Models that learn from pairs: a loss of the whole batch, which data ranks alone share.


DATA = "data"


def contrastive_is_data_parallel(x: Candidate) -> Diagnostic | None:
    """Features of all pairs meet in the loss: they are gathered over data ranks, and both sides are
    small."""
    if not x.graph.task_traits.compares_pairs:
        return None
    degrees = {
        **{axis.name: x.strategy.degrees()[axis.name] for axis in rank_axes()},
        "expert": x.strategy.expert,
    }
    axis = next((name for name, degree in degrees.items() if name != DATA and degree > 1), None)
    if axis is None:
        return None
    return found(
        "SW3181",
        f"parallelism.{axis}",
        f"{axis} {degrees[axis]}: contrastive training is verified with data parallelism only",
        f"Write `{axis}: 1`. For a model that is too large for one GPU, use zero_stage: 1, 2 or 3.",
        (1,),
    )


def contrastive_has_one_micro_batch(x: Candidate) -> Diagnostic | None:
    """Refuse gradient accumulation of a contrastive loss: two micro-batches give two losses over
    fewer pairs, and their mean is another loss (arXiv 2103.00020 compares each image with all
    captions of the batch)."""
    steps = x.strategy.gradient_accumulation_steps
    if not x.graph.task_traits.compares_pairs or steps == 1:
        return None
    batch, data = x.recipe.training.global_batch_size, x.strategy.data
    fitting = batch // data if batch % data == 0 else None
    return found(
        "SW3182",
        "parallelism.micro_batch_size" if fitting else "training.global_batch_size",
        f"{steps} micro-batches a step are {steps} losses, each over a part of the {batch} pairs, "
        "and not the loss of all",
        f"Write `micro_batch_size: {fitting}` (or auto), recompute activations, or take more GPUs: "
        "each holds its share of the batch at once."
        if fitting
        else f"Give a batch that {data} data ranks divide.",
        () if fitting is None else (fitting,),
    )


def contrastive_verified(x: Candidate) -> Diagnostic | None:
    """Refuse the first setting that contrastive training does not support, or means nothing."""
    if not x.graph.task_traits.compares_pairs:
        return None
    recipe = x.recipe
    asked = (
        (
            "target",
            f"target: {recipe.target}",
            "contrastive" not in ENGINES[recipe.target].tasks,
            "Write `target: deepspeed`.",
        ),
        (
            "training.tokens",
            "`tokens`",
            recipe.training.tokens is not None,
            "Its batch is counted in pairs, and captions are filled up: give `steps` or `epochs`.",
        ),
        (
            "validation",
            "`validation`",
            recipe.validation is not None,
            "A loss over held-out pairs depends on how many are compared at once. Remove the "
            "section, and evaluate checkpoints by zero-shot accuracy.",
        ),
        (
            "lora",
            "LoRA",
            recipe.lora is not None,
            "Remove the section; `model.freeze: [vision]` trains the text alone.",
        ),
        (
            "parallelism.activation_checkpointing",
            "selective checkpointing",
            x.strategy.activation_checkpointing == "selective",
            "Write `activation_checkpointing: none`, or full.",
        ),
    )
    for key, what, is_asked, help in asked:
        if is_asked:
            return found(
                "SW3183", key, f"{what} is not for contrastive training in this version", help
            )
    return None
