"""Preference objectives train as plain loops of the papers' formulas in one process, under every
ZeRO stage and kind of rank; the reference's scores are those of the starting weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.case_launches import Proved, sample_of
from tests.parity.objective_layouts import check, over_four_ranks, over_two_ranks
from tests.parity.preference import PreferenceCase as Case

IPO = {"name": "ipo", "beta": 0.2}
AVERAGED = {"name": "ipo", "beta": 0.2, "average": True}
SIMPO = {"name": "simpo", "beta": 2.0, "gamma": 0.7}
ORPO = {"name": "orpo", "beta": 0.4}
KTO = {"name": "kto", "beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.9}
SMOOTHED = {"name": "dpo", "beta": 0.5, "label_smoothing": 0.1}

REWARD = {"name": "reward", "center_coefficient": 0.05}

TWO: dict[str, Case] = {
    "llama-zero0": Case(model="llama", data=2, zero_stage=0),
    "gpt2-zero1-smoothed": Case(model="gpt2", data=2, objective=SMOOTHED),
    "gpt2-zero2-ipo": Case(model="gpt2", data=2, zero_stage=2, objective=IPO),
    "llama-zero3-simpo": Case(model="llama", data=2, zero_stage=3, objective=SIMPO),
    "llama-zero3-chunked": Case(model="llama", data=2, zero_stage=3, loss="chunked"),
    "llama-tp2-orpo": Case(model="llama", tensor=2, objective=ORPO),
    "gpt2-tp2": Case(model="gpt2", tensor=2, checkpointing="full"),
    "llama-pp2": Case(model="llama", pipeline=2),
    "gpt2-pp2-averaged": Case(model="gpt2", pipeline=2, loss="chunked", objective=AVERAGED),
    "llama-context2": Case(model="llama", context=2, accumulation=3),
    "llama-context2-orpo": Case(model="llama", context=2, objective=ORPO, checkpointing="full"),
    "qwen3-moe-expert2-ipo": Case(model="qwen3_moe", data=2, expert=2, objective=IPO),
    "llama-lora-zero2": Case(model="llama", data=2, zero_stage=2, lora_rank=4),
    "llama-lora-zero3": Case(model="llama", data=2, zero_stage=3, lora_rank=4, objective=IPO),
    "llama-kto-zero0": Case(model="llama", data=2, zero_stage=0, objective=KTO),
    "gpt2-kto-zero3": Case(model="gpt2", data=2, zero_stage=3, objective=KTO),
    "llama-kto-tp2": Case(model="llama", tensor=2, loss="chunked", objective=KTO),
    "gpt2-kto-pp2": Case(model="gpt2", pipeline=2, objective=KTO),
    "llama-kto-context2": Case(model="llama", context=2, objective=KTO),
    "resumed-llama-pp2": Case(model="llama", pipeline=2, resumed=True),
    "resumed-gpt2-tp2-simpo": Case(model="gpt2", tensor=2, objective=SIMPO, resumed=True),
}
REWARD_TWO: dict[str, Case] = {
    "llama-reward-tp2": Case(model="llama", tensor=2, objective=REWARD),
    "gpt2-reward-pp2": Case(model="gpt2", pipeline=2, objective=REWARD, checkpointing="full"),
    "llama-reward-context2": Case(model="llama", context=2, objective=REWARD),
    "qwen3-moe-reward-expert2": Case(model="qwen3_moe", data=2, expert=2, objective=REWARD),
    "gpt2-reward-lora-zero3": Case(
        model="gpt2", data=2, zero_stage=3, objective=REWARD, lora_rank=4, pretrained=True
    ),
}
REWARD_MORE: dict[str, Case] = {
    "llama-reward-zero0": Case(model="llama", data=2, zero_stage=0, objective=REWARD),
    "qwen3-moe-reward-zero1": Case(model="qwen3_moe", data=2, objective=REWARD, pretrained=True),
    "gpt2-reward-zero2": Case(model="gpt2", data=2, zero_stage=2, objective=REWARD),
    "llama-reward-zero3": Case(
        model="llama", data=2, zero_stage=3, objective=REWARD, pretrained=True
    ),
    "llama-reward-lora-zero0": Case(
        model="llama", data=2, zero_stage=0, objective=REWARD, lora_rank=4
    ),
    "gpt2-reward-lora-zero1": Case(
        model="gpt2",
        data=2,
        objective=REWARD,
        lora_rank=4,
        pretrained=True,
        starts="reward",
        checkpointing="full",
    ),
    "llama-reward-lora-zero2": Case(
        model="llama", data=2, zero_stage=2, objective=REWARD, lora_rank=4, pretrained=True
    ),
    "llama-reward-lora-context2": Case(
        model="llama", context=2, objective=REWARD, lora_rank=4, pretrained=True
    ),
    "resumed-llama-reward-lora-zero3": Case(
        model="llama",
        data=2,
        zero_stage=3,
        objective=REWARD,
        lora_rank=4,
        pretrained=True,
        resumed=True,
    ),
    "qwen3-moe-reward-tp2": Case(model="qwen3_moe", tensor=2, objective=REWARD),
    "qwen3-moe-reward-context2": Case(model="qwen3_moe", context=2, objective=REWARD),
    "llama-reward-tied-pp2": Case(
        model="llama-tied", pipeline=2, objective=REWARD, pretrained=True, checkpointing="selective"
    ),
    "gpt2-reward-tp2": Case(
        model="gpt2", tensor=2, objective=REWARD, pretrained=True, starts="reward"
    ),
    "resumed-llama-reward-pp2": Case(
        model="llama", pipeline=2, objective=REWARD, resumed=True, pretrained=True
    ),
    "resumed-qwen3-moe-reward-tp2": Case(
        model="qwen3_moe", tensor=2, objective=REWARD, resumed=True
    ),
}
REWARD_FOUR: dict[str, Case] = {
    "llama-reward-tp2-pp2": Case(model="llama", tensor=2, pipeline=2, objective=REWARD),
    "gpt2-reward-dualpipev": Case(
        model="gpt2-deep",
        data=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        objective=REWARD,
    ),
    "llama-reward-dualpipev-tp2": Case(
        model="llama-deep",
        tensor=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        objective=REWARD,
    ),
    "llama-reward-context2-zero3": Case(
        model="llama", context=2, data=2, zero_stage=3, objective=REWARD
    ),
    "llama-reward-context2-pp2": Case(model="llama", context=2, pipeline=2, objective=REWARD),
    "qwen3-moe-reward-expert2-tp2": Case(
        model="qwen3_moe", data=2, expert=2, tensor=2, objective=REWARD
    ),
    "qwen3-moe-reward-expert2-pp2": Case(
        model="qwen3_moe", data=2, expert=2, pipeline=2, objective=REWARD
    ),
    "resumed-qwen3-moe-reward-zero3": Case(
        model="qwen3_moe", data=4, zero_stage=3, micro=1, objective=REWARD, resumed=True
    ),
}
PACKED_TWO: dict[str, Case] = {
    "llama-packed-zero0": Case(model="llama", data=2, zero_stage=0, packed=True),
    "gpt2-packed-zero3-ipo": Case(
        model="gpt2", data=2, zero_stage=3, objective=AVERAGED, packed=True
    ),
    "gpt2-packed-tp2-simpo": Case(model="gpt2", tensor=2, objective=SIMPO, packed=True),
    "llama-packed-pp2": Case(model="llama", pipeline=2, loss="chunked", packed=True),
    "llama-packed-context2-orpo": Case(model="llama", context=2, objective=ORPO, packed=True),
}
PACKED_MORE: dict[str, Case] = {
    "gpt2-packed-zero1-smoothed": Case(model="gpt2", data=2, objective=SMOOTHED, packed=True),
    "llama-packed-zero2-ipo": Case(
        model="llama", data=2, zero_stage=2, objective=IPO, checkpointing="full", packed=True
    ),
    "llama-packed-tp2-chunked": Case(model="llama", tensor=2, loss="chunked", packed=True),
    "gpt2-packed-pp2-orpo": Case(
        model="gpt2", pipeline=2, objective=ORPO, checkpointing="full", packed=True
    ),
    "qwen3-moe-packed-expert2": Case(model="qwen3_moe", data=2, expert=2, packed=True),
    "llama-packed-lora-zero2": Case(
        model="llama", data=2, zero_stage=2, lora_rank=4, objective=IPO, packed=True
    ),
    "llama-packed-context2-chunked": Case(
        model="llama", context=2, loss="chunked", accumulation=3, packed=True
    ),
    "resumed-llama-packed-pp2": Case(model="llama", pipeline=2, resumed=True, packed=True),
}
PACKED_REWARD: dict[str, Case] = {
    "llama-packed-reward-tp2": Case(model="llama", tensor=2, objective=REWARD, packed=True),
    "gpt2-packed-reward-pp2": Case(model="gpt2", pipeline=2, objective=REWARD, packed=True),
    "llama-packed-reward-context2": Case(model="llama", context=2, objective=REWARD, packed=True),
}
PACKED_FOUR: dict[str, Case] = {
    "llama-packed-tp2-pp2": Case(
        model="llama", tensor=2, pipeline=2, checkpointing="full", packed=True
    ),
    "gpt2-packed-dualpipev": Case(
        model="gpt2-deep",
        data=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        objective=SIMPO,
        packed=True,
    ),
    "llama-packed-context2-zero3": Case(
        model="llama", context=2, data=2, zero_stage=3, packed=True
    ),
}
FOUR: dict[str, Case] = {
    "llama-tp2-pp2": Case(model="llama", tensor=2, pipeline=2),
    "llama-tp2-zero3": Case(model="llama", tensor=2, data=2, zero_stage=3, objective=SIMPO),
    "gpt2-dualpipev": Case(
        model="gpt2-deep", data=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "llama-dualpipev-chunked": Case(
        model="llama-deep",
        tensor=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        loss="chunked",
    ),
    "llama-context2-zero3": Case(model="llama", context=2, data=2, zero_stage=3),
    "llama-context2-tp2": Case(model="llama", context=2, tensor=2, objective=IPO),
    "llama-kto-dualpipev": Case(
        model="llama-deep",
        data=2,
        pipeline=2,
        schedule="dualpipev",
        accumulation=4,
        objective=KTO,
    ),
    "qwen3-moe-kto-expert2-tp2": Case(model="qwen3_moe", data=2, expert=2, tensor=2, objective=KTO),
    "qwen3-moe-expert2-pp2": Case(model="qwen3_moe", data=2, expert=2, pipeline=2),
    "resumed-llama-context2-zero2": Case(
        model="llama", context=2, data=2, zero_stage=2, resumed=True
    ),
}


WORKER, LIMITS = "preference_worker.py", {"scores": 1e-5, "exported": 1e-5}
EVERY: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.3},
    "ipo": IPO,
    "simpo": SIMPO,
    "orpo": ORPO,
    "kto": KTO,
    "reward": REWARD,
}


@pytest.mark.launch
@pytest.mark.prove
@pytest.mark.parametrize("objective", EVERY)
def test_every_layout(objective: str, tmp_path: Path, proved: Proved) -> None:
    own = EVERY[objective]
    every = {"two": over_two_ranks(lora=objective != "reward"), "four": over_four_ranks()}
    for ranks, fields in every.items():
        cases = {name: Case(objective=own, **each) for name, each in fields.items()}
        for name, figures in check(cases, tmp_path / ranks, WORKER, **LIMITS).items():
            proved("preference", f"{objective} {name}", figures)


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            sample_of(
                TWO,
                "gpt2-zero2-ipo",
                "llama-zero3-simpo",
                "llama-tp2-orpo",
                "llama-pp2",
                "llama-context2",
                "qwen3-moe-expert2-ipo",
                "llama-lora-zero3",
                "llama-kto-tp2",
            ),
            id="sample",
        ),
        pytest.param(TWO, id="two-ranks", marks=pytest.mark.prove),
        pytest.param(FOUR, id="four-ranks", marks=pytest.mark.prove),
        pytest.param(PACKED_TWO, id="packed", marks=pytest.mark.prove),
        pytest.param(PACKED_MORE, id="packed-two-ranks", marks=pytest.mark.prove),
        pytest.param(PACKED_REWARD, id="packed-rewards", marks=pytest.mark.prove),
        pytest.param(PACKED_FOUR, id="packed-four-ranks", marks=pytest.mark.prove),
        pytest.param(
            sample_of(REWARD_TWO, "gpt2-reward-pp2", "gpt2-reward-lora-zero3"), id="rewards-sample"
        ),
        pytest.param(REWARD_TWO, id="rewards", marks=pytest.mark.prove),
        pytest.param(REWARD_MORE, id="rewards-two-ranks", marks=pytest.mark.prove),
        pytest.param(REWARD_FOUR, id="rewards-four-ranks", marks=pytest.mark.prove),
    ],
)
def test_trains_as_one_process(cases: dict[str, Case], tmp_path: Path, proved: Proved) -> None:
    for name, figures in check(cases, tmp_path, WORKER, **LIMITS).items():
        proved("preference", name, figures)
