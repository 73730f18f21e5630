"""The layouts that the noise scale is proved in, and some that cut a model in every way in which
parameters are held twice."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.harness import Case

MEASURED = 4
"""Steps."""


@dataclass(frozen=True)
class NoiseCase(Case):
    """rows: of the recipe, tracking.noise_scale. packed: documents are kept apart, so that rows
    differ in labels."""

    rows: int = 64
    packed: bool = False

    @property
    def rows_are_comparable(self) -> bool:
        """Whether every row is a micro-batch of its own that is measured, with as many labels as
        each other."""
        return self.micro == 1 and self.rows >= self.batch and not self.packed


def _case(**keys: object) -> NoiseCase:
    return NoiseCase(**{"model": "llama", "micro": 1, "accumulation": 4, **keys})  # type: ignore[arg-type]


CASES: dict[str, NoiseCase] = {
    "zero0-data": _case(data=2, zero_stage=0),
    "zero1-data": _case(data=2),
    "zero2-data": _case(data=2, zero_stage=2),
    "zero3-data": _case(data=2, zero_stage=3),
    "pipeline": _case(pipeline=2, accumulation=8),
    "tensor": _case(tensor=2, accumulation=8),
    "no-accumulation": _case(data=2, accumulation=1),
    "larger-micro-batches": _case(data=2, micro=4),
    "packed-data": _case(data=2, packed=True, micro=2),
    "packed-pipeline": _case(pipeline=2, packed=True, micro=2),
    "some-rows-data": _case(data=2, rows=5, micro=2),
    "some-rows-pipeline": _case(pipeline=2, rows=3, accumulation=8),
    "dualpipev": _case(pipeline=2, schedule="dualpipev", accumulation=8),
    "some-rows-dualpipev": _case(pipeline=2, schedule="dualpipev", accumulation=8, rows=3),
    "recomputed-pipeline": _case(pipeline=2, checkpointing="full"),
    "recomputed-zero3": _case(data=2, zero_stage=3, checkpointing="selective"),
    "chunked-zero3": _case(data=2, zero_stage=3, loss="chunked"),
    "chunked-pipeline": _case(pipeline=2, loss="chunked"),
    "offload-zero2": _case(data=2, zero_stage=2, offload="optimizer"),
    "offload-zero3": _case(data=2, zero_stage=3, offload="parameters"),
    "tied-data": _case(model="llama-tied", data=2),
    "tied-tensor": _case(model="llama-tied", tensor=2),
    "gpt2-tensor": _case(model="gpt2", tensor=2),
    "gpt2-pipeline": _case(model="gpt2-untied", pipeline=2),
    "qwen3-tensor": _case(model="qwen3", tensor=2),
    "mixture-data": _case(model="mixtral", data=2),
    "mixture-pipeline": _case(model="mixtral", pipeline=2),
    "mixture-tensor": _case(model="mixtral", tensor=2),
    "lora-data": _case(data=2, lora_rank=4),
    "lora-zero3": _case(data=2, zero_stage=3, lora_rank=4),
    "bf16-zero1": _case(data=2, precision="bf16"),
    "bf16-zero3": _case(data=2, zero_stage=3, precision="bf16"),
    "bf16-pipeline": _case(pipeline=2, precision="bf16"),
    # Two key/value heads over four ranks: two ranks hold a copy of each.
    "copied-heads": _case(tensor=4),
    "pipeline-tensor": _case(pipeline=2, tensor=2),
    "pipeline-data": _case(pipeline=2, data=2),
    "tensor-zero3": _case(tensor=2, data=2, zero_stage=3),
}
SAMPLE = ("zero1-data", "zero3-data", "pipeline", "tensor", "packed-data")
