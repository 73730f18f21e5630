"""The balance loss of routers: which types get it, by what affinities, and what it adds to
gradients."""

from __future__ import annotations

import pytest
import torch

from shardwright.models.mixture_of_experts import (
    SEQUENCE_LENGTHS,
    NoRouterAuxLoss,
    RouterAuxLoss,
    detect_affinity,
    find_routers,
)
from shardwright.parallel.layer_compile_and_recompute import recompute_forward
from shardwright.utils.numeric_difference import max_abs_diff
from tests.parity.models import MODELS
from tests.parity.reference import initial_model
from tests.parity.router_aux_loss import row_loss

IDS = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _forget_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the micro-batch that another test of this process ran last."""
    monkeypatch.setattr(SEQUENCE_LENGTHS, "current", None)


@pytest.mark.parametrize(
    ("name", "affinity", "routers"),
    [("mixtral", "softmax", 4), ("dense-first", "softmax", 2), ("deepseek_v3", "sigmoid", 3)],
)
def test_what_routers_make_of_their_logits(name: str, affinity: str, routers: int) -> None:
    model = initial_model(MODELS[name], 0)
    assert detect_affinity(model, IDS) == affinity
    assert len(find_routers(model)) == routers


def test_a_dense_type_has_no_routers() -> None:
    found = detect_affinity(initial_model(MODELS["llama"], 0), IDS)
    assert isinstance(found, NoRouterAuxLoss) and "none of its routers" in found.why


def test_one_expert_a_token_does_not_tell() -> None:
    found = detect_affinity(initial_model({**MODELS["mixtral"], "num_experts_per_tok": 1}, 0), IDS)
    assert isinstance(found, NoRouterAuxLoss) and "one expert a token" in found.why


def test_even_routing_costs_one() -> None:
    """The least that it can be; all tokens on the same experts cost E / k at most."""
    balance = RouterAuxLoss(initial_model(MODELS["mixtral"], 0), 1.0, "softmax")
    balance.length = 4
    even = balance.of_layer(torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))
    assert even.item() == pytest.approx(1.0)
    alike = balance.of_layer(torch.tensor([[50.0, 50.0, 0.0, 0.0]] * 4), torch.tensor([[0, 1]] * 4))
    assert alike.item() == pytest.approx(2.0)


def test_rows_count_apart() -> None:
    """The first row's tokens choose two experts, the second row's the others: together they would
    look even."""
    balance = RouterAuxLoss(initial_model(MODELS["mixtral"], 0), 1.0, "softmax")
    balance.length = 2
    logits = torch.tensor([[50.0, 50.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 50.0, 50.0]] * 2)
    chosen = torch.tensor([[0, 1]] * 2 + [[2, 3]] * 2)
    assert balance.of_layer(logits, chosen).item() == pytest.approx(2.0)
    wanted = sum(row_loss(logits, chosen, 2, row, sigmoid=False).item() for row in range(2)) / 2
    assert balance.of_layer(logits, chosen).item() == pytest.approx(wanted)


def test_parts_of_a_row_add_up_to_it() -> None:
    """What two context ranks compute of half the tokens each, the counts of both being summed."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 4, generator=generator)
    chosen = logits.topk(2).indices
    counts = torch.zeros(1, 4).scatter_add_(1, chosen.view(1, -1), torch.ones(1, 16))
    halves = RouterAuxLoss(
        initial_model(MODELS["mixtral"], 0), 1.0, "softmax", pieces=2, summed=lambda own: counts
    )
    halves.length = 4
    total = halves.of_layer(logits[:4], chosen[:4]) + halves.of_layer(logits[4:], chosen[4:])
    assert total.item() == pytest.approx(row_loss(logits, chosen, 1, 0, sigmoid=False).item())


@pytest.mark.parametrize("own", [False, True], ids=["whole rows", "pieces of rows"])
def test_padding_is_no_token(own: bool) -> None:
    """Two rows of 8, of which 3 and 8 are tokens; the padding is routed as one token is, again and
    again. Of the first row the second piece has padding alone."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 8, 4, generator=generator)
    logits[0, 3:] = logits[0, 3]
    chosen = logits.topk(2).indices
    wanted = [
        row_loss(logits[r, :n], chosen[r, :n], 1, 0, sigmoid=False) for r, n in enumerate((3, 8))
    ]
    counts = torch.stack(
        [torch.bincount(chosen[r, :n].flatten(), minlength=4).float() for r, n in enumerate((3, 8))]
    )
    got = torch.zeros(())
    SEQUENCE_LENGTHS.current = torch.tensor([3, 8])
    try:
        for piece in range(2 if own else 1):
            model = initial_model(MODELS["mixtral"], 0)
            balance = RouterAuxLoss(model, 1.0, "softmax")
            if own:
                balance = RouterAuxLoss(
                    model, 1.0, "softmax", pieces=2, piece=piece, summed=lambda _: counts
                )
            balance.length = 4 if own else 8
            here = slice(piece * balance.length, (piece + 1) * balance.length)
            got = got + balance.of_layer(
                logits[:, here].reshape(-1, 4), chosen[:, here].reshape(-1, 2)
            )
    finally:
        SEQUENCE_LENGTHS.current = None
    assert got.item() == pytest.approx(float(sum(wanted)) / 2, rel=1e-6)


def test_recomputation_belongs_to_its_own_micro_batch() -> None:
    """A pipeline computes a micro-batch again when the next one's forward is done."""
    first, second = torch.tensor([3]), torch.tensor([5])
    seen: list[torch.Tensor | None] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(SEQUENCE_LENGTHS.current)
            return (x * x).sin()

    layer = Layer()
    recompute_forward(layer)
    try:
        made = []
        for SEQUENCE_LENGTHS.current in (first, second):
            made.append(layer(torch.ones(2, requires_grad=True)))
        for output in made:
            output.sum().backward()
        assert SEQUENCE_LENGTHS.current is second
    finally:
        SEQUENCE_LENGTHS.current = None
    assert [None if lengths is None else lengths.item() for lengths in seen] == [3, 5, 3, 5]


def test_tokens_that_are_no_rows_are_refused() -> None:
    balance = RouterAuxLoss(initial_model(MODELS["mixtral"], 0), 1.0, "softmax")
    balance.length = 3
    with pytest.raises(RuntimeError, match="4 tokens are not sequences of 3"):
        balance.of_layer(torch.zeros(4, 4), torch.zeros(4, 2, dtype=torch.int64))


def test_the_loss_stays_and_router_gradients_change() -> None:
    """Only while it trains: an evaluation computes what it did."""
    plain, balanced = (initial_model(MODELS["mixtral"], 0).train() for _ in range(2))
    RouterAuxLoss(balanced, 0.5, "softmax").length = IDS.shape[1]
    losses = [model(input_ids=IDS, labels=IDS, use_cache=False).loss for model in (plain, balanced)]
    assert losses[0].item() == losses[1].item()
    for loss in losses:
        loss.backward()
    plain_router, balanced_router = (
        next(iter(find_routers(model).values())).get_parameter("weight")
        for model in (plain, balanced)
    )
    assert plain_router.grad is not None and balanced_router.grad is not None
    assert max_abs_diff(plain_router.grad, balanced_router.grad) > 1e-4
    with torch.no_grad():
        assert torch.equal(
            *(m.eval()(input_ids=IDS, use_cache=False).logits for m in (plain, balanced))
        )
