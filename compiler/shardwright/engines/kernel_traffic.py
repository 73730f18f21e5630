"""Count the memory traffic of the kernels that `assume.kernels` names.

`auto` is the model's own modules; the others are those of published runs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTraffic:
    """Count elements that memory-bound kernels read and write in a forward pass, as their code
    does.

    norm: LayerNorm, by element of the hidden size: read, write
    eager_rms_norm: RMSNorm in Python, by element of the hidden size: cast, square, mean, scale,
        cast, weight, partly in float32
    residual: by element of the hidden size: two reads, one write
    dropout: by element of the hidden size, with its one-byte mask
    rotary: by element of queries and keys
    feed_forward: by saved element (plain: the activation's input and output; gated: gate, up,
        activated gate, product)
    constants: suffix of the kernels' own constants (cost/constants.json)
    engine: the engine of these kernels; without ZeRO on one data rank it is what ran
    vocabulary_multiple: the head's width on a rank is padded to it
    equal_layers_per_stage: stages hold equally many decoder layers, whatever embedding and head
        add, where that divides
    """

    norm: float
    eager_rms_norm: float
    residual: float
    dropout: float
    rotary: float
    feed_forward: float
    constants: str
    engine: str | None = None
    vocabulary_multiple: int = 1
    equal_layers_per_stage: bool = False


KERNEL_TRAFFIC: dict[str, KernelTraffic] = {
    "auto": KernelTraffic(
        norm=2,
        eager_rms_norm=14,
        residual=3,
        dropout=2.5,
        rotary=9,
        feed_forward=1.25,
        constants="hf",
    ),
    # Published runs have no dropout (see cost/layer_shapes.py).
    "hf": KernelTraffic(
        norm=2,
        eager_rms_norm=14,
        residual=3,
        dropout=0,
        rotary=9,
        feed_forward=1.25,
        constants="hf",
    ),
    # Bias, dropout and residual in one kernel, bias and activation in another (arXiv 2104.04473,
    # section 4.2). It pads the vocabulary to a multiple of 128 x t, and gives each stage as many
    # decoder layers.
    "megatron": KernelTraffic(
        norm=2,
        eager_rms_norm=2,
        residual=3,
        dropout=0.5,
        rotary=2,
        feed_forward=1.0,
        constants="megatron",
        engine="megatron",
        vocabulary_multiple=128,
        equal_layers_per_stage=True,
    ),
    # Each chain of elementwise operators is one kernel, the norm with the residual before it.
    "compiled": KernelTraffic(
        norm=2,
        eager_rms_norm=2,
        residual=2,
        dropout=0,
        rotary=2,
        feed_forward=0.75,
        constants="compiled",
    ),
}
