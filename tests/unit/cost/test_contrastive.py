"""What comparing pairs costs, against what the loss itself makes; and what an estimate of a shipped
model counts."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compile.recipe_compiler import estimate_recipe
from shardwright.cost.task_costs import HELD
from shardwright.cost.vision_encoder_flops import largest_image_sequence, vision_encoder_flops
from shardwright.models.graph_builder import catalog_graph
from shardwright.models.tasks.contrastive import contrastive_loss
from tests.unit.models.factory import model_section, recipe_of
from tools.generate.traced_graphs import config_text

LARGE = "openai/clip-vit-large-patch14"


class Peak(TorchDispatchMode):
    """Bytes of the storages that are alive at once, at most."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("kind", list(HELD))
def test_the_matrices_that_are_there_at_once(kind: str) -> None:
    rows, pairs, width = 128, 2048, 4
    every = [F.normalize(torch.randn(pairs, width), dim=-1).requires_grad_() for _ in range(2)]
    own = every[0][:rows], every[1][:rows]
    scale, bias = torch.tensor([2.0], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    with Peak() as counted:
        contrastive_loss(kind, own, (every[0], every[1]), scale, bias).backward()
    assert counted.peak / (4 * rows * pairs) == pytest.approx(HELD[kind], rel=0.1)


def test_the_tower_is_counted_as_its_matrices_say() -> None:
    """L(2n(4h^2 + 2hf) + 4n^2h) + 2n C P^2 h, with n the patches and the class token."""
    graph = catalog_graph(config_text(LARGE), "auto")
    assert graph is not None and graph.task_traits.compares_pairs and graph.features == 768
    layers, n, h, f = 24, 257, 1024, 4096
    wanted = (
        layers * (2 * n * (4 * h * h + 2 * h * f) + 4 * n * n * h)
        + 2 * 256 * 3 * 14**2 * h
        + 2 * h * 768
    )
    recipe = recipe_of()
    assert largest_image_sequence(recipe, graph) is not None
    assert vision_encoder_flops(recipe, graph)[0] == pytest.approx(wanted, rel=0.01)


def test_a_batch_needs_gpus_for_what_a_rank_holds_at_once() -> None:
    found = {}
    for nodes in (2, 16):
        plain = recipe_of(
            cluster={"nodes": nodes, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"},
            training={"sequence_length": 77, "global_batch_size": 32768},
            parallelism={"data": nodes * 8, "zero_stage": 1, "activation_checkpointing": "none"},
        )
        recipe = dataclasses.replace(plain, model=model_section(None, source=LARGE))
        _, found[nodes] = estimate_recipe(recipe)
        assert found[nodes].strategy.gradient_accumulation_steps == 1
    kept = {nodes: estimate.memory.stages[0].activations_bytes for nodes, estimate in found.items()}
    assert kept[2] == pytest.approx(8 * kept[16], rel=1e-6)
    assert found[16].memory.fits and not found[2].memory.fits
    assert found[16].time.step_seconds < found[2].time.step_seconds
    assert dataclasses.asdict(found[16].strategy)["micro_batch_size"] == 256
