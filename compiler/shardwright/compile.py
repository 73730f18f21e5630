"""The compile: one straight column of stages, each from frozen input to frozen output, and its
beginnings by name: `estimate`, `explain` and `plan` go a part of the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwright.cluster.cluster_types import Cluster
from shardwright.cluster.gpu_catalogue import resolve_cluster
from shardwright.compiled_folder_files import lower, sealed
from shardwright.compiled_folder_writer import check_checkpoint_folder
from shardwright.cost.calibrated_costs import check_measured, measured_errors
from shardwright.cost.goodput import goodput
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.engine_definition import Engine
from shardwright.engines.engine_table import (
    ENGINES,
    engines_for,
    lowering_of,
    package_errors,
    under,
)
from shardwright.launch.launchers.launch_files import is_launch_file
from shardwright.launch.launchers.launcher_checks import check_launch, unseen_paths
from shardwright.launch.launchers.launcher_table import plan_launch
from shardwright.layout.layout_estimate import Estimate, PredictionError
from shardwright.layout.layout_rule import Candidate
from shardwright.layout.parameter_sharding import StagePartition, TensorParallelMap
from shardwright.layout.planning_problem import Problem
from shardwright.layout.tensor_parallel_map import tensor_parallel_map, with_whole_experts
from shardwright.models.config_schema import config_warnings
from shardwright.models.graph_builder import build_model_graph, compare_weights
from shardwright.models.hub_files import processor_here
from shardwright.models.hub_snapshot import locate_weights, tokenizer_folder
from shardwright.models.model_graph import ModelGraph
from shardwright.models.remote_code import locate_own_code
from shardwright.models.remote_code_files import OwnCode
from shardwright.models.tokenizer_packages import missing_packages_warning
from shardwright.models.weights_location import LocatedWeights
from shardwright.plan.copied_inputs import copied_inputs, model_companions
from shardwright.plan.folder_paths import MODEL_DIRECTORY, TOKENIZER_DIRECTORY
from shardwright.plan.island_plans import island_plan
from shardwright.plan.plan import Plan, PlanBalance
from shardwright.plan.plan_builder import build_plan, data_errors, installed_versions
from shardwright.recipe.input_file_checks import check_files
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.cluster_sizing import Sizing
from shardwright.search.engine_choice import begin_others, settle_problem
from shardwright.search.layout_search import choose, pinned_estimate
from shardwright.search.runnable_recipes import check_executable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """files: path relative to the compiled folder -> content. error: of plan.predicted. islands:
    the files of each one's own folder, () without islands."""

    plan: Plan
    files: Mapping[str, bytes]
    islands: tuple[Mapping[str, bytes], ...] = ()
    warnings: tuple[Diagnostic, ...]
    error: PredictionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the recipe names, read. weights: None where they are random. own_code: its folder and
    what is in it. cluster: of one node where the recipe says `nodes: auto`. warnings: of the
    weights against the model, and of a configuration's keys that nothing reads."""

    weights: LocatedWeights | None
    own_code: tuple[Path, OwnCode] | None
    graph: ModelGraph
    cluster: Cluster
    warnings: tuple[Diagnostic, ...] = ()


def compile_recipe(recipe: Recipe) -> Compiled:
    """Raises Refusal, with the recipe's source, where the recipe cannot become a run."""
    try:
        inputs = read_inputs(recipe)
        problem, sizing = settle_problem(
            Problem(recipe=recipe, graph=inputs.graph, cluster=inputs.cluster)
        )
        problem.cluster.verify()
        # What depends on the number of nodes, and on the engine, is checked once it is decided.
        if sizing is not None or problem.recipe.target != recipe.target:
            _check(problem.recipe)
        estimate = choose(problem)
        s = estimate.strategy
        partition = StagePartition(
            boundaries=estimate.boundaries, schedule=s.schedule, virtual=s.virtual_stages
        )
        tensor_map = tensor_parallel_map(
            problem.graph,
            estimate.strategy.tensor,
            padded=ENGINES[problem.recipe.target].pads_vocabulary,
        )
        if s.expert_tensor_ranks != s.tensor:
            tensor_map = with_whole_experts(problem.graph, tensor_map)
        partition.verify(len(problem.graph.layers))
        tensor_map.verify()
        plan = _planned(problem, inputs, estimate, partition, tensor_map)
        islands = _islands(plan, problem, inputs)
        plan, files, warnings = _lowered(plan, problem, inputs)
        if islands:  # nothing is started from there
            files = {name: content for name, content in files.items() if not is_launch_file(name)}
    except Refusal as refusal:
        raise Refusal(*dict.fromkeys(refusal.diagnostics), source=recipe.source) from None
    warnings = (*inputs.warnings, *estimate.diagnostics, *warnings)
    return Compiled(
        plan=plan, files=files, islands=islands, warnings=warnings, error=estimate.error
    )


def read_problem(recipe: Recipe) -> Problem:
    """Without the weights. Raises Refusal with the errors of both at once."""
    errors: list[Diagnostic] = []
    cluster = _unless_refused(errors, lambda: resolve_cluster(recipe.cluster))
    _unless_refused(errors, lambda: check_measured(recipe))
    graph = _unless_refused(errors, lambda: build_model_graph(recipe.model))
    if errors or graph is None or cluster is None:
        raise Refusal(*errors, source=recipe.source)
    return Problem(recipe=recipe, graph=graph, cluster=cluster)


def size_recipe(recipe: Recipe, *, compares_engines: bool = False) -> tuple[Problem, Sizing | None]:
    """Up to the number of nodes, and what gradients are summed in. Sizing: None where the recipe
    gave the nodes. compares_engines: `other_engine` is going to be asked, and may begin
    meanwhile."""
    problem = read_problem(recipe)
    if compares_engines:
        begin_others(problem)
    return _told_of(recipe, lambda: settle_problem(problem))


def estimate_recipe(recipe: Recipe) -> tuple[Problem, Estimate]:
    """Up to the estimate of the pinned layout, `auto` filled by the search: it need not be
    feasible."""
    problem, _ = size_recipe(recipe)
    return problem, _told_of(recipe, lambda: pinned_estimate(problem))


def _told_of(recipe: Recipe, stage: Callable[[], T]) -> T:
    """What it refuses, with the recipe's lines."""
    try:
        return stage()
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=refusal.source or recipe.source) from None


def read_inputs(recipe: Recipe) -> Inputs:
    """None of these needs another one: all their errors are told together, and those of the layout
    with them."""
    errors: list[Diagnostic] = []
    _unless_refused(errors, lambda: _check(recipe))
    weights = _unless_refused(errors, lambda: locate_weights(recipe.model))
    # The configuration is read beside the weights, so that both are of one commit.
    section = (
        recipe.model if weights is None else dataclasses.replace(recipe.model, source=weights.path)
    )
    model = _unless_refused(errors, lambda: (build_model_graph(section), locate_own_code(section)))
    cluster = _unless_refused(errors, lambda: resolve_cluster(recipe.cluster))
    if model is None or cluster is None:
        raise Refusal(*errors)
    graph, own_code = model
    graph.verify()
    cluster.verify()
    warnings = (
        None
        if weights is None
        else _unless_refused(errors, lambda: compare_weights(section, graph))
    )
    if errors:
        raise Refusal(
            *errors, *_layout_errors(Problem(recipe=recipe, graph=graph, cluster=cluster), errors)
        )
    unread = () if section.config is None else config_warnings(section.config)
    return Inputs(
        weights=weights,
        own_code=own_code,
        graph=graph,
        cluster=cluster,
        warnings=(*unread, *(warnings or ())),
    )


def _unless_refused(errors: list[Diagnostic], stage: Callable[[], T]) -> T | None:
    """None where the stage refuses; its errors join the others."""
    try:
        return stage()
    except Refusal as refusal:
        errors.extend(d for d in refusal.diagnostics if d not in errors)
        return None


def _check(recipe: Recipe) -> None:
    """Where the engine is not chosen yet, what is refused by the one that refuses least; what it
    runs on is asked for once it is chosen."""
    engines = engines_for(recipe.target)
    found = [_errors(under(recipe, engine), engine) for engine in engines]
    if errors := (*min(found, key=len), *(package_errors(engines[0]) if len(engines) == 1 else ())):
        raise Refusal(*errors)


def _errors(recipe: Recipe, engine: Engine) -> tuple[Diagnostic, ...]:
    extra = (*engine.check_extra(recipe), *measured_errors(recipe))
    return (*check_executable(recipe), *check_files(recipe), *check_launch(recipe), *extra)


def _layout_errors(problem: Problem, errors: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """A recipe refused for its data or launch section should hear of its layout too, once a key."""
    recipe = problem.recipe
    if recipe.cluster.nodes is None:
        return ()
    try:
        choose(dataclasses.replace(problem, recipe=under(recipe, engines_for(recipe.target)[0])))
    except Refusal as refusal:
        told = {d.key for d in errors}
        return tuple(d for d in refusal.diagnostics if d not in errors and d.key not in told)
    return ()


def _balance(problem: Problem) -> PlanBalance | None:
    coefficient = problem.recipe.model.router_aux_loss
    if coefficient is None:
        return None
    from shardwright.models.model_probe import router_affinity

    affinity = router_affinity(problem.graph)
    assert isinstance(affinity, str), "a rule has refused it"
    return PlanBalance(coefficient=coefficient, affinity=affinity)


def _check_adapters(problem: Problem) -> None:
    if problem.recipe.lora is not None:
        from shardwright.models.model_probe import check_adapters

        check_adapters(problem.graph, problem.recipe.lora)


def _planned(
    problem: Problem,
    inputs: Inputs,
    estimate: Estimate,
    partition: StagePartition,
    tensor_map: TensorParallelMap,
) -> Plan:
    recipe, graph, engine = (
        with_save_interval(problem, estimate),
        problem.graph,
        ENGINES[problem.recipe.target],
    )
    _check_adapters(problem)
    if errors := (
        *data_errors(recipe, graph),
        *check_checkpoint_folder(recipe.checkpoint.directory),
    ):
        raise Refusal(*errors)
    plan = build_plan(
        recipe,
        graph,
        problem.cluster,
        estimate,
        partition,
        tensor_map,
        plan_launch(recipe.launch, problem.cluster.nodes, reads_hosts=engine.reads_hosts),
        installed_versions(engine.packages),
        inputs.weights,
        None if inputs.own_code is None else inputs.own_code[1],
        _balance(problem),
    )
    if engine.transformer_engine is not None:
        candidate = Candidate(
            recipe=recipe, graph=graph, cluster=problem.cluster, strategy=estimate.strategy
        )
        model = dataclasses.replace(
            plan.model, transformer_engine=engine.transformer_engine(candidate)
        )
        plan = dataclasses.replace(plan, model=model)
    plan = dataclasses.replace(plan, zero=lowering_of(recipe.target).plan_section(plan))
    plan.verify()
    return plan


def with_save_interval(problem: Problem, estimate: Estimate) -> Recipe:
    """The recipe with `checkpoint.every_steps: auto` settled: what a run does is in its plan,
    whatever is measured later."""
    recipe = problem.recipe
    if recipe.checkpoint.every_steps != "auto":
        return recipe
    found = goodput(problem, estimate)
    assert found is not None, "the interval of auto is always known"
    every, outer = found.interval_steps, recipe.training.outer
    if (
        every is not None and outer is not None
    ):  # between outer steps islands have weights of their own
        every = -(-every // outer.every_steps) * outer.every_steps
    section = dataclasses.replace(recipe.checkpoint, every_steps=every)
    return dataclasses.replace(recipe, checkpoint=section)


def _islands(plan: Plan, problem: Problem, inputs: Inputs) -> tuple[Mapping[str, bytes], ...]:
    count = 0 if plan.outer is None else plan.outer.islands
    return tuple(_lowered(island_plan(plan, k), problem, inputs)[1] for k in range(count))


def _lowered(
    plan: Plan, problem: Problem, inputs: Inputs
) -> tuple[Plan, Mapping[str, bytes], tuple[Diagnostic, ...]]:
    """(plan with the digests of its files, the files, warnings)."""
    files, warnings = lower(plan, problem.recipe, problem.graph)
    if inputs.own_code is not None:
        folder, code = inputs.own_code
        files |= {
            f"{MODEL_DIRECTORY}/{name}": (folder / name).read_bytes() for name, _ in code.files
        }
    files |= model_companions(plan)
    if (
        plan.model.sees
        and not plan.model.contrastive
        and (here := processor_here(problem.recipe.model)) is not None
    ):
        from shardwright.models.processor_stage import check_processor

        check_processor(problem.graph, here[0])
    if plan.model.sees and problem.recipe.model.source is None:
        from shardwright.models.processor_stage import inline_processor_files

        processor = inline_processor_files(problem.graph)
        files |= {f"{TOKENIZER_DIRECTORY}/{name}": content for name, content in processor.items()}
    tokenizer = _tokenizer_folder(problem.recipe, inputs.weights)
    files |= copied_inputs(problem.recipe, problem.cluster, tokenizer)
    missing = (
        () if tokenizer is None else missing_packages_warning(tokenizer, ("data", "tokenizer"))
    )
    warnings = (*warnings, *unseen_paths(plan), *missing)
    plan, files = sealed(plan, files)
    plan.verify()
    return plan, files, warnings


def _tokenizer_folder(recipe: Recipe, weights: LocatedWeights | None) -> Path | None:
    model = recipe.model
    names = [
        (key, part.tokenizer)
        for key, part in recipe.tokenized()
        if part.tokenizer not in (None, "byte")
    ]
    if not names:
        return None
    key, name = (*names[0][0], "tokenizer"), str(names[0][1])
    if name != model.source:
        return tokenizer_folder(name, "main", key)
    # The model's own: of the commit that its weights are of.
    revision = weights.revision if weights is not None and weights.revision else model.revision
    return tokenizer_folder(name, revision, key)
