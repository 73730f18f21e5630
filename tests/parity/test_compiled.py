"""`kernels: compile` trains as one plain process without torch.compile, and its layers are compiled
indeed; many in one launch. The types here are those of models/torch_compile_types.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shardwright.models.model_support import torch_compile_types
from tests.parity.case_launches import launched, sample_of
from tests.parity.harness import BF16_RELATIVE, LOSS_ABSOLUTE, NORM_RELATIVE, Case
from tests.parity.models import MODELS

pytestmark = pytest.mark.launch

COMPILED = Case(model="llama", kernels="compile")
ONE: dict[str, Case] = {
    "llama": COMPILED,
    "llama-full": dataclasses.replace(COMPILED, checkpointing="full"),
    "llama-partial-chunked": dataclasses.replace(
        COMPILED, checkpointing={"full": 2}, loss="chunked"
    ),
    "llama-bf16": dataclasses.replace(COMPILED, precision="bf16"),
    "gpt2": dataclasses.replace(COMPILED, model="gpt2-plain"),
    "llama-hf": dataclasses.replace(COMPILED, kernels="hf"),
    "mistral": dataclasses.replace(COMPILED, model="mistral"),
    "gemma2-full": dataclasses.replace(COMPILED, model="gemma2", checkpointing="full"),
    "qwen3-moe": dataclasses.replace(COMPILED, model="qwen3_moe"),
}
TWO: dict[str, Case] = {
    "llama-dp2-zero2": dataclasses.replace(COMPILED, data=2, zero_stage=2),
    "llama-pp2-full": dataclasses.replace(COMPILED, pipeline=2, checkpointing="full"),
    "gpt2-pp2": dataclasses.replace(COMPILED, model="gpt2-plain", pipeline=2),
    "gpt2-dp2-zero1": dataclasses.replace(COMPILED, model="gpt2-plain", data=2),
    "mixtral-dp2-zero2": dataclasses.replace(COMPILED, model="mixtral", data=2, zero_stage=2),
}
_TYPES = (
    *(
        "mistral",
        "ministral3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi",
        "phi3",
        "olmo",
        "olmo2",
        "olmo3",
        "cohere",
    ),
    *(
        "cohere2",
        "glm4",
        "smollm3",
        "stablelm",
        "starcoder2",
        "seed_oss",
        "gpt_neox",
        "qwen2",
        "qwen3",
        "granite",
    ),
    *("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
)
TYPES: dict[str, Case] = {name: dataclasses.replace(COMPILED, model=name) for name in _TYPES} | {
    f"{name}-full-bf16": dataclasses.replace(
        COMPILED, model=name, checkpointing="full", precision="bf16"
    )
    for name in ("qwen3", "gemma3_text", "mixtral", "deepseek_v3")
}
TYPES_PIPED: dict[str, Case] = {
    f"{name}-pp2": dataclasses.replace(COMPILED, model=name, pipeline=2)
    for name in ("gemma3_text", "cohere2", "smollm3", "qwen3_moe", "deepseek_v3", "gpt_oss")
}
"""Types whose layers are of several kinds, or are handed more than the hidden states."""


@pytest.mark.parametrize(
    "cases",
    [
        sample_of(TWO, "gpt2-pp2", "mixtral-dp2-zero2"),
        *(pytest.param(cases, marks=pytest.mark.prove) for cases in (TWO, ONE, TYPES, TYPES_PIPED)),
    ],
    ids=["sample", "two-ranks", "one-rank", "types", "types-in-a-pipeline"],
)
def test_compiled_layers_train_as_one_plain_process(cases: dict[str, Case], tmp_path: Path) -> None:
    for name, figures in launched(cases, tmp_path, "compiled_worker.py").items():
        half = cases[name].precision == "bf16"
        assert figures["loss"] <= (BF16_RELATIVE if half else LOSS_ABSOLUTE), (name, figures)
        assert half or figures["norm"] <= NORM_RELATIVE, (name, figures)


def test_each_type_is_among_the_cases() -> None:
    cases = (*ONE.values(), *TWO.values(), *TYPES.values())
    assert torch_compile_types() == {
        MODELS[case.model]["model_type"] for case in cases if case.kernels == "compile"
    }
