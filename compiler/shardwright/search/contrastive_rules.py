"""Models that learn from pairs: a loss of the whole batch, which data ranks alone share."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import rank_axes
from shardwright.layout.layout_rule import Candidate

DATA = "data"


def contrastive_is_data_parallel(x: Candidate) -> Diagnostic | None:
    """Features of all pairs meet in the loss: they are gathered over data ranks, and both sides are
    small."""
    if not x.graph.contrastive:
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
        f"{axis} {degrees[axis]}: a contrastive loss compares the pairs of all ranks, which is "
        "proved over data ranks alone",
        f"Write `{axis}: 1`. ZeRO shares out the states of a model that is too large for a GPU.",
        (1,),
    )


def contrastive_has_one_micro_batch(x: Candidate) -> Diagnostic | None:
    """Two micro-batches are two losses, each of fewer pairs: their mean is another loss (arXiv
    2103.00020 compares each picture with all captions of the batch)."""
    steps = x.strategy.gradient_accumulation_steps
    if not x.graph.contrastive or steps == 1:
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
    """The first key that is not, or that says nothing here."""
    if not x.graph.contrastive:
        return None
    recipe = x.recipe
    asked = (
        (
            "target",
            f"target: {recipe.target}",
            recipe.target not in _running(),
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


def _running() -> tuple[str, ...]:
    return tuple(name for name, engine in ENGINES.items() if engine.compares)
