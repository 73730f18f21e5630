"""Megatron-Core 0.19, under the Python that it wants: `make prove-megatron`. Elsewhere these are
left out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.engines.megatron.installed_parser import ask_installed_parser
from tests.megatron.cases import CASES, MUON, case, cut
from tests.megatron.test_arguments import PLANS, SMALLEST, asked, random_plans
from tests.megatron.test_launch import check_pair, goes_on
from tests.megatron.test_parity import check, launched
from tests.parity.harness import Case
from tests.unit.engines.test_megatron_muon import compiled


def _installed() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not _installed().startswith("0.19"), reason="megatron-core 0.19 wants Python 3.12"
    ),
]
AGAIN = (
    *("tp2-sequence", "pp2", "dp2", "cp2", "cp2-pp2", "tied-pp2-dp2", "vpp2-pp2-tp2-sequence"),
    *("full-tp2", "partial-pp2", "modules-pp2", "vpp2-pp2-dp2-partial", "offload-dp2", "bf16-dp2"),
    *("gpt2-tp2", "gpt2-pp2", "gpt2-dp2", "gpt2-cp2", "mixtral-ep2-tp2", "mixtral-ep2-modules"),
    *("qwen3-moe-tp2-sequence", "qwen3-moe-pp2", "qwen3-moe-dp2", "qwen3-moe-ep2"),
    *("qwen3-moe-ep2-cp2", "gpt-oss-tp2-ep2", "deepseek-all", "deepseek-modules"),
    *("overlap-ep2", "overlap-ep2-vpp2-pp2"),
)
RECOMPUTES_SOME = case(pipeline=2, accumulation=4, checkpointing={"full": 1})
HYBRID = case(data=2, accumulation=2, **cut())


def test_layouts_train_as_one_plain_process(tmp_path: Path) -> None:
    for name, found in launched({name: CASES[name] for name in AGAIN}, tmp_path).items():
        check(CASES[name], found)


@pytest.mark.parametrize(
    ("first", "second"), [(RECOMPUTES_SOME, HYBRID), (HYBRID, RECOMPUTES_SOME)]
)
def test_checkpoints_go_on_between_gpt_model_and_hybrid_model(
    first: Case, second: Case, tmp_path: Path
) -> None:
    """Ranks that recompute some layers build GPTModel, as those of 0.16 do for every layout."""
    check_pair(goes_on(first, second, tmp_path))


@pytest.mark.skipif(
    not importlib.util.find_spec("emerging_optimizers"), reason="emerging-optimizers is missing"
)
def test_muon_trains_as_one_plain_process(tmp_path: Path) -> None:
    """Megatron-Core's own Muon against a plain one, with its states' bytes."""
    for name, found in launched(MUON, tmp_path).items():
        check(MUON[name], found)


@pytest.mark.skipif(
    not importlib.util.find_spec("emerging_optimizers"), reason="emerging-optimizers is missing"
)
def test_the_parser_takes_the_options_of_muon(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled(write_recipe, monkeypatch)
    lines = made.files["megatron_args.sh"].decode().splitlines()
    options = [word for line in lines if "muon" in line for word in shlex.split(line)]
    smallest = [word for pair in SMALLEST.items() for word in pair]
    assert ask_installed_parser([*smallest, *options], 1) == {}
    unknown = [*smallest, *options, "--muon-scale-mode", "none"]
    assert "error" in ask_installed_parser(unknown, 1)


def test_random_plans_are_accepted_and_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron_args.sh by validate_args at its world size; the ranks as real modules on a group
    that sends nothing."""
    plans = random_plans(tmp_path, monkeypatch)
    answers = asked([question for question, _, _ in plans])
    assert answers == [{}] * PLANS, answers
    script = Path(__file__).with_name("proof_worker.py")
    text = json.dumps([["", config, plan] for _, config, plan in plans])
    done = subprocess.run(
        [sys.executable, script], input=text, capture_output=True, text=True, timeout=900
    )
    built = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert built == [{}] * PLANS, (built, done.stderr[-2000:])
