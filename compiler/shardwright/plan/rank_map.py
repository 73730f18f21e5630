"""Which rank sits where, and how many bytes of parameters it holds."""

from __future__ import annotations

from shardwright.cluster.cluster_types import Cluster
from shardwright.layout.axes import rank_coordinates
from shardwright.layout.layout import Layout
from shardwright.layout.parameter_sharding import LayerStages, TensorParallelMap
from shardwright.models.expert_modules import expert_modules
from shardwright.models.lora_targets import adapted_modules, adapter_sizes
from shardwright.models.model_graph import ModelGraph
from shardwright.plan.plan import PlanRank
from shardwright.recipe.recipe_types import ELEMENT_BYTES, Recipe


def build_rank_map(
    graph: ModelGraph,
    cluster: Cluster,
    strategy: Layout,
    partition: LayerStages,
    tensor_map: TensorParallelMap,
    recipe: Recipe,
) -> tuple[PlanRank, ...]:
    """By the order of the axes (layout/axes.py); nodes in order."""
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
    """A tensor that is tied over two stages counts on both, but only once on one rank.

    ZeRO-3 keeps ceil(numel / (data x context)) elements of each parameter; of an expert's, which
    `expert` ranks cut before, as many ranks fewer share each part.
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
    shares = strategy.shards if strategy.zero_stage == 3 else 1

    def resident(numel: int, cut: int) -> int:
        return -(-(numel // cut) // max(1, shares // cut))

    return sum(resident(*each) for each in held) * ELEMENT_BYTES[recipe.training.precision]
