"""`lint --for megatron`: the example of each explanation, scripts as people write them, and what
`compile` writes.

What the parser and Megatron-Core themselves do with the examples is in
tests/megatron/test_arguments.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics.code_explanations import CodeExplanation, megatron_args_explanations
from shardwright.diagnostics.code_registry import MEGATRON_ARGS_CODES
from shardwright.lint.megatron_lint import RULES, lint_arguments, options, read_arguments

NAME = "megatron_args.sh"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
TP=4
PP=${PP:-2}
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPT_ARGS="
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size ${PP} \\
    --num-layers 30  # 15 a stage
    --global-batch-size $BATCH --micro-batch-size 1
"
torchrun --nproc_per_node 8 --nnodes=2 pretrain_gpt.py ${GPT_ARGS[@]} \\
    --log-interval 10 --normalization rms
"""


def codes(text: str, world_size: int | None = None) -> list[str]:
    return [told.code for told in lint_arguments(read_arguments(NAME, text, world_size))]


def test_every_code_has_a_rule_and_a_text() -> None:
    assert (
        RULES.keys() | {"SW4900"}
        == MEGATRON_ARGS_CODES.keys()
        == megatron_args_explanations().keys()
    )
    assert all(
        entry.what and entry.why and entry.source for entry in megatron_args_explanations().values()
    )
    assert all(
        megatron_args_explanations()[code].example and megatron_args_explanations()[code].instead
        for code in RULES
    )


@pytest.mark.parametrize(
    "entry",
    [e for e in megatron_args_explanations().values() if e.example],
    ids=lambda entry: entry.code,
)
def test_example_and_instead(entry: CodeExplanation) -> None:
    assert codes(entry.example, entry.world_size or None) == [entry.code]
    assert codes(entry.instead, entry.world_size or None) == []


def test_a_script_is_read_as_a_shell_reads_it() -> None:
    """Its variables, comments, continued lines; the launcher's options are not the script's."""
    arguments = read_arguments(NAME, SCRIPT, 16)
    assert [g.name for g in arguments.given] == [
        *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers"),
        *("--global-batch-size", "--micro-batch-size", "--log-interval", "--normalization"),
    ]
    assert arguments.integer("--tensor-model-parallel-size") == 4
    assert arguments.integer("--pipeline-model-parallel-size") == 2
    assert arguments.integer("--global-batch-size") is None  # of the environment
    (told,) = lint_arguments(arguments)
    assert told.code == "SW4902" and told.location is not None and told.location.line == 13
    assert codes(SCRIPT, 12) == ["SW4911", "SW4902"]


@pytest.mark.parametrize(
    ("text", "world", "wanted"),
    [
        ("", None, ["SW4900"]),
        ("# --num-layers 3", None, ["SW4900"]),
        ("--num-layers", None, ["SW4902"]),
        ("--num-layers many", None, ["SW4902"]),
        ("--num-layers=32 --lr 1e-4 --clip-grad -1", None, []),
        ("--lr nan", None, ["SW4902"]),
        ("--attention-backend flash --exit-signal SIGTERM", None, []),
        ("--bf16 --seq-length 2048 \\\n --num-layerz 3", None, ["SW4901"]),
        ("--my-own-option 3", None, ["SW4901"]),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|t|t|t|t|t|t|tL' "
        "--micro-batch-size 1 "
         "--global-batch-size 6", 4, ["SW4922"]),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|t|t|tL' "
        "--micro-batch-size 1 "
         "--global-batch-size 6", 4, []),
        ("--num-experts 8 --expert-model-parallel-size 8 --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size "
         "1 --sequence-parallel", 8, []),
    ],
)  # fmt: skip
def test_other_files(text: str, world: int | None, wanted: list[str]) -> None:
    assert codes(text, world) == wanted


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / NAME
    file.write_text(SCRIPT)
    assert main(["lint", str(file), "--for", "megatron", "--world-size", "16"]) == 1
    shown = capsys.readouterr()
    assert "SW4902" in shown.err and "RMSNorm" in shown.err and f"{NAME}:13" in shown.err
    assert main(["lint", str(file), "--for", "megatron", "--fix"]) == 1
    file.write_text("--normalization RMSNorm\n")
    assert main(["lint", str(file), "--for", "megatron"]) == 0


def test_the_options_are_the_parsers() -> None:
    assert (
        len(options()) > 800
        and {"--sequence-parallel", "--num-layers", "--bf16"} <= options().keys()
    )
