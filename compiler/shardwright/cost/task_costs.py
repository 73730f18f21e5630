"""Cost what a task adds: the vision encoder and the contrastive loss."""

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
    """Return forward and backward seconds of a micro-batch, recomputation included.

    A layer's FLOPs run at the rate of its widest matrix, or at `assume.mfu` of the peak.

    rows: sequences of the micro-batch, each with as many images as `data.images` allows
    """
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


# The contrastive loss in fp32, as parallel/distributed_losses.py computes it. b: pairs of a rank,
# N: pairs of the global batch, P: feature width.


_FP32 = 4
_SIDES = 2
"""Counts an image's features and a caption's."""
_COMPARED = {"softmax": 2, "sigmoid": 1}
"""Counts the b x N matrices of a rank by loss: CLIP's cross-entropy works along both sides,
SigLIP's sum at each pair once."""
HELD = {"softmax": 6, "sigmoid": 6}
"""Counts the fp32 matrices of that size in memory at once: similarities, scaled and signed, the
loss's saved tensors, and a gradient (tests/unit/cost/test_contrastive.py counts them)."""
_PASSES = {"softmax": (6, 6), "sigmoid": (10, 8)}
"""Counts reads and writes of each, forward and backward, beside the product."""


def contrastive_loss_flops(recipe: Recipe, graph: ModelGraph) -> int:
    """Return a step's forward FLOPs: one N x N matrix, duplicates on other ranks not counted."""
    pairs = recipe.training.global_batch_size
    return 2 * pairs * pairs * graph.features if graph.task_traits.compares_pairs else 0


def contrastive_loss_seconds(
    recipe: Recipe, graph: ModelGraph, rows: int, device: Device, fp32_flops: float, c: Constants
) -> tuple[float, float]:
    """Return forward and backward seconds of a rank with `rows` pairs.

    fp32_flops: the fp32 peak
    """
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


def contrastive_loss_bytes(priced: PricedLayout) -> float:
    """Return the peak bytes on one rank while the loss is computed."""
    loss, pairs = priced.graph.cut.loss, priced.recipe.training.global_batch_size
    matrices = HELD[loss] * priced.strategy.micro_batch_size * pairs
    # Count the gathered features, their concatenation and their gradients.
    features = 3 * _SIDES * pairs * priced.graph.features
    return float(_FP32 * (matrices + features))


def feature_gather_seconds(priced: PricedLayout) -> float:
    """Features of all ranks gathered, and their gradients summed. Nothing hides it: it stands
    between the forward and the backward pass."""
    s = priced.strategy
    if not priced.graph.task_traits.compares_pairs or s.zero_world_size == 1:
        return 0.0
    moved = _FP32 * _SIDES * priced.recipe.training.global_batch_size * priced.graph.features
    group = priced.group(s.zero_world_size, s.tensor)
    gathered = gather_seconds(priced.cluster, priced.constants, group, moved)
    return gathered + all_reduce_seconds(priced.cluster, priced.constants, group, moved)
