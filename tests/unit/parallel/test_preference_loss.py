"""Losses of preference objectives: the papers' values at points that are known, and what a batch
leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.models.tasks.preference import PAIR_LOSSES, Completions
from shardwright.parallel import distributed_losses
from shardwright.parallel.distributed_losses import CausalLoss, ChunkedLoss, RewardLoss
from shardwright.parallel.micro_batches import label_counts
from shardwright.parallel.preference_loss import PreferenceLoss
from shardwright.recipe.objectives import METRICS, OBJECTIVES, ObjectiveSection

CPU = torch.device("cpu")
PAIRS = [name for name, traits in OBJECTIVES.items() if traits.compares_pairs]


def objective(name: str, **keys: float | bool) -> ObjectiveSection:
    return ObjectiveSection(name=name, **{**OBJECTIVES[name].defaults, **keys})  # type: ignore[arg-type]


def completions(total: float, tokens: int, reference: float) -> Completions:
    sums = torch.tensor([total], dtype=torch.float64, requires_grad=True)
    beside = torch.tensor([reference], dtype=torch.float64)
    return Completions(scores=sums, reference=beside, tokens=torch.tensor([tokens]))


def loss_of(o: ObjectiveSection, chosen: Completions, rejected: Completions) -> float:
    return float(PAIR_LOSSES[o.name](o, chosen, rejected).losses.detach())


def test_every_objective_of_pairs_has_a_loss() -> None:
    assert set(PAIR_LOSSES) == set(PAIRS)


def test_known_values() -> None:
    chosen, rejected = completions(-10, 4, -12), completions(-21, 7, -20)
    dpo = objective("dpo", beta=0.5)
    assert loss_of(dpo, chosen, rejected) == pytest.approx(math.log1p(math.exp(-1.5)))
    smoothed = replace(dpo, label_smoothing=0.25)
    wanted = 0.75 * math.log1p(math.exp(-1.5)) + 0.25 * math.log1p(math.exp(1.5))
    assert loss_of(smoothed, chosen, rejected) == pytest.approx(wanted)
    ipo = objective("ipo", beta=0.25)
    assert loss_of(ipo, chosen, rejected) == pytest.approx((3 - 2) ** 2)
    assert loss_of(replace(ipo, average=True), chosen, rejected) == pytest.approx(
        (2 / 4 + 1 / 7 - 2) ** 2
    )
    simpo = objective("simpo", beta=2.0, gamma=0.5)
    assert loss_of(simpo, chosen, rejected) == pytest.approx(
        math.log1p(math.exp(-(2 * (-2.5 + 3) - 0.5)))
    )
    odds = [p / (1 - p) for p in (math.exp(-2.5), math.exp(-3))]
    wanted = 2.5 + 0.1 * math.log1p(odds[1] / odds[0])
    assert loss_of(objective("orpo"), chosen, rejected) == pytest.approx(wanted)
    better, worse = completions(0.5, 1, 0), completions(-0.25, 1, 0)
    wanted = math.log1p(math.exp(-0.75)) + 0.1 * 0.25**2
    reward = objective("reward", center_coefficient=0.1)
    assert loss_of(reward, better, worse) == pytest.approx(wanted)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("total", [-1e-9, -0.5, -3000.0])
def test_gradients_are_finite_for_any_probability(name: str, total: float) -> None:
    """Also for a completion that is nearly certain, or next to impossible."""
    chosen, rejected = completions(total, 3, -2), completions(-3000.0, 5, -1e-9)
    PAIR_LOSSES[name](objective(name), chosen, rejected).losses.sum().backward()
    for each in (chosen, rejected):
        gradient = each.scores.grad
        assert gradient is not None and gradient.isfinite().all(), name


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_pairs_that_fill_up_a_batch_do_not_count(one_process: None) -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(6, 5, 11), torch.randint(11, (6, 5))
    labels[:, :2] = IGNORE_INDEX
    labels[3] = IGNORE_INDEX  # of the second pair, one has no label
    labels[4:] = IGNORE_INDEX
    reference = torch.randn(6, dtype=torch.float64)
    loss, first = CausalLoss(), CausalLoss()
    for each in (loss, first):
        each.objective = PreferenceLoss(objective("dpo"), CPU)
    found = loss(logits, (labels, label_counts(labels, None), reference))
    assert found.dtype == torch.float32
    pair = labels[:2], label_counts(labels[:2], None), reference[:2]
    assert float(found) == float(first(logits[:2], pair))
    assert loss.objective is not None and first.objective is not None
    metrics = loss.objective.metrics(is_counted=True)
    assert metrics == first.objective.metrics(is_counted=True)
    assert set(metrics) == set(METRICS) and metrics["margin"] != 0
    assert set(loss.objective.metrics(is_counted=True).values()) == {0.0}, "they are read once"


@pytest.mark.parametrize("name", ["dpo", "simpo"])
@pytest.mark.parametrize("kind", [CausalLoss, ChunkedLoss])
def test_packed_pairs_are_compared_as_those_alone(
    kind: type[CausalLoss], name: str, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pairs in a sequence of 12 tokens, and one beside padding."""
    torch.manual_seed(4)
    monkeypatch.setattr(distributed_losses, "chunk_length", lambda rows, length: 5)
    lengths = [[3, 4, 2, 3], [4, 5, 3]]
    starts = [[0, 3, 7, 9], [0, 4, 9]]
    logits, labels = torch.randn(2, 12, 11), torch.randint(11, (2, 12))
    for row, own in enumerate(starts):
        labels[row, own] = IGNORE_INDEX
    labels[1, 9:] = IGNORE_INDEX  # padding
    completions = torch.stack(
        [
            torch.repeat_interleave(torch.tensor(numbers), torch.tensor(own))
            for numbers, own in zip(([0, 1, 2, 3], [4, 5, 5]), lengths, strict=True)
        ]
    )
    spans = [(0, 0, 3), (0, 3, 7), (0, 7, 9), (0, 9, 12), (1, 0, 4), (1, 4, 9)]
    reads = OBJECTIVES[name].reads_reference
    reference = torch.randn(6, dtype=torch.float64)
    alone = torch.zeros(())
    plain, packed = CausalLoss(), kind()
    plain.objective = PreferenceLoss(objective(name), CPU)
    packed.objective = PreferenceLoss(replace(objective(name), packed=True), CPU)
    if isinstance(packed, ChunkedLoss):
        packed.tail = SimpleNamespace(logits=lambda hidden: hidden)  # type: ignore[assignment]
    own_logits = logits.clone().requires_grad_()
    for at in range(0, 6, 2):
        most = max(stop - start for _, start, stop in spans[at : at + 2])
        pair = torch.full((2, most), IGNORE_INDEX)
        rows = []
        for place, (row, start, stop) in enumerate(spans[at : at + 2]):
            pair[place, : stop - start] = labels[row, start:stop]
            padding = torch.zeros(most - (stop - start), 11)
            rows.append(torch.cat([own_logits[row, start:stop], padding]))
        beside = (reference[at : at + 2],) if reads else ()
        given = pair, label_counts(pair, None), *beside
        alone = alone + plain(torch.stack(rows), given)
    alone.backward()
    logits.requires_grad_()
    beside = (reference,) if reads else ()
    found = packed(logits, (labels, label_counts(labels, completions), completions, *beside))
    found.backward()
    assert float(found.detach()) == pytest.approx(float(alone.detach()), rel=1e-6)
    assert logits.grad is not None and own_logits.grad is not None
    assert torch.allclose(logits.grad, own_logits.grad, atol=1e-7)
    metrics = packed.objective.metrics(is_counted=True)
    assert metrics == pytest.approx(plain.objective.metrics(is_counted=True), rel=1e-6)


def test_a_reward_is_the_score_of_the_label_itself(one_process: None) -> None:
    scores = torch.arange(12.0).view(4, 3, 1).requires_grad_()
    labels = torch.full((4, 3), IGNORE_INDEX)
    labels[0, 2] = labels[1, 0] = labels[2, 1] = 7  # of the second pair, one has no label
    loss = RewardLoss()
    loss.objective = PreferenceLoss(objective("reward"), CPU)
    tokens = torch.tensor([1, 1, 1, 0])
    assert float(loss(scores, (labels, tokens)).detach()) == pytest.approx(
        math.log1p(math.exp(3 - 2))
    )
    metrics = loss.objective.metrics(is_counted=True)
    assert metrics == {
        "rewards_chosen": 2.0,
        "rewards_rejected": 3.0,
        "accuracy": 0.0,
        "margin": -1.0,
    }


def test_scores_are_of_each_label() -> None:
    torch.manual_seed(2)
    logits, labels = torch.randn(2, 4, 7), torch.randint(7, (2, 4))
    labels[0, 1] = IGNORE_INDEX
    loss = CausalLoss()
    loss.scores = []
    assert float(loss(logits, labels)) == 0
    [scores] = loss.scores
    wanted = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
    wanted[0, 0] = 0
    assert torch.allclose(scores, wanted, atol=1e-6)


def test_top_scores_have_ids_in_order_and_the_normalizer() -> None:
    torch.manual_seed(3)
    logits, labels = torch.randn(2, 4, 7), torch.randint(7, (2, 4))
    logits[0, 0] = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0, 0.0, 0.0])
    loss = CausalLoss()
    loss.scores, loss.top = [], 3
    loss(logits, labels)
    [scores] = loss.scores
    wanted = logits[:, :-1].log_softmax(-1)
    own, normalizers, ids, largest = scores.split([1, 1, 3, 3], dim=-1)
    assert torch.allclose(own, wanted.gather(-1, labels[:, 1:, None]), atol=1e-6)
    assert torch.allclose(normalizers[..., 0], logits[:, :-1].logsumexp(-1), atol=1e-6)
    assert torch.allclose(largest, wanted.topk(3).values, atol=1e-6)
    assert torch.allclose(largest, wanted.gather(-1, ids.long()), atol=1e-6)
    assert ids[0, 0].tolist() == [1, 3, 4], "equal ones are ordered by id"
