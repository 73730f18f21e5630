"""A step's seconds by line: every instant belongs to one, and real kernels to the right one."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwright.trace.kernel_classes import (
    COLLECTIVE_LINES,
    LINES,
    Line,
    line_of_collective,
    line_of_kernel,
    line_of_operator,
)
from shardwright.trace.step_trace import RankTrace, read_step_trace
from tests.unit.trace.trace_files import event, kernel, nccl, step_marks, write_trace

H200 = Path(__file__).parent / "h200_kernels.json"
"""Each kernel of one forward and backward pass of a Llama, a Qwen3 and a GPT-2 on an H200."""


def read(tmp_path: Path, events: list[dict[str, Any]], **more: Any) -> RankTrace:
    steps = more.pop("steps", None)
    found = read_step_trace(write_trace(tmp_path / "t.json", events, **more), steps)
    assert sum(line.seconds for line in found.lines.values()) == pytest.approx(found.step_seconds)
    return found


def milliseconds(found: RankTrace) -> dict[Line, float]:
    return {
        line: round(time.seconds * 1e3, 6)
        for line, time in found.lines.items()
        if time.seconds > 1e-12
    }


def expected_line(name: str) -> Line:
    """Return the line of a kernel in H200, by its first words alone."""
    if name.startswith(("nvjet_", "void cutlass::Kernel2<cutlass_75_tensorop", "void cublasLt::")):
        return "matrix_products"
    if name.startswith(("cudnn_generated_fort_native_sdpa", "void cudnn::fusion::")):
        return "attention"
    return "host_copies" if name.startswith("Memcpy DtoH") else "memory_bound"


def test_every_kernel_of_an_h200_lands_in_its_line() -> None:
    events = json.loads(H200.read_text())["traceEvents"]
    expected: Counter[Line] = Counter()
    for each in events:
        assert line_of_kernel(each["cat"], each["name"]) == expected_line(each["name"])
        expected[expected_line(each["name"])] += each["dur"] / 1e6
    found = read_step_trace(H200)
    assert found.device == "NVIDIA H200" and not found.is_cpu
    for line in LINES:
        if line != "idle":
            assert found.lines[line].seconds == pytest.approx(expected[line])
            assert found.lines[line].busy_seconds == pytest.approx(expected[line])
    assert sum(line.seconds for line in found.lines.values()) == pytest.approx(found.step_seconds)
    assert [call.is_backward for call in found.attention].count(True) == 2
    assert len(found.attention) == 4  # not cuDNN's helpers


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::...)", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("triton_tem_fused_flex_attention_3", "attention"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", "matrix_products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix_products"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT256x256x64_MI16x16x16x1", "matrix_products"),
        ("triton_tem_fused_mm_7", "matrix_products"),
        ("triton_poi_fused_add_mul_silu_4", "memory_bound"),
        ("triton_red_fused__log_softmax_12", "memory_bound"),
        ("void transformer_engine::normalization::rmsnorm_fwd_kernel<...>", "memory_bound"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
            "FusedOptimizerTensorListMetadata<3>, FusedAdamMathFunctor<float, 3> >",
            "optimizer",
        ),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float> >", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "all_gather"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_bf16(ncclDevComm*)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", "send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgs)", "other_collectives"),
        ("void deep_ep::internode::dispatch<false, 8, false>(int4*)", "all_to_all"),
        ("my_company_thing_v2", "other_kernels"),
    ],
)
def test_kernels_of_other_libraries(name: str, line: Line) -> None:
    assert line_of_kernel("kernel", name) == line


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("aten::addmm", "matrix_products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::mul", "memory_bound"),
        ("aten::native_layer_norm", "memory_bound"),
        ("aten::view", "idle"),
        ("aten::linear", "idle"),
        ("autograd::engine::evaluate_function: MmBackward0", "idle"),
        ("mylib::fused_thing", "other_kernels"),
        ("c10d::allreduce_", "all_reduce"),
    ],
)
def test_operators(name: str, line: Line) -> None:
    assert line_of_operator(name) == line


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("allreduce_coalesced", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("recv", "send_recv"),
        ("barrier", "other_collectives"),
        ("gloo:all_reduce", "all_reduce"),
    ],
)
def test_collectives(name: str, line: Line) -> None:
    assert line_of_collective(name) == line


def test_overlap_exposure_and_gaps(tmp_path: Path) -> None:
    events = [
        kernel("matrix_products", 0, 4),
        nccl("all_reduce", 2, 6, 1_000_000, range(2)),  # 2 ms of it beside the product
        kernel("memory_bound", 10, 2),
        kernel("attention", 11, 2),  # 1 ms beside the other kernel, shared evenly
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 1, tid=9),
        *step_marks((0, 16)),
    ]
    found = read(tmp_path, events)
    assert milliseconds(found) == {
        "matrix_products": 4,
        "all_reduce": 4,
        "memory_bound": 1.5,
        "attention": 1.5,
        "host_copies": 1,
        "idle": 4,
    }
    assert found.overlapped_seconds("all_reduce") == pytest.approx(2e-3)
    (call,) = found.collectives
    assert (call.message_bytes, call.size, call.ranks) == (2e6, 2, (0, 1))
    assert call.bus_bytes == 2e6  # 2 (n - 1) / n


def test_random_streams_add_up(tmp_path: Path) -> None:
    chosen = random.Random(3)
    for _ in range(20):
        events = [
            kernel(
                chosen.choice(("matrix_products", "attention", "memory_bound", "optimizer")), at, d
            )
            if chosen.random() < 0.7
            else nccl("all_gather", at, d, 10, range(4))
            for at, d in ((chosen.uniform(0, 50), chosen.uniform(0, 9)) for _ in range(60))
        ]
        read(tmp_path, events)


def test_steps_by_marks_by_option_and_by_default(tmp_path: Path) -> None:
    events = [kernel("matrix_products", at, 4) for at in (0, 10, 20)]
    marked = read(tmp_path, [*events, *step_marks((0, 10), (10, 20), (20, 30))])
    assert marked.steps == 3 and marked.step_seconds == pytest.approx(10e-3)
    assert marked.step_times == pytest.approx((10e-3,) * 3)
    assert milliseconds(marked) == {"matrix_products": 4, "idle": 6}
    told = read(tmp_path, events, steps=3)
    assert (told.steps, told.has_step_marks) == (3, False)
    assert told.step_seconds == pytest.approx(8e-3)
    assert read(tmp_path, events).step_seconds == pytest.approx(24e-3)


def test_what_the_optimizer_launches_is_its_own(tmp_path: Path) -> None:
    update = "Optimizer.step#AdamW.step"
    events = [
        kernel("memory_bound", 0, 2),
        kernel("memory_bound", 5, 2),  # a loop of plain kernels inside the update
        kernel("optimizer", 7, 1),
        event("user_annotation", update, 1, 1),
        event("gpu_user_annotation", update, 4.5, 4, tid=7),
    ]
    assert milliseconds(read(tmp_path, events)) == {
        "memory_bound": 2,
        "optimizer": 3,
        "idle": 3,
    }


def test_a_cpu_counts_operators_by_their_own_time(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::addmm", 2, 6),
        event("cpu_op", "aten::copy_", 4, 1),
        event("cpu_op", "aten::mul", 12, 3),
        event("cpu_op", "aten::scaled_dot_product_attention", 15, 4),
        event("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu", 16, 2),
        event("user_annotation", "gloo:all_reduce", 11, 3, tid=5)
        | {"args": {"Input Dims": [[1000, 10]], "Input type": ["float"]}},
        event("cpu_op", "c10d::allreduce_", 11, 0.5),
        event("user_annotation", "Optimizer.step#SGD.step", 20, 4),
        event("cpu_op", "aten::add_", 21, 1),
        *step_marks((0, 30)),
    ]
    found = read(tmp_path, events, rank=1)
    assert found.is_cpu and (found.rank, found.world_size) == (1, 2)
    assert milliseconds(found) == {
        "matrix_products": 5,
        "memory_bound": 4,
        "attention": 4,
        "all_reduce": 1,
        "optimizer": 4,
        "idle": 12,
    }
    assert found.collectives[0].message_bytes == 40_000
    assert found.lines["all_reduce"].calls == 1  # not the launch on top of it
    assert found.has_optimizer and len(found.attention) == 1  # not its inner operator


def test_memory_and_data_loading(tmp_path: Path) -> None:
    memory = {"ph": "i", "name": "[memory]", "ts": 1}
    events = [
        kernel("matrix_products", 0, 10),
        *(
            {**memory, "args": {"Device Type": device, "Total Allocated": total}}
            for device, total in ((1, 5_000), (1, 9_000), (1, 2_000), (0, 99_000))
        ),
        event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter", 2, 3),
    ]
    found = read(tmp_path, events)
    assert found.peak_bytes == 9_000
    assert found.data_loading_seconds == pytest.approx(3e-3)


def test_layers_are_those_of_marks_or_modules(tmp_path: Path) -> None:
    compiled = [
        event("gpu_user_annotation", f"Torch-Compiled Region: 0/{n}", n, 1, tid=7) for n in range(4)
    ]
    marked = [event("gpu_user_annotation", f"layer {n}", 2 * n, 1 + n, tid=7) for n in range(3)]
    found = read(tmp_path, [kernel("matrix_products", 0, 10), *compiled, *marked])
    assert [each.name for each in found.layers] == ["layer 0", "layer 1", "layer 2"]
    assert [each.seconds for each in found.layers] == pytest.approx([1e-3, 2e-3, 3e-3])
    modules = [
        event("python_function", f"nn.Module: {name}_{n}", 3 * n + at, d)
        for n in range(3)
        for name, at, d in (("Block", 0, 2), ("Linear", 0.5, 1))
    ]
    found = read(tmp_path, [event("cpu_op", "aten::mul", 0, 10), *modules])
    assert [each.name for each in found.layers] == ["Block 0", "Block 1", "Block 2"]


def test_a_split_all_to_all_is_no_send(tmp_path: Path) -> None:
    call = nccl("all_to_all", 0, 2, 100, range(4))
    call["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    found = read(tmp_path, [kernel("matrix_products", 3, 1), call])
    assert found.lines["all_to_all"].calls == 1
    assert all(found.lines[line].calls == 0 for line in COLLECTIVE_LINES if line != "all_to_all")
