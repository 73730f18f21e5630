"""Packed documents, each type's tiny copy, with eager and sdpa attention: what is proved is written into the table that
the compiler reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.hf.adapters import adapt
from shardwright.hf.packing import LENGTHS, why_not_packed
from shardwright.hf.probe import NotCuttable, probe
from shardwright.model.packing import proved_packing
from tests.zoo.configs import RUNNABLE, TEXT_VOCABULARY, randomize, tiny_config

Recorder = Callable[[str, str, dict[str, Any]], None]
MODEL = Path(__file__).parents[2] / "compiler" / "shardwright" / "model"
SAMPLE = ("llama", "gpt2", "gemma2", "qwen3_moe", "mixtral", "phi3", "bloom", "mamba", "opt", "deepseek_v3")


def outcome(model_type: str, attention: str) -> str:
    """ "" where packing is proved, else the reason."""
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(**tiny_config(model_type))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        randomize(model, 0)
        adapt(model.train())
        ids = torch.randint(3, TEXT_VOCABULARY, (len(LENGTHS), sum(LENGTHS[0])))
        return why_not_packed(model, probe(model, ids).cut, ids)
    except NotCuttable as reason:
        return f"not cut: {reason}"
    except Exception as error:  # whatever a type's own code raises
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sample_of_types(attention: str) -> None:
    for model_type in SAMPLE:
        why = outcome(model_type, attention)
        assert (why == "") == proved_packing(model_type, attention), (model_type, why)


@pytest.mark.prove
def test_every_type(proved: Recorder) -> None:
    torch.set_num_threads(1)
    found = {t: {a: outcome(t, a) for a in ("eager", "sdpa")} for t in RUNNABLE}
    table = {t: [a for a, why in by.items() if not why] for t, by in found.items()}
    (MODEL / "packing_proved.json").write_text(json.dumps(table, indent=1) + "\n")
    for model_type, by in found.items():
        proved("packing", model_type, {a: why or "proved" for a, why in by.items()})
    assert sum(bool(names) for names in table.values()) >= 100
