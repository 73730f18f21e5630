"""The losses of pairs: the mean of the ranks' shares, and its gradient, are those of one process;
and a model whose loss is another one is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel

from shardwright.models.layer_split import NotSplittable
from shardwright.models.tasks.contrastive import (
    SIGMOID,
    SOFTMAX,
    contrastive_loss,
    probe_contrastive,
)
from shardwright.models.tasks.task_registry import CONTRASTIVE
from tests.parity.contrastive import MODELS

SCALE, BIAS = torch.tensor([1.5]), torch.tensor([-0.5])


def features(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    one, other = (F.normalize(torch.randn(rows, 6), dim=-1) for _ in range(2))
    return one, other


@pytest.mark.parametrize("kind", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_mean_of_the_shares_is_the_loss_of_all(kind: str, ranks: int) -> None:
    every = features(8)
    for side in every:
        side.requires_grad_(True)
    whole = contrastive_loss(kind, every, every, SCALE, BIAS)
    wanted = torch.autograd.grad(whole, every)
    rows = 8 // ranks
    shares = []
    for rank in range(ranks):
        own = every[0].narrow(0, rank * rows, rows), every[1].narrow(0, rank * rows, rows)
        shares.append(contrastive_loss(kind, own, every, SCALE, BIAS, rank * rows))
    mean = torch.stack(shares).mean()
    assert torch.allclose(mean, whole, rtol=1e-6)
    for got, gradient in zip(torch.autograd.grad(mean, every), wanted, strict=True):
        assert torch.allclose(got, gradient, atol=1e-6)


@pytest.mark.parametrize(("model", "loss"), [("clip", SOFTMAX), ("siglip", SIGMOID)])
def test_a_tiny_copy_tells_its_loss_and_its_sides(model: str, loss: str) -> None:
    torch.manual_seed(0)
    tiny = AutoModel.from_config(
        AutoConfig.for_model(model, **MODELS[model]), dtype=torch.float32
    ).train()
    names = {name for name, _ in tiny.named_parameters()}
    found = probe_contrastive(tiny, CONTRASTIVE.example(tiny.config))
    assert (
        found.cut.loss == loss
        and found.cut.stack == "text_model.encoder.layers"
        and not found.cut.untrained
    )
    assert {n for n in names if n.startswith("vision_model.")} <= set(found.embedding)
    assert "logit_scale" in found.head
    assert {*found.embedding, *found.head} == {
        n for n in names if not n.startswith(found.cut.stack)
    }


def test_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = AutoModel.from_config(
        AutoConfig.for_model("clip", **MODELS["clip"]), dtype=torch.float32
    ).train()
    from transformers.models.clip import modeling_clip

    plain = modeling_clip.image_text_contrastive_loss
    monkeypatch.setattr(
        modeling_clip, "image_text_contrastive_loss", lambda similarity: 1.01 * plain(similarity)
    )
    with pytest.raises(NotSplittable, match="neither"):
        probe_contrastive(tiny, CONTRASTIVE.example(tiny.config))
