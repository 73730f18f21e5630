"""Estimate each layer's forward, backward and recompute seconds, and each stage's compute and
collectives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.calibrated_costs import (
    calibration_for,
    host_overhead_seconds,
    measured_layer_seconds,
    representative_layers,
)
from shardwright.cost.chip_rates import low_precision_gain
from shardwright.cost.collective_seconds import all_reduce_seconds, gather_seconds, send_seconds
from shardwright.cost.communication_bytes import (
    context_exchange_bytes,
    expert_exchange_seconds,
    expert_imbalance,
    has_deepep,
    hidden_state_bytes,
    layer_all_reduces,
    repeats_feed_forward_reduce,
)
from shardwright.cost.cost_constants import Constants
from shardwright.cost.kernel_seconds import (
    device_of,
    eager_attention_seconds,
    fused_attention_seconds,
    head_norm_seconds,
    linear_cast_seconds,
    product_pass_seconds,
    traffic_seconds,
)
from shardwright.cost.layer_shapes import (
    LayerShape,
    Product,
    model_shapes,
    recompute_stops_early,
    recomputed_product_flops,
    recomputed_products,
    uses_selective_op,
)
from shardwright.cost.priced_layout import ModelChunk, PricedLayout
from shardwright.cost.task_costs import contrastive_loss_seconds, vision_encoder_seconds
from shardwright.cost.vision_encoder_flops import largest_image_sequence
from shardwright.engines.engine_table import traits_of
from shardwright.engines.run_profiles import kernel_profile
from shardwright.layout.formats import FORMATS, element_bytes
from shardwright.layout.gpu_cluster import Gpu
from shardwright.layout.layout import Layout
from shardwright.layout.low_precision_modules import low_precision_shares
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph
from shardwright.models.trainable_parameters import is_decoder_frozen
from shardwright.recipe.literal_types import (
    LayerCheckpointing,
    Precision,
    RecomputedModules,
    RecomputeModule,
)
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2, Recipe
from shardwright.utils.memoize import hashed_key, memoize

# A product has two of its size in the backward pass: the inputs' gradient and the weights'.
BACKWARD_OVER_FORWARD = 2.0
COMPOSED_ACTIVATIONS = frozenset({"gelu_new"})
"""Activations that transformers computes with an operator for each term."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Hold seconds of one micro-batch, prefix sums over graph.layers (length layers + 1).

    recompute: of a layer that is checkpointed
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...]


def peak_flops(gpu: Gpu, precision: Precision) -> float:
    """Return the dense peak of the precision; a GPU without it computes in fp32, which a rule
    reports."""
    return (
        gpu.peak_flops.get(FORMATS[precision].peak)
        or gpu.peak_flops.get("fp32")
        or min(gpu.peak_flops.values())
    )


@hashed_key
def _layer_seconds_shared_key(
    recipe: Recipe, graph: ModelGraph, gpu: Gpu, c: Constants
) -> Hashable:
    return (
        graph.identity,
        (gpu.hbm_bytes_per_second, gpu.watts, gpu.cache_bytes, gpu.compute_units, gpu.is_cpu),
        (gpu.chip, gpu.best_product_flops, gpu.attention_flops),
        (
            peak_flops(gpu, recipe.training.precision),
            recipe.training.precision,
            recipe.training.sequence_length,
        ),
        (
            recipe.assume.kernels,
            recipe.assume.mfu,
            recipe.assume.expert_imbalance,
            (recipe.training.low_precision, recipe.training.low_precision_keep),
            recipe.lora is not None,
            recipe.model.freeze,
            largest_image_sequence(recipe, graph),
            recipe.training.global_batch_size if graph.task_traits.compares_pairs else 0,
        ),
        (recipe.cluster.measured and recipe.cluster.measured.sha256, recipe.target),
        c,
    )


def _layer_seconds_key(
    recipe: Recipe, graph: ModelGraph, gpu: Gpu, s: Layout, c: Constants
) -> Hashable:
    return (
        _layer_seconds_shared_key(recipe, graph, gpu, c),
        traits_of(recipe.target, recipe.assume.kernels, s),
        (
            s.tensor,
            s.context,
            s.expert,
            recipe.training.sequences_of(s.micro_batch_size),
            s.sequence_parallel,
            s.checkpointing,
            s.loss,
        ),
    )


@memoize(_layer_seconds_key)
def layer_seconds(
    recipe: Recipe, graph: ModelGraph, gpu: Gpu, s: Layout, c: Constants
) -> LayerTimes:
    """Return the seconds of each layer, which pipeline, data degree and ZeRO stage do not
    change."""
    shapes = model_shapes(graph, s.tensor)
    model = _MicroBatchCosts(recipe, graph, gpu, s, c)
    per_kind = [model.decoder(kind) for kind in shapes.kinds]
    ends = {"embedding": model.embedding(), "head": model.head(shapes.head_width)}
    per_layer = [
        ends[layer.kind] if index < 0 else per_kind[index]
        for layer, index in zip(graph.layers, shapes.kind_of, strict=True)
    ]
    if calibration_for(recipe, graph) is not None:
        places = representative_layers(shapes.kind_of)
        per_layer = [
            measured_layer_seconds(recipe, graph, s, at, each)
            for at, each in zip(places, per_layer, strict=True)
        ]
    forward, backward, recompute = (
        (0.0, *itertools.accumulate(seconds)) for seconds in zip(*per_layer, strict=True)
    )
    return LayerTimes(forward=forward, backward=backward, recompute=recompute)


class _MicroBatchCosts:
    """Cost one micro-batch on one rank; each method returns (forward, backward, recompute) of
    one layer."""

    def __init__(
        self, recipe: Recipe, graph: ModelGraph, gpu: Gpu, s: Layout, c: Constants
    ) -> None:
        precision = recipe.training.precision
        self.recipe, self.graph, self.s, self.c = recipe, graph, s, c
        self.kernels = kernel_profile(recipe.assume.kernels, graph.model_type, recipe.target)
        self.mfu = recipe.assume.mfu
        self.imbalance = expert_imbalance(recipe)
        self.low_precision = recipe.training.low_precision
        self.low_precision_gain = low_precision_gain(gpu, self.low_precision)
        self.low_precision_shares = low_precision_shares(
            graph, recipe.training, is_emulated=gpu.is_cpu
        )
        self.traits = traits_of(recipe.target, recipe.assume.kernels, s)
        # Frozen weights have no gradient; the adapters' own products are a few percent.
        self.frozen = recipe.lora is not None or is_decoder_frozen(graph, recipe.model.freeze)
        self.length = recipe.training.sequence_length
        self.sequences = recipe.training.sequences_of(s.micro_batch_size)
        self.tokens = self.sequences * self.length // s.context
        self.launches_are_free = gpu.kind.launches_are_free
        self.fp32_flops = peak_flops(gpu, "fp32")
        self.shapes = model_shapes(graph, s.tensor)
        library = "flash" if graph.attention == FLASH_ATTENTION_2 else self.kernels.attention
        self.device = device_of(
            gpu, peak_flops(gpu, precision), element_bytes(precision), c, library
        )

    def decoder(self, kind: LayerShape) -> tuple[float, float, float]:
        mode = self.s.checkpointing
        if self.mfu is not None:
            scores = self._at_mfu(kind.attention_flops * self.length, self.shapes.attention_degree)
            forward = self._at_mfu(kind.matmul_flops, self.s.tensor) + scores
            recompute = (
                kind.attention_module_flops if self.traits.selective_recomputes_projections else 0
            )
            inside = self._at_mfu(recompute, self.s.tensor) + scores
            back = self._backward_at_mfu(forward)
            if isinstance(mode, tuple):
                flops = recomputed_product_flops(kind, mode, self.s.tensor)
                parts = self._at_mfu(flops, self.s.tensor)
                return forward, back, parts + scores * ("core_attn" in mode)
            return forward, back, {"none": 0.0, "selective": inside, "full": forward}[mode]
        outside, projections = (
            self._products(kind, in_attention=False),
            self._products(kind, in_attention=True),
        )
        scores, scores_backward = self._scores(kind)
        moved_inside, moved_outside = self._moved(kind)
        forward = outside[0] + projections[0] + scores + moved_inside + moved_outside
        backward = (
            outside[1]
            + projections[1]
            + scores_backward
            + BACKWARD_OVER_FORWARD * (moved_inside + moved_outside)
        )
        unread_inside, unread = (
            self._skipped_product(kind, in_attention=True),
            self._skipped_product(kind, in_attention=False),
        )
        if not self.traits.selective_recomputes_projections:
            selective = scores
        elif uses_selective_op(self.graph, self.kernels):
            selective = (
                moved_inside
                + moved_outside
                + sum(
                    self._product(self.tokens, p.n, p.k, p.batch)[0]
                    for p in recomputed_products(kind.products)
                )
            )
            selective += scores if self._is_eager else 0.0
        else:
            selective = scores + projections[0] - unread_inside + moved_inside
        floor = (
            0.0
            if self.launches_are_free
            else self.c.of_family("kernels_per_layer", self.kernels.family) * self.c.launch_seconds
        )
        forward, backward = max(forward, floor), max(backward, BACKWARD_OVER_FORWARD * floor)
        if isinstance(mode, tuple):
            return forward, backward, self._module_seconds(kind, mode, scores)
        return (
            forward,
            backward,
            {"none": 0.0, "selective": selective, "full": max(floor, forward - unread)}[mode],
        )

    def decoder_kernels(self, kind: LayerShape) -> tuple[KernelSeconds, KernelSeconds]:
        """Split `decoder`'s forward and backward seconds by kind of kernel."""
        passes, outside, inside = (
            self.decoder(kind),
            self._products(kind, in_attention=False),
            self._products(kind, in_attention=True),
        )
        scores, moved, products = self._scores(kind), sum(self._moved(kind)), 0.0
        if self._is_eager:
            heads = self.sequences * self.graph.attention_heads
            products = kind.attention_flops and eager_attention_seconds(
                self.device,
                self.c,
                heads=heads / (self.shapes.attention_degree * self.s.context),
                head_dim=self.graph.head_dim,
                length=self.length,
                passes=0,
            )

        def split(at: int, over_forward: float) -> KernelSeconds:
            own = products * over_forward
            in_products = outside[at] + inside[at] + own
            eager = scores[at] - own if self._is_eager else 0.0
            attention = 0.0 if self._is_eager else scores[at]
            memory_bound = over_forward * moved + eager
            host = passes[at] - in_products - attention - memory_bound
            return _kernels(
                products=in_products,
                attention=attention,
                memory_bound=memory_bound,
                host=max(0.0, host),
            )

        return split(0, 1.0), split(1, BACKWARD_OVER_FORWARD)

    def end_kernels(
        self, which: str, width: int, forward: float, backward: float
    ) -> tuple[KernelSeconds, KernelSeconds]:
        """Split the embedding's or the head's seconds. A vision encoder counts as products."""
        lookup = self._lookup()
        if which == "embedding":
            products = (forward - lookup, backward - BACKWARD_OVER_FORWARD * lookup)
        elif self.graph.task_traits.compares_pairs:
            rows = self.sequences
            products = self._product(rows, self.graph.features, self.graph.hidden_size, 1)
        else:
            padded = self._padded_vocabulary(width)
            products = self._product(self.tokens, padded, self.graph.hidden_size, 1)
        ahead, back = (
            _kernels(products=(own := min(max(0.0, p), whole)), memory_bound=whole - own)
            for p, whole in zip(products, (float(forward), float(backward)), strict=True)
        )
        return ahead, back

    def _module_seconds(self, kind: LayerShape, modules: RecomputedModules, scores: float) -> float:
        """Return the seconds of a layer's recompute_modules, whose whole forward passes repeat.

        scores: forward seconds of attention over S x S
        """
        hidden, has_experts = self.graph.hidden_size, kind.experts_per_token > 0
        per_element = self.tokens * self._element

        def moved(elements: float) -> float:
            return traffic_seconds(self.device, self.c, per_element * elements)

        def products(module: RecomputeModule) -> float:
            chosen = [p for p in kind.products if p.module == module]
            return sum(self._product(self.tokens, p.n, p.k, p.batch)[0] for p in chosen)

        def feed_forward() -> float:
            inside = self._products(kind, in_attention=False)[0]
            return inside + moved(self._feed_forward_elements(kind))

        activated = kind.activated_expert_features(hidden)
        up = sum(p.n for p in kind.products if p.module == "mla_up_proj")
        norms = (
            kind.fused_norms * self.kernels.norm + kind.composed_norms * self.kernels.eager_rms_norm
        )
        shared = self.kernels.feed_forward * kind.inner_features("shared_experts", hidden)
        alone = "moe" not in modules
        seconds: dict[RecomputeModule, Callable[[], float]] = {
            "core_attn": lambda: scores,
            "layernorm": lambda: moved(
                norms * hidden / (self.s.tensor if self.s.sequence_parallel else 1)
            ),
            # Each result is read and written again by the rotation.
            "mla_up_proj": lambda: products("mla_up_proj") + moved(2 * up) if up else 0.0,
            "mlp": lambda: 0.0 if has_experts else feed_forward(),
            # Gate, up and the activated gate's product.
            "moe_act": lambda: moved(3 * activated) if alone else 0.0,
            "shared_experts": lambda: (
                products("shared_experts") + moved(shared) if alone and shared else 0.0
            ),
            "moe": lambda: feed_forward() if has_experts else 0.0,
        }
        return sum(seconds[module]() for module in modules)

    def embedding(self) -> tuple[float, float, float]:
        """Cost the lookup: rows read and written, their gradients accumulated; and the vision
        encoder."""
        rows = self.sequences
        tower = vision_encoder_seconds(
            self.recipe,
            self.graph,
            "none" if isinstance(self.s.checkpointing, tuple) else self.s.checkpointing,
            rows,
            self.device,
            self.c,
        )
        if self.mfu is not None:
            return *tower, 0.0
        forward = self._lookup()
        return forward + tower[0], BACKWARD_OVER_FORWARD * forward + tower[1], 0.0

    def head(self, width: int) -> tuple[float, float, float]:
        """Cost the last norm, the product with the vocabulary, and the loss (a third of its traffic
        forward).

        A chunked loss recomputes its logits.
        """
        if self.graph.task_traits.compares_pairs:
            return self._contrastive_head()
        if self.mfu is not None:
            forward = self._at_mfu(self.graph.layers[-1].matmul_flops_per_token, self.s.tensor)
            return (
                forward,
                self._backward_at_mfu(forward),
                forward if self.s.loss == "chunked" else 0.0,
            )
        width = self._padded_vocabulary(width)
        forward, backward = self._product(self.tokens, width, self.graph.hidden_size, 1)
        logits = self.tokens * width * self.c.of_family("logit_traffic_bytes", self.kernels.family)
        loss = traffic_seconds(self.device, self.c, logits)
        moved = self.tokens * self.graph.layers[-1].activation_elements_per_token * self._element
        norm = traffic_seconds(self.device, self.c, moved)
        recompute = forward + loss / 3 if self.s.loss == "chunked" else 0.0
        return forward + loss / 3 + norm, backward + loss * 2 / 3 + 2 * norm, recompute

    def _contrastive_head(self) -> tuple[float, float, float]:
        """Cost the last norm, the projection of each example, and the similarities of all pairs."""
        graph, rows = self.graph, self.sequences
        forward, backward = contrastive_loss_seconds(
            self.recipe, graph, rows, self.device, self.fp32_flops, self.c
        )
        if self.mfu is not None:
            projected = self._at_mfu(graph.layers[-1].matmul_flops_per_token, 1)
            return forward + projected, backward + self._backward_at_mfu(projected), 0.0
        product = self._product(rows, graph.features, graph.hidden_size, 1)
        moved = self.tokens * graph.layers[-1].activation_elements_per_token * self._element
        norm = traffic_seconds(self.device, self.c, moved)
        return forward + product[0] + norm, backward + product[1] + 2 * norm, 0.0

    def _lookup(self) -> float:
        """Return forward seconds of the embedding's rows, read and written."""
        moved = 2 * self.tokens * self.graph.hidden_size * self._element
        return traffic_seconds(self.device, self.c, moved)

    def _padded_vocabulary(self, width: int) -> int:
        """Return the head's local width as its kernels pad it."""
        multiple = self.kernels.vocabulary_multiple
        return -(-width // multiple) * multiple

    @property
    def _is_eager(self) -> bool:
        """Return whether attention writes its scores to memory."""
        return self.graph.attention == "eager" and not self.kernels.fuses_attention_sinks

    @property
    def _element(self) -> int:
        return self.device.element_bytes

    def _backward_at_mfu(self, forward: float) -> float:
        return (BACKWARD_OVER_FORWARD - self.frozen) * forward

    def _at_mfu(self, flops_per_token: float, degree: int) -> float:
        """Return FLOPs / (peak x mfu): assume.mfu replaces every efficiency and the memory
        traffic."""
        assert self.mfu is not None
        return flops_per_token * self.tokens / degree / (self.device.flops_per_second * self.mfu)

    def _product(self, m: float, n: int, k: int, batch: float) -> tuple[float, float]:
        forward, inputs, weights = product_pass_seconds(
            self.device, self.c, m=m, n=n, k=k, batch=batch
        )
        return forward, inputs if self.frozen else inputs + weights

    def _products(self, kind: LayerShape, *, in_attention: bool) -> tuple[float, float]:
        """Return forward and backward seconds of the products inside or outside the attention
        module.

        The shapes give the rate, the traced FLOPs the amount, because a layer may route a token to
        some experts only.
        """
        chosen = [p for p in kind.products if p.in_attention == in_attention]
        if not chosen:
            return 0.0, 0.0
        every = sum(p.n * p.k * p.batch for p in kind.products)
        has_experts = any(p.batch > 1 for p in kind.products)
        routed = kind.matmul_flops / (2 * every * self.s.tensor) if has_experts else 1.0
        forward = backward = 0.0
        expert = self.s.expert if kind.expert_numel else 1
        for p in chosen:
            rows, batch, busiest = max(1.0, self.tokens), float(p.batch), 1.0
            if p.batch > 1:
                # A rank holds fewer experts, each with tokens of all expert ranks; the step waits
                # for the busiest rank.
                rows = max(1.0, self.tokens * min(1.0, routed) * expert)
                batch, busiest = p.batch / expert, self.imbalance if expert > 1 else 1.0
            f, b = self._in_low_precision(*self._product(rows, p.n, p.k, batch), rows, p, batch)
            f, b = busiest * f, busiest * b
            forward, backward = forward + f, backward + b
        return forward, backward

    def _in_low_precision(
        self, forward: float, backward: float, rows: float, p: Product, batch: float
    ) -> tuple[float, float]:
        """Return the seconds of a linear layer's product with the recipe's low precision.

        Products get faster; inputs, weights and the output's gradient are scaled and cast.

        batch: products of so many rows
        """
        gain = self.low_precision_gain
        share = (
            self.low_precision_shares.get(p.name, 0.0)
            if p.batch == 1
            else float(self.traits.low_precision_experts)
        )
        if gain == 1.0 or share == 0.0:
            return forward, backward
        ahead, back = linear_cast_seconds(
            self.device,
            self.c,
            low_precision=self.low_precision,
            family=self.kernels.family,
            m=rows,
            n=p.n,
            k=p.k,
        )
        return (
            (1 - share) * forward + share * (forward / gain + batch * ahead),
            (1 - share) * backward + share * (backward / gain + batch * back),
        )

    def _skipped_product(self, kind: LayerShape, *, in_attention: bool) -> float:
        """Return forward seconds of the last product, where recomputation skips it (see
        recompute_stops_early)."""
        last = [p for p in kind.products if p.in_attention == in_attention][-1:]
        if not last or last[0].batch > 1 or not recompute_stops_early(self.graph, self.kernels):
            return 0.0
        return self._product(self.tokens, last[0].n, last[0].k, 1)[0]

    def _scores(self, kind: LayerShape) -> tuple[float, float]:
        """Return forward and backward seconds of attention over S x S."""
        graph, s = self.graph, self.s
        if not kind.attention_flops:
            return 0.0, 0.0
        degree = self.shapes.attention_degree
        heads = self.sequences * graph.attention_heads / (degree * s.context)
        if self._is_eager:
            passes = self.c.of_family("score_passes", self.kernels.family)
            forward = eager_attention_seconds(
                self.device,
                self.c,
                heads=heads,
                head_dim=graph.head_dim,
                length=self.length,
                passes=passes,
            )
            return forward, BACKWARD_OVER_FORWARD * forward
        return fused_attention_seconds(
            self.device,
            self.c,
            flops=kind.attention_flops * self.length * self.tokens / degree,
            head_dim=graph.head_dim,
            length=self.length,
        )

    def _moved(self, kind: LayerShape) -> tuple[float, float]:
        """Return forward seconds of memory-bound kernels, inside and outside the attention
        module."""
        passes, hidden, graph, shapes = (
            self.kernels,
            self.graph.hidden_size,
            self.graph,
            self.shapes,
        )
        dropout = passes.dropout if graph.max_dropout > 0 else 0.0
        norms = kind.fused_norms * passes.norm + kind.composed_norms * passes.eager_rms_norm
        whole = (norms + 2 * (passes.residual + dropout)) * hidden
        cut = self._feed_forward_elements(kind)
        rotated = (graph.attention_heads + graph.key_value_heads) * graph.head_dim
        inside = kind.attention_elements + (0.0 if shapes.positions else passes.rotary * rotated)
        sharers = self.s.tensor if self.s.sequence_parallel else 1

        def seconds(elements: float) -> float:
            return traffic_seconds(self.device, self.c, self.tokens * self._element * elements)

        return (
            seconds(inside / shapes.attention_degree) + self._head_norm_seconds(kind),
            seconds(whole / sharers + cut),
        )

    def _head_norm_seconds(self, kind: LayerShape) -> float:
        """Return forward seconds of the norms of queries and keys."""
        elements = self.kernels.eager_rms_norm * kind.head_norm_features
        moved = self.tokens * self._element * elements / self.shapes.attention_degree
        rate = traffic_seconds if self.kernels.family != "hf" else head_norm_seconds
        return rate(self.device, self.c, moved)

    def _feed_forward_elements(self, kind: LayerShape) -> float:
        """Return the elements of a token that kernels of the feed-forward network move."""
        hidden = self.graph.hidden_size
        kept = 4 * hidden + (hidden if self.graph.max_dropout > 0 else 0)
        inner = max(0, kind.elements - kind.attention_elements - kept)
        moved = self.kernels.feed_forward * inner
        if activation_name(self.graph) in COMPOSED_ACTIVATIONS:
            moved += self.kernels.composed_activation * self.graph.feed_forward_size
        return moved / self.shapes.feed_forward_degree


def activation_name(graph: ModelGraph) -> str:
    """Return the feed-forward's activation as transformers names it; "" where it is not said."""
    for config in (graph.config, graph.config.get("text_config")):
        for key in ("hidden_act", "activation_function", "hidden_activation"):
            if isinstance(config, dict) and isinstance(name := config.get(key), str):
                return name
    return ""


# Forward and backward passes of one micro-batch, kernels and collectives. They add up over layers,
# so any stage is a difference of prefix sums.


Floats = NDArray[np.float64]

# Forward share of a micro-batch's cost beyond its layers; a backward pass is two forward passes.
FORWARD_SHARE = 1 / 3
# Shares of the host's launches around a collective: the backward pass launches two kernels for one
# of the forward pass.
LAUNCHED_FORWARD, LAUNCHED_BACKWARD = 2 / 3, 4 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Hold seconds of one micro-batch, prefix sums over graph.layers (length layers + 1).

    backward_*: recomputation included, except for partial checkpointing partial_recompute_*: what
    each decoder layer adds if partial checkpointing recomputes it
    per_rank_seconds: compute beyond the layers, once a pipeline rank
    send_seconds: one message over one boundary
    is_host_bound: the host's launches bound a layer's forward pass, not the GPU
    """

    forward_compute: tuple[float, ...]
    backward_compute: tuple[float, ...]
    forward_comm: tuple[float, ...]
    backward_comm: tuple[float, ...]
    partial_recompute_compute: tuple[float, ...]
    partial_recompute_comm: tuple[float, ...]
    per_rank_seconds: float
    send_seconds: float
    is_host_bound: bool


@hashed_key
def _pass_times_shared_key(problem: Problem, c: Constants) -> Hashable:
    r, cluster = problem.recipe, problem.cluster
    return (
        (cluster.nvlink_domains > 1, cluster.nvlink_domain_gpus, cluster.gpus_per_node),
        (cluster.fabric, cluster.fabric_is_given),
        (cluster.intra_node_bytes_per_second, cluster.inter_node_bytes_per_second),
        (
            cluster.gpu.hbm_bytes_per_second,
            cluster.gpu.is_cpu,
            problem.graph.identity,
            r.training.sequence_length,
        ),
        (r.target, r.assume.kernels, r.assume.mfu is None, r.assume.expert_imbalance),
        r.training.objective.name,
        c,
    )


def _pass_times_key(priced: PricedLayout) -> Hashable:
    """Return all that the layers' seconds depend on, except the placement of ranks."""
    s = priced.strategy
    return (
        _pass_times_shared_key(priced.problem, priced.constants),
        layer_seconds(priced.recipe, priced.graph, priced.cluster.gpu, s, priced.constants),
        (
            priced.element_bytes,
            priced.accumulation_dtype,
            priced.adapter_sizes,
            priced.frozen,
            priced.traits,
        ),
        # The schedule decides only the stage of a tied tensor.
        priced.shapes.shared_numel > 0 and s.schedule,
        (
            s.pipeline > 1,
            s.context,
            s.expert,
            s.tensor,
            priced.sequences,
        ),
        (s.expert_tensor, s.expert_dispatcher, s.overlapped_share),
        (s.checkpointing, priced.checkpointed_activations is None, s.sequence_parallel),
    )


def pass_times(priced: PricedLayout) -> PassTimes:
    """Return the passes of the layout's model, for any stage boundaries.

    They do not depend on the ZeRO stage, unless the engine's overhead was measured.
    """
    return replace(
        _of_layers(priced),
        per_rank_seconds=micro_batch_overhead_seconds(priced),
        send_seconds=pipeline_send_seconds(priced),
    )


@memoize(_pass_times_key)
def _of_layers(priced: PricedLayout) -> PassTimes:
    s, c, gpu = priced.strategy, priced.constants, priced.cluster.gpu
    seconds = layer_seconds(priced.recipe, priced.graph, gpu, s, c)
    forward, recompute = _each(seconds.forward), _each(seconds.recompute)
    partly = np.zeros(len(priced.graph.layers))
    if priced.checkpointed_activations is not None:
        # Embedding and head are never checkpointed; a chunked loss stays.
        partly[1:-1] = recompute[1:-1]
    backward = _each(seconds.backward) + (recompute - partly)
    if priced.recipe.assume.mfu is None:
        backward = backward + _accumulation_seconds(priced)
    forward_comm, backward_comm, partial_recompute_comm = _tensor_comm_seconds(
        priced, forward, backward, partly
    )
    is_floor = s.tensor > 1 and priced.traits.tensor_parallel_launch_cost == "floor"
    launches = 2 * LAUNCHED_FORWARD * _collective_launch_seconds(priced) if is_floor else 0.0
    # The host is the bound where a layer takes as long as its launches.
    is_host_bound = bool(
        len(forward_comm) > 2 and forward_comm[1] + forward[1] <= launches * (1 + 1e-9)
    )
    if s.context > 1 or s.expert > 1:
        exchange = np.array(
            [
                _context_exchange_seconds(priced) * (layer.kind == "decoder")
                for layer in priced.graph.layers
            ]
        )
        rows = np.array(expert_exchange_seconds(priced))
        partial = priced.checkpointed_activations is not None
        repeated = not partial and s.recomputes_attention
        whole = not partial and s.recomputes_experts
        forward_comm += exchange + rows
        backward_comm += (1 + repeated) * exchange + (1 + whole) * rows
        partial_recompute_comm += (exchange + rows) * partial
    if floor := _expert_host_seconds(priced):
        has_experts = np.array(
            [
                kind >= 0 and priced.shapes.kinds[kind].experts_per_token > 0
                for kind in priced.shapes.kind_of
            ]
        )
        idle = floor * FORWARD_SHARE - forward - forward_comm
        forward_comm = forward_comm + has_experts * np.maximum(0.0, idle)
        idle = floor * (1 - FORWARD_SHARE) - backward - backward_comm
        backward_comm = backward_comm + has_experts * np.maximum(0.0, idle)
    passes = 1 + priced.recipe.training.objective.traits.forward_only_passes
    return PassTimes(
        forward_compute=tuple(passes * each for each in seconds.forward),
        backward_compute=_sums(backward),
        forward_comm=_sums(passes * forward_comm),
        backward_comm=_sums(backward_comm),
        partial_recompute_compute=_sums(partly),
        partial_recompute_comm=_sums(partial_recompute_comm),
        per_rank_seconds=0.0,
        send_seconds=0.0,
        is_host_bound=is_host_bound,
    )


def _expert_host_seconds(priced: PricedLayout) -> float:
    """Return the host's seconds for an expert layer's micro-batch under Megatron-Core, forward and
    backward, which bound what its GPU takes; 0 elsewhere."""
    if priced.cluster.gpu.kind.launches_are_free or not priced.kernels.host_bounds_experts:
        return 0.0
    c = priced.constants
    # Half of what hides of the exchange: launches of one micro-batch run while another computes.
    hidden = c.expert_overlap_share * priced.strategy.overlapped_share / 2
    seconds = c.expert_host_seconds_deepep if has_deepep(priced) else c.expert_host_seconds_alltoall
    return seconds * (1 - hidden)


def micro_batch_overhead_seconds(priced: PricedLayout) -> float:
    """Return a micro-batch's seconds beyond the layers on a pipeline rank."""
    if priced.recipe.assume.mfu is not None:
        return 0.0
    otherwise = 0.0 if priced.cluster.gpu.is_cpu else priced.constants.micro_batch_seconds
    seconds = host_overhead_seconds(priced.recipe, priced.graph, priced.strategy, otherwise)
    passes = priced.recipe.training.objective.traits.forward_only_passes
    return seconds * (1 + passes * FORWARD_SHARE)


def _each(sums: tuple[float, ...] | tuple[int, ...]) -> Floats:
    return np.diff(np.array(sums, dtype=np.float64))


def _sums(values: Floats) -> tuple[float, ...]:
    return (0.0, *np.cumsum(values).tolist())


def _accumulation_seconds(priced: PricedLayout) -> Floats:
    """Return the seconds in which each micro-batch's gradient is added to the accumulated one."""
    s = priced.strategy
    numel = _each(priced.adapter_sizes or priced.shapes.numel)
    if priced.traits.fuses_accumulation:
        return np.zeros(len(numel))
    if priced.frozen:
        numel -= _each(priced.frozen)
    if s.shards_experts:
        numel -= _each(priced.shapes.expert_numel) * (1 - 1 / s.expert_shard_ratio)
    if not priced.adapter_sizes and (priced.strategy.ends_share_rank):
        numel[-1] -= (
            priced.shapes.shared_numel
        )  # the embedding is on the head's rank, and a tied tensor there is one
    moved = priced.element_bytes + 2 * element_bytes(priced.accumulation_dtype)
    rate = priced.cluster.gpu.hbm_bytes_per_second * priced.constants.memory_efficiency
    return moved * numel / rate


def _tensor_comm_seconds(
    priced: PricedLayout,
    ahead_compute: Floats,
    back_compute: Floats,
    partial_recompute_compute: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Return each layer's tensor-parallel seconds: forward, backward, and partial recompute.

    Counts all-reduces (see layer_all_reduces) and the gathers of linears whose output is gathered.
    The embedding reduces its output forward, the head its input's gradient backward.

    *_compute: each layer's compute, with which the host's launches overlap (see
    _collective_launch_seconds)
    """
    s, c, cluster, shapes = priced.strategy, priced.constants, priced.cluster, priced.shapes
    layers = len(priced.graph.layers)
    if s.tensor == 1:
        return np.zeros(layers), np.zeros(layers), np.zeros(layers)
    group, message = priced.group(s.tensor, 1), priced.tokens * priced.element_bytes
    reduce = all_reduce_seconds(cluster, c, group, message * priced.graph.hidden_size)
    ahead, recompute = layer_all_reduces(priced)
    partly = 0 if priced.checkpointed_activations is None else recompute
    back = ahead + recompute - partly + _repeated_reduces(priced)
    features, gathers = _each(shapes.gathered_features), _each(shapes.gathered_products)
    moved = np.zeros(layers)
    if features.any():
        # Half is the output's gather forward, half the input gradient's reduction backward.
        seconds_of = functools.cache(
            lambda f, n: gather_seconds(cluster, c, group, f * message / 2, n)
        )
        moved = np.array(list(map(seconds_of, features.tolist(), map(int, gathers.tolist()))))
    host, added = (
        _collective_launch_seconds(priced),
        priced.traits.tensor_parallel_launch_cost == "added",
    )

    def idle(launched: Floats, collectives: Floats, moved: Floats, compute: Floats) -> Floats:
        """Return how long each layer's GPU waits for the host's launches."""
        return collectives * host if added else np.maximum(0.0, launched * host - moved - compute)

    again_launched, launched = np.full(layers, float(partly)), ahead + gathers
    forward = ahead * reduce + moved
    forward += idle(LAUNCHED_FORWARD * launched, launched, forward, ahead_compute)
    backward = back * reduce + moved
    launched_back = LAUNCHED_BACKWARD * launched + LAUNCHED_FORWARD * (back - ahead)
    backward += idle(launched_back, back + gathers, backward, back_compute)
    parts = partly * reduce + np.zeros(layers)
    parts += idle(
        LAUNCHED_FORWARD * again_launched, again_launched, parts, partial_recompute_compute
    )
    ends = reduce + (host if added else 0.0)
    forward[0], forward[-1] = ends, 0.0
    backward[0], backward[-1] = 0.0, ends
    parts[0] = parts[-1] = 0.0
    return forward, backward, parts


def _repeated_reduces(priced: PricedLayout) -> Floats:
    """Return each layer's all-reduces that recompute_modules repeat."""
    kinds = [*(repeats_feed_forward_reduce(priced, kind) for kind in priced.shapes.kinds), False]
    found: Floats = np.array(kinds, dtype=np.float64)[list(priced.shapes.kind_of)]
    return found  # -1: no decoder layer


def _collective_launch_seconds(priced: PricedLayout) -> float:
    """Return the host's seconds for the launches around one tensor-parallel collective."""
    c, s, cluster = priced.constants, priced.strategy, priced.cluster
    is_hidden = priced.traits.tensor_parallel_launch_cost == "hidden"
    if is_hidden or cluster.gpu.kind.launches_are_free:
        return 0.0
    crossing = s.pipeline > 1 and cluster.nvlink_domains > 1
    crossing = crossing and priced.traits.pipeline_raises_launch_cost
    return c.collective_host_seconds + (c.pipeline_host_seconds * s.tensor if crossing else 0.0)


def partial_recompute_seconds(
    priced: PricedLayout, found: PassTimes, blocks: Iterable[ModelChunk]
) -> tuple[float, float]:
    """Compute and collectives of a micro-batch's backward pass that partial checkpointing adds on
    these stages."""
    if priced.checkpointed_activations is None:
        return 0.0, 0.0
    ends = [(block.start, priced.checkpointed_stop(block.start, block.stop)) for block in blocks]

    def over(sums: tuple[float, ...]) -> float:
        return sum(sums[stop] - sums[start] for start, stop in ends)

    return over(found.partial_recompute_compute), over(found.partial_recompute_comm)


def _context_exchange_seconds(priced: PricedLayout) -> float:
    """Return the seconds of context parallelism around each layer's attention.

    All-to-alls exchange tokens for heads of queries, output, keys and values, each of which leaves
    (s - 1) / s of itself (arXiv 2309.14509). Key heads that s does not divide are repeated. The
    backward pass takes the same, as does recomputed attention. Megatron gathers the keys and values
    of the whole sequence, and reduces their gradients (arXiv 2407.21783, 3.3.2).
    """
    s = priced.strategy
    if s.context == 1:
        return 0.0
    group = priced.group(s.context, s.tensor)
    calls = 2 if priced.traits.context_gathers_kv else 4
    return gather_seconds(
        priced.cluster, priced.constants, group, context_exchange_bytes(priced), calls
    )


def pipeline_send_seconds(priced: PricedLayout) -> float:
    """Return the seconds of an activation or gradient to the neighbour, data x context x tensor
    ranks away.

    DeepSpeed (pipe_partitioned) and Megatron (scatter-gather, arXiv 2104.04473) send a share from
    each tensor rank and gather it there; DualPipeV sends the whole. Megatron sends both ways at
    once, DeepSpeed one after the other. A forward-only pass adds an activation to each pair of an
    activation and a gradient; the seconds of a message include its share.
    """
    s, c, cluster = priced.strategy, priced.constants, priced.cluster
    if s.pipeline == 1:
        return 0.0
    message = hidden_state_bytes(priced)
    share = s.message_shards
    seconds = send_seconds(cluster, c, s.tensor * s.zero_world_size, message / share)
    if share > 1 and not s.sequence_parallel:
        seconds += gather_seconds(cluster, c, priced.group(s.tensor, 1), message)
    seconds *= 1 + priced.recipe.training.objective.traits.forward_only_passes / 2
    return seconds / 2 if priced.traits.bidirectional_p2p and s.virtual_stages == 1 else seconds


# The same seconds by kind of kernel, for a comparison with a profiled step.


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSeconds:
    """Split a micro-batch's compute on a pipeline rank by kind of kernel.

    attention: fused attention; the products of eager attention are products
    memory_bound: everything else that the device computes
    host: the device waits for the host's launches
    """

    products: float
    attention: float
    memory_bound: float
    host: float

    def __add__(self, other: KernelSeconds) -> KernelSeconds:
        return KernelSeconds(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            memory_bound=self.memory_bound + other.memory_bound,
            host=self.host + other.host,
        )

    def scaled_to(self, seconds: float) -> KernelSeconds:
        """Return the same shares of other seconds; without shares all of them are memory-bound."""
        total = self.products + self.attention + self.memory_bound + self.host
        if not total:
            return _kernels(memory_bound=seconds)
        share = seconds / total
        return KernelSeconds(
            products=self.products * share,
            attention=self.attention * share,
            memory_bound=self.memory_bound * share,
            host=self.host * share,
        )


def _kernels(
    *,
    products: float = 0.0,
    attention: float = 0.0,
    memory_bound: float = 0.0,
    host: float = 0.0,
) -> KernelSeconds:
    return KernelSeconds(
        products=products, attention=attention, memory_bound=memory_bound, host=host
    )


def kernel_seconds(priced: PricedLayout, rank: int) -> KernelSeconds | None:
    """Return the kinds of a micro-batch's `stage_seconds(...).compute` on a pipeline rank, which
    they add up to; None where `assume.mfu` prices all kernels as one."""
    if priced.recipe.assume.mfu is not None:
        return None
    recipe, graph, gpu, s = priced.recipe, priced.graph, priced.cluster.gpu, priced.strategy
    model = _MicroBatchCosts(recipe, graph, gpu, s, priced.constants)
    kinds = [model.decoder_kernels(kind) for kind in priced.shapes.kinds]
    seconds = layer_seconds(recipe, graph, gpu, s, priced.constants)
    forward, backward, again = (
        _each(part) for part in (seconds.forward, seconds.backward, seconds.recompute)
    )
    accumulated = _accumulation_seconds(priced)
    found = _kernels(host=micro_batch_overhead_seconds(priced))
    for block in priced.ranks[rank]:
        recomputed_stop = priced.checkpointed_stop(block.start, block.stop)
        for at in range(block.start, block.stop):
            kind = priced.shapes.kind_of[at]
            if kind < 0:
                passes = model.end_kernels(
                    graph.layers[at].kind, priced.shapes.head_width, forward[at], backward[at]
                )
            else:
                ahead, back = kinds[kind]
                passes = ahead.scaled_to(float(forward[at])), back.scaled_to(float(backward[at]))
            found += passes[1] + _kernels(memory_bound=float(accumulated[at]))
            for _ in range(1 + recipe.training.objective.traits.forward_only_passes):
                found += passes[0]
            is_recomputed = priced.checkpointed_activations is None or (
                at < recomputed_stop or kind < 0
            )
            if again[at] and is_recomputed:
                found += _recomputed_kernels(passes[0], float(again[at]), s.checkpointing)
    return found


def _recomputed_kernels(
    forward: KernelSeconds, seconds: float, mode: LayerCheckpointing
) -> KernelSeconds:
    """Split recomputation as the forward pass; what "selective" recomputes is attention first."""
    if mode != "selective":
        return forward.scaled_to(seconds)
    attention = min(seconds, forward.attention)
    rest = replace(forward, attention=0.0).scaled_to(seconds - attention)
    return rest + _kernels(attention=attention)
