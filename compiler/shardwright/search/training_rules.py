"""Check what is trained and how: the engine's values, frozen parameters, LoRA, kernels, noise."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_definition import Engine
from shardwright.engines.engine_table import DEFAULT_TARGET, ENGINES
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate
from shardwright.layout.muon_matrices import unsplit_parameter
from shardwright.layout.optimizer_matrices import matrix_parameters
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.quantized_moments import BLOCK, keeps_blocks
from shardwright.layout.tensor_parallel_map import weight_orientation
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import ModelGraph, Parameter
from shardwright.models.model_support import torch_compile_types
from shardwright.models.trainable_parameters import (
    MODEL_PARTS,
    adapted_modules,
    default_target_modules,
    frozen_parameter_names,
    parameters_matching,
)
from shardwright.plan.plan import zero_learning_rate_updates
from shardwright.recipe.learning_rate_schedules import SCHEDULES
from shardwright.recipe.objectives import NEXT_TOKEN, SCORING_TASK
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2, Recipe


def engine_recipe_errors(engine: Engine, recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return what of a recipe the engine does not run, all at once.

    The one rule about the precisions, optimizers and tasks in its row of the engine table comes
    first (Engine.refusal_code), then the engine's own checks of other keys. `task: auto` is
    resolved with the model.
    """
    values = {
        "training.precision": recipe.training.precision,
        "training.optimizer.name": recipe.training.optimizer.name,
        "training.low_precision": recipe.training.low_precision,
        "model.task": recipe.model.task,
        "training.objective.name": recipe.training.objective.name,
    }
    errors = []
    for key, trained in engine.trained_values().items():
        value = values[key]
        if value in (*trained, "auto"):
            continue
        others = (e.name for e in ENGINES.values() if value in e.trained_values()[key])
        other, why = next(others, None), engine.refusal_reasons.get(key)
        errors.append(
            found(
                engine.refusal_code,
                key,
                f"{key}: {value} does not run under target: {engine.name}"
                + (f": {why}" if why else ""),
                f"Change {key}" + (f", or write `target: {other}`." if other else "."),
                trained,
            )
        )
    return (*errors, *engine.key_errors(recipe))


def freeze_names_exist(x: Candidate) -> Diagnostic | None:
    """An entry of model.freeze is a part of a vision-language model, the path of a module, or a
    pattern of parameter names. Each entry must match at least one parameter."""
    entry = next((e for e in x.recipe.model.freeze if not parameters_matching(x.graph, e)), None)
    if entry is None:
        return None
    vision = x.graph.vision
    why = (
        f": {vision.untraced}"
        if vision is not None and entry in MODEL_PARTS and vision.untraced
        else ""
    )
    return found(
        "SW1435",
        "model.freeze",
        f"{entry!r} in model.freeze matches no parameter of model_type {x.graph.model_type!r}{why}",
        (
            f"Name a part of a vision-language model ({', '.join(MODEL_PARTS)}), a module's path, "
            "or a pattern of parameter names (`model.layers.0.*`)."
        ),
        MODEL_PARTS if x.graph.task_traits.has_images else (),
    )


def freeze_leaves_trainable(x: Candidate) -> Diagnostic | None:
    """A run without a trainable parameter would change nothing."""
    frozen = frozen_parameter_names(x.graph, x.recipe.model.freeze)
    if not frozen or x.recipe.lora is not None or x.recipe.forward_only:
        return None
    all_names = {p.name for layer in x.graph.layers for p in layer.parameters}
    if any(name not in frozen and name not in x.graph.cut.untrained for name in all_names):
        return None
    return found(
        "SW1436", "model.freeze", "nothing is left to train", "Take a part out of `freeze`."
    )


def freeze_without_lora(x: Candidate) -> Diagnostic | None:
    """LoRA trains only its adapters and freezes the whole model, so model.freeze has no effect."""
    if not x.recipe.model.freeze or x.recipe.lora is None:
        return None
    return found(
        "SW1437",
        "model.freeze",
        "LoRA freezes every parameter of the model already",
        "Remove `freeze`, or the `lora` section.",
    )


# Where LoRA runs: on whole layers, without a pipeline.


def lora_without_pipeline(x: Candidate) -> Diagnostic | None:
    """A stage of frozen layers has no gradient to send back before its first adapter, and
    DeepSpeed's pipeline engine waits for one."""
    if x.recipe.lora is None or x.strategy.pipeline == 1:
        return None
    return found(
        "SW1432",
        "parallelism.pipeline",
        f"LoRA does not run with pipeline {x.strategy.pipeline}",
        "Write `pipeline: 1`; zero_stage: 3 shards the frozen parameters instead.",
        (1,),
    )


def lora_without_tensor_parallel(x: Candidate) -> Diagnostic | None:
    """LoRA's adapters are made for whole linear layers. An adapter on a linear layer that tensor
    ranks split would have to be split with it."""
    if x.recipe.lora is None or x.strategy.tensor == 1:
        return None
    return found(
        "SW1433",
        "parallelism.tensor",
        f"LoRA adapts whole linear layers, which tensor {x.strategy.tensor} splits",
        "Write `tensor: 1`; zero_stage: 3 shards the frozen parameters instead.",
        (1,),
    )


def lora_target_modules_exist(x: Candidate) -> Diagnostic | None:
    """LoRA adapts linear layers of the decoder layers. An entry of lora.target_modules is the last
    part of their paths, such as `q_proj`."""
    lora = x.recipe.lora
    if lora is None:
        return None
    known = default_target_modules(x.graph)
    missing = [name for name in adapted_modules(x.graph, lora) if name not in known]
    if known and not missing:
        return None
    what = (
        f"has no linear layer {missing[0]!r} in its decoder layers"
        if missing
        else "has no linear layer in its decoder layers"
    )
    return found(
        "SW1434",
        "lora.target_modules",
        f"model_type {x.graph.model_type!r} {what}",
        f"Choose from {', '.join(known)}, or write `target_modules: auto` for all of them."
        if known
        else "Remove the `lora` section: this type can be trained in full.",
        known,
    )


# Where `model.kernels: compile` runs: what is compared with a plain Hugging Face run, and nothing
# else.


_KERNELS = "model.kernels"
_HELP = "Write `kernels: hf`, or `kernels: auto`, which uses `compile` only where it is verified."


def compiled_model_verified(x: Candidate) -> Diagnostic | None:
    """torch.compile is verified under `target: deepspeed` for the model types in
    models/torch_compile_types.json, without LoRA, flash-attn and fp16. A compiled layer draws other
    random numbers than an uncompiled one, so dropout cannot be compared."""
    recipe, graph = x.recipe, x.graph
    if recipe.model.kernels != "compile":
        return None
    if not ENGINES[recipe.target].compiles_layers:
        why = f"under target: {recipe.target}"
    elif graph.model_type not in torch_compile_types():
        why = f"for model_type {graph.model_type!r}"
    elif graph.max_dropout:
        why = f"with dropout {graph.max_dropout:g}"
    elif recipe.lora is not None:
        why = "with LoRA, whose adapters are inside the layers"
    elif graph.attention == FLASH_ATTENTION_2:
        why = f"with attention: {FLASH_ATTENTION_2} (`attention: sdpa` is verified)"
    elif FORMATS[recipe.training.precision].scales_loss:
        why = f"with precision: {recipe.training.precision}"
    else:
        return None
    return found(
        "SW3161",
        _KERNELS,
        f"torch.compile of the layers is not verified {why}",
        _HELP,
        ("hf", "auto"),
    )


def compiled_layout_verified(x: Candidate) -> Diagnostic | None:
    """torch.compile is verified for layers that run as one graph. Tensor, context and expert ranks
    and ZeRO-3 add collectives to a layer, DualPipeV splits its backward pass in two, and selective
    checkpointing runs a part of it twice. Offload was not compared with a single-process run."""
    s = x.strategy
    if x.recipe.model.kernels != "compile":
        return None
    refused = {
        "tensor": (s.tensor > 1, "1"),
        "context": (s.context > 1, "1"),
        "expert": (s.expert > 1, "1"),
        "schedule": (not s.pipeline_schedule.compiles_layers, "1f1b"),
        "zero_stage": (s.zero_stage == 3, "0, 1 or 2"),
        "activation_checkpointing": (s.activation_checkpointing == "selective", "none or full"),
        "offload": (s.offload != "none", "none"),
    }
    for name, (is_refused, instead) in refused.items():
        if is_refused:
            return found(
                "SW3162",
                ("parallelism", name),
                f"torch.compile of the layers is not verified with {name}: {getattr(s, name)}",
                f"Write {name}: {instead}, or `model.kernels: hf`.",
            )
    return None


# Optimizers: the matrices that Muon orthogonalizes, and where each was compared with one process.


_OPTIMIZER = "training.optimizer.name"


def muon_matrices_are_known(x: Candidate) -> Diagnostic | None:
    """Muon orthogonalizes each matrix of the decoder layers by itself. For a weight that joins
    several matrices, this version must know their order: the Newton-Schulz iterations of the joined
    weight would give another update."""
    if not OPTIMIZERS[x.recipe.training.optimizer.name].orthogonalizes:
        return None
    joined = unsplit_parameter(x.graph, x.recipe.model.freeze)
    if joined is None:
        return None
    return found(
        "SW3231",
        _OPTIMIZER,
        f"{joined.name} of a {x.graph.model_type!r} joins several matrices in an order that this "
        "version does not know, so muon cannot update each matrix by itself",
        "Write `training.optimizer: {name: adamw}`, or name the parameter in model.freeze.",
        ("adamw",),
    )


def blocks_of_moments_are_kept(x: Candidate) -> Diagnostic | None:
    """Each block of 256 elements of a weight has one scale for its 8-bit moments. Ranks that each
    hold a part of a block would compute other scales than a single process."""
    s, optimizer = x.strategy, x.recipe.training.optimizer.name
    expert = s.expert if s.shards_experts else 1
    if not OPTIMIZERS[optimizer].quantizes or max(s.tensor, expert) == 1:
        return None
    cut = _cut_parameter(x.graph, x.recipe.model.freeze, optimizer, s.tensor, expert)
    if cut is None:
        return None
    axis = "tensor" if s.tensor > 1 else "expert"
    return found(
        "SW3233",
        f"parallelism.{axis}",
        f"{axis} {getattr(s, axis)} splits blocks of {BLOCK} elements of {cut.name} "
        f"{list(cut.shape)}, each of which {optimizer} quantizes with one scale",
        f"Choose a smaller {axis} degree, so that each rank holds whole blocks, or write "
        "`training.optimizer: {name: adamw}`.",
    )


@functools.lru_cache(maxsize=256)
def _cut_parameter(
    graph: ModelGraph, freeze: tuple[str, ...], optimizer: str, tensor: int, expert: int
) -> Parameter | None:
    """Return a parameter whose blocks tensor or expert ranks would share."""
    experts = expert_modules(graph) if expert > 1 else {}
    for p in matrix_parameters(optimizer, graph, freeze):
        parts = expert if p.name.rpartition(".")[0] in experts else 1
        if not keeps_blocks(weight_orientation(graph, p, tensor), parts):
            return p
    return None


def optimizer_verified(x: Candidate) -> Diagnostic | None:
    """Optimizers other than AdamW are verified against a single-process run for text models, with
    ZeRO stages 0 to 3 and with tensor, pipeline, context and expert ranks."""
    recipe = x.recipe
    if (name := recipe.training.optimizer.name) == "adamw":
        return None
    refused = {
        "parallelism.offload": (
            x.strategy.offload != "none",
            f"offload {x.strategy.offload}",
            "Write `offload: none`",
        ),
        "lora": (recipe.lora is not None, "LoRA", "Remove the `lora` section"),
        "cluster.islands": (
            recipe.cluster.islands > 1,
            f"islands: {recipe.cluster.islands}",
            "Write `islands: 1`",
        ),
        "training.precision": (
            FORMATS[recipe.training.precision].scales_loss,
            f"precision: {recipe.training.precision}",
            "Write `precision: bf16`",
        ),
        "model.task": (
            x.graph.task != "causal-lm",
            f"task {x.graph.task}",
            "Train a model of task causal-lm",
        ),
    }
    for key, (is_refused, what, instead) in refused.items():
        if is_refused:
            return found(
                "SW3232",
                key,
                f"the optimizer {name} is not verified with {what}",
                f"{instead}, or write `training.optimizer: {{name: adamw}}`.",
            )
    return None


def objective_verified(x: Candidate) -> Diagnostic | None:
    """Objectives other than next-token are verified against a single-process run for the tasks
    causal-lm and sequence-classification, without islands and without the gradient noise scale. A
    reward model has no vocabulary, and so no chunked loss."""
    objective = x.recipe.training.objective
    if objective.name == NEXT_TOKEN:
        return None
    scores = objective.traits.scores_sequences
    refused = {
        "model.task": (
            x.graph.task not in ("causal-lm", SCORING_TASK),
            f"task {x.graph.task}",
            f"Train a model of task causal-lm or {SCORING_TASK}",
        ),
        "model.loss": (
            scores and x.recipe.model.loss == "chunked",
            "loss: chunked",
            "Write `loss: auto`",
        ),
        "cluster.islands": (
            x.recipe.cluster.islands > 1,
            "DiLoCo islands",
            "Write `islands: 1`",
        ),
        "tracking.noise_scale": (
            x.recipe.tracking is not None and x.recipe.tracking.noise_scale is not None,
            "the gradient noise scale",
            "Remove tracking.noise_scale",
        ),
    }
    for key, (is_refused, what, instead) in refused.items():
        if is_refused:
            return found(
                "SW3234",
                key,
                f"the objective {objective.name} is not verified with {what}",
                f"{instead}, or write `training.objective: {{name: next-token}}`.",
            )
    return None


# `tracking.noise_scale`: where it was compared with the gradient of every row
# (docs/batch-size.md), and no further.


_NOISE_SCALE = "tracking.noise_scale"


def noise_scale_has_two_batch_sizes(x: Candidate) -> Diagnostic | None:
    """The noise scale is estimated from gradients of two batch sizes: a micro-batch and the whole
    global batch."""
    s = x.strategy
    if x.recipe.tracking.noise_scale is None or s.data * s.gradient_accumulation_steps > 1:
        return None
    return found(
        "SW3192",
        "parallelism.micro_batch_size",
        (
            f"{_NOISE_SCALE} needs more than one micro-batch a step, and the whole global batch is "
            f"one micro-batch of {s.micro_batch_size} sequences"
        ),
        (
            "Lower parallelism.micro_batch_size, raise training.global_batch_size, or remove "
            "tracking.noise_scale."
        ),
    )


def noise_scale_verified(x: Candidate) -> Diagnostic | None:
    """The noise scale is compared with the gradients of single sequences under ZeRO stages 0 to 3,
    with tensor ranks, and in pipelines without tied parameters. The error names the first setting
    with which it is not."""
    if x.recipe.tracking.noise_scale is None:
        return None
    for key, what, instead in _unverified_settings(x):
        return found(
            "SW3191",
            key,
            f"{_NOISE_SCALE} is not verified with {what}",
            f"{instead}, or remove tracking.noise_scale.",
        )
    return None


def _unverified_settings(x: Candidate) -> Iterator[tuple[str, str, str]]:
    """(key, what it is, what to write instead)."""
    s, recipe, training = x.strategy, x.recipe, x.recipe.training
    if not ENGINES[recipe.target].measures_noise_scale:
        yield "target", f"target: {recipe.target}", f"Write `target: {DEFAULT_TARGET}`"
    if recipe.cluster.islands > 1:  # each has weights of its own between outer steps
        yield "cluster.islands", f"islands: {recipe.cluster.islands}", "Write `islands: 1`"
    # Context ranks have parts of a sequence's gradient, expert ranks the sum over several ranks'
    # sequences.
    for axis in ("context", "expert"):
        if getattr(s, axis) > 1:
            yield f"parallelism.{axis}", f"{axis} {getattr(s, axis)}", f"Write `{axis}: 1`"
    if (
        s.pipeline > 1 and x.graph.tied
    ):  # the two gradients of one tensor are on two stages until the step's end
        tied = f"pipeline {s.pipeline} and {x.graph.tied[0][0]} tied over two stages"
        yield "parallelism.pipeline", tied, "Write `pipeline: 1`"
    if FORMATS[training.precision].scales_loss:
        yield "training.precision", f"precision: {training.precision}", "Write `precision: bf16`"
    if training.gradient_accumulation_dtype not in (None, "fp32"):
        dtype = training.gradient_accumulation_dtype
        yield (
            "training.gradient_accumulation_dtype",
            f"gradient_accumulation_dtype: {dtype}",
            "Write `gradient_accumulation_dtype: fp32`",
        )
    if not x.graph.task_traits.noise_scale:
        yield _NOISE_SCALE, f"task {x.graph.task}", "Train a model of task causal-lm"
    if recipe.model.router_aux_loss is not None:  # its gradient does not grow with the labels
        yield "model.router_aux_loss", "router_aux_loss", "Write `router_aux_loss: off`"
    if recipe.model.kernels == "compile":
        yield "model.kernels", "kernels: compile", "Write `kernels: hf`"


# A schedule that leaves a share of a short run untrained. Of the recipe alone.


WARN_FROM_SHARE = 0.2
"""Warns from this share of all updates on; for longer runs `explain` says that the last update
has the rate 0."""


def learning_rate_is_zero(x: Candidate) -> Diagnostic | None:
    """An update with a learning rate of 0 changes no weights. With `first_step: 0` this is the
    first update of a warm-up. With a schedule that ends at 0 it is the last update. The warning is
    for runs in which such updates are at least a fifth of all."""
    training = x.recipe.training
    zero, steps = zero_learning_rate_updates(training), training.step_count_or_zero
    if zero < WARN_FROM_SHARE * steps or zero == 0 or training.epochs is not None:
        return None
    s = training.scheduler
    row = SCHEDULES[s.name]
    trains = "nothing is trained" if zero == steps else f"{zero} of {steps} updates trains nothing"
    if s.first_step == 0 and not row.counts_from_one:
        return found(
            "SW3220",
            "training.scheduler.first_step",
            f"{trains}: with first_step 0 the first update of a warm-up has the learning rate 0",
            "Write `first_step: 1`, or no warm-up for a trial run of a few steps.",
            severity="warning",
        )
    end = next((key for key in ("min_lr", "lr_end") if key in row.keys), "")
    least = f"a {end} above 0" if end else "a schedule that ends above 0"
    return found(
        "SW3220",
        f"training.scheduler.{end}"
        if end and getattr(s, end) is not None
        else "training.scheduler",
        f"{trains}: the last update of a {s.name} schedule{f' with {end} 0' if end else ''} has "
        "the learning rate 0",
        f"Write `scheduler: {{name: constant}}` for a trial run of a few steps, or {least}. Or "
        "write `first_step: 0`, as transformers counts: each rate then comes one update later, so "
        "that the last update is above 0, and the first one of a warm-up is 0.",
        severity="warning",
    )
