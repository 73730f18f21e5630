"""The cost model's numbers that no data sheet gives. First-order values, set by hand against published runs.

Each says what it stands for and where it was seen. Nothing else in cost/ holds a bare constant.
"""

from __future__ import annotations

# Share of a dense peak that a large matrix product reaches on a GPU (arXiv 2104.04473 reports about 0.5 end to end).
GEMM_EFFICIENCY = 0.76
# The same for the two attention products: batched and small (eager), or fused and recomputing (sdpa, flash).
ATTENTION_EFFICIENCY = {"eager": 0.4, "sdpa": 0.45, "flash_attention_2": 0.55}
# A width that is not a multiple of 64 falls off the tensor cores' tiles (BigScience: 94 against 120 TFLOP/s); a
# head size that is not a multiple of 8 likewise.
ODD_WIDTH_EFFICIENCY = 0.85
ODD_HEAD_EFFICIENCY = 0.9
# Times that elementwise kernels move one kept activation through memory in a forward pass (read and write), by the
# kernels in use: unfused Hugging Face, Megatron's fused softmax/gelu/dropout, or torch.compile.
ELEMENTWISE_PASSES = {"hf": 3.0, "megatron": 2.0, "compiled": 1.5}
# The same for one score of eager attention: mask, softmax, dropout.
SCORE_PASSES = {"hf": 3.0, "megatron": 1.5, "compiled": 1.5}
# Share of a link's nominal bandwidth that collectives reach.
LINK_EFFICIENCY = 0.7
# Share of a backward pass's length behind which data-parallel traffic can hide.
OVERLAP = 0.6
# Bytes that an Adam step moves per updated parameter: read gradient, master, two moments; write three and the copy.
ADAM_BYTES_PER_PARAMETER = 30
# Fixed cost of one micro-batch on one stage: launches, schedule (seconds). 2.4 ms a call were measured on a CPU.
MICRO_BATCH_OVERHEAD_SECONDS = 2e-3
# Device context, communicators and library workspaces (bytes), as nvidia-smi shows them.
FRAMEWORK_BYTES = 4_000_000_000
# A CPU rank's own interpreter and libraries.
CPU_FRAMEWORK_BYTES = 600_000_000
# The allocator's rounding and fragmentation, as a share of everything it hands out.
FRAGMENTATION = 0.05
# Bytes per logit while the loss runs: half-precision logits, their float32 copy, and a half-precision gradient.
LOGIT_BYTES = 8
# Elements in a gradient bucket of DeepSpeed's ZeRO (reduce_bucket_size, allgather_bucket_size defaults).
BUCKET_ELEMENTS = 500_000_000
# memory_headroom: auto, as a share of the device's memory.
MEMORY_HEADROOM = 0.05
