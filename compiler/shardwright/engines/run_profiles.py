"""Describe whose run the cost model prices: the recipe's own, or one that `assume.kernels` names.

The cost model reads these records, never a name. Records of assumed runs are in assumed_runs.json,
which `make fit-cost` writes: only tools/fit_cost knows the published runs behind them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal, TypedDict


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProfile:
    """Count what a layer's kernels move, save and recompute; the defaults are Hugging Face's.

    norm, eager_rms_norm, residual, dropout: elements read and written in a forward pass, by element
        of the hidden size; the eager RMSNorm casts, squares, scales and weighs one by one, partly
        in float32, and dropout has a one-byte mask
    rotary: the same, by element of queries and keys
    feed_forward: the same, by saved element (plain: the activation's input and output; gated: gate,
        up, activated gate, product)
    composed_activation: the same, by inner feature, of an activation of many operators (gelu_new)
    attention: the library of fused attention (cost/chip_rates.py)
    family: suffix of the kernels' own constants (cost/constants.json)
    loss_family: the same, of the bytes at the loss
    fuses_attention_sinks: attention that is eager in Hugging Face's modules is fused
    uses_deepep: experts have DeepEP's dispatcher, whatever the recipe says
    traces_activations: saved activations are those of the traced modules; else arXiv 2205.05198's
    recomputes_elementwise: the backward pass recomputes cheap operators, as torch.compile does
    selective_by_operator: "selective" is torch's, by operator (arXiv 2410.06511, 2.2.3)
    stops_recompute_early: a checkpoint's recomputation ends once all that it dropped is back
    vocabulary_multiple: the head's width on a rank is padded to it
    equal_layers_per_stage: stages hold equally many decoder layers, whatever embedding and head
        add, where that divides
    engine_without_zero: without ZeRO on one data rank, the traits are those of this engine
    """

    norm: float = 2
    eager_rms_norm: float = 20
    residual: float = 3
    dropout: float = 2.5
    rotary: float = 9
    feed_forward: float = 1.25
    composed_activation: float = 18
    attention: Literal["torch", "best", "flash", "flash1"] = "torch"
    family: str = "hf"
    loss_family: str = "auto"
    fuses_attention_sinks: bool = False
    uses_deepep: bool = False
    traces_activations: bool = True
    recomputes_elementwise: bool = False
    selective_by_operator: bool = False
    stops_recompute_early: bool = True
    vocabulary_multiple: int = 1
    equal_layers_per_stage: bool = False
    engine_without_zero: str | None = None

    @property
    def host_bounds_experts(self) -> bool:
        """Return whether the host's launches and waits for token counts bound an expert layer.

        Hugging Face's modules are bound by each kernel's launch instead.
        """
        return self.family == "megatron"


OWN_KERNELS = {
    "megatron": KernelProfile(
        eager_rms_norm=2,
        dropout=0.5,
        rotary=2,
        feed_forward=1.0,
        composed_activation=0,
        attention="best",
        fuses_attention_sinks=True,
        family="megatron",
        loss_family="megatron",
        traces_activations=False,
    )
}
"""Profiles of `assume.kernels: auto` for targets that do not run Hugging Face's modules."""


class AssumedEngine(TypedDict, total=False):
    """Hold how the engine of an assumed run differs from the target's.

    title: the engine whose runs are estimated
    family: engines that are predicted alike, whose runs tell of one another
    traits: of EngineTraits
    kernels: of KernelProfile, beyond those of `assume.kernels`
    """

    title: str
    family: str
    traits: dict[str, Any]
    kernels: dict[str, Any]


class AssumedRuns(TypedDict):
    """Hold assumed_runs.json.

    kernels: by `assume.kernels`, the fields of KernelProfile that differ
    model_kernels: by `assume.kernels` and model type, further ones
    engines: by target and `assume.kernels`
    families: by target, of runs that no entry of engines describes
    """

    kernels: dict[str, dict[str, Any]]
    model_kernels: dict[str, dict[str, dict[str, Any]]]
    engines: dict[str, dict[str, AssumedEngine]]
    families: dict[str, str]


@functools.cache
def assumed_runs() -> AssumedRuns:
    text = resources.files("shardwright.engines").joinpath("assumed_runs.json").read_text("utf-8")
    runs: AssumedRuns = json.loads(text)
    return runs


@functools.cache
def kernel_profile(kernels: str, model_type: str, target: str = "deepspeed") -> KernelProfile:
    """Return the profile of a model's kernels; kernels: as in `assume`."""
    if kernels == "auto":
        return OWN_KERNELS.get(target, KernelProfile())
    runs = assumed_runs()
    changes = runs["kernels"][kernels] | runs["model_kernels"].get(kernels, {}).get(model_type, {})
    changes = changes | runs["engines"].get(target, {}).get(kernels, {}).get("kernels", {})
    return replace(KernelProfile(), **changes)
