"""What runs over islands: what was compared with a simulation in one process, and no more
(docs/islands.md)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import DEFAULT_TARGET, ENGINES
from shardwright.layout.layout_rule import Candidate
from shardwright.recipe.recipe_types import Recipe

_VERIFIED: dict[str, int | str] = {"context": 1, "offload": "none", "schedule": "1f1b"}


def diloco_layout_verified(x: Candidate) -> Diagnostic | None:
    """The outer step takes each rank's own range of the fp32 masters."""
    wrong = {
        key: value
        for key, plain in _VERIFIED.items()
        if (value := getattr(x.strategy, key)) != plain
    }
    if (
        x.strategy.expert > 1 and x.strategy.zero_stage == 0
    ):  # data ranks then share no masters to slice
        wrong["expert"] = x.strategy.expert
    if x.recipe.cluster.islands == 1 or not wrong:
        return None
    key, value = next(iter(wrong.items()))
    plain = _VERIFIED.get(key, 1)
    beside = " at ZeRO-0" if key == "expert" else ""
    return found(
        "SW3173",
        f"parallelism.{key}",
        (
            f"{key} {value}{beside} beside {x.recipe.cluster.islands} islands is not compared with "
            "a run in one process"
        ),
        (
            f"Use {key}: {plain}. Islands run under ZeRO 0 to 3, with tensor and expert ranks and "
            "1F1B pipelines."
        ),
        (plain,),
    )


def check_islands(recipe: Recipe) -> Iterator[Diagnostic]:
    """SW1924: what of a recipe with islands can be estimated and not compiled."""
    outer, launch = recipe.training.outer, recipe.launch
    if outer is None:
        return
    beside: dict[str, tuple[bool, str]] = {
        "target": (not ENGINES[recipe.target].islands, f"Write `target: {DEFAULT_TARGET}`."),
        "training.precision": (
            recipe.training.precision == "fp16",
            "Write `precision: bf16` or fp32.",
        ),
        "data.images": (
            any(part.images is not None for _, part in recipe.dataset_sections()),
            "Train a model on text: pictures were not tried.",
        ),
        "lora": (recipe.lora is not None, "Remove the section: adapters were not tried."),
        "launch.hostfile": (
            launch.hostfile is not None,
            (
                "Each island has hosts of its own: give `--hostfile` to each `shardwright run DIR "
                "--island K`."
            ),
        ),
        "launch.launcher": (
            launch.kubernetes is not None or launch.launcher == "kubernetes",
            "Use another launcher: a pod of one island was not tried.",
        ),
    }
    for key, (is_wrong, help) in beside.items():
        if is_wrong:
            message = f"{key}: this version does not run {recipe.cluster.islands} islands so"
            yield found("SW1924", key, message, help)
