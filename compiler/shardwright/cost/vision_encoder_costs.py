"""Seconds that the tower of a model that sees takes, on the largest row that `data.images`
allows."""

from __future__ import annotations

from shardwright.cost.cost_constants import Constants
from shardwright.cost.kernel_seconds import Device, product_seconds
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
