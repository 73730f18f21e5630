"""`--why-not islands=N`: other numbers of islands as `estimate` prices them, and one world over the
same links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from tests.unit.cli.shipped_models import write_llama


def recipe(folder: Path, *, gbits: float = 1.0, **parallelism: Any) -> str:
    cluster = {"nodes": 4, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    cluster |= {"islands": 2, "inter_island_gbits_per_second": gbits}
    training = {
        "sequence_length": 2048,
        "global_batch_size": 256,
        "steps": 1000,
        "outer": {"every_steps": 50},
    }
    model = {"source": "meta-llama/Llama-3.2-1B", "weights": "random"}
    return write_llama(
        folder, model=model, cluster=cluster, training=training, parallelism=parallelism
    )


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("gbits", "verdict"), [(1.0, "loses"), (400.0, "wins")])
def test_one_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gbits: float, verdict: str
) -> None:
    path = recipe(tmp_path, gbits=gbits)
    plan = asked(capsys, "estimate", path)
    told = asked(capsys, "explain", path, "--why-not", "islands=1")
    found, step = told["islands"], plan["time"]["step_seconds"]
    assert told["verdict"] == verdict and found == plan["islands"]
    inner = step - plan["time"]["outer_comm_seconds"]
    parameters = 1_235_814_400
    assert found["gradient_bytes"] == 2 * parameters  # 2 (n - 1) / n of two bytes each
    assert found["gradient_seconds"] == pytest.approx(2 * parameters * 8 / gbits / 1e9)
    assert found["data_parallel_step_seconds"] == pytest.approx(
        max(inner, found["gradient_seconds"])
    )
    assert found["data_parallel_longest_seconds"] == pytest.approx(
        inner + found["gradient_seconds"]
    )
    assert found["days"] == pytest.approx(plan["training"]["days"])
    assert found["data_parallel_days"] == pytest.approx(
        1000 * found["data_parallel_step_seconds"] / 86400
    )
    assert main(["explain", path, "--why-not", "islands=1"]) == 0
    page = capsys.readouterr().out
    assert ("take islands" in page) == (verdict == "loses")
    assert (
        "arXiv 2503.09799: theirs" in page
        and "2 islands +0.2 %" in page
        and "one world, none hidden" in page
    )


def test_other_islands_are_priced_as_estimate_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, data=8, tensor=2)
    told = asked(capsys, "explain", path, "--why-not", "islands=4")
    assert told["ignored_pins"] == ["tensor", "data"]
    free = [w for key in told["ignored_pins"] for w in ("--set", f"parallelism.{key}=auto")]
    same = asked(capsys, "estimate", path, "--set", "cluster.islands=4", *free)
    for key in ("strategy", "memory", "time", "training"):
        assert told["estimate"][key] == same[key], key
    assert told["estimate"]["time"]["outer_comm_seconds"] == pytest.approx(
        3 * told["plan"]["time"]["outer_comm_seconds"]
    )
    assert main(["explain", path, "--why-not", "islands=4"]) == 0
    page = capsys.readouterr().out
    assert "4 islands +0.5 %" in page and "plan     2 islands, each tensor=2" in page
    mixed = asked(capsys, "explain", path, "--why-not", "islands=4,tensor=4")
    assert mixed["estimate"]["strategy"]["tensor"] == 4


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path)
    told = asked(capsys, "explain", path, "--why-not", "islands=3")
    assert told["verdict"] == "forbidden" and {d["code"] for d in told["diagnostics"]} == {"SW1231"}
    for words, code in (
        ("islands=0", "SW1104"),
        ("islands=x", "SW1102"),
        ("islands=1,tensor=2", "SW3303"),
    ):
        refused = asked(capsys, "explain", path, "--why-not", words, code=1)
        assert [d["code"] for d in refused["diagnostics"]] == [code]


def test_a_recipe_of_one_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path, cluster={"nodes": 2, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"})
    told = asked(capsys, "explain", path, "--why-not", "islands=2")
    assert (
        told["verdict"] == "forbidden"
        and "--set cluster.islands=N" in told["diagnostics"][0]["help"]
    )
    assert asked(capsys, "explain", path, "--why-not", "islands=1")["verdict"] == "chosen"
    link = ("--set", "cluster.islands=2", "--set", "cluster.inter_island_gbits_per_second=1")
    assert asked(capsys, "explain", path, *link, "--why-not", "islands=1")["verdict"] == "loses"


def test_diff_says_what_a_recipe_of_one_world_is_priced_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    islands = recipe(tmp_path)
    document = json.loads(Path(islands).read_text())
    cluster = {key: document["cluster"][key] for key in ("nodes", "gpus_per_node", "gpu")}
    training = {key: value for key, value in document["training"].items() if key != "outer"}
    changed = {**document, "cluster": cluster, "training": training}
    plain = write_llama(
        tmp_path, "plain.json", **{k: v for k, v in changed.items() if k != "version"}
    )
    for pair, name in (((islands, plain), "A"), ((plain, islands), "B")):
        assert main(["diff", *pair]) == 0
        page = " ".join(capsys.readouterr().out.split())
        assert f"`explain {name} --why-not islands=1` prices it over the links of islands" in page
        assert "the order of the samples" not in page and "come in another order" not in page
        assert "(SW6218)" in page
    assert main(["diff", islands, islands]) == 0
    assert "islands=1" not in capsys.readouterr().out
