"""Copies in host memory over two nodes: a host that is lost with its memory, damaged copies, and a
later attempt in another layout. Each node is a launch.sh of its own, with a host name and a memory
of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.memory_copies import ROOT_VARIABLE
from shardwright.utils.child_processes import free_port, program_path
from shardwright.utils.numeric_difference import max_series_diff
from tests.launch.supervised import LOSS_TOLERANCE, PLANT
from tests.parity.harness import Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = pytest.mark.launch

NAMED = 'import os, socket\nsocket.gethostname = lambda: os.environ["HOST_NAME"]\n'
KILL_AT, EVERY = 6, 2
TWO = Case(model="llama", data=2, nodes=2)


def compiled(case: Case, folder: Path, name: str, *faults: Any, **checkpoint: Any) -> Path:
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["launch"] = {"launcher": "no_ssh"}
    document["checkpoint"] = {"in_memory": True, "in_memory_every": EVERY, **checkpoint}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    out = folder / name
    must(shardwright("compile", folder / "recipe.yaml", "-o", out))
    script = out / "train.py"
    script.write_text(NAMED + PLANT.format(faults=list(faults)) + script.read_text())
    return out


def attempt(out: Path, folder: Path, hosts: str, *, succeeds: bool = True) -> str:
    """Start a node on each host; return what all printed."""
    port, processes = str(free_port()), []
    for node, host in enumerate(hosts):
        memory = folder / "memory" / host
        memory.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PATH": program_path(),
            "NODE_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "HOST_NAME": host,
            ROOT_VARIABLE: str(memory),
        }
        processes.append(
            subprocess.Popen(
                ["bash", str(out / "launch.sh")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    printed = [process.communicate(timeout=200)[0] for process in processes]
    text = "\n".join(printed)
    assert all((process.returncode == 0) == succeeds for process in processes), text[-4000:]
    return text


def copies(folder: Path, host: str) -> dict[str, list[Path]]:
    """The files of each copy on a host, by the step folder's name."""
    found: dict[str, list[Path]] = {}
    for path in sorted((folder / "memory" / host).glob("*/*/*/attempt-*/step-*/*")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def lose(folder: Path, host: str) -> None:
    (folder / "memory" / host).rename(folder / "memory" / f"{host}-lost")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[float]]:
    """Yield the losses of a run without a fault and without copies."""
    folder = tmp_path_factory.mktemp("whole")
    one = dataclasses.replace(TWO, nodes=1)
    write_inputs(one, folder)
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    must(shardwright("run", folder / "out"))
    yield [m["loss"] for m in metrics(folder / "out")]


def check(out: Path, losses: list[float], resumed: int) -> None:
    lines = metrics(out)
    assert [m["step"] for m in lines] == list(range(1, len(losses) + 1))
    assert [m["attempt"] for m in lines] == [1] * resumed + [2] * (len(losses) - resumed)
    off = max_series_diff([m["loss"] for m in lines], losses)
    assert off <= LOSS_TOLERANCE, off


@pytest.mark.prove
def test_a_host_that_is_lost_with_its_memory(tmp_path: Path, losses: list[float]) -> None:
    """No checkpoint is on disk: the lost host's part comes from its peer's memory."""
    out = compiled(TWO, tmp_path, "out", (KILL_AT + 1, (1,), 1, "kill"))
    attempt(out, tmp_path, "ab", succeeds=False)
    held = copies(tmp_path, "a")
    assert sorted(held) == [f"step-{KILL_AT - EVERY:08d}", f"step-{KILL_AT:08d}"]
    # Both ranks' parts are on both hosts, and no unfinished copy is left.
    for host in "ab":
        for files in copies(tmp_path, host).values():
            names = {path.name for path in files}
            assert {f"rank-0000{rank}-000.safetensors" for rank in (0, 1)} <= names
    lose(tmp_path, "b")
    text = attempt(out, tmp_path, "ac")
    assert f"resumes from the copy of step {KILL_AT} in memory" in text
    check(out, losses, resumed=KILL_AT)
    found = json.loads((out / "run" / "status.json").read_text())["attempts"]
    assert [a["started_step"] for a in found] == [0, KILL_AT]
    # Once the last step is on disk no host's memory is used.
    assert not copies(tmp_path, "a") and not copies(tmp_path, "c")
    lines = (out / "run" / "memory_copies.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


def test_a_damaged_copy_is_not_used(tmp_path: Path, losses: list[float]) -> None:
    """One bit in the only copy of a lost host's part: the copy before is used."""
    out = compiled(TWO, tmp_path, "out", (KILL_AT + 1, (1,), 1, "kill"), every_steps=3)
    attempt(out, tmp_path, "ab", succeeds=False)
    lose(tmp_path, "b")
    place = next(
        path
        for path in copies(tmp_path, "a")[f"step-{KILL_AT:08d}"]
        if path.name == "rank-00001-000.safetensors"
    )
    content = bytearray(place.read_bytes())
    content[-5] ^= 1
    place.write_bytes(content)
    # The checkpoint of the same step on disk goes too.
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{KILL_AT:08d}"
    (newest / "manifest.json").unlink()
    text = attempt(out, tmp_path, "ac")
    step = f"step {KILL_AT}"
    assert f"warning[SW6331]: the copy of {step} in memory is not used" in text
    assert "rank-00001-000.safetensors is damaged on host a" in text
    assert f"resumes from the copy of step {KILL_AT - EVERY} in memory" in text
    check(out, losses, resumed=KILL_AT - EVERY)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("case", "later"),
    [
        (TWO, Case(model="llama", pipeline=2, nodes=1, accumulation=4)),
        (
            Case(model="llama", tensor=2, data=2, nodes=2),
            Case(model="llama", data=4, zero_stage=3, nodes=2, accumulation=1),
        ),
        (
            Case(model="llama", data=4, zero_stage=2, nodes=2, accumulation=1),
            Case(model="llama", pipeline=2, tensor=2, nodes=2, accumulation=4),
        ),
    ],
    ids=["fewer-hosts", "tensor-to-zero-3", "zero-2-to-pipeline-and-tensor"],
)
def test_another_layout_goes_on_from_the_copies(tmp_path: Path, case: Case, later: Case) -> None:
    """A plan for fewer nodes compiles into the same folder and runs without the lost host."""
    assert case.batch == later.batch
    out = compiled(case, tmp_path, "out", (KILL_AT + 1, (1,), case.world - 1, "kill"))
    attempt(out, tmp_path, "ab", succeeds=False)
    lose(tmp_path, "b")
    other = compiled(later, tmp_path, "other")
    for name in ("plan.json", "train.py", "launch.sh", "launch", "ds_config.json"):
        if (other / name).exists():
            subprocess.run(["cp", "-r", str(other / name), str(out)], check=True)
    text = attempt(out, tmp_path, "ac"[: later.nodes])
    assert f"resumes from the copy of step {KILL_AT} in memory" in text
    whole = tmp_path / "whole"
    one = dataclasses.replace(case, nodes=1)
    write_inputs(one, whole)
    must(shardwright("compile", whole / "recipe.yaml", "-o", whole / "out"))
    must(shardwright("run", whole / "out"))
    lines = metrics(out)
    wanted = [m["loss"] for m in metrics(whole / "out")]
    assert [m["attempt"] for m in lines] == [1] * KILL_AT + [2] * (len(wanted) - KILL_AT)
    off = max_series_diff([m["loss"] for m in lines], wanted, relative=True)
    assert off <= LOSS_TOLERANCE, off
