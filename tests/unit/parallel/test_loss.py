"""The loss: the sum over the predicted tokens times `scale`, whole, in chunks, and inside the
model's forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.model_skeleton import OutputHead
from shardwright.parallel.distributed_losses import CausalLoss, ChunkedLoss, wrap_chunked_loss
from tests.unit.models.factory import SMALL_LLAMA

VOCABULARY, SHAPE, SCALE = 256, (2, 21), 0.25


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SMALL_LLAMA), dtype=torch.float32
    )


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def labels(ids: torch.Tensor) -> torch.Tensor:
    """Some are no labels: in every chunk another number, in one none at all."""
    dropped = torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.3
    dropped[:, 10:13] = True
    return torch.where(dropped, -100, ids)


def plain(
    model: Any, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    """Hugging Face's own loss: the mean, times the number of labels."""
    model.zero_grad()
    total = model(input_ids=ids, labels=labels).loss * int((labels[:, 1:] != -100).sum()) * SCALE
    total.backward()
    return float(total.detach()), {n: p.grad.clone() for n, p in model.named_parameters()}


def check(found: torch.Tensor, model: Any, wanted: tuple[float, dict[str, torch.Tensor]]) -> None:
    model.zero_grad()
    found.backward()
    assert float(found.detach()) == pytest.approx(wanted[0], rel=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[1][name], atol=1e-5, rtol=1e-4), name


@pytest.mark.parametrize("wrapped", [False, True])
def test_whole(wrapped: bool, model: Any, ids: torch.Tensor, labels: torch.Tensor) -> None:
    """A pipeline hands its labels on as a tuple."""
    wanted = plain(model, ids, labels)
    loss = CausalLoss()
    loss.scale = SCALE
    check(loss(model(input_ids=ids).logits, (labels,) if wrapped else labels), model, wanted)


@pytest.mark.parametrize("wrapped", [False, True])
def test_in_chunks(
    wrapped: bool,
    model: Any,
    ids: torch.Tensor,
    labels: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = plain(model, ids, labels)
    loss, head, seen = ChunkedLoss(), OutputHead(model), list[int]()
    loss.scale, loss.tail = SCALE, head
    logits = head.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[1])
        return logits(hidden)

    monkeypatch.setattr(head, "logits", counted)
    hidden = head.hidden(lambda: model(input_ids=ids))
    found = loss(hidden, (labels,) if wrapped else labels)
    assert max(seen) == 3 and sum(seen) == SHAPE[1] - 1, (
        "an eighth of the row at most, and no position behind the last"
    )
    check(found, model, wanted)
    assert len(seen) == 14, "each chunk's logits are made again in the backward pass"


def test_inside_the_models_forward(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> None:
    wanted = plain(model, ids, labels)
    loss = ChunkedLoss()
    loss.scale = SCALE
    wrap_chunked_loss(model, loss)
    check(model(labels=labels, input_ids=ids, use_cache=False), model, wanted)


def test_half_precision_logits_are_summed_in_single(ids: torch.Tensor) -> None:
    logits = torch.randn(*SHAPE, VOCABULARY, generator=torch.Generator().manual_seed(3)).bfloat16()
    loss = CausalLoss()(logits, ids)
    wanted = F.cross_entropy(
        logits.float()[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
    )
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(wanted), rel=1e-6)
