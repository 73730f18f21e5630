"""Training over several hosts, each with a network and processes of its own: `make test-hosts`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.hosts import Host, hosts, why_not
from tests.parity.harness import Case, compare

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TWO = Case(model="llama", pipeline=2, tensor=2, nodes=2)
THREE = Case(model="gpt2", pipeline=3, nodes=3)


def hostfile(made: list[Host], case: Case, folder: Path) -> Path:
    path = folder / "hostfile"
    path.write_text("".join(f"{host.name} slots={case.world // case.nodes}\n" for host in made))
    return path


@pytest.mark.parametrize("case", [TWO, THREE], ids=["pp2-tp2-on-two", "pp3-on-three"])
def test_trains_through_pdsh_like_one_process(case: Case, tmp_path: Path) -> None:
    with hosts(case.nodes, tmp_path / "net") as made:

        def start(out: Path) -> None:
            named = hostfile(made, case, tmp_path)
            made[0].must(sys.executable, "-m", "shardwright", "run", out, "--hostfile", named)

        compare(case, tmp_path, start)


def test_trains_without_ssh_like_one_process(tmp_path: Path) -> None:
    """launch.sh on each node, as any scheduler would start it."""
    case = replace(TWO, launcher="no_ssh")
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    with hosts(case.nodes, tmp_path / "net") as made:

        def start(out: Path) -> None:
            named, a = hostfile(made, case, tmp_path), made[0].address
            started = [
                subprocess.Popen(
                    host.command("env", path, f"NODE_RANK={i}", f"MASTER_ADDR={a}", "bash", out / "launch.sh", named),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for i, host in enumerate(made)
            ]
            for process in started:
                output, _ = process.communicate(timeout=300)
                assert process.returncode == 0, output[-3000:]

        compare(case, tmp_path, start)
