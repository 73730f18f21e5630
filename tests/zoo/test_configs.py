"""The tiny configurations build, train, and differ from the defaults of their types."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch

from tests.zoo import configs, overrides

SEED = 20
SAMPLE = 20
SEQUENCE = 24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(model_type: str) -> None:
    """One type: plain JSON, finite loss, gradients, nothing random in train mode, no weight left at
    zero or one."""
    json.dumps(configs.tiny_config(model_type), allow_nan=False)
    model = configs.build(model_type)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) < 3_000_000, "not tiny"
    for name, parameter in model.named_parameters():
        assert (
            torch.isfinite(parameter).all()
            and parameter.std(unbiased=False) + (parameter.numel() < 2) > 0
        ), name

    ids = torch.randint(
        3, configs.TEXT_VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(0)
    )
    loss = model(**configs.inputs(model_type, ids)).loss
    assert torch.isfinite(loss)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)
    assert torch.equal(loss, model(**configs.inputs(model_type, ids)).loss), (
        "train mode is not deterministic"
    )


def test_every_type_is_here_once() -> None:
    assert set(overrides.IMPOSSIBLE) <= set(configs.TYPES)
    assert (
        len(configs.TYPES)
        == len(set(configs.TYPES))
        == len(configs.RUNNABLE) + len(overrides.IMPOSSIBLE)
    )
    with pytest.raises(KeyError, match="timm"):
        configs.tiny_config("gemma3n")
    with pytest.raises(KeyError, match="not a causal-LM type"):
        configs.tiny_config("gpt5")


def test_seed_moves_multipliers_and_no_shape() -> None:
    first, second = configs.tiny_config("granite", 0), configs.tiny_config("granite", 1)
    assert first == configs.tiny_config("granite", 0)
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    }


def test_building_leaves_the_table_as_it_was() -> None:
    before = configs.tiny_config("cohere_compass_text")
    configs.build("cohere_compass_text")
    assert configs.tiny_config("cohere_compass_text") == before


def test_randomize_leaves_no_bias_at_zero() -> None:
    layer = torch.nn.LayerNorm(8)
    configs.randomize(layer, 0)
    assert (layer.weight != 1).all() and (layer.bias != 0).all()


@pytest.mark.parametrize("model_type", sorted(random.Random(SEED).sample(configs.RUNNABLE, SAMPLE)))
def test_sample(model_type: str) -> None:
    check(model_type)


@pytest.mark.prove
def test_all_types() -> None:
    failed: dict[str, str] = {}
    for model_type in configs.RUNNABLE:
        try:
            check(model_type)
        except Exception as error:  # the table of all failures is the result
            failed[model_type] = f"{type(error).__name__}: {error}"[:200]
    assert not failed, json.dumps(failed, indent=1)
