"""Models that see, taken apart: the tower, the projector and the merge are one piece, the decoder
layers another one each, and no picture crosses between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.models.layer_split import NotSplittable, probe
from shardwright.models.model_skeleton import Skeleton, without_images
from shardwright.models.tasks.vision_language import UnsupportedImages, example_images
from shardwright.models.tiny_config import VOCABULARY
from tests.unit.models import vision_language_models


@pytest.mark.parametrize("model_type", vision_language_models.CONFIGS)
def test_pieces_give_the_models_logits(model_type: str) -> None:
    model = vision_language_models.tiny(model_type)
    ids, beside = example_images(model, VOCABULARY)
    found = probe(model, ids, beside)  # bit for bit, or it raises
    assert ".layers" in found.cut.stack and "vis" not in found.cut.stack
    tower = [name for name, _ in model.named_parameters() if "vis" in name]
    assert tower and set(tower) <= set(found.embedding)
    assert not set(tower) & set(found.head)


def test_last_block_of_a_tower_that_gives_the_one_before_it_is_not_trained() -> None:
    model = vision_language_models.tiny("llava")
    untrained = probe(model, *example_images(model, VOCABULARY)).cut.untrained
    assert "model.vision_tower.encoder.layers.2.self_attn.q_proj.weight" in untrained
    assert "model.vision_tower.encoder.layers.1.self_attn.q_proj.weight" not in untrained


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_pieces_follow_where_the_pictures_stand(model_type: str) -> None:
    """Positions and masks come from the batch: one captured for another batch of the same shape
    would be wrong."""
    model = vision_language_models.tiny(model_type)
    ids, beside = example_images(model, VOCABULARY)
    skeleton = Skeleton(model, probe(model, ids, beside).cut, (ids.shape[0], ids.shape[1]))
    moved = {
        name: value.roll(5, 1) if value.shape == ids.shape else value
        for name, value in beside.items()
    }
    blind = {
        name: torch.zeros_like(value)
        for name, value in without_images(beside).items()
        if value.ndim == 2
    }
    blind.pop("image_grid_thw", None)
    batches: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (ids, dict(beside)),
        (ids.roll(5, 1), moved),
        (torch.randint(20, VOCABULARY, ids.shape), blind),  # no picture at all
    ]
    plain = [model(input_ids=tokens, use_cache=False, **given).logits for tokens, given in batches]
    assert not torch.equal(plain[0].roll(5, 1), plain[1])
    for (tokens, given), wanted in zip(batches, plain, strict=True):
        skeleton.begin()
        state = skeleton.embed(tokens, None, given)
        for index in range(len(skeleton.layers)):
            state = skeleton.decode(index, state)
        assert torch.equal(skeleton.head(state), wanted)


def test_model_that_ignores_its_pictures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_language_models.tiny("llava")
    ids, beside = example_images(model, VOCABULARY)
    features = model.model.get_image_features

    def constant(*args: Any, **kwargs: Any) -> Any:
        found = features(*args, **kwargs)
        found.pooler_output = [torch.ones_like(each) for each in found.pooler_output]
        return found

    monkeypatch.setattr(model.model, "get_image_features", constant)
    with pytest.raises(NotSplittable, match="do not depend on the images"):
        probe(model, ids, beside)


def test_a_type_without_a_placeholder_is_told() -> None:
    config = CONFIG_MAPPING["blip"]()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(UnsupportedImages, match="no token that stands for a picture"):
        example_images(model, VOCABULARY)
