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
    """Matrix products in low_precision need a GPU with instructions for the format. A CPU emulates
    every format."""
    name, gpu = x.recipe.training.low_precision, x.cluster.gpu
    if name == "none" or gpu.is_cpu or LOW_PRECISION_FORMATS[name].peak in gpu.peak_flops:
        return None
    others = tuple(n for n, row in LOW_PRECISION_FORMATS.items() if row.peak in gpu.peak_flops)
    # From one scale a tensor to one for 16 elements: the last that the engine runs is the nearest.
    nearest = [n for n in others if n in ENGINES[x.recipe.target].low_precision] or others
    return found(
        "SW3185",
        _KEY,
        f"gpu {gpu.name} has no peak TFLOP/s for {LOW_PRECISION_FORMATS[name].peak}, which "
        f"low_precision: {name} needs",
        f"Write low_precision: {nearest[-1]}, the nearest format that the GPU supports."
        if others
        else "Remove low_precision, or describe a GPU that supports it under cluster.gpu, with its "
        f"peak_tflops.{LOW_PRECISION_FORMATS[name].peak}.",
        (*others, "none"),
    )


def low_precision_beside(x: Candidate) -> Diagnostic | None:
    """With LoRA, a contrastive loss or DiLoCo islands, low precision has not been compared with a
    single-process run. On a GPU torchao's matrix products return bf16, so precision must be bf16.
    """
    recipe = x.recipe
    if recipe.training.low_precision == "none":
        return None
    if recipe.lora is not None:
        key, why, help = "lora", "LoRA", "Remove the `lora` section, or low_precision."
    elif x.graph.task_traits.compares_pairs:
        key, why, help = "model.task", "a contrastive loss", "Remove low_precision."
    elif recipe.cluster.islands > 1:
        key, why, help = (
            "cluster.islands",
            f"islands: {recipe.cluster.islands}",
            "Write `islands: 1`, or remove low_precision.",
        )
    elif recipe.training.precision != "bf16" and not x.cluster.gpu.is_cpu:
        key, why = "training.precision", f"precision: {recipe.training.precision} on GPUs"
        help = "Write `precision: bf16`, or remove low_precision."
    else:
        return None
    return found("SW3186", key, f"{_KEY} is not verified with {why}", help)


def kept_linears_exist(x: Candidate) -> Diagnostic | None:
    """An entry of low_precision_keep is the path of a linear layer in the decoder layers, the last
    part of such a path, a module around it, or a pattern. Each must match a linear layer."""
    if not x.recipe.training.low_precision_keep:
        return None
    linears = [path for layer in x.graph.layers for path in linear_modules(layer)]
    for entry in x.recipe.training.low_precision_keep:
        if not any(keeps(entry, path) for path in linears):
            names = tuple(dict.fromkeys(path.rpartition(".")[2] for path in linears))
            return found(
                "SW3187",
                _KEEP,
                f"{entry!r} names no linear layer in the decoder layers of model_type "
                f"{x.graph.model_type!r}",
                f"Choose from {', '.join(names)}, or write a path or pattern (`{linears[0]}`)."
                if linears
                else f"Remove {entry!r} from low_precision_keep.",
                names,
            )
    return None


def low_precision_converts(x: Candidate) -> Diagnostic | None:
    """Low precision has no effect where no linear layer has widths that the format's kernels
    accept, or where low_precision_keep names all linear layers."""
    training = x.recipe.training
    is_cpu = x.cluster.gpu.is_cpu
    if training.low_precision == "none" or low_precision_modules(
        x.graph, training, is_emulated=is_cpu
    ):
        return None
    multiple = LOW_PRECISION_FORMATS[training.low_precision].width_multiple
    kept = ", ".join(training.low_precision_keep)
    less = f"Remove entries of low_precision_keep ({kept}), or remove" if kept else "Remove"
    return found(
        "SW3188",
        _KEY,
        f"low_precision: {training.low_precision} converts no linear layer of this model",
        f"The format's kernels accept only widths that are multiples of {multiple}. {less} "
        "low_precision.",
        ("none",),
    )


def tensor_ranks_keep_widths(x: Candidate) -> Diagnostic | None:
    """The kernels of a low-precision format need linear layers whose widths are multiples of 16, 32
    or 128. Each tensor rank must hold such widths."""
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
                    f"tensor {tensor} splits {p.name} to {' x '.join(map(str, shape))}, but "
                    f"{training.low_precision} needs multiples of {multiple}",
                    "Use fewer tensor ranks, or name the linear layer in "
                    "training.low_precision_keep.",
                )
    return None


def scales_depend_on_layout(x: Candidate) -> Diagnostic | None:
    """Each rank scales its own part of a tensor, so other layouts and micro-batch sizes round
    differently."""
    name = x.recipe.training.low_precision
    if name == "none" or not LOW_PRECISION_FORMATS[name].scales_depend_on_layout:
        return None
    return found(
        "SW3190",
        _KEY,
        f"low_precision: {name} has one scale for each rank's part of a tensor, so losses differ "
        "in the third digit between layouts and between micro-batch sizes",
        "Write `low_precision: fp8_rowwise` if losses must be equal in every layout.",
        severity="note",
    )


def casts_are_fused(x: Candidate) -> Diagnostic | None:
    """Without torch.compile, torchao's linear layers scale and cast their operands operator by
    operator, which can take longer than their faster products save."""
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
