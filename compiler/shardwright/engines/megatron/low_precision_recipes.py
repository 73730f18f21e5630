"""Write `training.low_precision` as Transformer Engine's recipes, by Megatron-Core's arguments.

No test here runs their kernels. Megatron-Core's configuration and Megatron-LM's parser take the
arguments, and a stand-in shows which linears compute under the recipe. Lines are of megatron-core
0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout import Candidate
from shardwright.layout.low_precision_modules import keeps
from shardwright.models.trainable_parameters import linear_modules
from shardwright.utils.json_values import JsonScalar

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionRecipe:
    """Describe a format of `training.low_precision` under Megatron-Core.

    name: Megatron-Core's name of the recipe
    settings: TransformerConfig's arguments
    version: the first Transformer Engine that has it (megatron/core/fp8_utils.py:552,
        megatron/core/fp4_utils.py:76)
    gather_options: options of pretrain_gpt.py for FP8 parameters, which its distributed optimizer
        takes
    """

    name: str
    settings: Mapping[str, JsonScalar]
    version: str
    gather_options: tuple[str, ...] = ()


def _fp8(recipe: str, version: str, values: str, *more: str) -> LowPrecisionRecipe:
    return LowPrecisionRecipe(
        name=recipe,
        settings={"fp8": values, "fp8_recipe": recipe},
        version=version,
        gather_options=("--fp8-param-gather", *more),
    )


LOW_PRECISION_RECIPES: Mapping[str, LowPrecisionRecipe] = {
    # E5M2 for gradients, as in Megatron-Bridge's recipe with current scales.
    "fp8_tensorwise": _fp8("tensorwise", "2.2.0.dev0", "hybrid"),
    # DeepSeek-V3 (arXiv 2412.19437, 3.3.2): E4M3 for all tensors.
    "fp8_blockwise": _fp8("blockwise", "2.3.0.dev0", "e4m3"),
    # arXiv 2506.08027: E4M3 for all tensors.
    "mxfp8": _fp8("mxfp8", "2.1.0", "e4m3", "--reuse-grad-buf-for-mxfp8-param-ag"),
    "nvfp4": LowPrecisionRecipe(
        name="nvfp4",
        settings={"fp4": "e2m1", "fp4_recipe": "nvfp4"},
        version="2.7.0.dev0",
    ),
}
REFUSAL_REASON = "Transformer Engine has no recipe with one scale for each row of a matrix"


def bf16_layers(plan: Plan) -> tuple[int, int]:
    """Return how many decoder layers at the start and at the end compute in bf16: those before the
    first and after the last linear that the plan converts."""
    assert plan.low_precision is not None
    layers = [
        name for stage in plan.stages for name in stage.layers if name not in ("embedding", "head")
    ]
    converted = [
        place
        for place, layer in enumerate(layers)
        if any(path.startswith(f"{layer}.") for path in plan.low_precision.modules)
    ]
    return converted[0], len(layers) - 1 - converted[-1]


def low_precision_settings(plan: Plan) -> dict[str, Any]:
    """Return the recipe's arguments of TransformerConfig."""
    if plan.low_precision is None:
        return {}
    first, last = bf16_layers(plan)
    kept = {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }
    settings = LOW_PRECISION_RECIPES[plan.low_precision.format].settings
    return {**settings, **(kept if first or last else {})}


_OPTIONS = {"fp8": "fp8-format", "fp4": "fp4-format"}
"""Maps a field of TransformerConfig to its option, where the two differ."""


def low_precision_options(plan: Plan, *, gathers_parameters: bool) -> Iterator[tuple[str, ...]]:
    """Yield the recipe's options of pretrain_gpt.py.

    gathers_parameters: the distributed optimizer runs on the GPU, which can gather the weights in
        the format in which products take them
    """
    if plan.low_precision is None:
        return
    for name, value in low_precision_settings(plan).items():
        option = f"--{_OPTIONS.get(name, name.replace('_', '-'))}"
        yield (option,) if value is True else (option, str(value))
    if gathers_parameters:
        row = LOW_PRECISION_RECIPES[plan.low_precision.format]
        yield from ((option,) for option in row.gather_options)


def keeps_whole_layers_at_the_ends(x: Candidate) -> Diagnostic | None:
    """Megatron-Core turns low precision on for a decoder layer as a whole
    (megatron/core/transformer/transformer_block.py:751), and off only for layers at the start and
    the end. So low_precision_keep can name only all linear layers of such decoder layers."""
    training = x.recipe.training
    if training.low_precision not in LOW_PRECISION_RECIPES:
        return None
    layers = [layer for layer in x.graph.layers if layer.kind == "decoder"]
    kept = [
        [any(keeps(entry, path) for entry in training.low_precision_keep) for path in paths]
        for layer in layers
        if (paths := linear_modules(layer))
    ]
    whole = [all(flags) for flags in kept]
    inner = whole[whole.index(False) :][::-1] if False in whole else []
    inner = inner[inner.index(False) :] if inner else []
    if not any(inner) and all(all(flags) or not any(flags) for flags in kept):
        return None
    return found(
        "SW3179",
        "training.low_precision_keep",
        f"low_precision_keep {', '.join(training.low_precision_keep)} does not run under "
        "Megatron-Core, which keeps only whole decoder layers at the start and the end in bf16",
        f"Name decoder layers from the start or the end (`{layers[0].name}`, "
        f"`{layers[-1].name}`), or remove low_precision_keep.",
    )
