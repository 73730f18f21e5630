"""The rules by themselves: the example of each explanation, known-good files, and broken ones with
their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.code_explanations import CodeExplanation, ds_config_explanations
from shardwright.diagnostics.code_registry import DS_CONFIG_CODES
from shardwright.diagnostics.diagnostic_rendering import render_diagnostics
from shardwright.lint.ds_config_document import parse_ds_config
from shardwright.lint.ds_config_linter import RULES, diagnostic, fixed, lint, linted_ds_config
from shardwright.lint.lint_rule import Audience
from tools.generate.lint_page import PAGE, written

HERE = Path(__file__).parent
CASES = HERE.parent / "cases"
GOOD = sorted((HERE / "good").glob("*.json"))
BAD = sorted((HERE / "bad").glob("*.json"))

# What is right to say of files that train: each is a key that does nothing there, or a default that
# is another than the file's words suggest.
WARNINGS: dict[str, list[str]] = {
    "deepspeed-ulysses": ["SW4611"],
    "trainer-tensor-parallel": ["SW4207"],
}

# Come from reading the file, from a model, or from the lowering: no rule over a document.
ELSEWHERE = {
    "SW4001",
    "SW4002",
    "SW4003",
    "SW4004",
    "SW4005",
    "SW4006",
    "SW4007",
    "SW4009",
    "SW4010",
    "SW4011",
    "SW4012",
    "SW4013",
    "SW4101",
    "SW4612",
    "SW4613",
    "SW4614",
    "SW4801",
}


def codes(text: str, audience: Audience | None = None, world_size: int | None = None) -> list[str]:
    try:
        document = parse_ds_config("ds_config.json", text)
    except Refusal as refusal:
        return [found.code for found in refusal.diagnostics]
    return [
        found.code for found in lint(document, linted_ds_config(document, audience, world_size))
    ]


def test_every_code_has_a_rule_and_a_text() -> None:
    assert RULES.keys() | ELSEWHERE == DS_CONFIG_CODES.keys()
    assert not RULES.keys() & ELSEWHERE
    assert ds_config_explanations().keys() == DS_CONFIG_CODES.keys()
    assert all(
        entry.what and entry.why and entry.source for entry in ds_config_explanations().values()
    )
    assert all(
        bool(entry.example) == bool(entry.instead) for entry in ds_config_explanations().values()
    )
    assert all(ds_config_explanations()[code].example for code in RULES)
    assert len(RULES) >= 40


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ds_config_explanations().values() if entry.example],
    ids=lambda entry: entry.code,
)
def test_example_and_instead(entry: CodeExplanation) -> None:
    audience = cast("Audience | None", entry.audience or None)
    assert codes(entry.example, audience, entry.world_size or None) == [entry.code]
    assert codes(entry.instead, audience, entry.world_size or None) == []


def test_there_are_known_good_files() -> None:
    assert len(GOOD) >= 30


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_good_file_has_no_error(path: Path) -> None:
    audience: Audience = "trainer" if path.stem.startswith("trainer-") else "deepspeed"
    document = parse_ds_config(str(path), path.read_text(encoding="utf-8"))
    found = lint(document, linted_ds_config(document, audience))
    assert [finding for finding in found if finding.severity == "error"] == []
    assert sorted(finding.code for finding in found) == WARNINGS.get(path.stem, [])


def test_warnings_are_of_files_that_are_there() -> None:
    assert WARNINGS.keys() <= {path.stem for path in GOOD}


@pytest.mark.parametrize(
    "path", sorted(CASES.glob("*/expected/ds_config*.json")), ids=lambda path: path.parts[-3]
)
def test_what_compile_writes_is_clean(path: Path) -> None:
    plan = json.loads((path.parent / "plan.json").read_text())
    world = None if path.name == "ds_config.autotp.json" else plan["strategy"]["data"]
    assert codes(path.read_text(), "deepspeed", world) == []


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_file_is_shown_as_it_was(path: Path, update_golden: bool) -> None:
    audience: Audience = "trainer" if path.stem.startswith("trainer-") else "deepspeed"
    text = path.read_text(encoding="utf-8")
    try:
        document = parse_ds_config(path.name, text)
        found = [
            diagnostic(document, finding)
            for finding in lint(document, linted_ds_config(document, audience, 8))
        ]
        shown = render_diagnostics(found, document.source, color=False)
    except Refusal as refusal:
        shown = render_diagnostics(refusal.diagnostics, refusal.source, color=False)
    golden = path.with_suffix(".txt")
    if update_golden:
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8"), (
        "`make generated` writes it anew; read the difference"
    )
    assert "error[SW4" in shown


def test_lint_of_a_file_for_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --for a file with "auto" is linted as the Trainer's, and says so."""
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}')
    assert main(["lint", str(path)]) == 0
    assert "note[SW4119]" in capsys.readouterr().err
    assert main(["lint", str(path), "--format", "github"]) == 0
    assert capsys.readouterr().out.startswith("::notice ")
    assert main(["lint", str(path), "--for", "trainer"]) == 0
    assert capsys.readouterr() == (f"ok {path}\n", "")
    assert main(["lint", str(path), "--for", "deepspeed"]) == 1
    assert "error[SW4119]: train_micro_batch_size_per_gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("audience", "severities"),
    [
        ("deepspeed", ["note", "note", "note"]),
        ("trainer", ["error", "note", "warning"]),
        (None, ["warning", "note", "warning"]),
    ],
)
def test_text_that_deepspeeds_models_convert(
    audience: Audience | None, severities: list[str]
) -> None:
    """ "false" is false for pydantic; the Trainer's own test of bf16.enabled takes it for true."""
    text = json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": "false"},
            "zero_optimization": {"contiguous_gradients": "false", "stage": "2"},
        }
    )
    document = parse_ds_config("ds_config.json", text)
    found = lint(document, linted_ds_config(document, audience))
    assert [f.code for f in found] == ["SW4116"] * 3
    assert [f.severity for f in found] == severities
    assert all(f.fix for f in found)
    if audience == "deepspeed":
        assert {f.message.partition("; ")[2] for f in found} == {"DeepSpeed converts it"}


LIGHTNING = json.dumps(
    {
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    }
)


def test_a_file_for_pytorch_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning fills in the batch, and no "auto"; without --for the message names it."""
    path = tmp_path / "ds.json"
    path.write_text(LIGHTNING)
    assert main(["lint", "--for", "lightning", str(path)]) == 0
    assert capsys.readouterr() == (f"ok {path}\n", "")
    assert main(["lint", str(path)]) == 1
    shown = capsys.readouterr().err
    assert "error[SW4201]" in shown and "`lint --for lightning`" in shown
    assert main(["lint", "--for", "deepspeed", str(path)]) == 1
    assert "lightning" not in capsys.readouterr().err
    assert codes('{"train_micro_batch_size_per_gpu": "auto"}', "lightning") == ["SW4119"]
    assert codes('{"steps_per_print": 10,}', "lightning") == ["SW4008"]


CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("name", "params", "zero", "message"),
    [
        ("AdamW", {"fused": True}, {"stage": 2}, 'FusedAdam takes no "fused"'),
        ("Adam", {"amsgrad": True}, {"stage": 2}, "FusedAdam refuses amsgrad"),
        ("AdamW", {"amsgrad": True}, CPU, "DeepSpeedCPUAdam refuses amsgrad"),
        ("AdamW", {"set_grad_none": True}, CPU, "DeepSpeedCPUAdam takes no"),
        ("Lion", {"fp32_optimizer_states": True}, {"stage": 2}, "FusedLion"),
        ("Adagrad", {"amsgrad": True}, {"stage": 2}, "Adagrad takes no"),
        ("AdamW", {"amsgrad": False, "fp32_optimizer_states": True}, {"stage": 2}, ""),
        ("AdamW", {"fused": True, "amsgrad": True, "torch_adam": True}, CPU, ""),
        ("Lion", {"fp32_optimizer_states": True}, CPU, ""),
        ("AdamW", {"fused": False}, {"stage": 2, "offload_optimizer": {"device": "auto"}}, ""),
    ],
)  # fmt: skip
def test_the_class_that_deepspeed_builds_takes_the_parameters(
    name: str, params: dict[str, Any], zero: dict[str, Any], message: str
) -> None:
    text = json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "optimizer": {"type": name, "params": {"lr": 1e-4, **params}},
        }
    )
    document = parse_ds_config("ds_config.json", text)
    found = [f for f in lint(document, linted_ds_config(document, "trainer")) if f.code == "SW4504"]
    assert bool(found) is bool(message)
    for f in found:
        assert f.severity == "error"
        assert f.message.replace(", which DeepSpeed builds here,", "").startswith(message)


@pytest.mark.parametrize(
    ("batch", "world", "wanted"),
    [
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, None, ["SW4207"]),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, 8, ["SW4207"]),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}, 8, []),
        ({"train_micro_batch_size_per_gpu": "auto"}, None, []),
    ],
)
def test_accumulation_that_accelerate_writes(
    batch: dict[str, Any], world: int | None, wanted: list[str]
) -> None:
    text = json.dumps({**batch, "zero_optimization": {"stage": 1}})
    assert codes(text, "trainer", world) == wanted
    document, _ = fixed(parse_ds_config("ds_config.json", text), "trainer", world)
    assert bool(wanted) is (document.config.get("gradient_accumulation_steps") == "auto")


def test_gathered_weights_are_of_use_under_autotp() -> None:
    """DeepSpeed's own published example; Accelerate raises without the key at every stage."""
    gather: dict[str, Any] = {"stage": 1, "gather_16bit_weights_on_model_save": True}
    autotp = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": gather,
        "tensor_parallel": {"autotp_size": 2},
    }
    for audience in ("deepspeed", "trainer"):
        assert codes(json.dumps(autotp), audience) == []
    assert codes(json.dumps({**autotp, "tensor_parallel": {"autotp_size": 1}}), "trainer") == [
        "SW4401"
    ]
    without = json.dumps({**autotp, "zero_optimization": {"stage": 1}})
    assert codes(without, "trainer") == ["SW4415"] and codes(without, "deepspeed") == []


def test_the_page_of_rules_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "run `make generated`"
