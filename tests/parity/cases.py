"""The layouts that parity is proved over."""

from __future__ import annotations

from tests.parity.harness import Case

_LAYOUTS: dict[str, dict[str, object]] = {
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "dp2-zero0": {"data": 2, "zero_stage": 0},
    "dp2-zero1": {"data": 2},
    "dp2-zero2": {"data": 2, "zero_stage": 2},
    "dp2-zero3": {"data": 2, "zero_stage": 3},
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "pp2-dp2": {"pipeline": 2, "data": 2},
    "tp2-dp2-zero1": {"tensor": 2, "data": 2},
    "tp2-dp2-zero2": {"tensor": 2, "data": 2, "zero_stage": 2},
    "tp2-dp2-zero3": {"tensor": 2, "data": 2, "zero_stage": 3},
    "pp2-tp2-dp2": {"pipeline": 2, "tensor": 2, "data": 2},
    "dualpipev-pp2": {"pipeline": 2, "schedule": "dualpipev", "accumulation": 4},
    "dualpipev-pp2-tp2": {"pipeline": 2, "tensor": 2, "schedule": "dualpipev", "accumulation": 4},
    "full-pp2": {"pipeline": 2, "checkpointing": "full"},
    "selective-pp2-tp2": {"pipeline": 2, "tensor": 2, "checkpointing": "selective"},
    "full-dp2-zero3": {"data": 2, "zero_stage": 3, "checkpointing": "full"},
    "selective-dp2-zero3": {"data": 2, "zero_stage": 3, "checkpointing": "selective"},
    "accumulation4": {"accumulation": 4},
    "accumulation4-pp2": {"pipeline": 2, "accumulation": 4},
    "clipping0-dp2-zero0": {"data": 2, "zero_stage": 0, "clipping": 0.0},
    "clipping0-tp2-zero0": {"tensor": 2, "zero_stage": 0, "clipping": 0.0},
    "clipping0-pp2": {"pipeline": 2, "clipping": 0.0},
    "pp4": {"pipeline": 4},
    "pretrained-pp2-tp2": {"pipeline": 2, "tensor": 2, "pretrained": True},
    "pretrained-dp2-zero3": {"data": 2, "zero_stage": 3, "pretrained": True},
    "offload-dp2-zero1": {"data": 2, "offload": "optimizer"},
    "offload-pp2-dp2": {"pipeline": 2, "data": 2, "offload": "optimizer"},
    "bf16-offload-pp2": {"pipeline": 2, "offload": "optimizer", "precision": "bf16"},
    "offload-dp2-zero2": {"data": 2, "zero_stage": 2, "offload": "optimizer"},
    "offload-dp2-zero3": {"data": 2, "zero_stage": 3, "offload": "optimizer"},
    "offload-parameters-tp2-dp2": {
        "tensor": 2,
        "data": 2,
        "zero_stage": 3,
        "offload": "parameters",
    },
    "bf16-offload-dp2-zero2": {
        "data": 2,
        "zero_stage": 2,
        "offload": "optimizer",
        "precision": "bf16",
    },
    "bf16-offload-parameters-dp2": {
        "data": 2,
        "zero_stage": 3,
        "offload": "parameters",
        "precision": "bf16",
    },
    # Other layouts of the chunked loss: test_chunked.py, many in one launch.
    "chunked-pp2": {"pipeline": 2, "loss": "chunked"},
    "chunked-dp2-zero3": {"data": 2, "zero_stage": 3, "loss": "chunked"},
    "chunked-bf16-pp2-tp2": {"pipeline": 2, "tensor": 2, "precision": "bf16", "loss": "chunked"},
    "chunked-bf16-dp2-zero3": {"data": 2, "zero_stage": 3, "precision": "bf16", "loss": "chunked"},
    "bf16-one": {"precision": "bf16"},
    "bf16-pp2": {"pipeline": 2, "precision": "bf16"},
    "bf16-pp2-tp2": {"pipeline": 2, "tensor": 2, "precision": "bf16"},
    "bf16-tp2-dp2-zero1": {"tensor": 2, "data": 2, "precision": "bf16"},
    "bf16-dp2-zero2": {"data": 2, "zero_stage": 2, "precision": "bf16"},
    "bf16-dp2-zero3": {"data": 2, "zero_stage": 3, "precision": "bf16"},
}

CASES: dict[str, Case] = {
    f"{model}-{name}": Case(model=model, **layout)  # type: ignore[arg-type]
    for model in ("llama", "gpt2")
    for name, layout in _LAYOUTS.items()
} | {
    "llama-tied-pp2-tp2": Case(model="llama-tied", pipeline=2, tensor=2),
    "llama-tied-tp2-dp2-zero3": Case(model="llama-tied", tensor=2, data=2, zero_stage=3),
    "qwen2-pp2-tp2": Case(model="qwen2", pipeline=2, tensor=2),
    # transformers stacks a layer's experts in one parameter, which ZeRO-3 gathers whole: no leaf
    # modules are needed.
    "mixtral-dp2-zero3": Case(model="mixtral", data=2, zero_stage=3, micro=1),
    "qwen3_moe-dp2-zero3": Case(model="qwen3_moe", data=2, zero_stage=3, micro=1),
    "gpt2-untied-pp2-tp2": Case(model="gpt2-untied", pipeline=2, tensor=2),
}

SAMPLE = (
    "llama-dp2-zero2",
    "mixtral-dp2-zero3",
    "gpt2-dualpipev-pp2",
    "llama-bf16-pp2-tp2",
)
"""What `make test-more` runs, each in a launch; `make prove` runs CASES and the 8-rank layouts."""
