"""The tower in the estimate: its work is the first stage's, which gets fewer decoder layers;
frozen, it goes forward alone. And what `model.freeze` leaves of states and gradients."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.vision_encoder_flops import (
    SequenceImages,
    largest_image_sequence,
    vision_encoder_activation_bytes,
    vision_encoder_flops,
    vision_encoder_layer_costs,
)
from shardwright.layout.layout_estimate import Estimate
from shardwright.models.model_graph import (
    ImageCost,
    ModelGraph,
    Parameter,
    SavedVisionActivations,
    VisionEncoder,
    VisionLayer,
)
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_types import DataSection, ImagesSection, Recipe
from shardwright.search.layout_resolution import estimate_layout
from tests.unit.cost.test_estimate import change
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of, recipe_of

BLOCKS = [f"model.visual.blocks.{n}" for n in range(4)]
PROJECTOR = "model.visual.merger"
HIDDEN, INNER = 1280, 3420


def layer(name: str, forward: int) -> VisionLayer:
    sizes: dict[Checkpointing, int] = {"none": 34 * HIDDEN, "full": 2 * HIDDEN}
    kept = [
        SavedVisionActivations(checkpointing=mode, element_bytes=2, bytes=ImageCost(per_patch=size))
        for mode, size in sizes.items()
    ]
    work = ImageCost(per_patch=forward, per_pair=4 * HIDDEN)
    return VisionLayer(
        name=name,
        widths=(INNER, HIDDEN),
        forward=work,
        backward=ImageCost(per_patch=2 * forward, per_pair=10 * HIDDEN),
        kept=tuple(dataclasses.replace(k, element_bytes=e) for k in kept for e in (2, 4)),
    )


def seeing(blocks: int = 4) -> ModelGraph:
    """Llama 3 8B behind a tower as wide as Qwen2.5-VL's."""
    plain, names = graph_of(LLAMA_8B), [f"model.visual.blocks.{n}" for n in range(blocks)]
    own = [Parameter(name=f"{name}.mlp.weight", shape=(INNER, HIDDEN)) for name in names]
    own += [Parameter(name="model.visual.patch.weight", shape=(HIDDEN, 1176))]
    own += [Parameter(name=f"{PROJECTOR}.weight", shape=(4096, HIDDEN))]
    first = dataclasses.replace(plain.layers[0], parameters=(*plain.layers[0].parameters, *own))
    vision = VisionEncoder(
        patch=14,
        patches=0,
        patches_per_token=4.0,
        layers=(
            *(layer(name, 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)) for name in names),
            layer("", 10**6),
        ),
        tower=("model.visual",),
        projector=(PROJECTOR,),
    )
    return dataclasses.replace(
        plain,
        layers=(first, *plain.layers[1:]),
        task="image-text-to-text",
        vision=vision,
        config_hash=f"seeing-{blocks}",  # all that is remembered goes by it
    )


PIXELS = 14 * 14 * 4096


def recipe(
    freeze: tuple[str, ...] = (), per_row: int = 4, max_pixels: int = PIXELS, length: int = 4096
) -> Recipe:
    plain = recipe_of(LLAMA_8B, training={"sequence_length": length})
    data = DataSection(
        kind="chat",
        path="data.jsonl",
        tokenizer="byte",
        packing=False,
        shuffle=True,
        images=ImagesSection(per_row=per_row, max_pixels=max_pixels),
    )
    return dataclasses.replace(
        plain, data=data, model=dataclasses.replace(plain.model, freeze=freeze)
    )


def estimate(
    graph: ModelGraph, given: Recipe, pipeline: int = 4, zero_stage: int = 1, again: str = "none"
) -> Estimate:
    layout = change(
        tensor=1,
        pipeline=pipeline,
        data=8 // pipeline,
        gradient_accumulation_steps=2 * pipeline,
        micro_batch_size=1,
        zero_stage=zero_stage,
        activation_checkpointing=again,
    )
    return estimate_layout(problem_of(given, graph), layout)


def test_a_row_holds_no_more_patches_than_it_has_tokens_for() -> None:
    graph = seeing()
    assert largest_image_sequence(recipe(length=2048), graph) == SequenceImages(
        image_count=2, patches=4096
    )
    assert largest_image_sequence(recipe(length=512), graph) == SequenceImages(
        image_count=1, patches=2048
    )
    assert largest_image_sequence(recipe(max_pixels=14 * 14 * 64), graph) == SequenceImages(
        image_count=4, patches=64
    )
    assert largest_image_sequence(recipe(), graph_of(LLAMA_8B)) is None


def test_pictures_count_one_by_one() -> None:
    """Attention is inside a picture: four of them are four times one."""
    graph = seeing()
    one, four = (vision_encoder_flops(recipe(per_row=n), graph)[0] for n in (1, 4))
    n, per_patch = 4096, 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
    assert one == 4 * (per_patch * n + 4 * HIDDEN * n**2) + 10**6 * n + 4 * HIDDEN * n**2
    assert four == 4 * one


def test_a_search_counts_the_layers_once() -> None:
    """Every layout asks for them, and finding the trained ones reads all parameters' names."""
    plain, again = recipe(), recipe()
    graph = seeing()
    costs = vision_encoder_layer_costs(plain, graph, "none", 2)
    assert vision_encoder_layer_costs(again, graph, "none", 2) is costs
    frozen = vision_encoder_layer_costs(recipe(("vision",)), graph, "none", 2)
    assert frozen is not costs and frozen != costs


def test_the_first_stage_gets_fewer_decoder_layers() -> None:
    """Also where nothing fits, as without checkpointing here."""
    plain, with_tower = (
        estimate(graph, recipe(), again="full") for graph in (graph_of(LLAMA_8B), seeing(32))
    )
    assert with_tower.memory.fits and with_tower.boundaries[1] <= plain.boundaries[1] - 5
    nothing_fits = estimate(seeing(32), recipe())
    assert not nothing_fits.memory.fits and nothing_fits.boundaries[1] <= plain.boundaries[1] - 5
    assert with_tower.time.step_seconds > 1.1 * plain.time.step_seconds


def test_a_frozen_tower_goes_forward_alone_and_keeps_nothing() -> None:
    graph = seeing(32)
    all_of_it, frozen = recipe(), recipe(("vision", "projector"))
    assert vision_encoder_flops(frozen, graph) == (vision_encoder_flops(all_of_it, graph)[0], 0)
    assert vision_encoder_activation_bytes(frozen, graph, "none", 2) == 0
    # The projector's own gradient asks for no block's; the tower's asks for the projector's.
    aligned = vision_encoder_flops(recipe(("vision",)), graph)[1]
    assert graph.vision is not None
    skipped = [4 * block.backward.of(4096) for block in graph.vision.layers[:-1]]
    assert aligned == vision_encoder_flops(recipe(), graph)[1] - sum(skipped)
    assert vision_encoder_flops(recipe(("projector",)), graph) == vision_encoder_flops(
        all_of_it, graph
    )


def test_blocks_of_which_the_first_are_frozen_begin_behind_them() -> None:
    graph = seeing(4)
    frozen = recipe((*BLOCKS[:3], "model.visual.patch.weight"))
    row_of = [4 * block.backward.of(4096) for block in graph.vision.layers]  # type: ignore[union-attr]
    assert vision_encoder_flops(frozen, graph)[1] == row_of[3] + row_of[4]
    # In the middle: the gradient goes through a frozen block, to its input alone.
    assert vision_encoder_flops(recipe((BLOCKS[2],)), graph)[1] == sum(row_of) - row_of[2] / 2


def test_full_checkpointing_keeps_the_inputs_of_blocks() -> None:
    graph, given = seeing(32), recipe()
    whole, inputs = (
        vision_encoder_activation_bytes(given, graph, mode, 2) for mode in ("none", "full")
    )
    patches = 4 * 4096
    assert whole == 33 * 34 * HIDDEN * patches and inputs == (32 * 2 + 34) * HIDDEN * patches


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_states_are_those_of_what_is_trained(zero_stage: int) -> None:
    graph = seeing(4)
    trained = sum(p.numel for p in graph.layers[0].parameters if p.name.startswith("model.visual"))
    (whole,), (stage,) = (
        estimate(graph, recipe(freeze), pipeline=1, zero_stage=zero_stage).memory.stages
        for freeze in ((), ("text",))
    )
    assert stage.parameters_bytes == whole.parameters_bytes
    assert stage.optimizer_bytes == pytest.approx(12 * trained / 8)
    assert stage.gradients_bytes == pytest.approx(
        whole.gradients_bytes * trained / graph.total_parameters, rel=1e-6
    )


def test_a_frozen_text_part_has_no_gradients_of_weights() -> None:
    graph = seeing(4)
    all_of_it, frozen = (
        estimate(graph, recipe(freeze), pipeline=1).time for freeze in ((), ("text",))
    )
    tower = sum(vision_encoder_flops(recipe(), graph)) * 16
    flops = [
        (t.model_tflops_per_gpu * 1e12 * t.step_seconds * 8 - tower) for t in (all_of_it, frozen)
    ]
    assert flops[1] == pytest.approx(flops[0] * 2 / 3)
    assert frozen.compute_seconds < 0.8 * all_of_it.compute_seconds
