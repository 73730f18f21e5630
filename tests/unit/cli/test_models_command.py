"""`shardwright models`: the matrix as a table, as JSON, and one type in detail."""

from __future__ import annotations

import json

import pytest

from shardwright.cli import main as cli
from shardwright.cli import models_command
from shardwright.models.model_support import (
    COLUMNS,
    VLM_COLUMNS,
    Cell,
    support,
    support_text,
    vision_language_types,
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["models", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_row_a_type_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "") and "\x1b" not in out
    table, counts, note = out.rstrip("\n").split("\n\n")
    rows = table.splitlines()
    assert [row.split()[0] for row in rows] == ["type", *support().types]
    assert all(row == row.rstrip() for row in rows)
    totals = [
        sum(int(row.split()[1 + column]) for row in counts.splitlines())
        for column in range(len(COLUMNS))
    ]
    assert totals == [len(support().types)] * len(COLUMNS)
    assert (
        f"{len(support().types)} causal-LM types of transformers {support().transformers}" in note
    )


def test_colours_on_a_terminal_change_no_letter() -> None:
    plain, colored = (models_command.overview(support(), color=color) for color in (False, True))
    assert "\x1b[32mverified" in colored
    for code in ("\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"):
        colored = colored.replace(code, "")
    assert [line.rstrip() for line in colored.splitlines()] == plain.splitlines()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--json")[:2] == (0, support_text())
    code, out, _ = run(capsys, "llama", "--json")
    document = json.loads(out)
    assert (
        code == 0 and document["type"] == "llama" and document["pipeline"]["verdict"] == "verified"
    )


def test_one_type(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "llama")
    assert (
        code == 0 and "worst differences: loss " in out and "tensor: a degree that divides" in out
    )
    by_model = run(capsys, "meta-llama/Llama-3.1-8B")
    assert by_model == (0, out, "")
    assert "expert: 1" in out and "context: a degree" in out and "target: megatron too" in out
    mixture = run(capsys, "mixtral")[1]
    assert "expert ranks over data ranks (data=2 expert=2 zero_stage=1): verified" in mixture
    assert "expert: a degree that divides data x context" in mixture
    assert "context ranks (context=2 zero_stage=1): refused SW3143" in (
        found := run(capsys, "bloom")[1]
    )
    assert "context: 1" in found and "target: not megatron" in found


def cell(verdict: str) -> Cell:
    return Cell(
        verdict=verdict, code="", reason="", loss=None, norm=None, weights=None, sharded=None
    )


def test_recipe_keys_say_no_more_than_was_proved() -> None:
    def keys(**verdicts: str) -> str:
        return " | ".join(
            models_command.causal_lm_recipe_lines(
                {name: cell(verdicts.get(name, "untested")) for name in support().columns}
            )
        )

    assert keys() == keys(zero="refused") == "no layout of this type is verified"
    assert "pipeline: 1 " in keys(zero="verified") and "tensor: 1" in keys(zero="verified")
    assert "gathered outputs" in keys(tensor_fallback="verified")
    assert "together: not verified" in keys(pipeline="verified", tensor_sharded="verified")
    assert "together" not in keys(
        pipeline="verified", tensor_sharded="verified", pipeline_tensor="verified"
    )


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("lama", "SW2003", "valid: llama"),
        ("xyzzy", "SW2003", "`shardwright models` lists them"),
        ("vit", "SW2004", "AutoModelForCausalLM or"),
        ("t5", "SW2017", "decoder-only model"),
        ("llama --task image-text-to-text", "SW2019", "takes no images"),
        ("xyzzy --task image-text-to-text", "SW2003", "unknown model_type"),
        ("qwen2_5_vl --task causal-lm", "SW2004", "has no causal language model"),
        ("a\x1b[31m", "SW2003", "unknown model_type"),
    ],
)
def test_other_names(name: str, code: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, out, err = run(capsys, *(name.split() if "--task" in name else [name]))
    assert (
        (exit_code, out) == (1, "")
        and f"error[{code}]" in err
        and words in err
        and "\x1b" not in err
    )


def test_types_that_see(capsys: pytest.CaptureFixture[str]) -> None:
    vlm = support("image-text-to-text")
    assert set(vlm.types) == vision_language_types() and tuple(vlm.columns) == VLM_COLUMNS
    code, out, err = run(capsys, "--task", "image-text-to-text")
    assert (code, err) == (
        0,
        "",
    ) and f"{len(vlm.types)} image-text-to-text types of transformers" in out
    assert [row.split()[0] for row in out.split("\n\n")[0].splitlines()] == ["type", *vlm.types]
    assert run(capsys, "--task", "image-text-to-text", "--json")[1] == support_text(
        "image-text-to-text"
    )
    found = run(capsys, "qwen2_5_vl")
    assert found == run(capsys, "Qwen/Qwen2.5-VL-7B-Instruct") and found[0] == 0
    assert "split into layers bit for bit (an image in each sequence)" in found[1]
    assert "context ranks" in run(capsys, "gemma3")[1], (
        "of a type that has both, text is the default"
    )
    assert "split into layers" in run(capsys, "gemma3", "--task", "image-text-to-text")[1]


def test_keys_of_types_that_see_say_no_more_than_was_proved() -> None:
    def keys(**verdicts: str) -> str:
        return " | ".join(
            models_command.vlm_recipe_lines(
                {name: cell(verdicts.get(name, "untested")) for name in VLM_COLUMNS}
            )
        )

    assert keys() == "no layout of this type is verified"
    assert "pipeline: 1 " in keys(layer_split="verified") and "3 is not verified" in keys(
        pipeline="verified"
    )
    assert "0 to 3" in keys(zero="verified") and "one stage a layer" in keys(pipeline="verified")
