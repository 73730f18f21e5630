"""Seconds that the tower of a model that sees takes, on the largest row that `data.images`
allows.
"""

from __future__ import annotations

from shardwright.cost.collective_seconds import all_reduce_seconds, gather_seconds
from shardwright.cost.cost_constants import Constants
from shardwright.cost.kernel_seconds import Device, product_seconds, traffic_seconds
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.vision_encoder_flops import largest_image_sequence, vision_encoder_layer_costs
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_types import Recipe


def vision_encoder_seconds(
    recipe: Recipe,
    graph: ModelGraph,
    checkpointing: Checkpointing,
    rows: int,
    device: Device,
    c: Constants,
) -> tuple[float, float]:
    """Forward and backward of a micro-batch of so many rows, what is run again included. A layer's
    FLOPs at the rate that its widest matrix reaches; at `assume.mfu` of the peak where that is
    given."""
    forward = backward = 0.0
    row, mfu = largest_image_sequence(recipe, graph), recipe.assume.mfu
    for each in vision_encoder_layer_costs(recipe, graph, checkpointing, device.element_bytes):
        assert row is not None
        n, k = each.layer.widths
        if mfu is not None or not n:
            rate = device.flops_per_second * (mfu or c.gemm_efficiency)
        else:
            m = rows * row.image_count * row.patches
            rate = 2 * m * n * k / product_seconds(device, c, m=m, n=n, k=k)
        forward += rows * each.forward / rate
        backward += rows * (each.backward + each.recompute_flops) / rate
    return forward, backward


# What comparing all pairs of a batch costs: similarities, and the features that every data rank
# gets of the others.
#
# As parallel/distributed_losses.py computes them, in fp32. Letters: b pairs of a rank, N of the
# global batch, P width of the features.


_FP32 = 4
_SIDES = 2
"""A picture's features and a caption's."""
_COMPARED = {"softmax": 2, "sigmoid": 1}
"""Matrices b x N of a rank, by `Cut.loss`: CLIP's cross-entropy looks along both sides, SigLIP's
sum at each pair once."""
HELD = {"softmax": 6, "sigmoid": 6}
"""fp32 matrices of that size that are there at once, of all: similarities, scaled and signed, what
the loss keeps of them, and a gradient on its way (tests/unit/cost/test_contrastive.py counts
them)."""
_PASSES = {"softmax": (6, 6), "sigmoid": (10, 8)}
"""Reads and writes of each, forward and backward, beside the product."""


def contrastive_loss_flops(recipe: Recipe, graph: ModelGraph) -> int:
    """Forward, of a step: one matrix N x N, whatever each rank computes of it a second time."""
    pairs = recipe.training.global_batch_size
    return 2 * pairs * pairs * graph.features if graph.task_traits.compares_pairs else 0


def contrastive_loss_seconds(
    recipe: Recipe, graph: ModelGraph, rows: int, device: Device, fp32_flops: float, c: Constants
) -> tuple[float, float]:
    """Forward and backward of a rank with so many pairs. fp32_flops: its peak."""
    elements = rows * recipe.training.global_batch_size * _COMPARED[graph.cut.loss]
    product = (
        2 * elements * graph.features / (fp32_flops * (recipe.assume.mfu or c.gemm_efficiency))
    )
    if recipe.assume.mfu is not None:
        return product, 2 * product
    read, back = (
        traffic_seconds(device, c, passes * _FP32 * elements) for passes in _PASSES[graph.cut.loss]
    )
    return product + read, 2 * product + back


def contrastive_loss_bytes(layout: PricedLayout) -> float:
    """Of a rank, while the loss is computed."""
    loss, pairs = layout.graph.cut.loss, layout.recipe.training.global_batch_size
    matrices = HELD[loss] * layout.strategy.micro_batch_size * pairs
    # As they arrive, side by side, and their gradients.
    features = 3 * _SIDES * pairs * layout.graph.features
    return float(_FP32 * (matrices + features))


def feature_gather_seconds(layout: PricedLayout) -> float:
    """Features of all ranks gathered, and their gradients summed. Nothing hides it: it stands
    between the forward and the backward pass."""
    s = layout.strategy
    if not layout.graph.task_traits.compares_pairs or s.shards == 1:
        return 0.0
    moved = _FP32 * _SIDES * layout.recipe.training.global_batch_size * layout.graph.features
    group = layout.group(s.zero_world_size, s.tensor)
    gathered = gather_seconds(layout.cluster, layout.constants, group, moved)
    return gathered + all_reduce_seconds(layout.cluster, layout.constants, group, moved)
