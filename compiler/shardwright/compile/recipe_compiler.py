"""The compile: one straight column of stages, each from frozen input to frozen output, and its
beginnings by name: `estimate`, `explain` and `plan` go a part of the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwright.compile.compiled_folder import (
    check_checkpoint_folder,
    compiled_files,
    with_file_digests,
)
from shardwright.cost.calibrated_costs import calibration_errors, check_calibration
from shardwright.cost.goodput import check_host_memory, goodput, memory_copy_cost
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.engines.engine_table import (
    ENGINES,
    engines_for,
    lowering_of,
    missing_name_errors,
    package_errors,
    recipe_for_engine,
)
from shardwright.launch.launchers.launch_files import is_launch_file
from shardwright.launch.launchers.launcher_table import (
    check_launch,
    plan_launch,
    short_stop_warning,
    unexpanded_variables,
    unmounted_paths,
    unsaved_recovery_warning,
    untested_launcher_warning,
)
from shardwright.layout.gpu_cluster import Cluster, resolve_cluster
from shardwright.layout.layout import Candidate
from shardwright.layout.layout_estimate import Estimate, PredictionError
from shardwright.layout.low_precision_modules import low_precision_modules
from shardwright.layout.parameter_sharding import LayerStages, TensorParallelMap
from shardwright.layout.planning_problem import Problem
from shardwright.layout.tensor_parallel_map import tensor_parallel_map, with_unsplit_experts
from shardwright.models.config_schema import config_warnings
from shardwright.models.graph_builder import build_model_graph, compare_weights
from shardwright.models.model_files import RemoteCode, WeightsLocation
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_sources import local_processor, locate_weights, tokenizer_folder
from shardwright.models.remote_code import locate_remote_code
from shardwright.models.tokenizer_packages import missing_packages_warning
from shardwright.plan.copied_inputs import input_files_to_copy, pretrained_companion_files
from shardwright.plan.folder_paths import MODEL_DIRECTORY, TOKENIZER_DIRECTORY
from shardwright.plan.island_plans import island_plan
from shardwright.plan.plan import Plan, PlanRouterAuxLoss
from shardwright.plan.plan_builder import build_plan, check_training_data, installed_versions
from shardwright.recipe.input_file_checks import check_files, missing_teacher_warning
from shardwright.recipe.plain_secrets import plain_secret_warnings
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.accumulation_dtype_choice import estimate_with_accumulation_dtype
from shardwright.search.cluster_sizing import ClusterSizing
from shardwright.search.engine_choice import resolve_problem, start_engine_comparison
from shardwright.search.layout_search import choose_layout
from shardwright.search.runnable_recipes import check_runnable
from shardwright.search.training_rules import engine_recipe_errors

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """files: path relative to the compiled folder -> content. error: of plan.predicted. islands:
    the files of each one's own folder, () without islands."""

    plan: Plan
    files: Mapping[str, bytes]
    islands: tuple[Mapping[str, bytes], ...] = ()
    warnings: tuple[Diagnostic, ...]
    error: PredictionError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileInputs:
    """Hold what the recipe names. weights: None where they are random. remote_code: its folder and
    what is in it. cluster: of one node where the recipe says `nodes: auto`. warnings: of the
    weights against the model, and of a configuration's keys that nothing reads."""

    weights: WeightsLocation | None
    remote_code: tuple[Path, RemoteCode] | None
    graph: ModelGraph
    cluster: Cluster
    warnings: tuple[Diagnostic, ...] = ()


def compile_recipe(recipe: Recipe) -> CompileResult:
    """Raises Refusal, with the recipe's source, where the recipe cannot become a run."""
    try:
        inputs = read_inputs(recipe)
        problem, sizing = resolve_problem(
            Problem(recipe=recipe, graph=inputs.graph, cluster=inputs.cluster)
        )
        problem.cluster.verify()
        # What depends on the number of nodes, and on the engine, is checked once it is decided.
        if sizing is not None or problem.recipe.target != recipe.target:
            _check(problem.recipe)
        estimate = choose_layout(problem)
        s = estimate.strategy
        partition = LayerStages(
            boundaries=estimate.boundaries, schedule=s.schedule, virtual=s.virtual_stages
        )
        tensor_map = tensor_parallel_map(
            problem.graph,
            estimate.strategy.tensor,
            padded=ENGINES[problem.recipe.target].pads_vocabulary,
        )
        if s.expert_tensor_ranks != s.tensor:
            tensor_map = with_unsplit_experts(problem.graph, tensor_map)
        partition.verify(len(problem.graph.layers))
        tensor_map.verify()
        plan = _build_plan(problem, inputs, estimate, partition, tensor_map)
        if errors := missing_name_errors(plan):
            raise Refusal(*errors)
        islands = tuple(
            _lower_plan(island_plan(plan, k), problem, inputs)[1] for k in plan.island_numbers
        )
        plan, files, warnings = _lower_plan(plan, problem, inputs)
        if (saves := goodput(problem, estimate)) is not None:
            warnings = (*warnings, *short_stop_warning(plan, saves.save_seconds))
        if islands:  # nothing is started from there
            files = {name: content for name, content in files.items() if not is_launch_file(name)}
    except Refusal as refusal:
        raise Refusal(*dict.fromkeys(refusal.diagnostics), source=recipe.source) from None
    warnings = (
        *inputs.warnings,
        *plain_secret_warnings(recipe),
        *unexpanded_variables(recipe),
        *unsaved_recovery_warning(recipe),
        *missing_teacher_warning(recipe),
        *estimate.diagnostics,
        *warnings,
    )
    return CompileResult(
        plan=plan, files=files, islands=islands, warnings=warnings, error=estimate.error
    )


def read_problem(recipe: Recipe) -> Problem:
    """Read a problem without the model's weights. Raises Refusal with the errors of model and
    cluster at once."""
    errors: list[Diagnostic] = []
    cluster = _collect_errors(errors, lambda: resolve_cluster(recipe.cluster))
    _collect_errors(errors, lambda: check_calibration(recipe))
    graph = _collect_errors(errors, lambda: build_model_graph(recipe.model))
    if errors or graph is None or cluster is None:
        raise Refusal(*errors, source=recipe.source)
    return Problem(recipe=recipe, graph=graph, cluster=cluster)


def resolve_recipe(
    recipe: Recipe, *, prices_other_engines: bool = False
) -> tuple[Problem, ClusterSizing | None]:
    """Up to the number of nodes, and what gradients are summed in. Sizing: None where the recipe
    gave the nodes. prices_other_engines: `other_engine` is going to be asked, and may begin
    meanwhile."""
    problem = read_problem(recipe)
    if prices_other_engines:
        start_engine_comparison(problem)
    return _with_recipe_source(recipe, lambda: resolve_problem(problem))


def estimate_recipe(recipe: Recipe) -> tuple[Problem, Estimate]:
    """Up to the estimate of the pinned layout, `auto` filled by the search: it need not be
    feasible."""
    problem, _ = resolve_recipe(recipe)
    return _with_recipe_source(recipe, lambda: estimate_with_accumulation_dtype(problem))


def _with_recipe_source(recipe: Recipe, stage: Callable[[], T]) -> T:
    """Run a stage, and add the recipe's lines to its refusal."""
    try:
        return stage()
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=refusal.source or recipe.source) from None


def read_inputs(recipe: Recipe) -> CompileInputs:
    """Read the inputs that do not depend on each other, and refuse with all their errors and those
    of the layout."""
    errors: list[Diagnostic] = []
    _collect_errors(errors, lambda: _check(recipe))
    weights = _collect_errors(errors, lambda: locate_weights(recipe.model))
    # The configuration is read beside the weights, so that both are of one commit.
    section = (
        recipe.model if weights is None else dataclasses.replace(recipe.model, source=weights.path)
    )
    model = _collect_errors(
        errors, lambda: (build_model_graph(section), locate_remote_code(section))
    )
    cluster = _collect_errors(errors, lambda: resolve_cluster(recipe.cluster))
    if model is None or cluster is None:
        raise Refusal(*errors)
    graph, remote_code = model
    graph.verify()
    cluster.verify()
    warnings = (
        None
        if weights is None
        else _collect_errors(errors, lambda: compare_weights(section, graph))
    )
    if errors:
        raise Refusal(
            *errors, *_layout_errors(Problem(recipe=recipe, graph=graph, cluster=cluster), errors)
        )
    unread_key_warnings = () if section.config is None else config_warnings(section.config)
    return CompileInputs(
        weights=weights,
        remote_code=remote_code,
        graph=graph,
        cluster=cluster,
        warnings=(*unread_key_warnings, *(warnings or ())),
    )


def _collect_errors(errors: list[Diagnostic], stage: Callable[[], T]) -> T | None:
    """Return the stage's result; None where it refuses, and its errors join `errors`."""
    try:
        return stage()
    except Refusal as refusal:
        errors.extend(d for d in refusal.diagnostics if d not in errors)
        return None


def _check(recipe: Recipe) -> None:
    """Refuse what every engine refuses, where the engine is not chosen yet. Its own packages are
    checked once it is chosen."""
    engines = engines_for(recipe.target)
    found = []
    for engine in engines:
        own = recipe_for_engine(recipe, engine)
        errors = (*check_runnable(own), *check_files(own), *check_launch(own))
        found.append((*errors, *engine_recipe_errors(engine, own), *calibration_errors(own)))
    if errors := (*min(found, key=len), *(package_errors(engines[0]) if len(engines) == 1 else ())):
        raise Refusal(*errors)


def _layout_errors(problem: Problem, errors: list[Diagnostic]) -> tuple[Diagnostic, ...]:
    """A recipe refused for its data or launch section should hear of its layout too, once a key."""
    recipe = problem.recipe
    if recipe.cluster.nodes is None:
        return ()
    try:
        choose_layout(
            dataclasses.replace(
                problem, recipe=recipe_for_engine(recipe, engines_for(recipe.target)[0])
            )
        )
    except Refusal as refusal:
        reported_keys = {d.key for d in errors}
        return tuple(
            d for d in refusal.diagnostics if d not in errors and d.key not in reported_keys
        )
    return ()


def _balance(problem: Problem) -> PlanRouterAuxLoss | None:
    coefficient = problem.recipe.model.router_aux_loss
    if coefficient is None:
        return None
    from shardwright.models.model_probe import router_affinity

    affinity = router_affinity(problem.graph)
    assert isinstance(affinity, str), "a rule has refused it"
    return PlanRouterAuxLoss(coefficient=coefficient, affinity=affinity)


def _build_plan(
    problem: Problem,
    inputs: CompileInputs,
    estimate: Estimate,
    partition: LayerStages,
    tensor_map: TensorParallelMap,
) -> Plan:
    recipe, graph, engine = (
        with_checkpoint_interval(problem, estimate),
        problem.graph,
        ENGINES[problem.recipe.target],
    )
    if problem.recipe.lora is not None:
        from shardwright.models.model_probe import check_lora_adapters

        check_lora_adapters(problem.graph, problem.recipe.lora)
    if engine.low_precision and (
        converted := low_precision_modules(
            graph, recipe.training, is_emulated=problem.cluster.gpu.is_cpu
        )
    ):
        from shardwright.models.model_probe import check_low_precision

        check_low_precision(graph, converted)
    if errors := (
        *check_training_data(recipe, graph),
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
        None if inputs.remote_code is None else inputs.remote_code[1],
        _balance(problem),
        converts_experts=engine.traits.low_precision_experts,
    )
    if engine.transformer_engine is not None:
        candidate = Candidate(
            recipe=recipe, graph=graph, cluster=problem.cluster, strategy=estimate.strategy
        )
        model = dataclasses.replace(
            plan.model, transformer_engine=engine.transformer_engine(candidate)
        )
        plan = dataclasses.replace(plan, model=model)
    plan = dataclasses.replace(plan, zero=lowering_of(recipe.target).zero_settings(plan))
    plan.verify()
    return plan


def with_checkpoint_interval(problem: Problem, estimate: Estimate) -> Recipe:
    """Return the recipe with `auto` intervals of checkpoints resolved: what a run does is in its
    plan, whatever is measured later. Raises Refusal, SW5220, where hosts are known to have no room
    for copies in memory."""
    recipe = problem.recipe
    if not recipe.checkpoint.in_memory:
        recipe = dataclasses.replace(
            recipe, checkpoint=dataclasses.replace(recipe.checkpoint, in_memory_every=None)
        )
    else:
        copies = memory_copy_cost(problem, estimate)
        check_host_memory(problem, estimate, copies)
        section = dataclasses.replace(recipe.checkpoint, in_memory_every=copies.every_steps)
        recipe = dataclasses.replace(recipe, checkpoint=section)
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


def _lower_plan(
    plan: Plan, problem: Problem, inputs: CompileInputs
) -> tuple[Plan, Mapping[str, bytes], tuple[Diagnostic, ...]]:
    """(plan with the digests of its files, the files, warnings)."""
    files, warnings = compiled_files(plan, problem.recipe, problem.graph)
    if inputs.remote_code is not None:
        folder, code = inputs.remote_code
        files |= {
            f"{MODEL_DIRECTORY}/{name}": (folder / name).read_bytes() for name, _ in code.files
        }
    files |= pretrained_companion_files(plan)
    if (
        plan.model.task_traits.images_in_text
        and (here := local_processor(problem.recipe.model)) is not None
    ):
        from shardwright.models.image_processor import check_processor

        check_processor(problem.graph, here[0])
    if plan.model.task_traits.has_images and problem.recipe.model.source is None:
        from shardwright.models.image_processor import processor_files_from_config

        processor = processor_files_from_config(problem.graph)
        files |= {f"{TOKENIZER_DIRECTORY}/{name}": content for name, content in processor.items()}
    tokenizer = _tokenizer_folder(problem.recipe, inputs.weights)
    files |= input_files_to_copy(problem.recipe, problem.cluster, tokenizer)
    missing = (
        () if tokenizer is None else missing_packages_warning(tokenizer, ("data", "tokenizer"))
    )
    warnings = (*warnings, *untested_launcher_warning(plan), *unmounted_paths(plan), *missing)
    plan, files = with_file_digests(plan, files)
    plan.verify()
    return plan, files, warnings


def _tokenizer_folder(recipe: Recipe, weights: WeightsLocation | None) -> Path | None:
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
