"""What the probe finds in toy models, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shardwright.models.layer_split import (
    NotSplittable,
    check_layer_split,
    find_inseparable_layers,
    find_layer_split,
    probe,
)
from shardwright.models.model_skeleton import Skeleton
from tests.unit.models import toy_models
from tests.unit.models.toy_models import IDS, LAYERS


@pytest.mark.parametrize(
    ("toy", "payload", "carried", "together"),
    [
        (toy_models.Toy, (), (), ()),
        (toy_models.LearnedArgument, ("1", "pair.1"), (), ()),
        (toy_models.LayersOwnInput, ("1",), (), ()),
        (toy_models.Carried, (), (1,), ()),
        (toy_models.SharedState, (), (), ((1, 2),)),
        (toy_models.SharedParameters, (), (), ((0, 2),)),
        (toy_models.Skips, (), (), ()),
    ],
)
def test_what_crosses_and_what_stays_together(
    toy: type[toy_models.Toy],
    payload: tuple[str, ...],
    carried: tuple[int, ...],
    together: tuple[tuple[int, int], ...],
) -> None:
    cut = probe(toy(), IDS).cut
    assert (cut.stack, cut.hidden_position) == ("body.layers", 0)
    assert (cut.payload, cut.carried, cut.together) == (payload, carried, together)
    assert (cut.loss, cut.causal) == ("next_token", True)


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        (toy_models.LoopAdds, "more than the hidden states"),
        (toy_models.Loops, "in a loop: body.layers"),
        (toy_models.Remembers, "more than the hidden states|differ"),
    ],
)
def test_what_cannot_be_cut_is_refused(toy: type[toy_models.Toy], reason: str) -> None:
    with pytest.raises(NotSplittable, match=reason):
        probe(toy(), IDS)


def test_a_cut_without_its_payload_or_its_group_is_refused() -> None:
    for toy, wrong in (
        (toy_models.LearnedArgument, {"payload": ("1",)}),
        (toy_models.SharedState, {"together": ()}),
    ):
        model = toy()
        found = probe(model, IDS)
        with pytest.raises((NotSplittable, KeyError)):
            check_layer_split(
                model, dataclasses.replace(found.cut, **wrong), found.embedding, found.head, IDS
            )


def test_edges_by_gradient_and_by_value() -> None:
    assert probe(toy_models.Toy(), IDS).embedding == ("body.table.weight",)
    found = probe(toy_models.ConstantTable(), IDS)
    assert found.embedding == ("body.table.weight", "body.places.weight")
    assert found.head == ("norm.weight", "norm.bias", "out.weight", "out.bias")
    assert probe(toy_models.OwnParameter(), IDS).embedding == ("body.scale", "body.table.weight")
    # A payload's own parameters live with the embedding.
    assert "body.extra.weight" in probe(toy_models.LearnedArgument(), IDS).embedding


def test_parameters_of_a_deeper_tower_are_placed_by_pattern() -> None:
    found = dataclasses.replace(
        probe(toy_models.Toy(), IDS), head=("norm.weight", "tower.0.weight")
    )
    names = (
        "body.table.weight",
        "body.layers.17.linear.weight",
        "norm.weight",
        "tower.0.weight",
        "tower.11.weight",
    )
    assert found.place(names) == (
        ("body.table.weight",),
        ("norm.weight", "tower.0.weight", "tower.11.weight"),
    )
    assert found.place((*names, "tower.0.scale")) is None


def test_a_model_that_sees_later_tokens_is_told_apart() -> None:
    assert not probe(toy_models.SeesAll(), IDS).cut.causal


@pytest.mark.parametrize(
    ("toy", "loss"), [(toy_models.ShiftedLabels, "given"), (toy_models.Smoothed, "other")]
)
def test_own_loss(toy: type[toy_models.Toy], loss: str) -> None:
    assert probe(toy(), IDS).cut.loss == loss


def test_a_chain_takes_every_layer_that_carries() -> None:
    """State is found between neighbours and further apart, at any depth."""
    model = toy_models.SharedState()
    cut = find_layer_split(model, IDS)
    assert find_inseparable_layers(model, cut, IDS) == ((1, 2),)


@pytest.mark.parametrize(
    "toy", [toy_models.LearnedArgument, toy_models.LayersOwnInput, toy_models.Carried]
)
def test_gradients_flow_back_through_the_payload(toy: type[toy_models.Toy]) -> None:
    """The pieces one after another give every parameter the plain model's gradient."""
    model = toy()
    plain = _gradients(model, model(IDS).logits)
    skeleton = Skeleton(model, find_layer_split(model, IDS), (IDS.shape[0], IDS.shape[1]))
    state = skeleton.embed(IDS, None)
    for index in range(LAYERS):
        state = skeleton.decode(index, state)
    pieces = _gradients(model, skeleton.head(state))
    assert plain.keys() == pieces.keys() and all(
        torch.equal(pieces[n], g) for n, g in plain.items()
    )
    assert all(value is None for value in state.payload), (
        "behind its last use nothing crosses any more"
    )


def _gradients(model: toy_models.Toy, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_what_no_gradient_reaches_is_left_alone() -> None:
    """A constant table is no parameter to an optimizer, though a flat one would let it decay."""
    assert probe(toy_models.Toy(), IDS).cut.untrained == ()
    table = toy_models.ConstantTable()
    table.tower = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    for frozen in (True, False):  # looked up under no_grad all the same
        table.body.places.weight.requires_grad_(not frozen)
        assert probe(table, IDS).cut.untrained == (
            "body.places.weight",
            "tower.*.weight",
            "tower.*.bias",
        )
        assert table.body.places.weight.requires_grad != frozen
    # A layer that does not run: others of its kind do.
    assert probe(toy_models.Skips(), IDS).cut.untrained == ()
