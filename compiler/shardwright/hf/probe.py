"""Finds where a model can be cut, and proves it: pieces that own nothing but their own weights must reproduce it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.hf.skeleton import Skeleton
from shardwright.ir.cut import Cut


class NotCuttable(Exception):
    """The model has no cut that reproduces it: one line, the reason."""


@dataclass(frozen=True)
class Probed:
    """What running a tiny copy of the model taught: names are the full model's too.

    embedding, head: parameters outside the decoder stack that the piece before and the piece behind it use; a tied one
        is in both. attention: the attention module's name inside a decoder layer, "" where the layers have none in
        common.
    """

    cut: Cut
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    attention: str


def probe(model: nn.Module, input_ids: torch.Tensor) -> Probed:
    """`model`: tiny, on the CPU, in eval mode. Raises NotCuttable with the reason."""
    cut = find_cut(model, input_ids)
    check_cut(model, cut, input_ids)
    _check_loss(model, input_ids)
    embedding, head = _edges(model, cut, input_ids)
    return Probed(cut=cut, embedding=embedding, head=head, attention=_attention(model, cut))


@torch.no_grad()
def _check_loss(model: nn.Module, input_ids: torch.Tensor) -> None:
    """The trainer's loss is cross-entropy on labels shifted by one; some types compute another one."""
    output = model(input_ids=input_ids, labels=input_ids, use_cache=False)
    logits = output.logits
    if logits.shape[:2] != input_ids.shape:
        raise NotCuttable("its logits are not one row a token")
    shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())
    if not torch.allclose(output.loss, shifted, rtol=1e-5, atol=1e-6):
        raise NotCuttable("its own loss is not cross-entropy on the next token")


def _edges(model: nn.Module, cut: Cut, input_ids: torch.Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """By gradient: what the hidden states before the first layer, and the logits after the last one, depend on."""
    outside = [(n, p) for n, p in model.named_parameters() if not n.startswith(cut.stack + ".")]
    for _, p in outside:
        p.requires_grad_(True)
    if any((cut.stack + ".").startswith(name.rpartition(".")[0] + ".") or "." not in name for name, _ in outside):
        raise NotCuttable("it has parameters of its own, outside any module that a stage could take")
    skeleton, parameters = Skeleton(model, cut), [p for _, p in outside]
    hidden = skeleton.embed(input_ids, None)
    before = torch.autograd.grad(hidden.square().sum(), parameters, allow_unused=True)
    logits = skeleton.head(hidden.detach(), None)
    behind = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
    names = [name for name, _ in outside]
    embedding = tuple(n for n, g in zip(names, before, strict=True) if g is not None)
    head = tuple(n for n, g, b in zip(names, behind, before, strict=True) if g is not None or b is None)
    return embedding, head  # what neither uses goes with the head: it is saved, and gets no gradient anywhere


def _attention(model: nn.Module, cut: Cut) -> str:
    found = [
        {name for name, m in layer.named_modules() if "attention" in type(m).__name__.lower() and name}
        for layer in model.get_submodule(cut.stack).children()
    ]
    common = set.intersection(*found) if found else set()
    return min(common, key=lambda name: (name.count("."), name)) if common else ""


@dataclass
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@torch.no_grad()
def find_cut(model: nn.Module, input_ids: torch.Tensor) -> Cut:
    """The outermost ModuleList whose children each run once, in order. Raises NotCuttable."""
    stacks = [
        (path, list(m.children())) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0
    ]
    calls: list[_Call] = []
    handles = [
        child.register_forward_hook(
            lambda module, args, kwargs, output: calls.append(_Call(module, args, kwargs, output)), with_kwargs=True
        )
        for child in {id(c): c for _, children in stacks for c in children}.values()
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for path, children in sorted(stacks, key=lambda s: (s[0].count("."), -len(s[1]))):
        ours = [call for call in calls if any(call.module is c for c in children)]
        if [id(c.module) for c in ours] == [id(c) for c in children]:
            cut = _slots(path, ours, input_ids)
            if cut is not None:
                return cut
    raise NotCuttable("no list of layers runs once each, in order, on the hidden states")


def _slots(path: str, calls: list[_Call], input_ids: torch.Tensor) -> Cut | None:
    """Where the hidden states enter and leave: the argument that is the previous layer's output."""
    first = calls[0].output
    length = len(first) if isinstance(first, tuple) else 0
    hidden = first[0] if length else first
    if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != input_ids.shape:
        return None
    if len(calls) == 1:
        same = [i for i, a in enumerate(calls[0].args) if isinstance(a, torch.Tensor) and a.shape == hidden.shape]
        return Cut(stack=path, hidden_position=same[0], hidden_keyword=None, output_length=length) if same else None
    position = next((i for i, a in enumerate(calls[1].args) if _same(a, hidden)), None)
    keyword = next((k for k, a in calls[1].kwargs.items() if _same(a, hidden)), None)
    if position is None and keyword is None:
        return None
    return Cut(
        stack=path,
        hidden_position=position,
        hidden_keyword=keyword if position is None else None,
        output_length=length,
    )


def _same(a: Any, b: torch.Tensor) -> bool:
    return a is b or (isinstance(a, torch.Tensor) and a.shape == b.shape and torch.equal(a, b))


@torch.no_grad()
def check_cut(model: nn.Module, cut: Cut, input_ids: torch.Tensor) -> None:
    """Raises NotCuttable unless the isolated pieces give the plain model's logits, bit for bit."""
    plain = model(input_ids=input_ids, use_cache=False).logits
    layers = list(model.get_submodule(cut.stack).children())
    inside = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters()}
    counts: dict[int, int] = {}
    for layer in layers:
        for p in layer.parameters():
            counts[id(p)] = counts.get(id(p), 0) + 1
    if any(n > 1 for n in counts.values()):
        raise NotCuttable("decoder layers share parameters")
    hidden = _isolated(model, cut, inside, None).embed(input_ids, None)
    for index in range(len(layers)):
        hidden = _isolated(model, cut, inside, index).decode(index, hidden, None)
    got = _isolated(model, cut, inside, None).head(hidden, None)
    if got.shape != plain.shape or not torch.equal(got, plain):
        raise NotCuttable("more than the hidden states crosses between its layers")


def _isolated(model: nn.Module, cut: Cut, inside: dict[int, int], index: int | None) -> Skeleton:
    """A copy that owns decoder layer `index` only, or (None) everything outside the decoder stack."""
    keep = [p for p in model.parameters() if inside.get(id(p)) == index]
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(model, memo)
    skeleton = Skeleton(twin, cut)
    skeleton.release({id(memo[id(p)]) for p in keep}, torch.device("cpu"), torch.float32)
    return skeleton
