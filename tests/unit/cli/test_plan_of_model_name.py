"""`plan MODEL`: a model's name in place of a recipe, the recipe that stands for it, and what is
refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from shardwright.cli.main import main
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.models.factory import SMALL_LLAMA

H100 = ("--gpu", "h100-sxm-80gb", "--nodes")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)


def plan_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_issues_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "meta-llama/Llama-3.1-70B", *H100, "4", "--top", "3")
    assert found["recipe"] == "meta-llama/Llama-3.1-70B"
    best = found["plans"][0]
    assert best["feasible"] and best["memory"]["fits"]
    s = best["strategy"]
    assert s["tensor"] * s["pipeline"] * s["data"] == 32
    planned, assumed = found["planned_as"], found["assumed"]
    assert (
        planned["model"]["source"] == "meta-llama/Llama-3.1-70B"
        and planned["model"]["weights"] == "random"
    )
    assert planned["cluster"]["gpus_per_node"] == 8
    assert planned["training"]["sequence_length"] == 4096
    assert planned["training"]["global_batch_size"] == 1024  # 4 Mi tokens
    assert set(assumed) == {
        "cluster.gpus_per_node",
        *(
            f"training.{key}"
            for key in ("sequence_length", "global_batch_size", "precision", "steps")
        ),
    }
    # 70 B parameters on 32 GPUs in some plausible time.
    assert 0.1 < best["time"]["mfu"] < 0.7


def test_flags_and_set_are_not_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--gpus-per-node",
        "3",
        "--sequence-length",
        "512",
        "--global-batch-size",
        "6",
        "--precision",
        "fp16",
    )
    pins = ("--set", "training.steps=7", "--set", "parallelism.pipeline=3")
    found = plan_json(capsys, "gpt2", *H100, "1", *flags, *pins)
    training = found["planned_as"]["training"]
    assert [
        training[k] for k in ("sequence_length", "global_batch_size", "precision", "steps")
    ] == [512, 6, "fp16", 7]
    assert found["assumed"] == []
    assert found["plans"][0]["strategy"]["pipeline"] == 3
    assert found["plans"][0]["training"]["steps"] == 7


def test_assumptions_follow_the_model_and_the_world(capsys: pytest.CaptureFixture[str]) -> None:
    # GPT-2's longest sequence is 1024; 4 Mi tokens of it are 4096 sequences, and 24 GPUs want a
    # multiple of 24.
    training = plan_json(capsys, "gpt2", *H100, "3", "--top", "1")["planned_as"]["training"]
    assert (training["sequence_length"], training["global_batch_size"]) == (1024, 24 * 171)


def test_the_printed_recipe_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "SmolLM2-135M", *H100, "1", "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines[: lines.index("")]
    said = " ".join(line.strip() for line in head).partition("  model:")[0]
    assert said.startswith("planned as this recipe (assumed: cluster.gpus_per_node, training.")
    start = next(i for i, line in enumerate(head) if line.startswith("  model:"))
    body = "\n".join(line.removeprefix("  ") for line in head[start:])
    path = tmp_path / "recipe.yaml"
    path.write_text(f"version: 1\nname: copied\n{body}\n")
    recipe = load_recipe(path)
    assert recipe.model.source == "HuggingFaceTB/SmolLM2-135M"  # the only id that ends in it
    assert (recipe.training.sequence_length, recipe.training.global_batch_size) == (4096, 1024)
    assert lines[len(head) + 1].split()[:3] == ["#", "layout", "memory"]


def test_a_model_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    monkeypatch.chdir(tmp_path)
    found = plan_json(capsys, "my model", *H100, "1", "--top", "1")
    assert (
        found["planned_as"]["training"]["sequence_length"] == SMALL_LLAMA["max_position_embeddings"]
    )


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == ""
    return captured.err


def test_a_model_of_a_type_that_nobody_wrote_a_line_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Qwen/Qwen3-32B", *H100, "4"]) == 0
    assert re.search(r"^ *1  DP 32, ZeRO-3", capsys.readouterr().out, re.MULTILINE)


def test_all_errors_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "meta-llama/Llama-3.1-80B", "--gpu", "h1000", "--nodes", "4")
    assert "SW2001" in err and "meta-llama/Llama-3.1-8B" in err and "SW3001" in err
    assert "<stdin>" not in err


def test_a_value_that_the_schema_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "gpt2", *H100, "1", "--precision", "int4")
    assert "SW1103" in err and " --> --precision int4\n" in err


def test_errors_point_at_the_words_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no file of the planned recipe that a reader could open."""
    err = refused(
        capsys, "Qwen/Qwen3-9000B", "--gpu", "h1000", "--nodes", "4", "--gpus-per-node", "4"
    )
    assert " --> Qwen/Qwen3-9000B\n" in err and " --> --gpu h1000\n" in err
    err = refused(
        capsys, "gpt2", *H100, "1", "--set", "parallelism.data=8", "--global-batch-size", "3"
    )
    assert " --> --global-batch-size 3\n" in err
    err = refused(capsys, "gpt2", *H100, "1", "--set", "training.steps=none")
    assert " --> --set:1:16\n" in err
    err = refused(capsys, "gpt2", "--gpu", "\udc80", "--nodes", "1")
    assert "SW1016" in err and "stdin" not in err and ":4:" not in err
    assert main(["init", "Qwen/Qwen3-8B", "--gpu", "h1000", "--nodes", "0"]) == 1
    err = capsys.readouterr().err
    assert " --> --nodes 0\n" in err


def test_a_model_is_planned_on_one_node_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "gpt2", "--gpu", "h100-sxm-80gb", "--top", "1")
    assert found["planned_as"]["cluster"]["nodes"] == 1 and "cluster.nodes" in found["assumed"]


@pytest.mark.parametrize(
    ("words", "gpu", "told"),
    [
        ("h100", "h100-sxm-80gb", "--gpu h100: taken as h100-sxm-80gb\n"),
        ("NVIDIA H200", "h200-sxm-141gb", "taken as h200-sxm-141gb\n"),
        (
            "a100",
            "a100-sxm4-80gb",
            "taken as a100-sxm4-80gb (the catalogue has a100-sxm4-40gb too)",
        ),
        ("A100-40GB", "a100-sxm4-40gb", "taken as a100-sxm4-40gb\n"),
        ("v100_sxm2", "v100-sxm2-32gb", "(the catalogue has v100-sxm2-16gb too)"),
        ("h100-pcie", "h100-pcie-80gb", "taken as h100-pcie-80gb\n"),
        ("A100 PCIe 40GB", "a100-pcie-40gb", "taken as a100-pcie-40gb\n"),
        ("RTX 4090", "rtx4090-24gb", "taken as rtx4090-24gb\n"),
        ("rtx pro 6000", "rtxpro6000-96gb", "taken as rtxpro6000-96gb\n"),
        ("cpu", "cpu", ""),
    ],
)
def test_a_short_name_of_a_gpu(
    words: str, gpu: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--precision", "fp16"] if "v100" in gpu else []
    assert main(["plan", "gpt2", "--gpu", words, "--json", "--top", "1", *more]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["planned_as"]["cluster"]["gpu"] == gpu
    assert told in err and (told or not err)


def test_a_short_name_that_fits_no_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "SW3001" in refused(capsys, "gpt2", "--gpu", "h100-sxm2")
    assert "SW3001" in refused(capsys, "gpt2", "--gpu", "h1")


def test_init_takes_a_short_name_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "gpt2", "--gpu", "h100"]) == 0
    out, err = capsys.readouterr()
    assert 'gpu: "h100-sxm-80gb"' in out and "taken as h100-sxm-80gb" in err


def test_what_is_no_name_and_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "SW2015" in refused(capsys, "no $(name)", *H100, "1")
    assert "SW1001" in refused(capsys, "no-such-recipe.yaml")
    assert "SW1001" in refused(capsys, "neither-slash-nor-flags")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("meta-llama/Llama-3.1-70B",), "needs --gpu NAME"),
        (("meta-llama/Llama-3.1-70B", "--nodes", "4"), "needs --gpu NAME"),
        (("recipe.yaml", "--gpu", "cpu", "--sequence-length", "5"), "--gpu, --sequence-length"),
        (("gpt2", "--nodes", "0", "--gpu", "cpu"), "--nodes"),
    ],
)
def test_usage(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *argv)


def test_a_file_is_a_recipe_whatever_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("openai-community")
    Path("openai-community/gpt2").write_text("version: [1\n")
    assert "SW1005" in refused(capsys, "openai-community/gpt2")
