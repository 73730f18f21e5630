"""Models that see: where they run, and what an estimate does not know of them yet."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import rank_axes
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2


def vision_language_verified(x: Candidate) -> Diagnostic | None:
    """Vision-language models are not verified under Megatron-Core, or with DualPipeV, offload,
    flash_attention_2, the chunked loss, torch.compile or fp16. ZeRO stage 3 is not verified if a
    module runs once for each image: ranks gather its weights for each run, so ranks with more
    images would wait for the others."""
    if not x.graph.task_traits.has_images:
        return None
    recipe = x.recipe
    seeing = [name for name, engine in ENGINES.items() if "image-text-to-text" in engine.tasks]
    asked = (
        ("target", f"target: {recipe.target}", seeing[0], recipe.target not in seeing),
        (
            "parallelism.schedule",
            f"schedule {x.strategy.schedule}",
            "1f1b",
            not x.strategy.pipeline_schedule.takes_images,
        ),
        (
            "parallelism.offload",
            f"offload {x.strategy.offload}",
            "none",
            x.strategy.offload != "none",
        ),
        (
            "model.attention",
            f"attention: {FLASH_ATTENTION_2}",
            "auto",
            x.graph.attention == FLASH_ATTENTION_2,
        ),
        ("model.loss", "the chunked loss", "full", recipe.model.loss == "chunked"),
        ("model.kernels", "kernels: compile", "hf", recipe.model.kernels == "compile"),
        (
            "training.precision",
            f"precision: {recipe.training.precision}",
            "bf16",
            FORMATS[recipe.training.precision].scales_loss,
        ),
        # Ranks gather a module's weights when it runs: those with more images would wait for the
        # others.
        (
            "parallelism.zero_stage",
            (
                f"zero_stage 3, with {next(iter(x.graph.modules_run_per_image), '')} run once for "
                "each image,"
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
                f"{what} is not verified for a vision-language model",
                f"Write `{key.rpartition('.')[2]}: {instead}`.",
                (instead,),
            )
    return None


def vision_encoder_not_counted(x: Candidate) -> Diagnostic | None:
    """The time and the activations of a vision encoder are counted by running the encoder on fake
    tensors. Where that fails, only its parameters are counted."""
    if not x.graph.task_traits.has_images or (x.graph.vision is not None and x.graph.vision.layers):
        return None
    why = "" if x.graph.vision is None else f" ({x.graph.vision.untraced})"
    return found(
        "SW3172",
        "model",
        (
            "time and memory are estimated without the vision encoder's computation on "
            f"images{why}; its parameters are counted"
        ),
        "Raise parallelism.memory_headroom, and measure a step.",
        severity="warning",
    )


# Models that learn from pairs: a loss of the whole batch, which data ranks alone share.


DATA = "data"


def contrastive_is_data_parallel(x: Candidate) -> Diagnostic | None:
    """The contrastive loss compares the features of all pairs of the batch, which are gathered over
    data ranks. Other ranks are not verified with it."""
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
    """A contrastive loss compares each image with all captions of the batch (arXiv 2103.00020).
    With gradient accumulation each micro-batch has a loss over fewer pairs, and the mean of these
    losses is another loss."""
    steps = x.strategy.gradient_accumulation_steps
    if not x.graph.task_traits.compares_pairs or steps == 1:
        return None
    batch, data = x.recipe.training.global_batch_size, x.strategy.data
    fitting = batch // data if batch % data == 0 else None
    return found(
        "SW3182",
        "parallelism.micro_batch_size" if fitting else "training.global_batch_size",
        f"{steps} micro-batches a step would give {steps} losses, each over a part of the {batch} "
        "pairs, and not the loss over all pairs",
        f"Write `micro_batch_size: {fitting}` (or auto): each GPU then holds its share of the "
        "batch at once. If that does not fit in memory, write `activation_checkpointing: full`, or "
        "use more GPUs."
        if fitting
        else f"Use a global_batch_size that is a multiple of data {data}.",
        () if fitting is None else (fitting,),
    )


def contrastive_verified(x: Candidate) -> Diagnostic | None:
    """Contrastive training runs under `target: deepspeed` only, without LoRA, `validation` and
    selective activation checkpointing. Its batch is counted in pairs, so `training.tokens` has no
    meaning."""
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
            "Write `steps` or `epochs` instead: the batch is counted in pairs, and captions are "
            "padded.",
        ),
        (
            "validation",
            "`validation`",
            recipe.validation is not None,
            "Remove the section, and evaluate checkpoints by zero-shot accuracy: a loss over "
            "held-out pairs depends on how many pairs are compared at once.",
        ),
        (
            "lora",
            "LoRA",
            recipe.lora is not None,
            "Remove the section. `model.freeze: [vision]` trains only the text encoder.",
        ),
        (
            "parallelism.activation_checkpointing",
            "activation_checkpointing: selective",
            x.strategy.activation_checkpointing == "selective",
            "Write `activation_checkpointing: none` or `full`.",
        ),
    )
    for key, what, is_asked, help in asked:
        if is_asked:
            return found(
                "SW3183", key, f"contrastive training does not support {what} in this version", help
            )
    return None
