"""The learning rate of each update against closed forms and transformers' own schedulers, and what
decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, optimization, trainer_utils

from shardwright.parallel.learning_rate import decay_groups, learning_rate
from shardwright.plan.plan import PlanScheduler
from shardwright.recipe.learning_rate_schedules import (
    OPTIONAL_KEYS,
    SCHEDULES,
    UNPLANNED_SCHEDULES,
)
from shardwright.recipe.recipe_schema import recipe_schema
from shardwright.recipe.recipe_types import OptimizerSection

LR, STEPS, WARMUP, DECAY = 3e-4, 40, 7, 11


def rates(
    name: str,
    *,
    steps: int = STEPS,
    warmup: int = WARMUP,
    low: float = 0.0,
    decay: int | None = None,
    **keys: Any,
) -> Any:
    optimizer = OptimizerSection(name="adamw", lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    scheduler = PlanScheduler(name=name, warmup_steps=warmup, min_lr=low, decay_steps=decay, **keys)
    return [learning_rate(optimizer, scheduler, steps, k) for k in range(1, steps + 1)]


THEIRS: dict[str, Callable[[torch.optim.Optimizer, int, float], Any]] = {
    "constant": lambda o, warmup, low: optimization.get_constant_schedule_with_warmup(o, warmup),
    "linear": lambda o, warmup, low: optimization.get_linear_schedule_with_warmup(o, warmup, STEPS),
    "cosine": lambda o, warmup, low: optimization.get_cosine_with_min_lr_schedule_with_warmup(
        o, warmup, STEPS, min_lr=low
    ),
    "wsd": lambda o, warmup, low: optimization.get_wsd_schedule(
        o, warmup, DECAY, num_training_steps=STEPS, decay_type="linear", min_lr_ratio=low / LR
    ),
}


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize(
    ("name", "low"), [*((name, 0.0) for name in THEIRS), ("cosine", 3e-5), ("wsd", 3e-5)]
)
def test_every_update_has_the_rate_of_transformers_own_scheduler(
    name: str, low: float, warmup: int
) -> None:
    """What theirs gives update k + 1 is what ours gives update k: none is made at a rate of 0 for
    its warm-up."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    theirs, wanted = THEIRS[name](optimizer, warmup, low), []
    for _ in range(STEPS):
        optimizer.step()
        theirs.step()
        wanted += theirs.get_last_lr()
    begin = (
        warmup if name == "wsd" and low else 0
    )  # that one of theirs warms up from the lowest rate, not from 0
    found = rates(name, warmup=warmup, low=low, decay=DECAY)
    assert found[begin:] == pytest.approx(wanted[begin:], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("warmup", [0, 1, 2, 9, 150])
@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine"])
def test_short_and_long_runs_against_get_scheduler(name: str, warmup: int, steps: int) -> None:
    """transformers gives update 1 the rate at 0, which is 0 where there is a warm-up; here it is
    the rate at 1. The last of these, behind transformers' last update, is 0 of a curve that falls:
    SW3220 tells where that matters."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    theirs, wanted = optimization.get_scheduler(name, optimizer, warmup, steps), []
    assert theirs.get_last_lr() == [0.0 if warmup else LR]
    for _ in range(steps):
        optimizer.step()
        theirs.step()
        wanted += theirs.get_last_lr()
    found = rates(name.removesuffix("_with_warmup"), steps=steps, warmup=warmup)
    last = -1 if warmup == steps else None  # refused in recipes (SW1205): ours ends at the peak
    assert found[:last] == pytest.approx(wanted[:last], rel=1e-12, abs=1e-18)
    assert (found[-1] <= 1e-18) == (name in ("linear", "cosine") and warmup < steps)


# Name in transformers -> its arguments, and ours where they differ.
SETTINGS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "linear": [({}, {})],
    "cosine": [({}, {}), ({"num_cycles": 1.25}, {"num_cycles": 1.25})],
    "cosine_with_restarts": [({}, {}), ({"num_cycles": 3}, {"num_cycles": 3.0})],
    "polynomial": [
        ({}, {}),
        ({"lr_end": 0.0, "power": 0.7}, {"lr_end": 0.0, "power": 0.7}),
        ({"lr_end": 2.9e-4, "power": 3.0}, {"lr_end": 2.9e-4, "power": 3.0}),
    ],
    "constant_with_warmup": [({}, {})],
    "inverse_sqrt": [({}, {}), ({"timescale": 13}, {"timescale": 13})],
    "cosine_with_min_lr": [
        ({"min_lr": 3e-5}, {"low": 3e-5}),
        ({"min_lr_rate": 0.3, "num_cycles": 1.5}, {"low": 0.3 * LR, "num_cycles": 1.5}),
    ],
    "cosine_warmup_with_min_lr": [
        ({"min_lr": 3e-5}, {"low": 3e-5}),
        ({"min_lr_rate": 0.0, "num_cycles": 1.5}, {"num_cycles": 1.5}),
        (
            {"min_lr_rate": 0.1, "warmup_lr_rate": 0.25},
            {"low": 0.1 * LR, "warmup_lr_rate": 0.25},
        ),
    ],
    "warmup_stable_decay": [
        ({"num_decay_steps": 1}, {"decay": 1}),
        ({"num_decay_steps": 9, "num_cycles": 1.5}, {"decay": 9, "num_cycles": 1.5}),
        *(
            (
                {
                    "num_decay_steps": 9,
                    "warmup_type": kind,
                    "decay_type": kind,
                    "min_lr_ratio": 0.2,
                },
                {"decay": 9, "warmup_type": kind, "decay_type": kind, "low": 0.2 * LR},
            )
            for kind in ("linear", "cosine", "1-sqrt")
        ),
    ],
}
CASES = [(name, theirs, ours) for name, each in SETTINGS.items() for theirs, ours in each]


def rates_of_transformers(name: str, warmup: int, steps: int, settings: dict[str, Any]) -> Any:
    """Return the rates of updates 1 to steps, and what the scheduler gives after the last one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = optimization.get_scheduler(name, optimizer, warmup, steps, settings)
    found = theirs.get_last_lr()
    for _ in range(steps):
        optimizer.step()
        theirs.step()
        found += theirs.get_last_lr()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 2, 7])
@pytest.mark.parametrize(("name", "theirs", "ours"), CASES)
def test_every_schedule_of_transformers_update_by_update(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], warmup: int
) -> None:
    """Compare each of 1 to 101 updates: `first_step: 0` counts as transformers. Without it update k
    takes the rate of update k + 1, except where transformers itself counts from 1."""
    for steps in (*range(1, 14), 36, 37, 100, 101):
        if warmup >= steps or warmup + theirs.get("num_decay_steps", 0) > steps:
            continue  # refused in recipes (SW1205)
        wanted = rates_of_transformers(name, warmup, steps, theirs)
        exact = rates(name, steps=steps, **{"warmup": warmup, "first_step": 0, **ours})
        assert exact == pytest.approx(wanted[:-1], rel=1e-12, abs=1e-18), steps
        found = rates(name, steps=steps, **{"warmup": warmup, **ours})
        behind = wanted[:-1] if name == "cosine_warmup_with_min_lr" else wanted[1:]
        assert found == pytest.approx(behind, rel=1e-12, abs=1e-18), steps


def test_every_name_of_transformers_has_a_row_or_a_reason() -> None:
    names = {kind.value for kind in trainer_utils.SchedulerType}
    assert names - set(SCHEDULES) == set(UNPLANNED_SCHEDULES)
    assert {name for name, _, _ in CASES} | {"constant"} == names - set(UNPLANNED_SCHEDULES)
    schema: Any = recipe_schema()
    scheduler = schema["properties"]["training"]["properties"]["scheduler"]["properties"]
    assert scheduler["name"]["enum"] == list(SCHEDULES)
    assert set(OPTIONAL_KEYS) <= set(scheduler)
    assert all(set(row.keys) <= set(scheduler) for row in SCHEDULES.values())
    for key, default in OPTIONAL_KEYS.items():
        assert scheduler[key]["default"] == default


@pytest.mark.parametrize("name", THEIRS)
def test_warm_up_is_a_straight_line_to_the_rate(name: str) -> None:
    found = rates(name, low=1e-5, decay=DECAY)
    assert found[:WARMUP] == pytest.approx(
        [LR * k / WARMUP for k in range(1, WARMUP + 1)], rel=1e-12
    )
    assert max(found) == found[WARMUP - 1] == LR


def test_closed_forms_between_warm_up_and_end() -> None:
    low, share = 1e-5, [k / (STEPS - WARMUP) for k in range(1, STEPS - WARMUP + 1)]
    assert rates("linear", low=low)[WARMUP:] == pytest.approx(
        [LR - (LR - low) * x for x in share], rel=1e-12
    )
    cosine = [low + (LR - low) * (1 + math.cos(math.pi * x)) / 2 for x in share]
    assert rates("cosine", low=low)[WARMUP:] == pytest.approx(cosine, rel=1e-12)
    assert rates("constant", low=low)[WARMUP:] == [LR] * (STEPS - WARMUP)
    stable = STEPS - WARMUP - DECAY
    assert rates("wsd", low=low, decay=DECAY)[WARMUP : WARMUP + stable] == [LR] * stable
    falling = [LR - (LR - low) * k / DECAY for k in range(1, DECAY + 1)]
    assert rates("wsd", low=low, decay=DECAY)[-DECAY:] == pytest.approx(falling, rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("low", [0.0, 3e-5])
def test_the_last_update_has_the_lowest_rate(name: str, low: float) -> None:
    found = rates(name, low=low, decay=DECAY)
    assert found[-1] == pytest.approx(low, abs=1e-18) and min(found[WARMUP:]) == found[-1]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_run_that_ends_with_its_warm_up(name: str) -> None:
    assert rates(name, steps=5, warmup=5)[-1] == LR
    assert rates(name, steps=1, warmup=0)[0] == pytest.approx(
        LR if name == "constant" else 0.0, abs=1e-18
    )


def named(groups: list[dict[str, Any]], model: nn.Module) -> list[tuple[set[str], float]]:
    names = {id(p): n for n, p in model.named_parameters()}
    return [({names[id(p)] for p in group["params"]}, group["weight_decay"]) for group in groups]


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 16},
    "qwen2": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "tie_word_embeddings": False,
    },
}
MODELS["qwen3_moe"] = {
    **MODELS["qwen2"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize("model_type", MODELS)
def test_biases_and_norms_do_not_decay(model_type: str) -> None:
    """Told by their names; embeddings, matrices and the experts' three-dimensional weights do."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type]))
    decays, rest = named(decay_groups(model.named_parameters(), 0.1), model)
    spared = {
        n for n, _ in model.named_parameters() if n.endswith("bias") or "norm" in n or ".ln_" in n
    }
    assert decays == ({n for n, _ in model.named_parameters()} - spared, 0.1) and rest == (
        spared,
        0.0,
    )
    assert spared and any("emb" in n or "wte" in n for n in decays[0])
    assert any(p.ndim == 3 for n, p in model.named_parameters() if n in decays[0]) == (
        model_type == "qwen3_moe"
    )


def test_what_zero3_has_partitioned_counts_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    assert named(decay_groups(model.named_parameters(), 0.1), model) == [
        ({"0.weight"}, 0.1),
        ({"0.bias"}, 0.0),
    ]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    assert named(decay_groups(model.named_parameters(), 0.1), model) == [
        ({"0.weight"}, 0.1),
        ({"1.weight", "1.bias"}, 0.0),
    ]
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    assert named(decay_groups(model.named_parameters(), 0.1), model) == [({"0.weight"}, 0.1)]
