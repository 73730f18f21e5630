"""Check where `training.low_precision` runs: the GPU, the linears and the layout."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.formats import LOW_PRECISION_FORMATS
from shardwright.layout.layout import Candidate
from shardwright.layout.low_precision_modules import keeps, low_precision_modules
from shardwright.layout.tensor_parallel_map import split_parameter
from shardwright.models.trainable_parameters import linear_modules

_KEY, _KEEP = "training.low_precision", "training.low_precision_keep"


def gpu_has_low_precision(x: Candidate) -> Diagnostic | None:
    """Refuse a format that the GPU has no instructions for, SW3185; a CPU emulates all of them."""
    name, gpu = x.recipe.training.low_precision, x.cluster.gpu
    if name == "none" or gpu.is_cpu or LOW_PRECISION_FORMATS[name].peak in gpu.peak_flops:
        return None
    others = tuple(n for n, row in LOW_PRECISION_FORMATS.items() if row.peak in gpu.peak_flops)
    # From one scale a tensor to one for 16 elements: the last that the engine runs is the nearest.
    nearest = [n for n in others if n in ENGINES[x.recipe.target].low_precision] or others
    return found(
        "SW3185",
        _KEY,
        f"gpu {gpu.name} has no {LOW_PRECISION_FORMATS[name].peak} peak, which {name} needs",
        f"Write low_precision: {nearest[-1]}, the nearest format that the GPU has."
        if others
        else "Remove low_precision, or give the peak in an inline gpu's peak_tflops.",
        (*others, "none"),
    )


def low_precision_beside(x: Candidate) -> Diagnostic | None:
    """Refuse what was not compared with one process beside low precision: SW3186.

    On a GPU torchao's products return bf16.
    """
    recipe = x.recipe
    if recipe.training.low_precision == "none":
        return None
    if recipe.lora is not None:
        key, why, help = "lora", "LoRA's adapters", "Remove the `lora` section, or low_precision."
    elif x.graph.task_traits.compares_pairs:
        key, why, help = "model.task", "a contrastive loss", "Remove low_precision."
    elif recipe.cluster.islands > 1:
        key, why, help = (
            "cluster.islands",
            "islands",
            "Write `islands: 1`, or remove low_precision.",
        )
    elif recipe.training.precision != "bf16" and not x.cluster.gpu.is_cpu:
        key, why = "training.precision", f"precision {recipe.training.precision}"
        help = "Write `precision: bf16`, in which the products return."
    else:
        return None
    return found("SW3186", key, f"{_KEY} is not proved beside {why}", help)


def kept_linears_exist(x: Candidate) -> Diagnostic | None:
    """Refuse an entry of low_precision_keep that names no linear: SW3187."""
    if not x.recipe.training.low_precision_keep:
        return None
    linears = [path for layer in x.graph.layers for path in linear_modules(layer)]
    for entry in x.recipe.training.low_precision_keep:
        if not any(keeps(entry, path) for path in linears):
            names = tuple(dict.fromkeys(path.rpartition(".")[2] for path in linears))
            return found(
                "SW3187",
                _KEEP,
                f"{entry!r} names no linear in the decoder layers of a {x.graph.model_type!r}",
                f"Name some of its linears, or a pattern of their paths (`{linears[0]}`)."
                if linears
                else "Leave it out.",
                names,
            )
    return None


def low_precision_converts(x: Candidate) -> Diagnostic | None:
    """Refuse low precision that converts no linear: SW3188."""
    training = x.recipe.training
    is_cpu = x.cluster.gpu.is_cpu
    if training.low_precision == "none" or low_precision_modules(
        x.graph, training, is_emulated=is_cpu
    ):
        return None
    multiple = LOW_PRECISION_FORMATS[training.low_precision].width_multiple
    return found(
        "SW3188",
        _KEY,
        f"low_precision: {training.low_precision} converts no linear of this model",
        f"Its kernels take widths that are multiples of {multiple}; low_precision_keep leaves out "
        f"{len(training.low_precision_keep)} names. Shorten that list, or remove low_precision.",
        ("none",),
    )


def tensor_ranks_keep_widths(x: Candidate) -> Diagnostic | None:
    """Refuse tensor ranks that cut a converted linear to widths that the kernels do not take:
    SW3189."""
    training, tensor, is_cpu = x.recipe.training, x.strategy.tensor, x.cluster.gpu.is_cpu
    if training.low_precision == "none" or tensor == 1 or is_cpu:
        return None
    multiple = LOW_PRECISION_FORMATS[training.low_precision].width_multiple
    converted = set(low_precision_modules(x.graph, training, is_emulated=False))
    for layer in x.graph.layers:
        for p in layer.parameters:
            if p.name.removesuffix(".weight") not in converted:
                continue
            shape = split_parameter(x.graph, p, tensor).shard_shape(0)
            if any(width % multiple for width in shape):
                return found(
                    "SW3189",
                    "parallelism.tensor",
                    f"tensor {tensor} cuts {p.name} to {' x '.join(map(str, shape))}, and "
                    f"{training.low_precision} takes multiples of {multiple}",
                    "Use fewer tensor ranks, or name the linear in training.low_precision_keep.",
                )
    return None


def scales_depend_on_layout(x: Candidate) -> Diagnostic | None:
    """Note that a rank scales its own part of a tensor, so that layouts round differently:
    SW3190."""
    name = x.recipe.training.low_precision
    if name == "none" or not LOW_PRECISION_FORMATS[name].scales_depend_on_layout:
        return None
    return found(
        "SW3190",
        _KEY,
        f"low_precision: {name} has one scale for a rank's part of a tensor: other layouts and "
        "micro-batches round otherwise, and their losses differ in the third digit",
        "Write `fp8_rowwise` where losses have to be equal in every layout.",
        severity="note",
    )


def casts_are_fused(x: Candidate) -> Diagnostic | None:
    """Warn of torchao's linears without torch.compile, SW3193: their casts run operator by
    operator."""
    recipe = x.recipe
    name, engine = recipe.training.low_precision, ENGINES[recipe.target]
    if (
        not engine.compiles_layers
        or name not in engine.low_precision
        or recipe.model.kernels == "compile"
        or x.cluster.gpu.is_cpu
    ):
        return None
    return found(
        "SW3193",
        "model.kernels",
        f"low_precision: {name} scales and casts every operand operator by operator; without "
        "torch.compile that can take longer than its products save",
        "Write `kernels: compile`, which fuses the casts (or `auto`, where it is verified). "
        "Otherwise compare the step time with `low_precision: none`.",
        ("compile", "auto"),
        severity="warning",
    )
