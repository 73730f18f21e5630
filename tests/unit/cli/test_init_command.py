"""`init`: a recipe that the other commands take, nothing that they would refuse. `completion`: what
a shell offers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import COMMANDS, main
from shardwright.layout.gpu_cluster import catalogue

FITTING = (
    ("Qwen/Qwen3-8B", "a100-sxm4-80gb", 2, 8),
    ("qwen3-8b", "h100-sxm-80gb", 1, 8),
    ("gpt2", "cpu", 1, 2),
    ("openai-community/gpt2-xl", "v100-sxm2-32gb", 1, 8),
    ("Qwen/Qwen3-0.6B", "rtx4090-24gb", 1, 1),
    ("mistralai/Mixtral-8x7B-v0.1", "h100-sxm-80gb", 4, 8),
)


def words(model: str, gpu: str, nodes: int, gpus_per_node: int) -> list[str]:
    return [
        "init",
        model,
        "--gpu",
        gpu,
        "--nodes",
        str(nodes),
        "--gpus-per-node",
        str(gpus_per_node),
    ]


@pytest.mark.parametrize("asked", FITTING, ids=lambda asked: f"{Path(asked[0]).name}-{asked[1]}")
def test_the_recipe_is_checked_and_planned(
    asked: tuple[str, str, int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.yaml"
    assert main([*words(*asked), "-o", str(path)]) == 0
    assert main(["check", str(path)]) == 0
    capsys.readouterr()
    assert main(["plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert plan["feasible"]
    s = plan["strategy"]
    assert s["tensor"] * s["pipeline"] * s["data"] == asked[2] * asked[3]
    text = path.read_text()
    assert text.count("#") > 10 and "synthetic" in text


@pytest.mark.prove
def test_every_gpu_of_the_catalogue(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for gpu in catalogue()["gpus"]:
        path = tmp_path / f"{gpu}.yaml"
        assert main([*words("gpt2", gpu, 1, 1), "-o", str(path)]) == 0, gpu
        assert main(["check", str(path)]) == 0


def test_it_is_printed_without_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(words(*FITTING[0])) == 0
    printed = capsys.readouterr()
    assert main([*words(*FITTING[0]), "-o", str(tmp_path / "r.yaml")]) == 0
    assert printed.out == (tmp_path / "r.yaml").read_text() and printed.err == ""


def test_nothing_is_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("mine")
    assert main([*words(*FITTING[0]), "-o", str(path)]) == 1
    assert "SW1442" in capsys.readouterr().err and path.read_text() == "mine"
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "nowhere")
    assert main([*words(*FITTING[0]), "-o", str(link)]) == 1
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("asked", "code", "near"),
    [
        (("Qwen/Qwen3-8B", "h100-sxm2", 1, 8), "SW3001", "h100-sxm-80gb"),
        (("Qwen/Qwen3-8b-Bse", "h100-sxm-80gb", 1, 8), "SW2001", "Qwen/Qwen3-8B-Base"),
        (("Qwen/Qwen3-8B", "h100-sxm-80gb", 1, 0), "SW1104", "1024"),
        (("Qwen/Qwen3-8B", "h100-sxm-80gb", -1, 8), "SW11", "nodes"),
        (("meta-llama/Llama-3.1-70B", "h100-sxm-80gb", 1, 8), "SW1443", "4 nodes"),
    ],
)
def test_what_no_recipe_would_do(
    asked: tuple[str, str, int, int],
    code: str,
    near: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: True)
    path = tmp_path / "r.yaml"
    assert main([*words(*asked), "-o", str(path)]) == 1
    err = capsys.readouterr().err
    assert code in err and near in err and "Traceback" not in err
    assert not path.exists()


def test_a_pipe_is_asked_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("h100-sxm-80gb\n"))
    assert main(["init", "gpt2"]) == 1
    assert "--gpu is missing" in capsys.readouterr().err
    assert sys.stdin.read() == "h100-sxm-80gb\n"


def test_a_folder_is_named_from_where_the_recipe_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.models.model_sources import catalog_config

    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").write_text(json.dumps(catalog_config("gpt2")))
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([*words("models/tiny", "a100-sxm4-40gb", 1, 1), "-o", "recipes/r.yaml"]) == 0
    assert 'source: "../models/tiny"' in Path("recipes/r.yaml").read_text()
    assert main(["plan", "recipes/r.yaml"]) == 0
    assert main([*words("models/tiny", "a100-sxm4-40gb", 1, 1), "-o", "r.yaml"]) == 0
    assert 'source: "./models/tiny"' in Path("r.yaml").read_text()


def test_a_folder_with_weights_is_fine_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who then swaps in data alone does not train from scratch unawares: the recipe and every
    summary say which."""
    from safetensors.numpy import save

    from shardwright.models.model_sources import catalog_config
    from shardwright.recipe.recipe_loader import load_recipe

    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(catalog_config("gpt2")))
    for file, weights, lr in (
        ("README.md", "random", 3e-4),
        ("model.safetensors", "pretrained", 2e-5),
    ):
        (folder / file).write_bytes(save({}))
        path = tmp_path / f"{weights}.yaml"
        assert main([*words(str(folder), "a100-sxm4-40gb", 1, 1), "-o", str(path)]) == 0
        recipe = load_recipe(path)
        assert (recipe.model.weights, recipe.training.optimizer.lr) == (weights, lr)
        capsys.readouterr()
        for command in ("check", "plan", "explain"):
            assert main([command, str(path)]) == 0
            assert f"weights {weights}" in capsys.readouterr().out, command


def test_without_its_library_completion_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    err = capsys.readouterr().err
    assert "SW1441" in err and "pip install shtab" in err


def offered(script: str, *typed: str) -> set[str]:
    """What bash would offer for the last word."""
    line = " ".join(f"'{word}'" for word in ("shardwright", *typed))
    program = (
        f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(typed)}; _shtab_shardwright; printf "
        f"'%s\\n' ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_what_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="completion needs shtab (pip install shtab)")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(COMMANDS) <= offered(script, "")
    assert {"plan"} == offered(script, "pl")
    assert set(catalogue()["gpus"]) <= offered(script, "init", "gpt2", "--gpu", "")
    assert {"h100-sxm-80gb", "h100-pcie-80gb", "h100-nvl-94gb"} == offered(
        script, "init", "gpt2", "--gpu", "h10"
    )
    assert "--why-not" in offered(script, "explain", "--w")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="completion needs shtab (pip install shtab)")
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
