"""List the number formats of `training.precision` and of accumulated gradients, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `lint` answers without the recipe's classes, a seventh of its time
    from shardwright.recipe.recipe_types import TrainingSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Describe a number format. engines/engine_table.py lists those that each engine supports.

    peak: the key of the GPU's `peak_tflops`
    torch_dtype: the attribute of torch
    accumulation: the dtype of accumulated gradients where the recipe says auto
    scales_loss: gradients underflow without a loss scale
    cpu: a CPU can train in it
    flash_attention: flash-attn has kernels for it
    spellings: its other names in configuration files
    """

    element_bytes: int
    peak: str
    torch_dtype: str
    accumulation: str
    scales_loss: bool = False
    cpu: bool = True
    flash_attention: bool = True
    spellings: tuple[str, ...] = ()

    @property
    def is_half(self) -> bool:
        """Return whether the optimizer keeps a wider master copy of the weights."""
        return self.element_bytes < MASTER_BYTES


MASTER_BYTES = 4
"""Counts the bytes of an element of the fp32 master copy."""

FORMATS: Mapping[str, Format] = {
    "bf16": Format(
        element_bytes=2,
        peak="bf16",
        torch_dtype="bfloat16",
        accumulation="fp32",
        spellings=("bfloat16",),
    ),
    "fp16": Format(
        element_bytes=2,
        peak="fp16",
        torch_dtype="float16",
        accumulation="fp16",
        scales_loss=True,
        cpu=False,
        spellings=("float16", "half"),
    ),
    "fp32": Format(
        element_bytes=4,
        peak="fp32",
        torch_dtype="float32",
        accumulation="fp32",
        flash_attention=False,
        spellings=("float32", "float"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionFormat:
    """Describe a format of `training.low_precision`, in which linear layers' products run.

    input_bytes: of an element of a linear's input, with its part of the scales
    peak: the key of the GPU's `peak_tflops`
    width_multiple: what kernels want the widths of a linear to be divisible by
    scales_depend_on_layout: one scale is for a whole tensor of a rank, so that other layouts round
        otherwise
    bf16_ends: shares of the decoder layers, at the start and at the end, that the format's
        published recipe keeps in half precision
    """

    input_bytes: float
    peak: str
    width_multiple: int
    scales_depend_on_layout: bool = False
    bf16_ends: tuple[float, float] = (0.0, 0.0)


LOW_PRECISION_FORMATS: Mapping[str, LowPrecisionFormat] = {
    "fp8_tensorwise": LowPrecisionFormat(
        input_bytes=1, peak="fp8", width_multiple=16, scales_depend_on_layout=True
    ),
    "fp8_rowwise": LowPrecisionFormat(input_bytes=1, peak="fp8", width_multiple=16),
    # One scale of four bytes for 128 elements (arXiv 2412.19437, 3.3.2).
    "fp8_blockwise": LowPrecisionFormat(input_bytes=1 + 4 / 128, peak="fp8", width_multiple=128),
    # One scale of a byte for 32 elements (OCP MX 1.0). GPUs multiply by such scales since FP4.
    "mxfp8": LowPrecisionFormat(input_bytes=1 + 1 / 32, peak="fp4", width_multiple=32),
    # One scale of a byte for 16 elements (arXiv 2509.25149); 3.1: the first 2 and the last 8 of 62
    # blocks stay in bf16.
    "nvfp4": LowPrecisionFormat(
        input_bytes=0.5 + 1 / 16,
        peak="fp4",
        width_multiple=32,
        scales_depend_on_layout=True,
        bf16_ends=(2 / 62, 8 / 62),
    ),
}


def element_bytes(name: str) -> int:
    """Return the bytes of one element of the format."""
    return FORMATS[name].element_bytes


def format_spelled(text: object) -> str | None:
    """Return the format that a configuration file's own spelling names, None where none has it."""
    return next(
        (
            name
            for name, row in FORMATS.items()
            if text in (name, *row.spellings, f"torch.{row.torch_dtype}")
        ),
        None,
    )


def accumulation_dtype(training: TrainingSection) -> str:
    """Return the format in which gradients are summed; auto takes that of the precision's row."""
    return training.gradient_accumulation_dtype or FORMATS[training.precision].accumulation


def sums_are_rounded(training: TrainingSection) -> bool:
    """Return whether gradients are accumulated in a narrower format than auto takes."""
    default = FORMATS[training.precision].accumulation
    return element_bytes(accumulation_dtype(training)) < element_bytes(default)
