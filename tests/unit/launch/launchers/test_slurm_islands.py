"""Islands under Slurm: a job each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli.main import main
from tests.unit.launch.launchers.two_node_recipes import TWO_NODES


def test_each_island_is_a_job_of_its_own(
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = {
        **TWO_NODES["cluster"],
        "nodes": 4,
        "islands": 2,
        "inter_island_gbits_per_second": 10,
    }
    launch = {"launcher": "slurm", "slurm": {"partition": "p"}, "outer_store": "login1:29471"}
    recipe, out = (
        write_recipe({**TWO_NODES, "cluster": cluster, "launch": launch}),
        tmp_path / "out",
    )
    assert main(["compile", str(recipe), "-o", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"shardwright outer-store {out}    (at login1:29471)" in told
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/usr/bin/env bash\necho \"$PWD $*\" >given\necho '42;cluster'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not list(out.glob("launch*")), "all islands together are started by nothing"
    for k in range(2):
        own = out / f"island-{k}"
        assert f"shardwright run {out} --island {k}" in told
        for script in ("launch.sh", "launch/job.sh", "launch/node.sh"):
            assert (
                subprocess.run(["bash", "-n", str(own / script)], capture_output=True).stderr == b""
            )
        job = {
            line
            for line in (own / "launch/job.sh").read_text().splitlines()
            if line.startswith("#SBATCH")
        }
        assert job >= {
            f"#SBATCH --job-name=small-island-{k}",
            "#SBATCH --nodes=2",
            "#SBATCH --partition=p",
        }
        assert json.loads((own / "plan.json").read_text())["outer"]["island"] == k
        assert main(["run", str(out), "--island", str(k)]) == 0
        assert (own / "given").read_text() == f"{own} --parsable launch/job.sh auto\n"
