"""List what `run` executes in this version, in one table. A recipe beyond it can be estimated,
not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.engines.engine_table import DEFAULT_TARGET, ENGINES
from shardwright.layout.axes import Axis, Value
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate, axes_in_print_order
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonScalar

# What runs over islands: what was compared with a simulation in one process, and no more
# (docs/islands.md).


_VERIFIED: dict[str, int | str] = {"context": 1, "offload": "none", "schedule": "1f1b"}


def diloco_layout_verified(x: Candidate) -> Diagnostic | None:
    """DiLoCo islands (`cluster.islands`) average their weight changes in an outer step
    (`training.outer`), in which each rank takes its own range of the fp32 master weights. This is
    not verified with context ranks, offload, DualPipeV, or expert ranks at ZeRO stage 0."""
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
    beside = " at zero_stage 0" if key == "expert" else ""
    return found(
        "SW3173",
        f"parallelism.{key}",
        (
            f"{key} {value}{beside} is not verified with {x.recipe.cluster.islands} DiLoCo islands "
            "against a single-process run"
        ),
        (
            f"Use {key}: {plain}{', or zero_stage: 1 or more' if key == 'expert' else ''}. Islands "
            "run under ZeRO 0 to 3, with tensor and expert ranks and 1F1B pipelines."
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
            FORMATS[recipe.training.precision].scales_loss,
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
            launch.kubernetes is not None
            or launch.task is not None
            or launch.launcher in ("kubernetes", "ray"),
            "Use another launcher: a pod, a task or a Ray job of one island was not tried.",
        ),
    }
    for key, (is_wrong, help) in beside.items():
        if is_wrong:
            message = f"{key}: this version does not run {recipe.cluster.islands} islands so"
            yield found("SW1924", key, message, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedValues:
    """value(recipe) must be in `allowed` (None stands for a key left out, or `auto`)."""

    code: str
    key: KeyPath
    value: Callable[[Recipe], JsonScalar | Value]
    allowed: tuple[JsonScalar, ...]
    help: str


def _unsupported_pin(axis: Axis, recipe: Recipe) -> Value | None:
    """The pin, where the target's engine does not have the axis."""
    return axis.off_value if axis.name in ENGINES[recipe.target].axes else axis.pin(recipe)


CAN_BE_ESTIMATED = "`shardwright estimate` and `shardwright plan` read it already."
CANNOT_BE_ESTIMATED = "This version has no numbers for it either."


def _assumed_kernels(recipe: Recipe) -> str:
    """`compiled` is what `model.kernels: compile` runs."""
    assumed = recipe.assume.kernels
    return "auto" if assumed == "compiled" and recipe.model.kernels == "compile" else assumed


MAX_WORLD_SIZE = 65536
"""Ranks that a plan.json can sensibly list: four times the largest published training."""

SUPPORTED_VALUES: tuple[SupportedValues, ...] = (
    *(
        SupportedValues(
            code="SW1914",
            key=("assume", key),
            value=value,
            allowed=allowed,
            help="Remove it: `assume` changes what an estimate predicts, not what a run does."
            + (
                " `model.kernels: compile` runs what `compiled` assumes."
                if key == "kernels"
                else ""
            ),
        )
        for key, value, allowed in (
            ("kernels", _assumed_kernels, ("auto", "hf")),
            ("mfu", lambda r: r.assume.mfu, (None,)),
            ("ignore_memory", lambda r: r.assume.ignore_memory, (False,)),
            ("expert_imbalance", lambda r: r.assume.expert_imbalance, (None,)),
        )
    ),
    SupportedValues(
        code="SW1925",
        key=("model", "transformer_engine"),
        value=lambda r: (
            "auto" if ENGINES[r.target].transformer_engine else r.model.transformer_engine
        ),
        allowed=("auto", "off"),
        help="Leave it out, or write `target: megatron`.",
    ),
    *(
        SupportedValues(
            code="SW1909",
            key=(axis.section, axis.name),
            value=partial(_unsupported_pin, axis),
            allowed=(axis.off_value, None),
            help=(
                f"Write `{axis.name}: {str(axis.off_value).lower()}`. "
                f"{CAN_BE_ESTIMATED if axis.has_cost_model else CANNOT_BE_ESTIMATED}"
            ),
        )
        for axis in axes_in_print_order()
        if not axis.in_every_engine
    ),
)


def check_runnable(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Everything in the recipe that this version cannot run, at once."""
    errors = [
        unsupported_value_error(limit, recipe)
        for limit in SUPPORTED_VALUES
        if limit.value(recipe) not in limit.allowed
    ]
    if recipe.data is None:
        errors.append(
            found(
                "SW1910",
                "data",
                "the recipe has no `data` section, so there is nothing to train on",
                (
                    "Add for example `data: {kind: text, path: corpus/*.txt, tokenizer: byte}`, or "
                    "`kind: synthetic`."
                ),
            )
        )
    errors += check_tokenizers(recipe)
    errors += check_islands(recipe)
    world = (recipe.cluster.nodes or 1) * recipe.cluster.gpus_per_node
    if world > MAX_WORLD_SIZE:
        errors.append(
            found(
                "SW1915",
                "cluster.nodes",
                f"the cluster has {world} GPUs; this version compiles for at most {MAX_WORLD_SIZE}",
                f"plan.json has an entry for each rank. Give fewer nodes. {CAN_BE_ESTIMATED}",
            )
        )
    return tuple(errors)


def check_tokenizers(recipe: Recipe) -> Iterator[Diagnostic]:
    parts = recipe.tokenized()
    for key, part in parts:
        if part.tokenizer is None:
            yield found(
                "SW1911",
                key,
                f"{part.kind} data needs a tokenizer",
                "Add `tokenizer: byte` (256 symbols), or the folder of a Hugging Face tokenizer.",
            )
        elif part.kind == "chat" and part.tokenizer == "byte" and part.template is None:
            yield found(
                "SW1402",
                key,
                "chat data needs a chat template, and the byte tokenizer has none",
                (
                    "Add `template:`, a Jinja2 chat template, or take the tokenizer of an "
                    "instruction-tuned model."
                ),
            )
    names = [part.tokenizer for _, part in parts if part.tokenizer is not None]
    for key, part in parts:
        if part.tokenizer is not None and part.tokenizer != names[0]:
            yield found(
                "SW1401",
                (*key, "tokenizer"),
                f"the tokenizer {part.tokenizer!r} stands beside {names[0]!r}: a model has one",
                (
                    f"Write `tokenizer: {names[0]}` for every part of the data, and for the "
                    "validation data."
                ),
            )


def unsupported_value_error(limit: SupportedValues, recipe: Recipe) -> Diagnostic:
    value = limit.value(recipe)
    name = ".".join(str(part) for part in limit.key)
    shown = (
        "this section"
        if value == "given"
        else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )
    return found(
        limit.code,
        limit.key,
        f"{name}: {shown} is valid, but this version does not run it",
        limit.help,
        tuple(
            str(v).lower() if isinstance(v, bool) else str(v)
            for v in limit.allowed
            if v is not None
        ),
    )
