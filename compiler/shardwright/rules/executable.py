"""What `run` executes in this version: one table. A recipe beyond it is valid and can be estimated, not compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, KeyPath
from shardwright.ir.json_value import JsonScalar
from shardwright.ir.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """value(recipe) must be in `allowed` (None stands for a key left out, or `auto`)."""

    code: str
    key: KeyPath
    value: Callable[[Recipe], JsonScalar]
    allowed: tuple[JsonScalar, ...]
    help: str


LATER = "`shardwright estimate` and `shardwright plan` read it already."

LARGEST_WORLD = 65536
"""Ranks that a plan.json can sensibly list: four times the largest published training."""

EXECUTABLE: tuple[Limit, ...] = (
    Limit(
        code="SW1901",
        key=("target",),
        value=lambda r: r.target,
        allowed=("deepspeed",),
        help="Write `target: deepspeed`; `shardwright estimate` takes the other targets.",
    ),
    Limit(
        code="SW1902",
        key=("data", "kind"),
        value=lambda r: r.data.kind if r.data else None,
        allowed=("text", "tokens", "synthetic", None),
        help="Turn the data into text files (kind: text) or into a .npy array of token ids (kind: tokens).",
    ),
    Limit(
        code="SW1903",
        key=("validation",),
        value=lambda r: None if r.validation is None else "given",
        allowed=(None,),
        help="Remove the `validation` section; score the checkpoints after the run.",
    ),
    Limit(
        code="SW1904",
        key=("model", "loss"),
        value=lambda r: r.model.loss,
        allowed=("auto", "full"),
        help="Write `loss: auto`.",
    ),
    Limit(
        code="SW1905",
        key=("model", "attention"),
        value=lambda r: r.model.attention,
        allowed=("auto", "sdpa", "eager"),
        help="Write `attention: auto`.",
    ),
    Limit(
        code="SW1906",
        key=("training", "epochs"),
        value=lambda r: r.training.epochs,
        allowed=(None,),
        help="The number of steps in an epoch is known only once the data is prepared: give `steps` or `tokens`.",
    ),
    Limit(
        code="SW1907",
        key=("launch", "launcher"),
        value=lambda r: r.launch.launcher,
        allowed=("auto", "local", "pdsh", "no_ssh"),
        help="Write `launcher: no_ssh` and start launch.sh once on each node from your own scheduler's script.",
    ),
    Limit(
        code="SW1907",
        key=("launch", "slurm"),
        value=lambda r: "given" if r.launch.slurm else None,
        allowed=(None,),
        help="Remove `launch.slurm`; write `launcher: no_ssh` and start launch.sh once on each node of the allocation.",
    ),
    Limit(
        code="SW1908",
        key=("launch", "setup_script"),
        value=lambda r: r.launch.setup_script,
        allowed=(None,),
        help="Remove it, and source the script in the shell that starts the run.",
    ),
    *(
        Limit(
            code="SW1914",
            key=("assume", key),
            value=value,
            allowed=allowed,
            help="Remove it: `assume` changes what an estimate predicts, not what a run does.",
        )
        for key, value, allowed in (
            ("kernels", lambda r: r.assume.kernels, ("auto", "hf")),
            ("mfu", lambda r: r.assume.mfu, (None,)),
            ("ignore_memory", lambda r: r.assume.ignore_memory, (False,)),
        )
    ),
    Limit(
        code="SW1909",
        key=("parallelism", "expert"),
        value=lambda r: r.parallelism.expert,
        allowed=(1,),
        help=f"Write `expert: 1`. {LATER}",
    ),
    Limit(
        code="SW1909",
        key=("parallelism", "context"),
        value=lambda r: r.parallelism.context,
        allowed=(1,),
        help=f"Write `context: 1`. {LATER}",
    ),
    Limit(
        code="SW1909",
        key=("parallelism", "virtual_stages"),
        value=lambda r: r.parallelism.virtual_stages,
        allowed=(1,),
        help=f"Write `virtual_stages: 1`. {LATER}",
    ),
    Limit(
        code="SW1909",
        key=("parallelism", "sequence_parallel"),
        value=lambda r: r.parallelism.sequence_parallel,
        allowed=(False,),
        help=f"Write `sequence_parallel: false`. {LATER}",
    ),
)


def check_executable(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Everything in the recipe that this version cannot run, at once."""
    found = [refuse(limit, recipe) for limit in EXECUTABLE if limit.value(recipe) not in limit.allowed]
    if recipe.data is None:
        found.append(
            Diagnostic(
                code="SW1910",
                message="the recipe has no `data` section, so there is nothing to train on",
                help="Add for example `data: {kind: text, path: corpus/*.txt, tokenizer: byte}`, or `kind: synthetic`.",
                key=("data",),
            )
        )
    elif recipe.data.kind == "text" and recipe.data.tokenizer is None:
        found.append(
            Diagnostic(
                code="SW1911",
                message="text data needs a tokenizer",
                help="Add `tokenizer: byte` (256 symbols), or the folder of a Hugging Face tokenizer.",
                key=("data",),
            )
        )
    world = (recipe.cluster.nodes or 1) * recipe.cluster.gpus_per_node
    if world > LARGEST_WORLD:
        found.append(
            Diagnostic(
                code="SW1915",
                message=f"the cluster has {world} GPUs; this version compiles for at most {LARGEST_WORLD}",
                help=f"plan.json has an entry for each rank. Give fewer nodes. {LATER}",
                key=("cluster", "nodes"),
            )
        )
    return tuple(found)


def refuse(limit: Limit, recipe: Recipe) -> Diagnostic:
    value = limit.value(recipe)
    name = ".".join(str(part) for part in limit.key)
    shown = "this section" if value == "given" else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    return Diagnostic(
        code=limit.code,
        message=f"{name}: {shown} is valid, but this version does not run it",
        help=limit.help,
        key=limit.key,
        valid=tuple(str(v).lower() if isinstance(v, bool) else str(v) for v in limit.allowed if v is not None),
    )
