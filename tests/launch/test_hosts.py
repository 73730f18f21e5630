"""Training over several hosts, each with a network and processes of its own: `make test-hosts`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from tests.launch.hosts import Host, hosts, why_not
from tests.launch.resume import compiled
from tests.launch.wait_until import wait_for, wait_until
from tests.parity.harness import Case, compare, metrics, must, recipe, shardwright, write_inputs

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TWO = Case(model="llama", pipeline=2, tensor=2, nodes=2)
THREE = Case(model="gpt2", pipeline=3, nodes=3)


def hostfile(made: list[Host], case: Case, folder: Path) -> Path:
    path = folder / "hostfile"
    path.write_text("".join(f"{host.name} slots={case.world // case.nodes}\n" for host in made))
    return path


def start(host: Host, *arguments: object) -> subprocess.Popen[str]:
    """The shardwright command on `host`."""
    return subprocess.Popen(
        host.command(sys.executable, "-m", "shardwright", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TEST_TOKEN": "passed-through"},
    )


@pytest.mark.parametrize("case", [TWO, THREE], ids=["pp2-tp2-on-two", "pp3-on-three"])
def test_trains_through_pdsh_like_one_process(case: Case, tmp_path: Path) -> None:
    with hosts(case.nodes, tmp_path / "net") as made:

        def train(out: Path) -> None:
            named = hostfile(made, case, tmp_path)
            made[0].must(sys.executable, "-m", "shardwright", "run", out, "--hostfile", named)

        compare(case, tmp_path, train)


def test_trains_without_ssh_like_one_process(tmp_path: Path) -> None:
    """launch.sh on each node, as any scheduler would start it."""
    case = replace(TWO, launcher="no_ssh")
    with hosts(case.nodes, tmp_path / "net") as made:

        def train(out: Path) -> None:
            for process in _launch_each(made, out, hostfile(made, case, tmp_path)):
                output, _ = process.communicate(timeout=300)
                assert process.returncode == 0, output[-3000:]

        compare(case, tmp_path, train)


def _launch_each(made: list[Host], out: Path, named: Path) -> list[subprocess.Popen[str]]:
    """launch.sh by hand, on every node."""
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    a = f"MASTER_ADDR={made[0].address}"
    return [
        subprocess.Popen(
            host.command("env", path, f"NODE_RANK={i}", a, "bash", out / "launch.sh", named),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, host in enumerate(made)
    ]


@pytest.mark.parametrize("victim", [3, 0])
def test_a_rank_killed_during_a_step_is_named_and_nothing_is_left(
    victim: int, tmp_path: Path
) -> None:
    with hosts(2, tmp_path / "net") as made:
        out = _compiled_to_last(tmp_path)
        seconds = _kill_and_expect(made, out, hostfile(made, TWO, tmp_path), victim)
        assert seconds < 30


@pytest.mark.prove
def test_twenty_killed_ranks_are_named(tmp_path: Path, proved: Any) -> None:
    with hosts(2, tmp_path / "net") as made:
        out = _compiled_to_last(tmp_path)
        named = hostfile(made, TWO, tmp_path)
        seconds = [_kill_and_expect(made, out, named, victim=3 - k % 4) for k in range(20)]
        assert max(seconds) < 30
        proved(
            "hosts",
            "kill -9 of a rank, two hosts",
            {"repetitions": 20, "seconds_at_most": max(seconds)},
        )


def test_a_rank_killed_under_launch_sh_alone_is_written_down(tmp_path: Path) -> None:
    """No `run` watches: rank 0 says who went, and nothing is left either."""
    with hosts(2, tmp_path / "net") as made:
        out = compiled(replace(TWO, launcher="no_ssh"), tmp_path, steps=4000)
        started = _launch_each(made, out, hostfile(made, TWO, tmp_path))
        wait_for(
            lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, started[0]
        )
        made[1].must("kill", "-9", _live(out, 3)["pid"])
        for process in started:
            process.communicate(timeout=60)
            assert process.returncode != 0
        status = json.loads((out / "run" / "status.json").read_text())
        assert (status["status"], status["rank"], status["host"], status["stage"]) == (
            "failed",
            3,
            "b",
            1,
        )
        _expect_nothing_left(made)


def test_a_host_that_goes_away_is_named_and_its_ranks_end_themselves(tmp_path: Path) -> None:
    """Its network breaks during a step: no connection is closed, so only silence tells."""
    with hosts(2, tmp_path / "net") as made:
        out = _compiled_to_last(tmp_path)
        process = start(made[0], "run", out, "--hostfile", hostfile(made, TWO, tmp_path))
        wait_for(
            lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process
        )
        made[1].must("ip", "link", "set", "eth0", "down")
        began = time.monotonic()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 3 and time.monotonic() - began < 60
        assert re.search(
            r"error\[SW6301\]: rank [23] \(stage 1, host b\): lost without an error message", errors
        ), errors
        _expect_nothing_left(made)


def test_a_host_that_ssh_does_not_reach_is_named(tmp_path: Path) -> None:
    with hosts(2, tmp_path / "net") as made:
        out = _compiled_to_last(tmp_path)
        made[1].must("ip", "link", "set", "eth0", "down")
        process = start(made[0], "run", out, "--hostfile", hostfile(made, TWO, tmp_path))
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 3
        assert "error[SW6301]: host b: ssh cannot connect, or the connection broke" in errors
        assert "b: ssh: connect to host b port 22:" in errors
        _expect_nothing_left(made)


def test_an_interrupt_ends_the_ranks_on_every_host(tmp_path: Path) -> None:
    with hosts(2, tmp_path / "net") as made:
        out = _compiled_to_last(tmp_path)
        process = start(made[0], "run", out, "--hostfile", hostfile(made, TWO, tmp_path))
        wait_for(
            lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process
        )
        environment = made[1].must("cat", f"/proc/{_live(out, 3)['pid']}/environ").split("\0")
        assert (
            "GLOO_SOCKET_IFNAME=eth0" in environment and "TEST_TOKEN=passed-through" in environment
        )
        (pid,) = (line.split()[0] for line in made[0].processes() if "shardwright run" in line)
        made[0].must("kill", "-INT", pid)
        process.communicate(timeout=120)
        assert process.returncode == 130
        _expect_nothing_left(made)


def _compiled_to_last(folder: Path) -> Path:
    """A run that does not end by itself, with values that DeepSpeed forwards by file only."""
    out = compiled(TWO, folder, steps=4000)
    overrides = ("launch.env.GLOO_SOCKET_IFNAME=eth0", "launch.env_from=[TEST_TOKEN]")
    must(
        shardwright(
            "compile",
            folder / "recipe.yaml",
            "-o",
            out,
            *(w for o in overrides for w in ("--set", o)),
        )
    )
    return out


def _live(out: Path, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (out / "run" / "ranks" / f"rank-{rank:05d}.json").read_text()
    )
    return document


def _is_empty(host: Host) -> bool:
    return not host.processes()


def _expect_nothing_left(made: list[Host]) -> None:
    for host in made:
        wait_until(partial(_is_empty, host), f"left on {host.name}: {host.processes()}")


def _kill_and_expect(made: list[Host], out: Path, named: Path, victim: int) -> float:
    """kill -9 of one rank in the middle of training; seconds until `run` is back with the right
    answer."""
    (out / "run" / "metrics.jsonl").unlink(missing_ok=True)  # an earlier attempt's
    process = start(made[0], "run", out, "--hostfile", named, "--resume", "never")
    wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process)
    live = _live(out, victim)
    host = next(h for h in made if h.name == live["host"])
    host.must("kill", "-9", live["pid"])
    began = time.monotonic()
    _, errors = process.communicate(timeout=120)
    seconds = time.monotonic() - began
    assert process.returncode == 3, errors
    stage = victim // 2
    assert (
        f"error[SW6301]: rank {victim} (stage {stage}, host {host.name}): killed (signal 9)"
        in errors
    ), errors
    status = json.loads((out / "run" / "status.json").read_text())
    assert (status["status"], status["rank"], status["host"], status["stage"]) == (
        "failed",
        victim,
        host.name,
        stage,
    )
    _expect_nothing_left(made)
    return seconds


def test_doctor_finds_each_fault_on_its_host_in_time(tmp_path: Path) -> None:
    with hosts(3, tmp_path / "net") as made:
        a, b, c = made
        case = Case(model="gpt2", pipeline=3, nodes=3)
        out = compiled(case, tmp_path)
        named = hostfile(made, case, tmp_path)

        code, told = _doctor(a, out, named)
        assert code == 0 and told["ok"], told
        said = {check["name"]: check["told"] for check in told["checks"]}
        assert said["all-reduce"] == "over all hosts"
        assert re.match(
            r"[\d.]+ Gb/s between hosts \(\w -> \w is the slowest\); [\d.]+ Gb/s a host",
            said["links"],
        ), said

        site, version = Path(deepspeed.__file__).parents[1], metadata.version("deepspeed")
        b.overlay(site)
        installed = site / f"deepspeed-{version}.dist-info"
        b.must("mv", installed, site / "deepspeed-0.19.9.dist-info")
        assert _red(_doctor(a, out, named)) == [
            "SW5302 b has deepspeed 0.19.9, but the plan was made with 0.19.8"
        ]

        c.must("ip", "link", "set", "eth0", "down")
        code, told = _doctor(a, out, named)
        found = _red((code, told))
        assert found[0].startswith("SW5301 c: ssh: connect to host c port 22: ")
        assert found[1:] == ["SW5302 b has deepspeed 0.19.9, but the plan was made with 0.19.8"]
        said = {check["name"]: check["told"] for check in told["checks"]}
        assert said["all-reduce"] == "over a, b only: the other hosts lack the pinned interface"


def test_doctor_finds_a_wrong_interface_name(tmp_path: Path) -> None:
    with hosts(2, tmp_path / "net", interfaces=("eth0", "ens3")) as made:
        document = recipe(TWO, tmp_path) | {"launch": {"env": {"GLOO_SOCKET_IFNAME": "eth0"}}}
        write_inputs(TWO, tmp_path)
        (tmp_path / "recipe.yaml").write_text(json.dumps(document))
        must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "out"))
        named = hostfile(made, TWO, tmp_path)
        (found,) = _red(_doctor(made[0], tmp_path / "out", named))
        assert found == "SW5307 b: GLOO_SOCKET_IFNAME=eth0, but the host's interfaces are lo, ens3"


def _doctor(host: Host, out: Path, named: Path) -> tuple[int, dict[str, Any]]:
    began = time.monotonic()
    done = host.run(
        sys.executable, "-m", "shardwright", "doctor", out, "--hostfile", named, "--json"
    )
    assert time.monotonic() - began < 20
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _red(answer: tuple[int, dict[str, Any]]) -> list[str]:
    code, told = answer
    assert code == 1
    return [
        f"{problem['code']} {problem['message']}"
        for check in told["checks"]
        for problem in check["problems"]
    ]
