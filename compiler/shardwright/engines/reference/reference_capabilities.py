"""The reference engine's row of the table."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_definition import Engine, EngineTraits
from shardwright.layout.layout import Candidate, rule
from shardwright.recipe.literal_types import Precision
from shardwright.recipe.objectives import OBJECTIVES
from shardwright.utils.json_values import JsonScalar


def single_process_only(x: Candidate) -> Diagnostic | None:
    """The reference engine is one process: it has no other ranks to split the model, the data or
    the optimizer states over, and it offloads nothing."""
    s = x.strategy
    wrong = [
        (axis, getattr(s, axis)) for axis in ("tensor", "pipeline", "data") if getattr(s, axis) > 1
    ]
    wrong += [("zero_stage", s.zero_stage)] if s.zero_stage else []
    wrong += [("offload", s.offload)] if s.offload != "none" else []
    if not wrong:
        return None
    return found(
        "SW3134",
        f"parallelism.{wrong[0][0]}",
        (
            "target: reference trains in one process, but the layout has "
            f"{', '.join(f'{name} {value}' for name, value in wrong)}"
        ),
        "Write `zero_stage: 0`, `offload: none` and degrees of 1, or `target: deepspeed`.",
    )


PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")


def unsupported_recipe_key(x: Candidate) -> Diagnostic | None:
    """The reference engine is one process of plain PyTorch on one GPU, in bf16 or fp32. A scheduler
    or a hostfile starts several processes, and keys of `extra` are DeepSpeed's."""
    launch, cluster = x.recipe.launch, x.recipe.cluster
    asked: tuple[tuple[str, JsonScalar, tuple[JsonScalar, ...]], ...] = (
        ("cluster.nodes", cluster.nodes or 1, (1,)),
        ("cluster.gpus_per_node", cluster.gpus_per_node, (1,)),
        # In the engine's row too; `estimate` checks layout rules alone.
        ("training.precision", x.recipe.training.precision, PRECISIONS),
        ("launch.launcher", launch.launcher, ("auto", "local")),
        ("launch.slurm", "given" if launch.slurm else None, (None,)),
        ("launch.kubernetes", "given" if launch.kubernetes else None, (None,)),
        ("launch.hostfile", launch.hostfile, (None,)),
        ("extra", "given" if x.recipe.extra else None, (None,)),
    )
    for name, value, allowed in asked:
        if value not in allowed:
            return found(
                "SW1921",
                name,
                f"{name if value == 'given' else f'{name}: {value}'} does not run under target: "
                "reference, which is one process of plain PyTorch",
                f"{'Remove' if value == 'given' else 'Change'} {name}, or write "
                "`target: deepspeed`.",
                tuple(str(v) for v in allowed if v is not None),
            )
    return None


RULES = {
    "SW1921": rule(unsupported_recipe_key),
    "SW3134": rule(single_process_only, "tensor", "pipeline", "data", "zero_stage", "offload"),
}


REFERENCE = Engine(
    name="reference",
    title="plain PyTorch",
    runtime="shardwright.engines.reference.reference_runtime",
    lowering="shardwright.engines.reference.reference_runtime",
    program="python",
    reads_hosts=False,
    traits=EngineTraits(
        selective_recomputes_projections=True,
        fuses_accumulation=False,
        tensor_parallel_launch_cost="floor",
        bidirectional_p2p=False,
        saved_stage_outputs=0,
        bucketed_zero=False,
        bucketed_pipeline=False,
        traffic="deepspeed",
        zero_1_overlaps=False,
        zero3_gathers_flat_layers=False,
        chunked_loss=True,
        hpz=False,
    ),
    precisions=PRECISIONS,
    optimizers={"adamw": "AdamW", "lion": "Lion"},
    low_precision={"fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise"},
    refusal_code="SW1921",
    refusal_reasons={
        "training.precision": "fp16 needs a loss scale, which this engine does not have",
        "training.low_precision": "torchao's linears of this format are prototypes for single GPUs",
    },
    rules=RULES,  # SW1921 refuses `extra`
    tasks=frozenset({"causal-lm", "image-text-to-text", "sequence-classification"}),
    objectives=tuple(OBJECTIVES),
    scores_tokens=True,
    automatic=False,
)
