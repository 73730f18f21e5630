"""Which types can have their rows cut over ranks: found on one process, with the reason where they
cannot."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from shardwright.models import context_parallel_probe
from shardwright.models.context_parallel_probe import context_split_blocker
from tests.zoo.configs import tiny_config

INTERFACE = "its attention does not go through transformers' attention interface"
MIXES = "its tokens see each other outside of attention"
COUNTS = "it counts its positions itself"
MASKS = "it uses the mask outside of attention"
FOUND = {
    "llama": "",
    "gpt2": "",
    "gemma2": "",
    "gpt_oss": "",
    "deepseek_v3": "",
    "opt": "",
    "bloom": INTERFACE,
    "mamba": INTERFACE,
    "jamba": MIXES,
    "lfm2": MIXES,
    "qwen3_next": MIXES,
    "roberta": COUNTS,
    "llama4_text": COUNTS,
    "deepseek_v32": MASKS,
    "doge": MASKS,
}


def model_of(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**tiny_config(model_type), **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def ids() -> torch.Tensor:
    return torch.randint(8, 100, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", FOUND)
def test_each_type_has_its_answer(model_type: str) -> None:
    interface = AttentionInterface.get_interface
    assert context_split_blocker(model_of(model_type), ids()) == FOUND[model_type]
    assert AttentionInterface.get_interface is interface


def test_what_is_not_a_number_is_no_proof() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    assert context_split_blocker(model, ids()) == "a tiny copy's logits are not finite"


def test_a_neighbour_that_leaks_into_a_norm_is_seen() -> None:
    class Leaks(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.01 * hidden.roll(1, dims=1)

    model = model_of("llama")
    model.model.norm = Leaks()
    assert context_split_blocker(model, ids()) == MIXES


LENGTH_DEPENDENT: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 5000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i for i in range(8)],
            "original_max_position_embeddings": 16,
        }
    },
    "dynamic": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0},
    },
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_frequencies_that_depend_on_the_length_are_those_of_the_whole_row(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half is shorter than the switch at 16, the row of 24 is longer; the probe sees where they
    are not given it."""
    changes = LENGTH_DEPENDENT[kind]
    assert context_split_blocker(model_of("llama", **changes), ids()) == ""
    monkeypatch.setattr(context_parallel_probe, "length_dependent_rope", lambda model: [])
    assert context_split_blocker(model_of("llama", **changes), ids()) == COUNTS


def test_a_rotary_embedding_is_called_in_any_way_and_gives_one_table_or_two() -> None:
    """It sees the last position of the whole sequence, and gives the tables of its own tokens
    alone."""
    seen: list[list[int]] = []

    class Table(nn.Module):
        rope_type: ClassVar[dict[str, str]] = {"full": "dynamic"}

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> Any:
            seen.append(position_ids[0].tolist())
            table = position_ids[..., None] * torch.ones(4)
            return table if layer_type == "one" else (table, table)

    model, own = Table(), torch.tensor([[2, 3]])
    with context_parallel_probe.full_sequence_rope(model, lambda _: 7):
        one = model(own, position_ids=own, layer_type="one")
        two = model(own, own, "two")
    assert seen == [[2, 3, 7], [2, 3, 7]]
    assert one.shape == (1, 2, 4) and [table[0, :, 0].tolist() for table in two] == [[2.0, 3.0]] * 2
