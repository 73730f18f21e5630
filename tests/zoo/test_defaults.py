"""The probe on real sizes: the default configuration of a type's own class is shrunk to a copy that
runs.

No weights are made but the copy's. What transformers itself cannot run as it is stands in BROKEN,
with the reason.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig

from shardwright.diagnostics import Refusal
from shardwright.models.model_probe import probe_config
from shardwright.models.tasks.task_registry import CAUSAL_LM
from tests.zoo.configs import RUNNABLE

BROKEN: dict[str, str] = {
    "cohere_compass_text": "no rotary table for the type of its layers",
    "dbrx": "rope_theta has no default",
    "deepseek_v2": "num_experts_per_tok has no default",
    "dots1": "n_shared_experts has no default",
    "hunyuan_v1_dense": "head_dim has no default",
    "hunyuan_v1_moe": "head_dim has no default",
    "lfm2_moe": "layer_types has no default",
    "ministral": "head_dim has no default",
    "musicgen": (
        "the class takes the decoder's configuration, the mapping hands it the composite one"
    ),
    "musicgen_melody": (
        "the class takes the decoder's configuration, the mapping hands it the composite one"
    ),
    "nemotron": "num_key_value_heads has no default",
    "qwen4_exp": "the indexer has no default sizes",
    "qwen4_exp_text": "the indexer has no default sizes",
    "reformer": "is_decoder is False by default, which its class refuses",
    "xmod": "default_language has no default",
}
NOT_CUT = {"hrm_text", "xlm"}
SAMPLE = sorted(
    random.Random(3).sample([t for t in RUNNABLE if t not in BROKEN.keys() | NOT_CUT], 6)
)


def check(model_type: str) -> None:
    """Raises Refusal where it is not cut."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        probe_config(AutoConfig.for_model(model_type), CAUSAL_LM, "auto", ("model", "config"))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("model_type", SAMPLE)
def test_sample(model_type: str) -> None:
    check(model_type)


@pytest.mark.prove
def test_all_types() -> None:
    refused = set()
    for model_type in RUNNABLE:
        try:
            check(model_type)
        except Refusal:
            refused.add(model_type)
    assert refused == BROKEN.keys() | NOT_CUT
