"""Traced FLOPs of every type that can be split, against torch's counter over the plain tiny
model."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwright.diagnostics import Refusal
from shardwright.models.graph_builder import build_model_graph
from tests.unit.models.factory import model_section
from tests.unit.models.test_trace import KERNELS, flops
from tests.zoo import configs

SEED = 10
SAMPLE = 3
LENGTHS = (64, 32)
"""Whole chunks of the linear attentions, of 64; positions that begin behind a padding index do not
reach that far."""

COUNTED = {
    "blt": "patch sizes come from the entropies of its own predictions",
    "dbrx": "loops over the experts that tokens chose",
    "jetmoe": "lists how many tokens each expert got",
    "longcat_flash": "lists the tokens that its experts without weights got",
    "qwen4_exp": "lists the positions that its indexer chose",
    "qwen4_exp_text": "lists the positions that its indexer chose",
    "xmod": "picks the tokens of each language",
}
"""Their own code asks for values, which fake tensors do not have: FLOPs are counted from the
parameters' shapes."""


CONSTANT = {
    "cpmant": "32 positions of its own before each text: a constant, which two lengths do not tell"
}
"""Off by up to two percent at these short lengths."""


def difference(model_type: str) -> tuple[float, float] | None:
    """Relative, forward and backward; None for a type that cannot be split."""
    try:
        graph = build_model_graph(model_section(dict(configs.tiny_config(model_type))))
    except Refusal:
        return None
    sources = {layer.flops_source for layer in graph.layers}
    counted = any(source.startswith("counted: ") for source in sources)
    assert counted == (model_type in COUNTED), f"{model_type}: {sources}"
    model = configs.build(model_type)
    assert graph.total_parameters == sum(p.numel() for p in model.parameters())
    for length in LENGTHS:
        ids = torch.randint(
            3, configs.TEXT_VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0)
        )
        try:
            with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
                logits = model(input_ids=ids, use_cache=False).logits
                forward = counter.get_total_flops()
                logits.sum().backward()
        except (IndexError, RuntimeError):
            continue
        ours = flops(graph, length)
        return ours[0] / forward - 1, ours[1] / (counter.get_total_flops() - forward) - 1
    raise AssertionError(f"{model_type} runs at no length")


def check(model_type: str) -> None:
    """Backward is looser: where heads differ in size the CPU has no fused attention, and does not
    compute its scores a second time as a GPU does."""
    found = difference(model_type)
    if found is not None and model_type not in COUNTED:
        limit = 0.02 if model_type in CONSTANT else 0.01
        assert abs(found[0]) < limit and -limit < found[1] < 0.06, f"{model_type}: {found}"


@pytest.mark.parametrize(
    "model_type",
    sorted(random.Random(SEED).sample([t for t in configs.RUNNABLE if t not in COUNTED], SAMPLE)),
)
def test_sample(model_type: str) -> None:
    check(model_type)


@pytest.mark.prove
def test_all_types() -> None:
    wrong: list[str] = []
    for model_type in configs.RUNNABLE:
        try:
            check(model_type)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong
