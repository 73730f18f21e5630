"""Packed documents, each type's tiny copy, with eager, sdpa and flash attention, as the compiler
probes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.diagnostics import Refusal
from shardwright.models.graph_trace import check_attention
from shardwright.models.model_probe import probe_config
from shardwright.models.packed_attention import emulate_flash_attention
from shardwright.models.tasks.task_registry import CAUSAL_LM
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from tests.zoo.configs import RUNNABLE, tiny_config

Recorder = Callable[[str, str, dict[str, Any]], None]
ATTENTIONS = ("eager", "sdpa", FLASH_ATTENTION_2)
ALL = frozenset(ATTENTIONS)
SAMPLE: dict[str, frozenset[str]] = {
    "llama": ALL,
    "qwen3_moe": ALL,
    "gemma2": ALL - {"sdpa"},  # soft caps on the scores: the type has no sdpa
    "deepseek_v3": ALL,
    "stablelm": ALL - {FLASH_ATTENTION_2},  # its layers do not hand on where documents end
    "opt": ALL,  # its code hands its mask no positions
    "gpt_oss": frozenset({"eager"}),  # nor its two masks; attention sinks
    "bloom": frozenset({"eager"}),  # ALiBi, and a mask of ones
    "mamba": frozenset(),
}


def outcome(model_type: str, attention: str) -> str:
    """ "" where packing is proved, else the reason."""
    with emulate_flash_attention() if attention == FLASH_ATTENTION_2 else nullcontext():
        try:
            config = AutoConfig.for_model(**tiny_config(model_type))
            with torch.device("meta"):
                check_attention(AutoModelForCausalLM.from_config(config), config, attention)
            return probe_config(config, CAUSAL_LM, attention, ()).packing
        except Refusal as refusal:
            return refusal.diagnostics[0].message
        except Exception as error:  # whatever a type's own code raises
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_sample_of_types(model_type: str) -> None:
    found = {attention: outcome(model_type, attention) for attention in ATTENTIONS}
    assert {attention for attention, why in found.items() if not why} == SAMPLE[model_type], found


@pytest.mark.prove
def test_every_type(proved: Recorder) -> None:
    torch.set_num_threads(1)
    found = {t: {a: outcome(t, a) for a in ATTENTIONS} for t in RUNNABLE}
    for model_type, by in found.items():
        proved("packing", model_type, {a: why or "proved" for a, why in by.items()})
    assert sum("" in by.values() for by in found.values()) >= 110
