"""`doctor` of this machine, and what it refuses before it tries anything."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.cli import main as cli
from shardwright.cli.launch_commands import check_has_errors, checks_json, checks_text
from shardwright.launch.host_checks import PlannedBandwidth, links
from shardwright.launch.host_probe import LinkRates, ProbedHost, RendezvousResult
from shardwright.launch.link_bandwidth import measure
from tests.parity.harness import must, shardwright


@pytest.mark.launch
def test_one_machine(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros((8, 32), dtype=np.int32))
    changes = {
        "data": {"kind": "tokens", "path": "tokens.npy"},
        "launch.env.GLOO_SOCKET_IFNAME": "lo",
    }
    must(shardwright("compile", write_recipe(changes), "-o", tmp_path / "out"))
    well = must(shardwright("doctor", tmp_path / "out"))
    assert "all is well" in well.stdout and "\nred" not in well.stdout
    assert not list((tmp_path / "out" / "run").glob(".doctor-*"))

    (tmp_path / "tokens.npy").unlink()
    changes["launch.env.GLOO_SOCKET_IFNAME"] = "ens77"
    np.save(tmp_path / "tokens.npy", np.zeros((8, 32), dtype=np.int32))
    must(shardwright("compile", write_recipe(changes), "-o", tmp_path / "out"))
    (tmp_path / "tokens.npy").unlink()
    ill = shardwright("doctor", tmp_path / "out", "--json")
    assert ill.returncode == 1
    problems = [p for check in json.loads(ill.stdout)["checks"] for p in check["problems"]]
    assert [p["code"] for p in problems] == ["SW5311", "SW5307"]
    assert (
        str(tmp_path / "tokens.npy") in problems[0]["message"] and "ens77" in problems[1]["message"]
    )


@pytest.fixture
def two_nodes(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    recipe = write_recipe({"cluster.nodes": 2, "cluster.gpus_per_node": 2})
    assert cli.main(["compile", str(recipe), "-o", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("hostfile", "code", "words"),
    [
        (None, "SW6003", "but there is no hostfile"),
        ("a slots=2\n", "SW5203", "1 host, but the plan has 2 nodes"),
        ("a slots=2\nb slots=4\n", "SW5203", "line 2: b has slots=4"),
        ("a slots=2\na slots=2\n", "SW5202", "hostfile line 2"),
        ("a slots=2\nb slots=two\n", "SW5201", "hostfile line 2"),
    ],
)
def test_a_hostfile_that_is_not_the_plan_s_cluster(
    hostfile: str | None,
    code: str,
    words: str,
    two_nodes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = []
    if hostfile is not None:
        (tmp_path / "hosts").write_text(hostfile)
        given = ["--hostfile", str(tmp_path / "hosts")]
    assert cli.main(["doctor", str(two_nodes), *given]) == 1
    error = capsys.readouterr().err
    assert f"error[{code}]" in error and words in error


def test_without_ssh(
    two_nodes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert cli.main(["doctor", str(two_nodes), "--hostfile", str(tmp_path / "hosts")]) == 1
    assert "error[SW5301]" in capsys.readouterr().err


@pytest.mark.prove
@pytest.mark.launch
def test_hosts_that_do_not_answer_are_not_said_to_be_well(two_nodes: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a.invalid slots=2\nb.invalid slots=2\n")
    if shutil.which("ssh") is not None:
        done = shardwright("doctor", two_nodes, "--hostfile", tmp_path / "hosts")
        assert done.returncode == 1 and "\nok " not in done.stdout
        assert done.stdout.count("SW5301") == 2 and done.stdout.endswith(
            "2 found; nothing was started\n"
        )


def test_a_slow_link_is_told_and_does_not_stop_a_run() -> None:
    assumed = PlannedBandwidth(
        intra_node_bytes_per_second=450e9, inter_node_bytes_per_second=50e9, is_cpu=False
    )
    met = [
        ProbedHost(
            host=host,
            met=RendezvousResult(
                sum=2, links=LinkRates(to_next=to_next, all_reduce=30e9, local=local)
            ),
        )
        for host, to_next, local in (("a", 48e9, 400e9), ("b", 12.5e9, 100e9))
    ]
    check = links(met, assumed)
    between, inside = check.problems
    assert between.code == inside.code == "SW5312" and between.severity == "warning"
    assert between.message == "b -> a: the link gives 100 Gb/s, but the plan assumes 400 Gb/s"
    assert "--set cluster.inter_node_gbits_per_second=100" in between.help
    assert "--set cluster.intra_node_gbytes_per_second=100" in inside.help
    assert "100 Gb/s between hosts (b -> a is the slowest), 400 planned" in check.told
    assert (
        not check_has_errors(check)
        and "warn links" in checks_text([check])
        and json.loads(checks_json([check]))["ok"]
    )


def test_what_is_not_measured_is_not_judged() -> None:
    assumed = PlannedBandwidth(
        intra_node_bytes_per_second=450e9, inter_node_bytes_per_second=50e9, is_cpu=False
    )
    assert not links([ProbedHost(host="a", met=RendezvousResult(sum=1))], assumed).problems
    assert not links([ProbedHost(host="a")], assumed).problems


def ring(rank: int, world: int, port: int, folder: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = measure(rank, world, torch.device("cpu"), seconds=1.0)
    (folder / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(found)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_measures_its_link(world: int, tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(
        ring, (world, port, tmp_path), nprocs=world, start_method="fork"
    )
    for rank in range(world):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["local"] is None
        # Loopback and two cores: between 10 Mb/s and 10 Tb/s.
        assert 1e6 < found["to_next"] < 1e12 and 1e6 < found["all_reduce"] < 1e12, found
