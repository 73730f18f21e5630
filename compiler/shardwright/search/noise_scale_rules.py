"""`tracking.noise_scale`: where it was compared with the gradient of every row
(docs/batch-size.md), and no further."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import DEFAULT_TARGET, ENGINES
from shardwright.layout.layout_rule import Candidate

_KEY = "tracking.noise_scale"


def noise_scale_has_two_batch_sizes(x: Candidate) -> Diagnostic | None:
    """The estimate needs gradients of two sizes: of a micro-batch, and of the whole batch."""
    s = x.strategy
    if x.recipe.tracking.noise_scale is None or s.data * s.gradient_accumulation_steps > 1:
        return None
    return found(
        "SW3192",
        "parallelism.micro_batch_size",
        (
            f"{_KEY} compares micro-batches, and one of {s.micro_batch_size} rows is the whole "
            "global batch"
        ),
        (
            "Lower parallelism.micro_batch_size, raise training.global_batch_size, or remove "
            "tracking.noise_scale."
        ),
    )


def noise_scale_verified(x: Candidate) -> Diagnostic | None:
    """The first key that is not. Proved are ZeRO 0 to 3, tensor ranks and pipelines without tied
    parameters."""
    if x.recipe.tracking.noise_scale is None:
        return None
    for key, what, instead in _unverified_settings(x):
        return found(
            "SW3191",
            key,
            f"{what}: there tracking.noise_scale is not compared with the gradients of single rows",
            f"{instead}, or remove tracking.noise_scale.",
        )
    return None


def _unverified_settings(x: Candidate) -> Iterator[tuple[str, str, str]]:
    """(key, what it is, what to write instead)."""
    s, recipe, training = x.strategy, x.recipe, x.recipe.training
    if not ENGINES[recipe.target].measures_noise_scale:
        yield "target", f"target: {recipe.target}", f"Write `target: {DEFAULT_TARGET}`"
    if recipe.cluster.islands > 1:  # each has weights of its own between outer steps
        yield "cluster.islands", f"islands: {recipe.cluster.islands}", "Train one island"
    # Context ranks have parts of a row's gradient, expert ranks the sum over several ranks' rows.
    for axis in ("context", "expert"):
        if getattr(s, axis) > 1:
            yield f"parallelism.{axis}", f"{axis} {getattr(s, axis)}", f"Write `{axis}: 1`"
    if (
        s.pipeline > 1 and x.graph.tied
    ):  # the two gradients of one tensor are on two stages until the step's end
        tied = f"pipeline {s.pipeline} with {x.graph.tied[0][0]} on two stages"
        yield "parallelism.pipeline", tied, "Write `pipeline: 1`"
    if training.precision == "fp16":
        yield "training.precision", "precision: fp16", "Train in bf16"
    if training.gradient_accumulation_dtype not in (None, "fp32"):
        dtype = training.gradient_accumulation_dtype
        yield (
            "training.gradient_accumulation_dtype",
            f"gradients summed in {dtype}",
            "Sum them in fp32",
        )
    if x.graph.is_vision_language:
        yield _KEY, "a model that sees", "Train a model on text"
    if recipe.model.router_aux_loss is not None:  # its gradient does not grow with the labels
        yield "model.router_aux_loss", "a balance loss", "Write `router_aux_loss: off`"
    if recipe.model.kernels == "compile":
        yield "model.kernels", "kernels: compile", "Write `kernels: hf`"
