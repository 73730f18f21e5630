"""Define Engine, all that the compile knows of an engine; nothing here imports what it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from shardwright.diagnostics import Diagnostic
from shardwright.layout.layout import Candidate, Rule
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import (
    AutoSwitch,
    Fabric,
    Precision,
    RecomputeModule,
    TaskName,
)
from shardwright.recipe.objectives import NEXT_TOKEN
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonObject
from shardwright.utils.private_names import Purpose

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Describe an engine's steps and memory; the cost model reads these traits instead of a name.

    selective_recomputes_projections: "selective" recomputes the attention module's products, not
        only the S x S ones
    fuses_accumulation: a product adds its gradient to the accumulated one itself
    frees_gradients_after_add: each gradient is freed once it is added to the accumulated one
    tensor_parallel_launch_cost: the host's launches around a tensor-parallel collective; "hidden"
        behind compute, a "floor" of the layer's time, or "added" because they drain the launch
        queue
    bidirectional_p2p: an activation and a gradient cross a stage boundary at once
    saved_stage_outputs: micro-batches whose output 1F1B's last stage keeps after their backward
        pass, at most
    bucketed_zero: ZeRO copies in and out of buckets slice by slice, and reaches a share of the
        links' rate
    bucketed_pipeline: a pipeline's gradients at ZeRO-1 do, too
    traffic: whose constants give the overlap of data-parallel traffic (cost_constants, overlap_)
    zero_1_overlaps: ZeRO-1 reduces gradients during the last backward pass, not after it
    zero3_gathers_flat_layers: ZeRO-3 gathers a layer from one flat buffer, without a hook at each
        module
    balances_stages_by_matmul_flops: stages have equal shares of the products, the head's included,
        whatever the host and the links add
    pipeline_raises_launch_cost: the launch cost grows with the tensor ranks where a pipeline
        crosses nodes
    overlaps_host_update: an optimizer in host memory takes a step's gradients from the GPU, which
        accumulates them, and updates one tensor while others are on the link, in fp32 both ways
    fabric: the fabric behind these traits, where the recipe names none
    context_gathers_kv: context ranks gather keys and values, instead of all-to-alls of heads
    low_precision_experts: stacks of experts multiply in low precision, too
    low_precision_inputs_saved: linears save their inputs for the backward pass in low precision
    repeats_orthogonalization: under Muon each rank orthogonalizes every matrix that it holds a
        shard of, which its tensor ranks gather in fp32; else the ranks share the matrices out
    chunked_loss, hpz: the engine supports them
    """

    selective_recomputes_projections: bool
    fuses_accumulation: bool
    tensor_parallel_launch_cost: Literal["hidden", "floor", "added"]
    bidirectional_p2p: bool
    saved_stage_outputs: int
    bucketed_zero: bool
    bucketed_pipeline: bool
    traffic: str
    zero_1_overlaps: bool
    zero3_gathers_flat_layers: bool
    chunked_loss: bool
    hpz: bool
    context_gathers_kv: bool = False
    low_precision_experts: bool = False
    low_precision_inputs_saved: bool = False
    frees_gradients_after_add: bool = False
    balances_stages_by_matmul_flops: bool = False
    pipeline_raises_launch_cost: bool = False
    overlaps_host_update: bool = False
    repeats_orthogonalization: bool = False
    fabric: Fabric | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Hold one row of the engine table.

    runtime: path of the module that the ranks call (trainer_protocol.EngineRuntime); only ranks
        import it
    lowering: path of the module that the compile calls (Lowering)
    program: the command with which the launch scripts start the ranks
    reads_hosts: the engine takes the hosts' names from a hostfile
    packages: required package -> tested versions
    private_names: returns which names of utils/private_names.py a plan needs
    extra: the optional dependency group that installs them
    artifacts: what the engine writes at the top of the compiled folder; a folder ends with a slash
    inputs: those artifacts that a run reads as data
    precisions: those that the engine trains in
    optimizers: those that the engine runs -> the engine's own names for them
    tasks: those that the engine trains models for
    objectives: those of recipe/objectives.py that the engine trains with
    scores_tokens: its trainers return the log-probabilities of labels (ScoringTrainer)
    refusal_code: code of a value that is not among these
    refusal_reasons: recipe key of these -> why other values do not run
    rules: code -> a layout that the engine does not run
    waived_rules: codes of rules about modules of this project that the engine does without
    key_errors: checks the recipe's keys that no axis and no field above covers
    axes: keys of a layout, beyond those of every engine, that the engine has
    low_precision: formats of `training.low_precision` -> the engine's own names for them
    compiles_layers: the engine runs `model.kernels: compile`
    transformer_engine: decides whether ranks use layers of Transformer Engine; None without them
    types: model types that the engine has modules of its own for; None where Hugging Face's run
    recompute_obstacle: returns why a layout's ranks cannot recompute a module of a layer by itself,
        "" where they can; None where no layout's can
    islands: the engine trains DiLoCo islands
    measures_noise_scale: the engine measures the gradient noise scale
    pads_vocabulary: to a multiple of the tensor ranks; the last ranks have fewer tokens
    automatic: `target: auto` may choose the engine
    tested_on_gpus: training was compared with single-process runs on GPUs, not only on CPU ranks
    unsupported_reason: returns what the engine does not do for a model, a verb first; "" where it
        may train the model
    """

    name: str
    title: str
    runtime: str
    traits: EngineTraits
    lowering: str
    program: str
    reads_hosts: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)
    private_names: Callable[[Plan], tuple[Purpose, ...]] = lambda plan: ()
    extra: str = "train"
    artifacts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    waived_rules: frozenset[str] = frozenset()
    key_errors: Callable[[Recipe], tuple[Diagnostic, ...]] = lambda recipe: ()
    axes: frozenset[str] = frozenset()
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    optimizers: Mapping[str, str] = field(default_factory=dict)
    refusal_code: str = "SW1922"
    refusal_reasons: Mapping[str, str] = field(default_factory=dict)
    low_precision: Mapping[str, str] = field(default_factory=dict)
    compiles_layers: bool = False
    transformer_engine: Callable[[Candidate], AutoSwitch] | None = None
    tasks: frozenset[TaskName] = frozenset({"causal-lm"})
    objectives: tuple[str, ...] = (NEXT_TOKEN,)
    scores_tokens: bool = False
    recompute_obstacle: Callable[[Candidate, RecomputeModule], str] | None = None
    types: frozenset[str] | None = None
    islands: bool = False
    measures_noise_scale: bool = False
    pads_vocabulary: bool = False
    automatic: bool = True
    tested_on_gpus: bool = True
    unsupported_reason: Callable[[ModelGraph], str] = lambda graph: ""

    def trained_values(self) -> dict[str, tuple[str, ...]]:
        """Return the recipe's key -> its values that the engine trains with."""
        return {
            "training.precision": self.precisions,
            "training.optimizer.name": tuple(self.optimizers),
            "training.low_precision": ("none", *self.low_precision),
            "model.task": tuple(sorted(self.tasks)),
            "training.objective.name": self.objectives,
        }


class Lowering(Protocol):
    """Turn a plan into the engine's files."""

    def zero_settings(self, plan: Plan) -> JsonObject:
        """Return the plan's `zero`: how the engine shards states; the plan lacks only this."""
        ...

    def files(
        self, plan: Plan, config: JsonObject
    ) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
        """Return the content of each file by path in the compiled folder, and warnings.

        config: the model's configuration

        Raises Refusal where the engine cannot train the model.
        """
        ...
