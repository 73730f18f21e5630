"""What `lint --model` says of AutoEP and of sequence ranks, and that the installed DeepSpeed does
so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.lint.ds_config_model_rules import detected, window

AUTOEP = {"train_batch_size": 8, "expert_parallel": {"enabled": True, "autoep_size": 2}}
SEQUENCE = {"train_batch_size": 8, "data_parallel_size": 4, "sequence_parallel_size": 2}


def codes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    model: str,
    *arguments: str,
) -> list[tuple[str, str]]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    main(
        ["lint", str(path), "--for", "deepspeed", "--format", "json", "--model", model, *arguments]
    )
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    return [(each["code"], each["message"]) for each in found]


def model_of(tmp_path: Path, kind: str) -> str:
    """A model folder, of which AutoEP looks at nothing but the type."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(tmp_path)


class TestExperts:
    def test_what_the_presets_are_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for model in (
            "mistralai/Mixtral-8x7B-v0.1",
            "Qwen/Qwen3-235B-A22B",
            "deepseek-ai/DeepSeek-V3",
        ):
            assert codes(tmp_path, capsys, AUTOEP, model) == []

    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            (
                "gpt_oss",
                "AutoEP does not find the experts of gpt_oss: it trains without expert ranks",
            ),
            ("olmoe", "AutoEP refuses a model of type olmoe"),
            ("qwen3", "AutoEP finds no experts in qwen3: `expert_parallel` has no effect"),
        ],
    )
    def test_what_they_are_not_for(
        self, kind: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert codes(tmp_path, capsys, AUTOEP, model_of(tmp_path, kind)) == [("SW4612", words)]

    def test_a_preset_by_name_is_the_user_s(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for key, value in (
            ("preset_model", "mixtral"),
            ("moe_layer_pattern", r"model\.layers\.\d+\.mlp"),
        ):
            config = {**AUTOEP, "expert_parallel": {"enabled": True, "autoep_size": 2, key: value}}
            assert codes(tmp_path, capsys, config, model_of(tmp_path, "gpt_oss")) == []

    def test_off_is_off(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = {**AUTOEP, "expert_parallel": {"enabled": False, "autoep_size": 2}}
        assert codes(tmp_path, capsys, config, model_of(tmp_path, "gpt_oss")) == []


class TestSequence:
    def test_windows(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        ((code, message),) = codes(tmp_path, capsys, SEQUENCE, "mistralai/Mistral-7B-v0.1")
        assert code == "SW4613" and "window of 4096 tokens" in message
        assert (
            codes(
                tmp_path, capsys, SEQUENCE, "mistralai/Mistral-7B-v0.1", "--sequence-length", "4096"
            )
            == []
        )
        assert codes(tmp_path, capsys, SEQUENCE, "mistralai/Mistral-7B-v0.3") == []
        assert (
            codes(tmp_path, capsys, SEQUENCE, "Qwen/Qwen2-7B") == []
        )  # it has a width, and uses none

    def test_heads(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        by_seven = {**SEQUENCE, "data_parallel_size": 1, "sequence_parallel_size": 7}
        assert codes(tmp_path, capsys, by_seven, "Qwen/Qwen2-7B") == [
            (
                "SW4614",
                (
                    "qwen2: 4 key and value heads are neither a multiple nor a divisor of 7 "
                    "sequence ranks"
                ),
            )
        ]
        ((code, message),) = codes(tmp_path, capsys, by_seven, "meta-llama/Llama-3.1-8B")
        assert code == "SW4614" and "32 attention heads are not divisible by 7" in message

    def test_without_a_model_nothing_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "ds.json"
        for config in (AUTOEP, SEQUENCE):
            path.write_text(json.dumps(config))
            assert main(["lint", str(path), "--for", "deepspeed"]) == 0
            assert capsys.readouterr() == (f"ok {path}\n", "")


def test_which_layers_see_a_window() -> None:
    assert window({"sliding_window": 8}) == 8
    assert window({"sliding_window": None}) is None and window({}) is None
    assert window({"sliding_window": 8, "use_sliding_window": False}) is None
    assert window({"sliding_window": 8, "layer_types": ["full_attention"]}) is None
    assert (
        window({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}) == 8
    )
    assert (
        window({"text_config": {"attention_chunk_size": 16, "layer_types": ["chunked_attention"]}})
        == 16
    )


def test_the_table_of_types_is_what_the_installed_deepspeed_does() -> None:
    """Each type of transformers that has experts, on the meta device, through DeepSpeed's own
    parser."""
    from tools.generate.autoep_support import measured

    assert measured() == detected()


def test_the_page_has_the_table_s_counts() -> None:
    found = Counter(detected().values())
    page = (Path(__file__).parents[2] / "docs/lint.md").read_text(encoding="utf-8")
    words = (
        f"of {found.total()} types it finds those of {found['found']}, refuses {found['refused']},"
    )
    assert words in page and f"trains {found['missed']}, GPT-OSS among them" in page
    assert detected()["gpt_oss"] == "missed"
