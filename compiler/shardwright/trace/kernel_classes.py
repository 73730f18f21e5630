"""Say which line of the comparison a kernel, an operator or a collective of a trace belongs to."""

from __future__ import annotations

import functools
import re
from typing import Literal, get_args

Line = Literal[
    "matrix_products",
    "attention",
    "memory_bound",
    "other_kernels",
    "optimizer",
    "host_copies",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "other_collectives",
    "idle",
]
COMPUTE_LINES: tuple[Line, ...] = (
    "matrix_products",
    "attention",
    "memory_bound",
    "other_kernels",
    "optimizer",
)
COLLECTIVE_LINES: tuple[Line, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "other_collectives",
)
LINES: tuple[Line, ...] = get_args(Line)
LINE_LABELS: dict[Line, str] = {
    "matrix_products": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound kernels",
    "other_kernels": "other kernels",
    "optimizer": "optimizer",
    "host_copies": "copies to and from the host",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send_recv": "send/recv",
    "other_collectives": "other collectives",
    "idle": "idle (host)",
}

# Names of GPU kernels, the first match counts. Sources: the names in traces of torch 2.4 to 2.13 on
# A100, H100 and H200, NCCL's and RCCL's device functions, and those of FlashAttention, cuDNN,
# Transformer Engine, apex, DeepSpeed, DeepEP and Inductor.
_KERNELS: tuple[tuple[Line, str], ...] = (
    ("all_to_all", r"deep_ep|hybrid_ep|dispatch_kernel|combine_kernel"),
    ("optimizer", r"multi_tensor|fused_?adam|fusedoptimizer|adamw?_|_lamb|lion_kernel"),
    (
        "attention",
        r"flash|fmha|sdpa|attention|attn|compute_dot_do_o|fused_mha|mha_|convert_dq|ring_attn",
    ),
    (
        "matrix_products",
        r"gemm|nvjet|cutlass|cublas|splitkreduce|gemv|\bcijk_|xmma|grouped_mm|deep_?gemm|matmul"
        r"|triton_tem_|conv(olution)?_?(fprop|dgrad|wgrad|\dd)|implicit_convolve|dot_kernel"
        r"|scaled_mm|magma",
    ),
    (
        "memory_bound",
        r"at::native|at_cuda_detail|\bcub::|thrust|elementwise|reduce|softmax|norm|triton_"
        r"|copy|cast|transpose|dropout|embedding|cross_entropy|rotary|rope|swiglu|silu|gelu|relu"
        r"|scan|sort|scatter|gather|index|permute|fill|quantize|cudnn::",
    ),
)
# Names of operators on a CPU. Of an operator that only rearranges metadata the time is the host's.
_OPERATORS: tuple[tuple[Line, str], ...] = (
    ("attention", r"^aten::.*(scaled_dot_product|_attention)"),
    (
        "matrix_products",
        r"^(aten|mkldnn|quantized)::_?_?(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|grouped_mm"
        r"|scaled_mm|mkldnn_linear\w*|linear_pointwise|convolution\w*|mkldnn_convolution\w*"
        r"|thnn_conv\w*|slow_conv\w*|convolution_backward)$",
    ),
    (
        "idle",
        r"^aten::(_?unsafe_view|view|_reshape_alias|reshape|t|transpose|permute|expand|as_strided"
        r"|slice|select|squeeze|unsqueeze|detach|alias|narrow|split\w*|chunk|unbind|linear|matmul"
        r"|to|_to_copy|contiguous|empty\w*|resize_|lift_fresh|item|is_nonzero|result_type"
        r"|_local_scalar_dense|einsum|expand_as|view_as|flatten|movedim|swapaxes|broadcast_to"
        r"|_has_compatible_shallow_copy_type|set_|record_stream|numpy_T)$|^detach_?$",
    ),
    ("memory_bound", r"^aten::"),
)
# Words of a collective's name, of NCCL's and RCCL's kernels, record_param_comms, c10d and gloo.
_COLLECTIVES: tuple[tuple[Line, str], ...] = (
    ("all_reduce", r"all_?reduce|one_shot|two_shot"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all"),
    ("send_recv", r"send|recv|point_?to_?point"),
    ("other_collectives", r""),
)
_COLLECTIVE_KERNEL = re.compile(
    r"nccl|rccl|mscclpp|msccl|multimem_|one_shot_all|two_shot_all|symm_mem", re.IGNORECASE
)
_COLLECTIVE_CALL = re.compile(r"^(gloo|nccl|mpi|ucc|xccl):", re.IGNORECASE)
_HOST_COPY = re.compile(r"HtoD|DtoH|Host|Pageable|Pinned", re.IGNORECASE)
BACKWARD = re.compile(r"backward|bprop|bwd", re.IGNORECASE)
"""Matches the name of a kernel or operator of the backward pass."""
ATTENTION_HELPER = re.compile(r"dot_do_o|convert_dq|reduce_head|preprocess|postprocess|combine")
"""Matches a kernel that runs beside each of attention's own."""


def _compiled(table: tuple[tuple[Line, str], ...]) -> tuple[tuple[Line, re.Pattern[str]], ...]:
    return tuple((line, re.compile(words, re.IGNORECASE)) for line, words in table)


_KERNEL_PATTERNS, _OPERATOR_PATTERNS, _COLLECTIVE_PATTERNS = (
    _compiled(_KERNELS),
    _compiled(_OPERATORS),
    _compiled(_COLLECTIVES),
)


@functools.lru_cache(maxsize=65_536)
def line_of_kernel(category: str, name: str) -> Line:
    """Return the line of an event on a GPU. category: kernel, gpu_memcpy or gpu_memset."""
    if category == "gpu_memcpy":
        return "host_copies" if _HOST_COPY.search(name) else "memory_bound"
    if category == "gpu_memset":
        return "memory_bound"
    if _COLLECTIVE_KERNEL.search(name):
        return line_of_collective(name)
    return _first(_KERNEL_PATTERNS, name) or "other_kernels"


@functools.lru_cache(maxsize=65_536)
def line_of_operator(name: str) -> Line:
    """Return the line of the time that an operator itself takes on a CPU."""
    if name.startswith("c10d::"):
        return line_of_collective(name)
    if line := _first(_OPERATOR_PATTERNS, name):
        return line
    is_custom = "::" in name and not name.startswith(("autograd::", "torch::", "torch.", "c10d"))
    return "other_kernels" if is_custom else "idle"


@functools.lru_cache(maxsize=4096)
def line_of_collective(name: str) -> Line:
    return _first(_COLLECTIVE_PATTERNS, name) or "other_collectives"


def is_collective_call(name: str) -> bool:
    """Return whether a record on a CPU thread is a whole collective, such as gloo:all_reduce."""
    return _COLLECTIVE_CALL.match(name) is not None


def _first(table: tuple[tuple[Line, re.Pattern[str]], ...], name: str) -> Line | None:
    return next((line for line, pattern in table if pattern.search(name)), None)
