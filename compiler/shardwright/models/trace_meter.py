"""Run one piece of a model on fake tensors, and measure its FLOPs and saved activations.

Shape letters: S sequence length (one sequence), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBytes:
    """Bytes saved for backward: `whole` on every tensor rank, `divided` split over tensor ranks."""

    whole: int
    divided: int

    @property
    def total(self) -> int:
        return self.whole + self.divided


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTrace:
    """Hold the measurements of one run.

    forward_flops, backward_flops: multiply and add count as two.
    attention_forward_flops: the attention module's part.
    saves: number of tensors saved by autograd.
    kept: saved bytes under checkpointing none, selective (attention saves only its inputs) and full
        (only the piece's input).
    """

    forward_flops: int
    attention_forward_flops: int
    backward_flops: int
    saves: int
    kept: tuple[ShardedBytes, ShardedBytes, ShardedBytes]


class GpuKernels(TorchFunctionMode):
    """Run dropout and scaled dot-product attention as a GPU does, on the CPU's fake tensors.

    The CPU's dropout saves noise as wide as its input, a GPU's a one-byte mask. The CPU's attention
    falls back to an S x S product for unequal head sizes or dropout; a GPU's fused kernels save the
    log-sum-exp.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and args[0].dim() == 4:
            return _attention(*args, **(kwargs or {}))
        if func is torch._grouped_mm:
            # Same product and saved tensors; torch's own shape rule accepts only bfloat16.
            return torch.ops.transformers.grouped_mm_fallback(
                args[0], args[1], (kwargs or {})["offs"]
            )
        return func(*args, **(kwargs or {}))


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # torch makes the mask additive at each call.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    out: torch.Tensor = _FusedAttention.apply(
        query, key, value, attn_mask, dropout_p, is_causal, scale
    )  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    """Save queries, keys, values, mask, output and log-sum-exp, as torch's fused kernels do.

    Fewer heads of keys and values than of queries are allowed, as in the flash kernel; gradients
    are cut to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        dropout: float,
        causal: bool,
        scale: Any,
    ) -> Any:
        out, log_sum_exp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, dropout, causal, scale=scale
        )
        if mask is None and out.shape == query.shape:
            # Flash attention's output has its queries' layout, memory-efficient attention's not.
            out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, mask, out, log_sum_exp)
        ctx.options = (seed, offset, dropout, [*ctx.needs_input_grad[:4]], causal)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, mask, out, log_sum_exp = ctx.saved_tensors
        seed, offset, dropout, needed, causal = ctx.options
        wide = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradients[0],
            query,
            key,
            value,
            mask,
            out,
            log_sum_exp,
            seed,
            offset,
            dropout,
            needed,
            causal,
        )
        heads = key.shape[1]
        return (
            wide[0],
            wide[1][:, :heads],
            wide[2][:, :heads],
            wide[3] if needed[3] else None,
            None,
            None,
            None,
        )


def _grouped_flops(
    a: tuple[int, ...], b: tuple[int, ...], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Count grouped matrix products: each row of `a` meets one expert's matrix."""
    rows, inner = a[-2:]
    return 2 * rows * inner * b[-1] * (a[0] if len(a) == 3 else 1)


class _Recorder:
    """Record which storages autograd saves, and where; `keep` is the pack hook."""

    def __init__(self, known: set[int], width: int, active: bool) -> None:
        self.known, self.width, self.active = known, width, active
        self.saves = 0
        self.depth = 0  # number of enclosing blocks
        self.in_attention = False
        self.saved: dict[int, int] = {}  # storage -> bytes
        self.wide: set[int] = set()
        self.outside_attention: set[int] = set()
        self.outside_blocks: set[int] = set()
        self.alive: list[torch.Tensor] = []  # else a freed storage's address could be reused

    def note(self, tensor: torch.Tensor, *, outside_block: bool, outside_attention: bool) -> None:
        storage = tensor.untyped_storage()
        where = storage._cdata
        if where in self.known or not self.active:
            return
        if where not in self.saved:
            self.alive.append(tensor)
            self.saved[where] = storage.nbytes()
            if storage.nbytes() > self.width * tensor.element_size():
                self.wide.add(where)
        if outside_block:
            self.outside_blocks.add(where)
        if outside_attention:
            self.outside_attention.add(where)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saves += 1
        self.note(tensor, outside_block=self.depth == 0, outside_attention=not self.in_attention)
        return tensor

    def total(self, where: set[int]) -> ShardedBytes:
        """Split the saved bytes: unsharded are block inputs and what norms and residuals save
        (arXiv 2205.05198, section 4.2.1)."""
        whole = sum(
            n for s, n in self.saved.items() if s in where and s in self.outside_blocks - self.wide
        )
        return ShardedBytes(
            whole=whole, divided=sum(n for s, n in self.saved.items() if s in where) - whole
        )


def measure_piece(
    run: Callable[[torch.Tensor | None], Any],
    hidden: torch.Tensor | None,
    *,
    layer: nn.Module | None,
    attention_module: str,
    known: list[torch.Tensor],
    width: int,
    count_flops: bool,
    starts_after: nn.Module | None = None,
) -> PieceTrace:
    """Run `run(hidden)` once, and its backward where FLOPs are counted.

    known: tensors that exist anyway (parameters, context).
    width: elements of the hidden states.
    starts_after: the module whose output the piece starts with; earlier work is not counted.
    """
    recorder = _Recorder({t.untyped_storage()._cdata for t in known}, width, starts_after is None)
    counted = {"before": 0, "attention": 0, "entered": 0}
    with ExitStack() as stack:
        counter = None
        if count_flops:
            import transformers.integrations.moe  # noqa: F401  registers its operators

            operators = torch.ops.transformers
            formulas = {
                torch.ops.aten._grouped_mm: _grouped_flops,
                operators.grouped_mm_fallback: _grouped_flops,
                operators.grouped_mm_fallback_backward: lambda a, b, *_, **__: (
                    2 * _grouped_flops(a, b)
                ),
            }
            counter = FlopCounterMode(display=False, custom_mapping=formulas)
            stack.enter_context(counter)

        def total() -> int:
            return 0 if counter is None else counter.get_total_flops()

        def begin(module: nn.Module, args: Any, output: Any) -> None:
            recorder.active, counted["before"] = True, total()

        def enter_attention(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            for tensor in tensors_in((args, kwargs)):
                recorder.note(tensor, outside_block=True, outside_attention=True)
            recorder.in_attention, counted["entered"] = True, total()

        def leave_attention(module: nn.Module, args: Any, output: Any) -> None:
            recorder.in_attention = False
            counted["attention"] += total() - counted["entered"]

        if starts_after is not None:
            stack.enter_context(starts_after.register_forward_hook(begin))
        if layer is not None:
            _hook_blocks(stack, layer, attention_module, recorder)
        if layer is not None and attention_module:
            module = layer.get_submodule(attention_module)
            stack.enter_context(module.register_forward_pre_hook(enter_attention, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave_attention))
        stack.enter_context(GpuKernels())
        with saved_tensors_hooks(recorder.keep, lambda tensor: tensor):
            output = run(hidden)
        forward = total()
        if counter is not None:
            roots = [t for t in tensors_in(output) if t.requires_grad]
            torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])
        backward = total() - forward
    own = ShardedBytes(whole=0 if hidden is None else hidden.untyped_storage().nbytes(), divided=0)
    return PieceTrace(
        forward_flops=forward - counted["before"],
        attention_forward_flops=counted["attention"],
        backward_flops=backward,
        saves=recorder.saves,
        kept=(recorder.total(set(recorder.saved)), recorder.total(recorder.outside_attention), own),
    )


def _hook_blocks(
    stack: ExitStack, layer: nn.Module, attention_module: str, recorder: _Recorder
) -> None:
    """Hook the blocks: the attention module, and the layer's children with matrices (feed-forward,
    experts)."""

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if recorder.depth == 0:
            for tensor in tensors_in((args, kwargs)):
                recorder.alive.append(tensor)
                recorder.outside_blocks.add(tensor.untyped_storage()._cdata)
        recorder.depth += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recorder.depth -= 1

    children = [
        child
        for direct in layer.children()
        for child in (direct.children() if isinstance(direct, nn.ModuleList) else (direct,))
    ]
    blocks = {id(m): m for m in children if any(p.dim() > 1 for p in m.parameters())}
    if attention_module:
        attention = layer.get_submodule(attention_module)
        blocks[id(attention)] = attention
    for block in blocks.values():
        stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
        stack.enter_context(block.register_forward_hook(leave))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
