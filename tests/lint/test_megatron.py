"""`lint --for megatron`: the example of each explanation, scripts as people write them, and what
`compile` writes.

What the parser and Megatron-Core themselves do with the examples is in
tests/megatron/test_arguments.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics.code_explanations import CodeExplanation, megatron_args_explanations
from shardwright.diagnostics.code_registry import MEGATRON_ARGS_CODES
from shardwright.lint.megatron_lint import RULES, lint_arguments
from shardwright.lint.megatron_script import options, read_arguments

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
        RULES.keys() | {"SW4900", "SW4903"}
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


DISTRIBUTED = """DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS --nnodes ${NUM_NODES:-1}
    --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 6000
)
"""
PROFILER = 'PROFILE="nsys profile --sample=none --trace=cuda,nvtx --cuda-graph-trace=node"\n'
LAUNCHES = {
    "arrays that only torchrun gets": (
        DISTRIBUTED + "MODEL_ARGS=(--num-layers 30 --bf16)\n"
        'torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}"\n'
    ),
    "a profiler in a variable": (
        PROFILER + "MODEL_ARGS=(--num-layers 30 --bf16)\n"
        "$PROFILE torchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL_ARGS[@]}\n"
    ),
    "srun starts a command that is a string": (
        'MODEL_ARGS=" --num-layers 30 \\\n  --bf16 "\n'
        'RUN="python -u ${MEGATRON}/pretrain_gpt.py ${MODEL_ARGS}"\n'
        'srun -l --container-image "a#b/c:1" --output=$PWD/%x_%j.log sh -c "${RUN}"\n'
    ),
    "options of the script itself": (
        'while [[ $# -gt 0 ]]; do\n  case $1 in\n    --checkpoint-path)\n      CKPT="$2"; shift 2\n'
        "      ;;\n    --data) DATA=$2 ;;\n  esac\ndone\n"
        'SCRIPT="pretrain_gpt.py"\n'
        "python -m torch.distributed.run --nnodes 2 ${SCRIPT} --num-layers 30 --bf16\n"
    ),
    "a launcher from outside, a script by a condition": (
        "if [[ $MODEL == *Hybrid* ]]; then\n    EXE=../pretrain_hybrid.py\nelse\n"
        "    EXE=../pretrain_gpt.py\nfi\n${LAUNCH} ${EXE} --num-layers 30 --bf16\n"
    ),
    "an array that is added to": (
        "ARGS=(--num-layers 30)\nARGS+=(\n    # half precision\n    --bf16\n)\n"
        "torchrun pretrain_gpt.py ${ARGS[@]} 2>&1 | tee --append log.txt\n"
    ),
}
"""How Megatron-LM's own examples start pretrain_gpt.py."""


@pytest.mark.parametrize("text", LAUNCHES.values(), ids=LAUNCHES)
def test_the_launchers_words_are_not_megatrons(text: str) -> None:
    arguments = read_arguments(NAME, text, 8)
    assert [(g.name, g.values) for g in arguments.given] == [
        ("--num-layers", ("30",)),
        ("--bf16", ()),
    ]
    assert lint_arguments(arguments) == ()
    wrong = read_arguments(NAME, text.replace("--num-layers 30", "--num-layers many"), 8)
    (told,) = lint_arguments(wrong)
    assert told.code == "SW4902" and told.location is not None
    line = text.replace("--num-layers 30", "--num-layers many").splitlines()[told.location.line - 1]
    assert line[told.location.column - 1 :].startswith("--num-layers")


def test_what_is_not_known_is_no_fault() -> None:
    """Options from outside may hold what is missing; a condition may decide on what clashes."""
    assert codes("torchrun pretrain_gpt.py --save ckpt --bf16") == ["SW4942"]
    assert codes("torchrun pretrain_gpt.py --save ckpt --bf16 $EXTRA") == []
    assert codes("python -u ${DIR}/pretrain_gpt.py $EVERYTHING") == []
    either = "if [ $HALF ]; then A=(--fp16); else A=(--bf16); fi\npython pretrain_gpt.py "
    assert codes(either + "${A[@]}") == []
    assert codes(either + "${A[@]} --fp16 --bf16") == ["SW4931"]
    tensor = "TP=2\nif [ $BIG ]; then TP=3; fi\npython pretrain_gpt.py "
    assert codes(tensor + "--tensor-model-parallel-size $TP", 8) == []
    assert codes("TP=3\npython pretrain_gpt.py --tensor-model-parallel-size $TP", 8) == ["SW4911"]


@pytest.mark.parametrize(
    "text",
    ["A=(", 'A="', "$(", "`", "\\", "A=$A\npython x.py $A", "${", "case fi done )", "x.py '"],
)
def test_no_script_is_too_odd(text: str) -> None:
    lint_arguments(read_arguments(NAME, text, 8))


BASE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 "
    "--train-iters 100 --lr 1e-4 --bf16 "
)
MISTAKES = {
    "--fp16": "SW4931",
    "--num-attention-heads 6 --tensor-model-parallel-size 2": "SW4932",
    "--hidden-size 250": "SW4932",
    "--max-position-embeddings 512": "SW4933",
    "--train-samples 1000": "SW4934",
    "--lr-warmup-samples 10": "SW4934",
    "--lr-warmup-iters 10 --lr-warmup-fraction 0.1": "SW4935",
    "--recompute-granularity selective --recompute-method uniform": "SW4936",
    "--overlap-param-gather --overlap-grad-reduce": "SW4937",
    "--use-distributed-optimizer --overlap-param-gather": "SW4938",
    "--num-experts 6 --expert-model-parallel-size 4": "SW4939",
    "--expert-model-parallel-size 4": "SW4940",
    "--seq-length 1002 --context-parallel-size 4": "SW4941",
    "--save ckpt": "SW4942",
    "--num-layers-per-virtual-pipeline-stage 1": "SW4943",
    "--min-lr 1e-3": "SW4944",
    "--tensor-model-parallel-size 2 --tp-comm-overlap": "SW4945",
    "--hidden-size 240 --num-attention-heads 12 --tensor-model-parallel-size 8": "SW4946",
    "--num-experts 4 --moe-router-topk 8": "SW4947",
    "--use-distributed-optimizer --optimizer-cpu-offload": "SW4948",
}


@pytest.mark.parametrize("options_given", MISTAKES)
def test_a_mistake_that_validate_args_refuses(options_given: str) -> None:
    """Finds one code, with a cause and a help, in a script that is right without it."""
    script = f"torchrun --nproc_per_node 8 pretrain_gpt.py {BASE}"
    assert codes(script, 8) == []
    (told,) = lint_arguments(read_arguments(NAME, script + options_given, 8))
    assert told.code == MISTAKES[options_given] and told.severity == "error" and told.help


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / NAME
    file.write_text(SCRIPT)
    assert main(["lint", str(file), "--for", "megatron", "--world-size", "16"]) == 1
    shown = capsys.readouterr()
    assert "SW4902" in shown.err and "RMSNorm" in shown.err and f"{NAME}:13" in shown.err
    assert main(["lint", str(file), "--for", "megatron", "--fix"]) == 1
    file.write_text("--normalization RMSNorm\n")
    assert main(["lint", str(file), "--for", "megatron"]) == 0


PARSER = """import argparse

def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--micro-batch-size", "--rampup-batch-size"):
        parser.add_argument(name, nargs="+")
    return parser.parse_args()

def validate_args(args, defaults):
    print("printed by every rank")
    if args.micro_batch_size == ["7"]:
        raise RuntimeError("no GPU here")
    assert args.micro_batch_size != ["8"], "eight is too many"
    assert args.micro_batch_size != ["9"]
"""


@pytest.mark.parametrize(
    ("options_given", "status", "shown"),
    [
        ("--micro-batch-size 1", 0, "validate_args accepts it"),
        ("--micro-batch-size 8", 1, "error[SW4903]: validate_args refuses the options: eight is"),
        ("--micro-batch-size 9", 1, 'the options: assert args.micro_batch_size != ["9"]'),
        ("--micro-batch-size 7", 0, "could not answer: RuntimeError: no GPU here"),
        ("--micro-batch-size $N", 0, ""),
        ("--micro-batch-size 8 $MORE", 0, ""),
    ],
)
def test_an_installed_parser_is_asked(
    options_given: str,
    status: int,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A package beside megatron.core; tests/megatron/test_arguments.py asks the real one."""
    package = tmp_path / "there/megatron/training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "arguments.py").write_text(PARSER)
    monkeypatch.syspath_prepend(tmp_path / "there")
    # Set before it is deleted: what the search imports is then gone at the end of the test.
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.delitem(sys.modules, "megatron")
    search = [str(tmp_path / "there"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, search)))
    file = tmp_path / NAME
    file.write_text(f"torchrun pretrain_gpt.py {options_given}\n")
    assert main(["lint", "--for", "megatron", "--world-size", "8", str(file)]) == status
    out, err = capsys.readouterr()
    assert shown in out + err
    assert bool(shown) or out == f"ok {file}\n"
    assert status or f"ok {file}" in out


def test_the_options_are_the_parsers() -> None:
    assert (
        len(options()) > 800
        and {"--sequence-parallel", "--num-layers", "--bf16"} <= options().keys()
    )
