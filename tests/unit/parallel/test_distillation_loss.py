"""The divergence from a teacher's most probable tokens, beside torch's own of all of them, over a
whole vocabulary and over one that is sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import multiprocessing

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.parallel.distillation_loss import top_k_divergence
from shardwright.utils.numeric_difference import max_abs_diff

VOCABULARY, SHAPE = 64, (3, 7)
SIZES = {"even": [32, 32], "uneven": [1, 50, 13]}


def example(tokens: int) -> tuple[torch.Tensor, ...]:
    """logits far from zero, labels of which some are ignored, the teacher's largest logits' ids
    and log-probabilities, and the gradients of both values."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(*SHAPE, VOCABULARY, generator=generator) * 4 + 200
    target = torch.randint(0, VOCABULARY, SHAPE, generator=generator)
    target.view(-1)[::3] = IGNORE_INDEX
    teacher = torch.randn(*SHAPE, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    found = teacher.log_softmax(dim=-1).topk(tokens, dim=-1)
    gradients = torch.randn(2, *SHAPE, generator=generator)
    return logits, target, found.indices.int(), found.values.float(), gradients


def plain(
    logits: torch.Tensor, target: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K + 1 outcomes, in fp64."""
    student = logits.double().log_softmax(dim=-1)
    top = student.gather(-1, ids.long())
    wanted = (teacher.double().exp() * (teacher.double() - top)).sum(dim=-1)
    if ids.shape[-1] < VOCABULARY:
        is_other = torch.ones_like(student, dtype=torch.bool).scatter(-1, ids.long(), False)
        others = student.exp().where(is_other, 0).sum(dim=-1)
        rest = 1 - teacher.double().exp().sum(dim=-1)
        wanted = wanted + rest * (rest.log() - others.log())
    is_label = target != IGNORE_INDEX
    losses = F.cross_entropy(
        logits.double().flatten(0, 1), target.flatten(), reduction="none"
    ).view(SHAPE)
    return losses, wanted.where(is_label, 0)


def slope(
    values: tuple[torch.Tensor, torch.Tensor], gradients: torch.Tensor, of: torch.Tensor
) -> torch.Tensor:
    total = (values[0] * gradients[0]).sum() + (values[1] * gradients[1]).sum()
    return torch.autograd.grad(total, of)[0]


@pytest.mark.parametrize("tokens", [1, 5, VOCABULARY])
def test_as_the_plain_formula(tokens: int) -> None:
    logits, target, ids, teacher, gradients = example(tokens)
    exact = logits.double().requires_grad_()
    wanted = plain(exact, target, ids, teacher)
    own = logits.clone().requires_grad_()
    found = top_k_divergence(own, target, ids, teacher)
    for each, plainly in zip(found, wanted, strict=True):
        assert max_abs_diff(each.double(), plainly) < 1e-5
    exact_slope = slope(wanted, gradients, exact)
    assert max_abs_diff(slope(found, gradients, own).double(), exact_slope) < 1e-5


def test_the_whole_vocabulary_is_torch_kl_div() -> None:
    logits, target, ids, teacher, _ = example(VOCABULARY)
    whole = torch.empty(*SHAPE, VOCABULARY).scatter(-1, ids.long(), teacher)
    kl = F.kl_div(logits.log_softmax(-1), whole, log_target=True, reduction="none").sum(dim=-1)
    found = top_k_divergence(logits, target, ids, teacher)[1]
    assert max_abs_diff(found, kl.where(target != IGNORE_INDEX, 0)) < 1e-5


def test_fewer_tokens_are_a_lower_bound() -> None:
    logits, target, *whole, _ = example(VOCABULARY)
    bounds = [
        top_k_divergence(logits, target, *(x[..., :tokens] for x in whole))[1].sum()
        for tokens in (1, 4, 16, VOCABULARY)
    ]
    assert bounds == sorted(bounds)


def test_a_certain_teacher_and_a_certain_student_have_finite_gradients() -> None:
    """Also where they are certain of different tokens, and nothing is left for others."""
    logits = torch.full((4, VOCABULARY), -300.0)
    logits[:, 3] = 300.0
    logits.requires_grad_()
    target = torch.tensor([3, 7, 3, IGNORE_INDEX])
    ids = torch.tensor([[3, 7], [7, 3], [3, 7], [3, 7]])
    teacher = torch.tensor([[0.0, -200.0], [0.0, -200.0], [-0.7, -0.8], [-0.7, -0.8]])
    found = top_k_divergence(logits, target, ids, teacher)
    (gradient,) = torch.autograd.grad(found[0].sum() + found[1].sum(), logits)
    assert all(each.isfinite().all() for each in (*found, gradient))
    assert not gradient[3].any() and not found[1][3]


def test_what_stands_in_the_place_of_no_label_is_not_read() -> None:
    """A score file has zeros there: an id K times, and a sum of probabilities that is K."""
    logits, target, ids, teacher, gradients = example(5)
    is_label = (target != IGNORE_INDEX).unsqueeze(-1)
    own = logits.clone().requires_grad_()
    wanted = top_k_divergence(own, target, ids, teacher)
    blank = logits.clone().requires_grad_()
    found = top_k_divergence(blank, target, ids * is_label, teacher * is_label)
    for each, full in zip(found, wanted, strict=True):
        assert torch.equal(each, full)
    assert torch.equal(slope(found, gradients, blank), slope(wanted, gradients, own))


def test_a_token_that_the_student_lacks_is_one_of_the_others() -> None:
    logits, target, ids, teacher, gradients = example(5)
    own, other = (logits.clone().requires_grad_() for _ in range(2))
    beyond = ids.clone()
    beyond[..., 2] = VOCABULARY + 3
    found = top_k_divergence(own, target, beyond, teacher)
    known = [0, 1, 3, 4]
    wanted = top_k_divergence(other, target, ids[..., known], teacher[..., known])
    for each, without in zip(found, wanted, strict=True):
        assert max_abs_diff(each, without) < 1e-6
    assert max_abs_diff(slope(found, gradients, own), slope(wanted, gradients, other)) < 1e-6


def worker(rank: int, folder: str) -> None:
    """Write the largest differences of this rank: case -> [values, their gradient]."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3)}
    apart = {}
    for name, sizes in SIZES.items():
        for tokens in (1, 5, VOCABULARY):
            if rank >= len(sizes):
                continue
            logits, target, ids, teacher, gradients = example(tokens)
            whole = logits.clone().requires_grad_()
            wanted = top_k_divergence(whole, target, ids, teacher)
            first = sum(sizes[:rank])
            own = logits.narrow(-1, first, sizes[rank]).clone().requires_grad_()
            found = top_k_divergence(
                own, target, ids, teacher, first=first, group=groups[len(sizes)]
            )
            exact = slope(wanted, gradients, whole).narrow(-1, first, sizes[rank])
            apart[f"{name} {tokens}"] = [
                max(max_abs_diff(a, b) for a, b in zip(found, wanted, strict=True)),
                max_abs_diff(slope(found, gradients, own), exact),
            ]
    Path(folder, f"{rank}.json").write_text(json.dumps(apart))
    dist.barrier()
    dist.destroy_process_group()


def test_a_sharded_vocabulary_has_the_same_values(tmp_path: Path) -> None:
    multiprocessing.start_processes(worker, (str(tmp_path),), nprocs=3, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for name, sizes in SIZES.items():
        for rank in range(len(sizes)):
            for tokens in (1, 5, VOCABULARY):
                assert max(found[rank][f"{name} {tokens}"]) < 1e-5, (name, tokens, found)
