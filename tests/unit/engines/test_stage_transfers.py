"""What crosses stages arrives as it was sent, with its gradients."""

from __future__ import annotations

import torch

from shardwright.engines.deepspeed.pipeline_module import StatePacker
from shardwright.models.model_skeleton import State


def state(dtype: torch.dtype) -> State:
    hidden = torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)
    table = torch.randn(1, 3, 2, dtype=torch.float32)
    ids, mask = torch.arange(6).view(2, 3), torch.tensor([[True, False, True]])
    return State(hidden=hidden, position_ids=ids, payload=(None, table, mask, ids.int(), None))


def test_two_flat_tensors_and_back() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sender, receiver = StatePacker(), StatePacker()
        for _ in range(2):  # the second micro-batch uses the shapes of the first
            sent = state(dtype)
            floating, integers = sender.pack(sent)
            assert (
                floating.is_floating_point()
                and floating.ndim == 1
                and integers.dtype == torch.int64
            )
            got = receiver.unpack(floating, integers)
            for a, b in zip(
                (sent.hidden, sent.position_ids, *sent.payload),
                (got.hidden, got.position_ids, *got.payload),
                strict=True,
            ):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a.dtype == b.dtype and torch.equal(a, b)


def test_gradients_arrive_at_their_parts() -> None:
    sent = state(torch.bfloat16)
    floating, integers = StatePacker().pack(sent)
    received = floating.detach().requires_grad_()
    got = StatePacker().unpack(received, integers)
    (got.hidden.float() * 3 + 0).sum().backward()
    floating.backward(received.grad)
    assert sent.hidden.grad is not None
    assert torch.equal(sent.hidden.grad, torch.full_like(sent.hidden, 3))
