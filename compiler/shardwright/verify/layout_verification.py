"""Compile and launch the tiny copy, and compare it with one plain process from the same weights."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.sequences import PADDING_ID
from shardwright.diagnostics import Refusal, refusal
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from shardwright.monitor.attempt_records import METRICS_FILE
from shardwright.monitor.run_files import EVALUATION_FILE
from shardwright.plan.plan import Plan
from shardwright.recipe.objectives import ObjectiveSection
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.engine_choice import resolve_problem
from shardwright.search.layout_search import choose_layout
from shardwright.utils.child_processes import end_processes, shardwright_command
from shardwright.utils.installation import missing_peft
from shardwright.utils.json_lines import read_json_lines
from shardwright.utils.json_values import JsonObject
from shardwright.utils.numeric_difference import max_series_diff, state_dict_max_abs_diff
from shardwright.verify import tiny_copy
from shardwright.verify.tiny_copy import (
    Completions,
    Conversations,
    Tokens,
    has_conversations,
    packs_documents,
    random_completions,
    random_conversations,
    random_tokens,
    separate_sequences,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from shardwright.verify.reference_run import Measure, Reference, Rows

# Comparisons and their limits (those of the project's own proofs).


LOSS_ABSOLUTE, NORM_RELATIVE, WEIGHT_ABSOLUTE, RATE_ABSOLUTE = 1e-5, 1e-4, 2e-5, 1e-12
METRIC_ABSOLUTE = 1e-5


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold one comparison; it passes where worst <= limit.

    worst: largest difference (utils/numeric_difference.py: infinite, never NaN).
    what: the unit.
    """

    name: str
    what: str
    worst: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.worst <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """Hold the result of a verification.

    architecture, parameters: of the tiny model.
    layout: the recipe's layout, by recipe keys.
    verified: the tiny layout.
    """

    architecture: str
    parameters: int
    layout: str
    verified: str
    checks: tuple[Comparison, ...]
    seconds: float

    @property
    def matches(self) -> bool:
        return all(check.passed for check in self.checks)


DROPOUT = "dropout"
LAUNCH_SECONDS = 600
"""Time limit of a launch (s): a tiny model takes half a minute."""
ProgressCallback = Callable[[str], None]
Row = dict[str, float | None]
"""A line of metrics.jsonl, None where a value is not finite."""


def verify_recipe(
    recipe: Recipe, report_progress: ProgressCallback, layout: Layout | None = None
) -> VerificationResult:
    """Verify a recipe's layout, by its own objective.

    report_progress: called as each stage starts.
    layout: of a compiled folder; None for the one that `compile` would choose
    Raises what compile raises, SW5402 (the model has no tiny copy), SW5403 (the tiny run does not
    finish; its folder is kept).
    """
    began = time.monotonic()
    graph, strategy = _planned(recipe, layout)
    small = tiny_copy.tiny_strategy(strategy)
    folder = Path(tempfile.mkdtemp(prefix="shardwright-verify-"))
    try:
        report_progress(f"building a tiny {graph.architecture}")
        reference, plan, given = _prepare(recipe, graph, strategy, small, folder, report_progress)
        report_progress(
            f"training it on {small.world_size} rank{'' if small.world_size == 1 else 's'}"
        )
        checks = (*given, *_measure(folder, plan, reference.result, report_progress))
        if (
            reference.held_out is not None
            and graph.max_dropout > 0
            and plan.lora is None
            and all(c.passed for c in checks)
        ):
            report_progress("training it with dropout")
            checks = (*checks, _evaluated_without_dropout(folder, graph, reference))
    except BaseException as error:
        if not isinstance(error, Refusal) or all(d.code != "SW5403" for d in error.diagnostics):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return VerificationResult(
        architecture=plan.model.architecture,
        parameters=plan.model.total_parameters,
        layout=strategy.describe(),
        verified=small.describe(),
        checks=checks,
        seconds=time.monotonic() - began,
    )


def _planned(recipe: Recipe, layout: Layout | None) -> tuple[ModelGraph, Layout]:
    """Return the model, and the layout that `compile` would choose where none is given."""
    if recipe.model.trust_remote_code is not None:
        raise refusal(
            "SW5402",
            "a model with its own Python code has no tiny copy",
            "`verify` shrinks only transformers' own types. Compile a small recipe for "
            "`gpu: cpu` and run that.",
            ("model", "trust_remote_code"),
        )
    cluster = resolve_cluster(recipe.cluster)
    problem, _ = resolve_problem(
        Problem(recipe=recipe, graph=build_model_graph(recipe.model), cluster=cluster)
    )
    return problem.graph, layout or choose_layout(problem).strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReferenceRun:
    """Hold the plain process's run.

    held_out: its held-out sequences
    measure: its objective
    """

    result: Reference
    held_out: Rows | None
    measure: Measure


def _prepare(
    recipe: Recipe,
    graph: ModelGraph,
    strategy: Layout,
    small: Layout,
    folder: Path,
    report_progress: ProgressCallback,
) -> tuple[_ReferenceRun, Plan, tuple[Comparison, ...]]:
    """Write the tiny model, its data and its compiled folder `out`; return (reference run, plan,
    comparisons of what the data was given)."""
    from transformers import AutoConfig

    from shardwright.engines.reference.reference_optimizer import optimizer_builder
    from shardwright.models.tiny_config import token_ids
    from shardwright.verify.reference_objectives import reference_measure
    from shardwright.verify.reference_run import (
        ReferenceAuxLoss,
        loaded,
        merge_reference_lora,
        reference_muon,
        train,
    )

    if not graph.task_traits.tiny_copy:
        raise _no_copy(graph, "tiny copies of vision-language models are not supported")
    if recipe.lora is not None and (absent := missing_peft()):
        raise Refusal(absent)
    objective = recipe.training.objective
    vocabulary, names = _tiny_model(
        graph,
        strategy,
        folder,
        recipe.training.sequence_length,
        with_other=objective.traits.reads_teacher or objective.reference is not None,
    )
    freeze = tiny_copy.tiny_freeze(graph, recipe.model.freeze, names)
    batch = tiny_copy.batch_of(small)
    packed, of_talks = packs_documents(recipe), has_conversations(recipe)
    special = token_ids(
        AutoConfig.from_pretrained(folder / tiny_copy.MODEL, trust_remote_code=False)
    ).special

    def drawn(seed: int, rows: int) -> Tokens | Conversations | Completions:
        if objective.traits.reads_preferences:
            return random_completions(seed, rows, tiny_copy.LENGTH, objective.traits, packed=packed)
        if of_talks:
            return random_conversations(seed, rows, tiny_copy.LENGTH, packed=packed)
        return random_tokens(
            seed, rows, tiny_copy.LENGTH, vocabulary, packed=packed, special=special
        )

    data = drawn(tiny_copy.SEED, tiny_copy.STEPS * batch)
    held_out = (
        drawn(tiny_copy.SEED + 1, tiny_copy.held_out_rows(small))
        if recipe.validation is not None
        else None
    )
    document = tiny_copy.tiny_recipe(
        recipe,
        small,
        data.write(folder / tiny_copy.TOKENS),
        None if held_out is None else held_out.write(folder / tiny_copy.HELD_OUT),
        freeze,
    )
    plan = _compiled(graph, document, folder)
    reference = loaded(folder / tiny_copy.MODEL, plan.model.attention, plan.model.task)
    given: tuple[Comparison, ...] = ()
    if isinstance(data, Tokens) and not objective.traits.reads_teacher:
        blocks = [data.rows(step * batch, (step + 1) * batch) for step in range(tiny_copy.STEPS)]
        held_out_rows = (
            held_out.rows(0, len(held_out.ids)) if isinstance(held_out, Tokens) else None
        )
    else:
        blocks, held_out_rows, given = _read(plan, folder, reference, report_progress)
    measure = reference_measure(objective, own_loss=plan.model.cut.loss == "next_token")
    balance = plan.model.router_aux_loss
    _freeze_and_adapt(reference, plan, recipe, freeze)
    result = train(
        reference,
        blocks,
        lr=tiny_copy.LR,
        betas=tiny_copy.BETAS,
        eps=tiny_copy.EPS,
        weight_decay=tiny_copy.DECAY,
        warmup=tiny_copy.WARMUP,
        clipping=plan.training.gradient_clipping,
        measure=measure,
        held_out=held_out_rows,
        every=tiny_copy.EVERY,
        balance=None
        if balance is None
        else ReferenceAuxLoss(reference, balance.coefficient, balance.affinity),
        muon=reference_muon(reference, plan),
        build=optimizer_builder(plan.optimizer),
    )
    if recipe.lora is not None:
        scale = recipe.lora.alpha / min(recipe.lora.rank, tiny_copy.RANK)
        result = dataclasses.replace(
            result, weights=merge_reference_lora(reference, result.weights, scale)
        )
    return _ReferenceRun(result=result, held_out=held_out_rows, measure=measure), plan, given


def _read(
    plan: Plan, folder: Path, model: PreTrainedModel, report_progress: ProgressCallback
) -> tuple[list[Rows], Rows | None, tuple[Comparison, ...]]:
    """Read the sequences of each step, and the held-out ones, as `prepare` cuts and packs them,
    with what a reference model or a teacher says of them.

    model: with its starting weights
    Returns, too, how far a teacher's scores are from those of one process.
    """
    from shardwright.data.data_preparation import prepare
    from shardwright.data.dataset import open_dataset
    from shardwright.data.score_files import TRAIN, VALIDATION, ScoreFile, TaughtSequences
    from shardwright.models.context_parallel_probe import length_dependent_rope
    from shardwright.verify.reference_objectives import add_reference, teacher_difference
    from shardwright.verify.reference_run import loaded

    out, objective = folder / "out", plan.training.objective
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # its progress
        prepare(plan, out, limit_bytes=None)
    data = open_dataset(plan, out)
    other = (
        loaded(folder / tiny_copy.OTHER_MODEL, plan.model.attention, plan.model.task).eval()
        if (folder / tiny_copy.OTHER_MODEL).exists()
        else None
    )
    if objective.traits.reads_teacher:
        report_progress("scoring its data under a teacher")
        _run_command(
            out,
            *("score", str(out), "--weights", str(folder / tiny_copy.OTHER_MODEL)),
            *("--top", str(tiny_copy.TEACHER_TOKENS), "-o", str(folder / tiny_copy.TEACHER_SCORES)),
        )
        scores, own = ScoreFile(folder / tiny_copy.TEACHER_SCORES), data.validation
        data = dataclasses.replace(
            data,
            train=TaughtSequences(data.train, scores.part(TRAIN)),
            validation=own and TaughtSequences(own, scores.part(VALIDATION)),
        )
    padded = bool(length_dependent_rope(model))
    blocks = [
        separate_sequences(data.train.read(data.order.indices(step)), padded=padded)
        for step in range(1, tiny_copy.STEPS + 1)
    ]
    held_out = (
        None
        if data.validation is None
        else separate_sequences(
            data.validation.read(np.arange(len(data.validation))), padded=padded
        )
    )
    every = [*blocks, *([] if held_out is None else [held_out])]
    if objective.traits.scores_sequences:
        # transformers finds the score by it, and `prepare` pads bytes with 0.
        model.config.get_text_config().pad_token_id = PADDING_ID
    if objective.traits.reads_reference:
        for rows in every:
            add_reference(other or model.eval(), rows)
    if not objective.traits.reads_teacher:
        return blocks, held_out, ()
    assert other is not None, "it was scored"
    worst = max(teacher_difference(other, rows) for rows in every)
    scored = Comparison(
        "teacher",
        f"log-probabilities of its {tiny_copy.TEACHER_TOKENS} most likely tokens",
        worst,
        LOSS_ABSOLUTE,
    )
    return blocks, held_out, (scored,)


def _freeze_and_adapt(
    model: nn.Module, plan: Plan, recipe: Recipe, freeze: tuple[str, ...]
) -> None:
    """Freeze parameters and add adapters by the recipe alone, independently of the plan's lists
    and of peft."""
    from shardwright.verify.reference_run import add_reference_lora

    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, entry) or fnmatchcase(name, f"{entry}.*") for entry in freeze):
            parameter.requires_grad_(False)
    if recipe.lora is not None:
        add_reference_lora(
            model,
            plan.model.cut.stack,
            recipe.lora.target_modules,
            rank=min(recipe.lora.rank, tiny_copy.RANK),
            alpha=recipe.lora.alpha,
            seed=tiny_copy.SEED,
        )


def _configuration(document: JsonObject) -> PretrainedConfig:
    from transformers import AutoConfig

    from shardwright.models.config_schema import decode_special_floats

    values = dict(decode_special_floats(dict(document)))
    config: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return config


def _tiny_model(
    graph: ModelGraph,
    strategy: Layout,
    folder: Path,
    sequence_length: int,
    *,
    with_other: bool = False,
) -> tuple[int, tuple[str, ...]]:
    """Write the tiny model to `folder`; return its vocabulary size and parameter names.

    with_other: write another model of the same sizes, too
    """
    import torch
    from transformers.utils import logging

    from shardwright.models.tasks.task_registry import task_named
    from shardwright.models.tiny_config import has_every_layer_kind

    task = task_named(graph.task)
    of_copy = (graph.config, strategy, sequence_length)
    logging.set_verbosity_error()  # transformers warns about tiny configurations
    logging.disable_progress_bar()
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    try:
        configs = (tiny_copy.tiny_config(*of_copy), graph.config)
        config, full = (_configuration(c) for c in configs)
        with torch.device("meta"):
            models = (task.build(full), task.build(config))
        if not has_every_layer_kind(*models):
            config = _configuration(tiny_copy.tiny_config(*of_copy, depth=False))
        for name in (*((tiny_copy.OTHER_MODEL,) if with_other else ()), tiny_copy.MODEL):
            torch.manual_seed(tiny_copy.SEED + (name == tiny_copy.OTHER_MODEL))
            model = task.build(config)
            with torch.no_grad():
                # Zero biases and unit norms would hide errors.
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(folder / name)
            config.save_pretrained(folder / name)
    except Exception as error:  # a type's code may raise anything at this size
        raise _no_copy(graph, f"{type(error).__name__}: {error}") from None
    names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    return int(config.get_text_config().vocab_size), names


def _compiled(graph: ModelGraph, document: JsonObject, folder: Path, out: str = "out") -> Plan:
    """Write the recipe `document` and compile it to the folder `out` in `folder`."""
    recipe = folder / f"recipe-{out}.json"
    recipe.write_text(json.dumps(document, indent=1), encoding="utf-8")
    try:
        compiled = compile_recipe(load_recipe(recipe))
    except Refusal as refusal:
        first = refusal.diagnostics[0]
        raise _no_copy(graph, f"{first.code}: {first.message}") from None
    write_folder(folder / out, compiled.files)
    return compiled.plan


def _no_copy(graph: ModelGraph, why: str) -> Refusal:
    return refusal(
        "SW5402",
        f"{graph.architecture} cannot be verified on a tiny copy: {' '.join(why.split())[:300]}",
        "Run `shardwright models TYPE` for what is verified of its type.",
    )


def _measure(
    folder: Path, plan: Plan, expected: Reference, report_progress: ProgressCallback
) -> tuple[Comparison, ...]:
    """Run the tiny copy and compare; resume it only where the training matches."""
    out = folder / "out"
    _launch(out)
    rows = list(read_json_lines(out / METRICS_FILE))
    report_progress("exporting its last checkpoint")
    used = {
        name: weight for name, weight in expected.weights.items() if name not in expected.unused
    }
    first: dict[str, torch.Tensor] = {}
    try:
        first = _exported(plan, out, folder / "first")
    except Refusal as refused:  # its own checkpoint is damaged
        weights = Comparison("weights", refused.diagnostics[0].message, math.inf, WEIGHT_ABSOLUTE)
    else:
        trained_weights = {
            name: weight
            for name, weight in first.items()
            if name in used or name not in expected.unused
        }
        weights = Comparison(
            "weights",
            "trained, saved and exported",
            state_dict_max_abs_diff(trained_weights, used),
            WEIGHT_ABSOLUTE,
        )
    held = 0
    for rank in plan.ranks:
        record = (out / "run" / "ranks" / f"rank-{rank.rank:05d}.json").read_text("utf-8")
        held += json.loads(record)["parameter_bytes"] != rank.parameter_bytes
    trained = (
        Comparison(
            "losses",
            f"of {tiny_copy.STEPS} steps",
            _max_diff(rows, "loss", expected.losses),
            loss_limit(plan.training.objective, expected),
        ),
        Comparison(
            "gradient norms",
            "relative",
            _max_diff(rows, "grad_norm", expected.grad_norms, relative=True),
            NORM_RELATIVE,
        ),
        Comparison(
            "learning rates",
            "",
            _max_diff(rows, "learning_rate", expected.learning_rates),
            RATE_ABSOLUTE,
        ),
        weights,
        *_objective_metrics(rows, expected, plan.training.objective),
        *_held_out(out, plan, expected),
        Comparison("split", "ranks whose parameter bytes differ from the plan", float(held), 0.0),
    )
    if not all(check.passed for check in trained):
        return trained
    shutil.rmtree(out / plan.checkpoint.directory / f"step-{tiny_copy.STEPS:08d}")
    report_progress(f"resuming from step {tiny_copy.EVERY}")
    _launch(out)
    resumed_rows = list(read_json_lines(out / METRICS_FILE))
    losses = [row["loss"] for row in rows]
    resumed = _exported(plan, out, folder / "again")
    return (
        *trained,
        Comparison(
            "resume",
            "losses, against the uninterrupted run",
            _max_diff(resumed_rows, "loss", losses),
            loss_limit(plan.training.objective, expected),
        ),
        *(
            dataclasses.replace(check, name=f"resumed {check.name}")
            for check in _held_out(out, plan, expected)
        ),
        Comparison(
            "resumed weights",
            "against the uninterrupted run",
            state_dict_max_abs_diff(resumed, first),
            WEIGHT_ABSOLUTE,
        ),
    )


def _held_out(out: Path, plan: Plan, expected: Reference) -> tuple[Comparison, ...]:
    """Compare held-out losses, where the recipe has `validation`."""
    if not expected.held_out:
        return ()
    lines = list(read_json_lines(out / EVALUATION_FILE))
    same_steps = [row["step"] for row in lines] == list(expected.held_out)
    worst = (
        max_series_diff([row["loss"] for row in lines], list(expected.held_out.values()))
        if same_steps
        else math.inf
    )
    return (
        Comparison(
            "held-out losses",
            f"after each {tiny_copy.EVERY} steps",
            worst,
            loss_limit(plan.training.objective, expected),
        ),
        *_named_metrics("held-out metrics", lines, list(expected.held_out_metrics.values())),
    )


def loss_limit(objective: ObjectiveSection, expected: Reference) -> float:
    """Return the limit of a loss's difference. IPO's losses are squares of differences of whole
    completions: the limit is relative to those above 1."""
    return LOSS_ABSOLUTE * max([1.0, *(expected.losses if objective.name == "ipo" else [])])


def _objective_metrics(
    rows: list[Row], expected: Reference, objective: ObjectiveSection
) -> tuple[Comparison, ...]:
    """Compare an objective's metrics of each step.

    At the first step a model may be its own reference: rounding decides which reward is higher.
    """
    metrics = list(expected.metrics)
    if objective.traits.reads_reference and objective.reference is None:
        metrics[0] = {name: v for name, v in metrics[0].items() if name != "accuracy"}
    return _named_metrics("metrics", rows, metrics)


def _named_metrics(
    name: str, lines: Sequence[Row], expected: Sequence[Mapping[str, float]]
) -> tuple[Comparison, ...]:
    """Compare the metrics of each line by name; nothing where there are none."""
    if not any(expected):
        return ()
    pairs = [
        (line.get(key), value)
        for line, metrics in zip(lines, expected, strict=False)
        for key, value in metrics.items()
    ]
    worst = (
        max_series_diff([found for found, _ in pairs], [value for _, value in pairs])
        if len(lines) == len(expected)
        else math.inf
    )
    return (Comparison(name, ", ".join(expected[-1]), worst, METRIC_ABSOLUTE),)


def _evaluated_without_dropout(
    folder: Path, graph: ModelGraph, reference: _ReferenceRun
) -> Comparison:
    """Train the tiny copy with the model's dropout, and compare its held-out loss with one process
    that evaluates without it."""
    import torch

    from shardwright.verify.reference_run import loaded

    document = json.loads((folder / "recipe-out.json").read_text("utf-8"))
    document["model"]["source"] = f"./{tiny_copy.MODEL}-{DROPOUT}"
    document["training"]["steps"] = tiny_copy.EVERY
    shutil.copytree(folder / tiny_copy.MODEL, folder / f"{tiny_copy.MODEL}-{DROPOUT}")
    config = folder / f"{tiny_copy.MODEL}-{DROPOUT}" / "config.json"
    config.write_text(
        json.dumps(tiny_copy.with_dropout(json.loads(config.read_text("utf-8")), graph.config)),
        "utf-8",
    )
    plan, out = _compiled(graph, document, folder, DROPOUT), folder / DROPOUT
    _launch(out)
    _exported(plan, out, folder / f"{DROPOUT}-exported")
    model = loaded(folder / f"{DROPOUT}-exported", plan.model.attention, plan.model.task)
    if plan.training.objective.traits.scores_sequences:
        model.config.get_text_config().pad_token_id = PADDING_ID
    assert reference.held_out is not None, "there is a held-out loss to compare"
    with torch.no_grad():
        expected = float(reference.measure(model.eval(), reference.held_out, None)[0])
    losses = [row["loss"] for row in read_json_lines(out / EVALUATION_FILE)]
    worst = max_series_diff(losses[-1:], [expected])
    return Comparison(
        f"held-out loss after {DROPOUT}",
        "evaluation without dropout",
        worst,
        loss_limit(plan.training.objective, reference.result),
    )


def _max_diff(
    rows: list[Row], key: str, expected: Sequence[float | None], *, relative: bool = False
) -> float:
    return max_series_diff([row[key] for row in rows], expected, relative=relative)


def _exported(plan: Plan, out: Path, target: Path) -> dict[str, torch.Tensor]:
    """Return the exported parameters, adapters merged, and the checkpoint's adapters."""

    from shardwright.checkpoint.checkpoint_loader import CheckpointReader
    from shardwright.checkpoint.huggingface_export import export_checkpoint
    from shardwright.verify.reference_run import loaded

    newest = max((out / "checkpoints").glob("step-*"))
    # DeepSpeed's reader of ZeRO-3 checkpoints prints to stdout, where the result goes.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        export_checkpoint(newest, target, merge=plan.lora is not None)
        model = loaded(target, task=plan.model.task)
    with CheckpointReader(newest) as reader:
        adapters = {
            name: reader.whole(name, "fp32") for name in reader.manifest.tensors if ".lora_" in name
        }
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | adapters


def _launch(out: Path) -> None:
    _run_command(out, "run", str(out))


def _run_command(out: Path, *arguments: str) -> None:
    """Run a `shardwright` command for the compiled folder `out` in its own process group. Raises
    SW5403."""
    process = subprocess.Popen(
        shardwright_command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
    )
    try:
        output, _ = process.communicate(timeout=LAUNCH_SECONDS)
    except BaseException as error:
        end_processes([process], signal.SIGINT, 30)
        if isinstance(error, subprocess.TimeoutExpired):
            raise _not_finished(out, f"no end after {LAUNCH_SECONDS} s") from None
        raise
    if process.returncode != 0:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error[")]
        raise _not_finished(out, (errors or lines[-1:] or ["no output"])[0])


def _not_finished(out: Path, why: str) -> Refusal:
    return refusal(
        "SW5403",
        f"the run of the tiny copy did not finish: {' '.join(why.split())[:300]}",
        f"Run `shardwright logs {out}` for its complete output.",
    )
