"""Find how a model is split into layers, and verify that isolated layers reproduce it bit for
bit."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwright.models.model_graph import (
    LayerRange,
    PipelineSplit,
    layers_that_share_parameters,
    merge_overlapping_ranges,
    name_pattern,
)
from shardwright.models.model_skeleton import (
    Arguments,
    Batch,
    Skeleton,
    State,
    leaves,
    parameter_aliases,
    without_images,
)
from shardwright.models.tasks.causal_lm import is_causal, own_loss


class NotSplittable(Exception):
    """The model could not be split into layers that reproduce it; one line, the reason."""


@dataclass(frozen=True)
class ModelStructure:
    """Hold what running a tiny copy of the model showed; names are the full model's too.

    cut: how hidden states enter and leave the decoder layers.
    embedding, head: parameters outside the decoder layers that the embedding or the head uses; a
        tied one is in both.
    attention: name of the attention module inside a decoder layer, "" where the layers have none in
        common.
    packing: why packed documents attend to each other, "" where they do not.
    modules_run_per_image: modules that run once for each image.
    """

    cut: PipelineSplit
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    attention: str
    packing: str = "it was not tried"
    modules_run_per_image: tuple[str, ...] = ()

    def place(self, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the embedding's and the head's parameters among the full model's.

        A vision encoder may be deeper than the tiny copy's, so names count by their patterns. None
        where a pattern is not in the tiny copy.
        """
        before, behind = ({name_pattern(n) for n in side} for side in (self.embedding, self.head))
        outside = [n for n in names if not n.startswith(self.cut.stack + ".")]
        if any(name_pattern(n) not in before | behind for n in outside):
            return None
        return (
            tuple(n for n in outside if name_pattern(n) in before),
            tuple(n for n in outside if name_pattern(n) in behind),
        )


def probe(
    model: nn.Module,
    input_ids: torch.Tensor,
    beside: Batch | None = None,
    find_loss: Callable[..., str | None] = own_loss,
) -> ModelStructure:
    """Find how `model` is split, and verify it. Raises NotSplittable with the reason.

    model: tiny, on the CPU, in training mode without dropout.
    beside: other forward inputs of a vision-language model.
    find_loss: takes these three, and returns PipelineSplit.loss.
    """
    if beside:
        others = {n: v.roll(1, -1) if v.is_floating_point() else v for n, v in beside.items()}
        with torch.no_grad():
            images_count = not torch.equal(
                logits_of(model, input_ids, beside), logits_of(model, input_ids, others)
            )
        if not images_count:
            raise NotSplittable("its logits do not depend on the images")
    cut = find_layer_split(model, input_ids, beside)
    cut = replace(cut, together=find_inseparable_layers(model, cut, input_ids, beside))
    embedding, head = _boundary_parameters(model, cut, input_ids, beside)
    check_layer_split(model, cut, embedding, head, input_ids, beside)
    loss = find_loss(model, input_ids, beside)
    if loss is None:
        raise NotSplittable("its logits are not one row a token")
    untrained, causal = (
        _untrained(model, cut.stack, input_ids, beside),
        is_causal(model, input_ids, beside),
    )
    cut = replace(cut, untrained=untrained, loss=loss, causal=causal)
    return ModelStructure(
        cut=cut, embedding=embedding, head=head, attention=attention_module(model, cut)
    )


def _boundary_parameters(
    model: nn.Module, cut: PipelineSplit, input_ids: torch.Tensor, beside: Batch | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters of the embedding and of the head, by the gradients of their outputs."""
    outside = {n: p for n, p in model.named_parameters() if not n.startswith(cut.stack + ".")}
    skeleton = Skeleton(model, cut, _tokens(input_ids))
    with _all_trainable(outside):
        state = skeleton.embed(input_ids, None, beside)
        embedding = parameters_with_gradient(
            [t for t in (state.hidden, *state.payload) if t is not None], outside
        )
        head = parameters_with_gradient(
            [skeleton.head(State(hidden=state.hidden.detach(), batch=state.batch))], outside
        )
    # Parameters without a gradient go to the head, except a constant table (sinusoidal positions)
    # that the embedding needs. In a vision-language model they are parts of the vision encoder.
    silent = {n: p for n, p in outside.items() if n not in embedding | head}
    embedding.update(
        silent if beside else _parameters_used_by_value(skeleton, input_ids, state, silent)
    )
    return tuple(n for n in outside if n in embedding), tuple(
        n for n in outside if n in head or n not in embedding
    )


@torch.no_grad()
def _parameters_used_by_value(
    skeleton: Skeleton, input_ids: torch.Tensor, state: State, silent: dict[str, nn.Parameter]
) -> list[str]:
    """Return which of these parameters the embedding's state depends on; try them one by one only
    where some matter."""

    def matters(parameters: Iterable[nn.Parameter]) -> bool:
        saved = [(p, p.data) for p in parameters]
        for p, data in saved:
            p.data = torch.zeros_like(data)
        try:
            return not _equal(skeleton.embed(input_ids, None), state)
        finally:
            for p, data in saved:
                p.data = data

    return [name for name, p in silent.items() if matters([p])] if matters(silent.values()) else []


def _untrained(
    model: nn.Module, stack: str, input_ids: torch.Tensor, beside: Batch | None
) -> tuple[str, ...]:
    """Return parameters without a gradient: by pattern, since the probe may not route to every
    expert.

    Vision encoder parameters are listed by name: a model may take its features before the last
        block.
    """
    named = dict(model.named_parameters())
    with _all_trainable(named):
        reached = parameters_with_gradient([logits_of(model, input_ids, beside)], named)
    trained = {name_pattern(n) for n in reached}
    outside = [n for n in named if beside and not n.startswith(stack + ".")]
    return (
        *dict.fromkeys(name_pattern(n) for n in named if name_pattern(n) not in trained),
        *(n for n in outside if n not in reached and name_pattern(n) in trained),
    )


@contextmanager
def _all_trainable(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Let every parameter have a gradient; a type may freeze some when it is built."""
    frozen = [p for p in parameters.values() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    yield
    for p in frozen:
        p.requires_grad_(False)


def parameters_with_gradient(
    tensors: list[torch.Tensor], parameters: dict[str, nn.Parameter]
) -> set[str]:
    """Return the names of the parameters that the tensors have a gradient for."""
    total = torch.stack([t.square().sum() for t in tensors if t.requires_grad]).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return {n for n, g in zip(parameters, gradients, strict=True) if g is not None}


def attention_module(model: nn.Module, cut: PipelineSplit) -> str:
    """Return the name of the attention module inside a decoder layer, "" where the layers have none
    in common."""
    names = [
        {
            name
            for name, m in layer.named_modules()
            if "attention" in type(m).__name__.lower() and name
        }
        for layer in model.get_submodule(cut.stack).children()
    ]
    common = set.intersection(*names) if names else set()
    return min(common, key=lambda name: (name.count("."), name)) if common else ""


def logits_of(model: nn.Module, input_ids: torch.Tensor, beside: Batch | None) -> torch.Tensor:
    return model(input_ids=input_ids, use_cache=False, **(beside or {})).logits  # type: ignore[no-any-return]


def _tokens(input_ids: torch.Tensor) -> tuple[int, int]:
    return input_ids.shape[0], input_ids.shape[1]


@dataclass
class _Call:
    module: nn.Module
    arguments: Arguments
    output: Any


@torch.no_grad()
def find_layer_split(
    model: nn.Module, input_ids: torch.Tensor, beside: Batch | None = None
) -> PipelineSplit:
    """Find the outermost ModuleList whose children run once each, in order, and what passes through
    them.

    A vision-language model's is the list that runs last, after the vision encoder's. Raises
    NotSplittable.
    """
    stacks = [
        (path, list(m.children()))
        for path, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and len(m) > 0
    ]
    calls: list[_Call] = []
    handles = [
        child.register_forward_hook(
            lambda module, args, kwargs, output: calls.append(
                _Call(module, (args, kwargs), output)
            ),
            with_kwargs=True,
        )
        for child in {id(c): c for _, children in stacks for c in children}.values()
    ]
    try:
        logits_of(model, input_ids, beside)
    finally:
        for handle in handles:
            handle.remove()
    last = {id(call.module): at for at, call in enumerate(calls)}

    def order(stack: tuple[str, list[nn.Module]]) -> tuple[int, int, int]:
        path, children = stack
        ended = max((last.get(id(child), -1) for child in children), default=-1)
        return (0 if beside is None else -ended), path.count("."), -len(children)

    for path, children in sorted(stacks, key=order):
        ours = [call for call in calls if any(call.module is c for c in children)]
        # Some layers may not run: cross-attention to an image without an image.
        ran = [id(c.module) for c in ours]
        in_order = len(set(ran)) == len(ran) and ran == [id(c) for c in children if id(c) in ran]
        if in_order and 2 * len(ran) >= len(children):
            if hasattr(ours[0].output, "_fields"):
                kind, fields = type(ours[0].output).__name__, ", ".join(ours[0].output._fields)
                raise NotSplittable(f"its layers hand on several streams as one {kind}: {fields}")
            cut = _slots(path, ours)
            if cut is not None:
                return _with_payload(model, cut, ours, input_ids, beside)
    runs = Counter(id(call.module) for call in calls)
    looped = [path for path, children in stacks if any(runs[id(c)] > 1 for c in children)]
    once = [path for path, children in stacks if all(runs[id(c)] == 1 for c in children)]
    why = "no list of layers runs once each, in order, on the hidden states"
    if looped:
        why = f"its layers run more than once, in a loop: {', '.join(looped)}"
    elif len({path.rpartition(".")[0] for path in once}) == 1 < len(once):
        why = f"its layers are no modules of their own: their parts lie in {', '.join(once)}"
    raise NotSplittable(why)


def _slots(path: str, calls: list[_Call]) -> PipelineSplit | None:
    """Find where the hidden states enter and leave: the argument that is the previous layer's
    output."""
    first = calls[0].output
    # Some layers return a list instead of a tuple; a ModelOutput is neither.
    length = len(first) if isinstance(first, tuple | list) else 0
    hidden = first[0] if length else first
    if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point() or hidden.ndim < 3:
        return None
    keyword: str | None = None
    if len(calls) == 1:
        args, _ = calls[0].arguments
        alike = (isinstance(a, torch.Tensor) and a.shape == hidden.shape for a in args)
        position = next((i for i, is_alike in enumerate(alike) if is_alike), None)
    else:
        args, kwargs = calls[1].arguments
        position = next((i for i, a in enumerate(args) if _same(a, hidden)), None)
        if position is None:
            keyword = next((k for k, a in kwargs.items() if _same(a, hidden)), None)
    if position is None and keyword is None:
        return None
    # Places in a layer's output that a later layer is handed: the same tensor, not an equal one.
    carried: set[int] = set()
    for index, call in enumerate(calls):
        later = {id(value) for after in calls[index + 1 :] for _, value in leaves(after.arguments)}
        output = call.output if isinstance(call.output, tuple | list) else ()
        for place, value in enumerate(output):
            if place and torch.is_tensor(value) and id(value) in later:
                carried.add(place)
    return PipelineSplit(
        stack=path,
        hidden_position=position,
        hidden_keyword=keyword,
        output_length=length,
        carried=tuple(sorted(carried)),
    )


def _same(a: Any, b: torch.Tensor) -> bool:
    return a is b or (isinstance(a, torch.Tensor) and a.shape == b.shape and torch.equal(a, b))


def _with_payload(
    model: nn.Module,
    cut: PipelineSplit,
    calls: list[_Call],
    input_ids: torch.Tensor,
    beside: Batch | None,
) -> PipelineSplit:
    """Add the arguments that another stage cannot compute: they differ on dummy ids, or with stub
    embeddings."""
    skeleton = isolated_copy(
        model, cut, {id(p) for p in model.get_submodule(cut.stack).parameters()}, input_ids
    )
    hidden = dict(leaves(calls[0].arguments))[skeleton._hidden_path]
    batch = None if beside is None else {"input_ids": input_ids, **without_images(beside)}
    dummy, slots = skeleton.context(hidden, None, batch)
    known = {use for slot in slots for use in slot.uses}
    payload = {
        path: None
        for call, (index, other) in zip(calls, dummy.items(), strict=True)
        for guesses in [dict(leaves(other))]
        for path, value in leaves(call.arguments)
        if isinstance(value, torch.Tensor)
        and path
        # else an earlier layer left it in a container: find_inseparable_layers handles that
        in guesses
        and path != skeleton._hidden_path
        and (index, path) not in known
        and not _same(guesses[path], value)
    }
    return replace(cut, payload=tuple(payload))


@torch.no_grad()
def check_layer_split(
    model: nn.Module,
    cut: PipelineSplit,
    embedding: tuple[str, ...],
    head: tuple[str, ...],
    input_ids: torch.Tensor,
    beside: Batch | None = None,
) -> None:
    """Raise NotSplittable unless isolated pieces give the model's logits bit for bit.

    embedding, head: the parameters that these two own.
    """
    expected = logits_of(model, input_ids, beside)
    before, behind = ({id(model.get_parameter(n)) for n in side} for side in (embedding, head))
    logits = run_in_pieces(model, cut, before, behind, input_ids, beside=beside)
    if logits.shape != expected.shape or not torch.equal(logits, expected):
        raise NotSplittable("more than the hidden states crosses between its layers")


def run_in_pieces(
    model: nn.Module,
    cut: PipelineSplit,
    before: set[int],
    behind: set[int],
    input_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    beside: Batch | None = None,
) -> torch.Tensor:
    """Return the logits of isolated pieces, as pipeline stages run.

    Each decoder layer is a piece; layers in `cut.together` are one. Each piece runs twice: a second
    micro-batch must find nothing of the first.
    before, behind: ids of the parameters owned by the embedding and by the head.
    """
    layers = list(model.get_submodule(cut.stack).children())
    state = isolated_copy(model, cut, before, input_ids).embed(input_ids, positions, beside)
    edges = itertools.accumulate(cut.blocks(len(layers))[1:-1], initial=0)
    for first, stop in itertools.pairwise(edges):
        own = {id(p) for layer in layers[first:stop] for p in layer.parameters()}
        skeleton, entering = isolated_copy(model, cut, own, input_ids), state
        for _ in range(2):
            skeleton.begin()
            state = entering
            for index in range(first, stop):
                state = skeleton.decode(index, state)
    return isolated_copy(model, cut, behind, input_ids).head(state)


def isolated_copy(
    model: nn.Module, cut: PipelineSplit, owned: set[int], input_ids: torch.Tensor
) -> Skeleton:
    """Return a copy that owns only these parameters of `model`, by id."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(model, memo)
    skeleton = Skeleton(twin, cut, _tokens(input_ids))
    skeleton.release({id(memo[p]) for p in owned}, torch.device("cpu"), torch.float32)
    return skeleton


@torch.no_grad()
def find_inseparable_layers(
    model: nn.Module, cut: PipelineSplit, input_ids: torch.Tensor, beside: Batch | None = None
) -> tuple[LayerRange, ...]:
    """Find decoder layers that share parameters, or state that does not cross stages.

    Such a layer is wrong, or fails, unless the layers it reads from ran before it on the same
    stage. Raises NotSplittable.
    """
    aliases = (tuple(names) for names in parameter_aliases(model))
    shared = layers_that_share_parameters(aliases, cut.stack)
    skeleton = Skeleton(model, cut, _tokens(input_ids))
    states = [skeleton.embed(input_ids, None, beside)]
    skeleton.begin()
    for index in range(len(skeleton.layers)):
        states.append(skeleton.decode(index, states[-1]))
    if not torch.equal(skeleton.head(states[-1]), logits_of(model, input_ids, beside)):
        raise NotSplittable("more than the hidden states crosses between its layers")
    ranges = []
    for last in range(len(skeleton.layers)):
        reach = next(
            (first for first in range(last, -1, -1) if _reproduces(skeleton, states, first, last)),
            None,
        )
        if reach is None:
            raise NotSplittable("two runs of it on the same tokens differ")
        ranges.append((reach, last))
    return merge_overlapping_ranges([*shared, *ranges])


def _reproduces(skeleton: Skeleton, states: list[State], first: int, last: int) -> bool:
    """Return whether a stage that starts with layer `first` gives the right state after layer
    `last`."""
    skeleton.begin()
    state = states[first]
    try:
        for index in range(first, last + 1):
            state = skeleton.decode(index, state)
    except Exception:  # a type's code may raise anything without an earlier layer's state
        return False
    return _equal(state, states[last + 1])


def _equal(a: State, b: State) -> bool:
    pairs = itertools.chain([(a.hidden, b.hidden)], zip(a.payload, b.payload, strict=True))
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)
