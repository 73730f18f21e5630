"""Assemble every decision into one Plan; nothing is searched or guessed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import shardwright
from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.layout.axes import rank_coordinates
from shardwright.layout.formats import accumulation_dtype, element_bytes
from shardwright.layout.fused_weights import FusedOrder
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.low_precision_modules import (
    low_precision_experts,
    low_precision_modules,
)
from shardwright.layout.muon_matrices import muon_matrices
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.parameter_sharding import LayerStages, TensorParallelMap
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_files import RemoteCode, WeightsLocation
from shardwright.models.model_graph import Layer, ModelGraph
from shardwright.models.trainable_parameters import (
    adapted_modules,
    adapter_sizes,
    frozen_parameter_patterns,
)
from shardwright.plan.folder_paths import CONFIG_FILE, TOKENIZER_DIRECTORY
from shardwright.plan.plan import (
    PLAN_VERSION,
    Plan,
    PlanCheckpoint,
    PlanDiLoCo,
    PlanLora,
    PlanLowPrecision,
    PlanModel,
    PlanRank,
    PlanRouterAuxLoss,
    PlanStage,
    PlanTraining,
    Predicted,
    resolve_scheduler,
)
from shardwright.recipe.recipe_types import (
    TOKENIZED_KINDS,
    DataSection,
    ImagesSection,
    LaunchSection,
    Recipe,
    TrainingSection,
)
from shardwright.utils.json_values import canonical_hash, copy_shared_fields

# Ranks on nodes, and the parameter bytes that each holds.


def build_rank_map(
    graph: ModelGraph,
    cluster: Cluster,
    strategy: Layout,
    partition: LayerStages,
    tensor_map: TensorParallelMap,
    recipe: Recipe,
) -> tuple[PlanRank, ...]:
    """Return the ranks in the order of the axes (layout/axes.py), nodes in order."""
    bytes_held = {
        (pipeline, tensor): _parameter_bytes(
            graph, strategy, partition, tensor_map, recipe, pipeline, tensor
        )
        for pipeline in range(strategy.pipeline)
        for tensor in range(strategy.tensor)
    }
    ranks = []
    for rank, at in enumerate(rank_coordinates(strategy.degrees())):
        node, slot = divmod(rank, cluster.gpus_per_node)
        held = bytes_held[at["pipeline"], at["tensor"]]
        ranks.append(PlanRank(rank=rank, node=node, slot=slot, **at, parameter_bytes=held))
    return tuple(ranks)


def _parameter_bytes(
    graph: ModelGraph,
    strategy: Layout,
    partition: LayerStages,
    tensor_map: TensorParallelMap,
    recipe: Recipe,
    pipeline: int,
    tensor: int,
) -> int:
    """Return a rank's resident parameter bytes; a tied tensor counts once on a rank.

    ZeRO-3 keeps ceil(numel / (data x context)) elements of each parameter. An expert's parameter is
    first sharded over `expert` ranks, so fewer ranks share each shard.
    """
    experts = expert_modules(graph) if strategy.shards_experts else {}
    shard_numel = {
        p.name: p.shard_numel(tensor) for module in tensor_map.modules for p in module.parameters
    }
    names = {
        parameter.name
        for stage in partition.stages_of_pipeline_rank(pipeline)
        for layer in graph.layers[partition.boundaries[stage] : partition.boundaries[stage + 1]]
        for parameter in layer.parameters
    }
    held = [
        (shard_numel[n], strategy.expert if n.rpartition(".")[0] in experts else 1) for n in names
    ]
    if recipe.lora is not None:
        modules = adapted_modules(graph, recipe.lora)
        held += [
            (numel, 1)
            for layer in graph.layers
            for numel in adapter_sizes(layer, modules, recipe.lora.rank)
        ]
    shares = strategy.zero_world_size if strategy.zero_stage == 3 else 1

    def resident(numel: int, cut: int) -> int:
        return -(-(numel // cut) // max(1, shares // cut))

    return sum(resident(*each) for each in held) * element_bytes(recipe.training.precision)


# Checks that the recipe's data and model agree on images.
_PAIR_EXAMPLE = "images: {per_row: 1, max_pixels: 1048576}"
PAIR_KINDS = ("jsonl", "parquet")
_EXAMPLE = "images: {per_row: 4, max_pixels: 1048576}"


def image_data_errors(recipe: Recipe, graph: ModelGraph) -> Iterator[Diagnostic]:
    """Yield SW1403 to SW1408 where the data's images do not fit the model."""
    parts = recipe.dataset_sections()
    if not graph.task_traits.has_images:
        for key, part in parts:
            if part.images is not None:
                what = f"a {graph.model_type!r} is trained for {graph.task}, which takes no images"
                help = (
                    "Remove `images`, or write `task: image-text-to-text` where transformers has "
                    "that task for the type."
                )
                yield found("SW1404", (*key, "images"), f"data.images: {what}", help)
        return
    own = "byte" if recipe.model.source is None else recipe.model.source
    pairs = graph.task_traits.compares_pairs
    if pairs:
        parts = recipe.dataset_sections()
        for key, part in parts:
            if part.kind not in PAIR_KINDS or part.images is None:
                what = (
                    f"{part.kind} data"
                    if part.kind not in PAIR_KINDS
                    else f"{part.kind} data without `images`"
                )
                yield found(
                    "SW1407",
                    key,
                    f"{what} cannot train a {graph.model_type!r}, which needs pairs of an image "
                    f"and a caption ({graph.task})",
                    f"Write `kind: jsonl` (or parquet), `field: caption` and `{_PAIR_EXAMPLE}`. "
                    "Each record holds a caption under that field and an image under `image`.",
                    PAIR_KINDS,
                )
            elif part.images.per_row != 1:
                yield found(
                    "SW1408",
                    (*key, "images"),
                    f"data.images: per_row is {part.images.per_row}, but a pair has one image",
                    "Write `per_row: 1`.",
                    (1,),
                )
            elif _without_folder(part.images) != _without_folder(parts[0][1].images):
                yield _different_images_error(key)
    for key, part in parts if not pairs else ():
        if part.kind != "chat" or part.images is None:
            what = f"{part.kind} data" if part.kind != "chat" else "chat data without `images`"
            yield found(
                "SW1403",
                key,
                f"{what} cannot train a vision-language {graph.model_type!r} ({graph.task})",
                f"Write `kind: chat` with, for example, `{_EXAMPLE}`, or `task: causal-lm` to "
                "train on text alone where the type has such a model.",
            )
        elif _without_folder(part.images) != _without_folder(parts[0][1].images):
            yield _different_images_error(key)
    for key, part in parts:
        if part.images is not None and part.tokenizer not in (None, own):
            yield found(
                "SW1406",
                (*key, "tokenizer"),
                f"the tokenizer {part.tokenizer!r} differs from that of the model's processor",
                f"Write `tokenizer: {own}`, or leave the key out.",
                (own,),
            )


def _without_folder(images: ImagesSection | None) -> ImagesSection | None:
    """Drop the folder, which may differ between the parts of a mixture."""
    return images and dataclasses.replace(images, folder=None)


def _different_images_error(key: KeyPath) -> Diagnostic:
    return found(
        "SW1405",
        (*key, "images"),
        "`images` differs between parts of the data, which share one processor",
        "Give all parts the largest value of each key.",
    )


def installed_versions(engine_packages: Iterable[str]) -> dict[str, str]:
    """Return the public versions ("2.13.0", not "2.13.0+cpu") of the packages that compute."""
    from importlib import metadata

    public = {}
    for name in ("torch", *engine_packages, "transformers"):
        with suppress(
            metadata.PackageNotFoundError
        ):  # a compile checks first that they are installed (engines/engine_table.py)
            public[name] = metadata.version(name).split("+")[0]
    return {"shardwright": shardwright.__version__, **public}


def build_plan(
    recipe: Recipe,
    graph: ModelGraph,
    cluster: Cluster,
    estimate: Estimate,
    partition: LayerStages,
    tensor_map: TensorParallelMap,
    launch: LaunchSection,
    versions: Mapping[str, str],
    weights: WeightsLocation | None,
    remote_code: RemoteCode | None,
    balance: PlanRouterAuxLoss | None,
    *,
    converts_experts: bool = False,
) -> Plan:
    """Build the plan, without its engine's section.

    weights: where they are; None for random ones
    balance: the routers' balance loss; None where there is none
    converts_experts: the engine's experts multiply in the recipe's low precision, too
    """
    strategy = estimate.strategy
    assert recipe.data is not None, "check_training_data has passed"
    training = recipe.training
    outer = recipe.training.outer
    has_muon = OPTIMIZERS[training.optimizer.name].orthogonalizes
    muon = muon_matrices(graph, recipe.model.freeze) if has_muon else {}
    owner = {
        stage: rank
        for rank in range(strategy.pipeline)
        for stage in partition.stages_of_pipeline_rank(rank)
    }
    bounds = zip(partition.boundaries, partition.boundaries[1:], strict=False)
    v = recipe.validation
    return Plan(
        version=PLAN_VERSION,
        name=recipe.name,
        target=recipe.target,
        recipe_hash=canonical_hash(recipe.document),
        versions=versions,
        model=PlanModel(
            model_type=graph.model_type,
            architecture=graph.architecture,
            config_file=CONFIG_FILE,
            config_hash=graph.config_hash,
            weights=recipe.model.weights,
            weights_path=None if weights is None else weights.path,
            revision=None if weights is None else weights.revision,
            attention=graph.attention,
            loss=strategy.loss,
            kernels="compile" if recipe.model.kernels == "compile" else "hf",
            shared_parameters=tuple(
                p.name for p in graph.layers[0].parameters if p in graph.layers[-1].parameters
            ),
            cut=graph.cut,
            embedding_modules=_modules(graph, graph.layers[0]),
            head_modules=_modules(graph, graph.layers[-1]),
            attention_module=graph.attention_module,
            tied=graph.tied,
            total_parameters=graph.total_parameters,
            vocabulary_size=graph.vocabulary_size,
            dropout=max(graph.max_dropout, 0.0 if recipe.lora is None else recipe.lora.dropout),
            remote_code=remote_code,
            router_aux_loss=balance,
            task=graph.task,
            frozen=frozen_parameter_patterns(graph, recipe.model.freeze),
            vision_encoder_blocks=tuple(layer.name for layer in graph.vision.layers if layer.name)
            if graph.vision
            else (),
            transformer_engine="off",
        ),
        strategy=strategy,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        gpu=cluster.gpu.name,
        is_cpu=cluster.gpu.is_cpu,
        stages=tuple(
            PlanStage(
                stage=stage,
                pipeline_rank=owner[stage],
                first_layer=first,
                layers=tuple(layer.name for layer in graph.layers[first:stop]),
            )
            for stage, (first, stop) in enumerate(bounds)
        ),
        tensor_parallel=tensor_map,
        ranks=build_rank_map(graph, cluster, strategy, partition, tensor_map, recipe),
        training=plan_training(training),
        optimizer=training.optimizer,
        scheduler=resolve_scheduler(training, training.step_count_or_zero),
        data=plan_data(recipe.data, has_images=graph.task_traits.has_images),
        checkpoint=copy_shared_fields(PlanCheckpoint, recipe.checkpoint),
        launch=launch,
        predicted=Predicted(memory=estimate.memory, time=estimate.time, training=estimate.training),
        zero={},
        extra=recipe.extra,
        tracking=recipe.tracking,
        validation=v
        if v is None or v.data is None
        else dataclasses.replace(
            v, data=plan_data(v.data, has_images=graph.task_traits.has_images)
        ),
        lora=plan_lora(recipe, graph),
        low_precision=_low_precision(recipe, graph, cluster, converts_experts=converts_experts),
        digests={},
        experts=tuple(expert_modules(graph)) if strategy.shards_experts else (),
        outer=None
        if outer is None
        else copy_shared_fields(PlanDiLoCo, outer, islands=recipe.cluster.islands, island=None),
        muon={name: joined.rows for name, joined in muon.items()},
        muon_orders={
            name: joined.order for name, joined in muon.items() if joined.order != FusedOrder()
        },
    )


def _low_precision(
    recipe: Recipe, graph: ModelGraph, cluster: Cluster, *, converts_experts: bool
) -> PlanLowPrecision | None:
    training = recipe.training
    if training.low_precision == "none":
        return None
    modules = low_precision_modules(graph, training, is_emulated=cluster.gpu.is_cpu)
    return PlanLowPrecision(
        format=training.low_precision,
        modules=modules,
        experts=low_precision_experts(graph, modules) if converts_experts else (),
    )


def plan_training(training: TrainingSection) -> PlanTraining:
    dtype = accumulation_dtype(training)
    return copy_shared_fields(
        PlanTraining, training, steps=training.step_count_or_zero, gradient_accumulation_dtype=dtype
    )


def _modules(graph: ModelGraph, layer: Layer) -> tuple[str, ...]:
    """Return the paths of the modules that own the layer's parameters, in order.

    A parameter is listed by its own path where its module also owns parameters of other layers, or
    holds the decoder stack.
    """
    own = {p.name for p in layer.parameters}
    own |= {name for group in graph.tied if group[0] in own for name in group}
    names = {p.name for side in graph.layers for p in side.parameters} | {
        n for group in graph.tied for n in group
    }
    shared = {_owner(name) for name in names - own}
    return tuple(
        dict.fromkeys(
            p.name
            if _owner(p.name) in shared or f"{graph.cut.stack}.".startswith(_owner(p.name) + ".")
            else owner
            for p in layer.parameters
            for owner in [_owner(p.name)]
        )
    )


def _owner(parameter: str) -> str:
    """Return the owner's path; a parameter of the outermost module is its own path."""
    return parameter.rpartition(".")[0] or parameter


def plan_data(data: DataSection, *, has_images: bool = False) -> DataSection:
    """has_images: the model has a processor, whose files hold the tokenizer, a byte's too."""
    path = None if data.kind == "synthetic" else data.path
    parts = tuple(plan_data(part, has_images=has_images) for part in data.mixture)
    tokenizer = None
    if data.kind in TOKENIZED_KINDS and data.tokenizer is not None:
        is_byte = data.tokenizer == "byte" and not has_images
        tokenizer = "byte" if is_byte else TOKENIZER_DIRECTORY
    return dataclasses.replace(data, path=path, tokenizer=tokenizer, mixture=parts)


def plan_lora(recipe: Recipe, graph: ModelGraph) -> PlanLora | None:
    if recipe.lora is None:
        return None
    return copy_shared_fields(
        PlanLora, recipe.lora, target_modules=adapted_modules(graph, recipe.lora)
    )


def check_training_data(recipe: Recipe, graph: ModelGraph) -> tuple[Diagnostic, ...]:
    data = recipe.data
    if data is None:
        return (
            Diagnostic(code="SW1910", message="the recipe has no `data` section", key=("data",)),
        )
    return (
        *image_data_errors(recipe, graph),
        *tuple(
            found(
                "SW1912",
                (*key, "tokenizer"),
                (
                    "the byte tokenizer has 256 symbols, but the model's vocab_size is "
                    f"{graph.vocabulary_size}"
                ),
                "Give the model a vocab_size of at least 256.",
            )
            for key, part in recipe.tokenized()
            if part.tokenizer == "byte" and graph.vocabulary_size < 256
        ),
    )
