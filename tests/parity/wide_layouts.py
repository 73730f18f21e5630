"""The layouts of expert ranks and of context ranks that parity is proved over: all that 8 ranks
hold."""

from __future__ import annotations

import itertools

from tests.parity.harness import Case

SHARED: dict[str, dict[str, object]] = {
    "e2": {"model": "mixtral", "data": 2, "expert": 2},
    "c2": {"model": "llama", "context": 2},
    "e2-c2": {"model": "qwen3_moe", "context": 2, "expert": 2},
}
"""Expert ranks out of data ranks, context ranks, and expert ranks out of context ranks."""

FEATURES: dict[str, dict[str, object]] = {
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "chunked": {"loss": "chunked"},
    "accumulation4": {"accumulation": 4},
    "bf16": {"precision": "bf16"},
}
"""Beside a pipeline of tensor ranks, and beside ZeRO-3."""


def _cases() -> dict[str, Case]:
    found: dict[str, dict[str, object]] = {}
    for (name, keys), pipeline, tensor in itertools.product(SHARED.items(), (1, 2), (1, 2)):
        place = f"{name}-pp{pipeline}-tp{tensor}"
        degrees = {**keys, "pipeline": pipeline, "tensor": tensor}
        for stage in (1, 2, 3) if pipeline == 1 else (1,):  # DeepSpeed's pipelines stop at ZeRO-1
            found[f"{place}-zero{stage}"] = {**degrees, "zero_stage": stage}
        if pipeline == 2:
            found[f"{place}-dualpipev"] = {**degrees, "schedule": "dualpipev", "accumulation": 4}
        if pipeline == tensor:
            stage = 3 if pipeline == 1 else 1
            for feature, more in FEATURES.items():
                found[f"{place}-zero{stage}-{feature}"] = {**degrees, "zero_stage": stage, **more}
    return {name: Case(**keys) for name, keys in found.items()}  # type: ignore[arg-type]


WIDE: dict[str, Case] = _cases()
