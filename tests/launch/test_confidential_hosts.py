"""Values of launch.env_from on two hosts: in the ranks' environment, and nowhere that anybody else
could read them."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import threading
from pathlib import Path

import pytest

from tests.launch.hosts import Host, hosts, why_not
from tests.parity.harness import Case, must, recipe, shardwright, write_inputs

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TWO = Case(model="gpt2", pipeline=2, nodes=2)
SECRET = "hf_canary-0123456789"
"""Passed on by pdsh and by mpirun without quotes, so that nothing but care keeps it off the command
lines."""


FAILING = """
import os
from shardwright.train.training_session import Session


def fail(*_):
    raise ValueError("401 for " + os.environ["TEST_TOKEN"])


Session.train = fail
"""


class Watched:
    """Looks at every process of this machine, the hosts' too, until it is stopped."""

    def __init__(self) -> None:
        self.shown: set[str] = set()
        self.ranks = 0
        """Those seen with the value in their environment."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        ranks = set()
        while not self._stop.wait(0.01):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command = (
                        (process / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                    )
                    if SECRET in command:
                        self.shown.add(command)
                    if (
                        "train.py" in command
                        and f"TOKEN={SECRET}".encode() in (process / "environ").read_bytes()
                    ):
                        ranks.add(process.name)
                except OSError:
                    continue  # it ended
        self.ranks = len(ranks)


def _compiled(folder: Path, launcher: str) -> Path:
    write_inputs(TWO, folder)
    document = recipe(TWO, folder)
    document["launch"] = {
        "launcher": launcher,
        "env": {"GLOO_SOCKET_IFNAME": "eth0"},
        "env_from": ["TEST_TOKEN"],
    }
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    (folder / "hostfile").write_text("a slots=1\nb slots=1\n")
    return folder / "out"


def _run(host: Host, out: Path) -> tuple[int, str]:
    values = {
        "TEST_TOKEN": SECRET,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    # Set by a file that is read, as a shell's own profile would be: `env NAME=value` would show it.
    profile = out.parent / "profile"
    profile.write_text("".join(f"export {name}={value}\n" for name, value in values.items()))
    program = (
        f'. "{profile}"; exec "{sys.executable}" -m shardwright run "{out}" --hostfile '
        f'"{out.parent}/hostfile"'
    )
    done = host.run("bash", "-c", program)
    return done.returncode, done.stdout + done.stderr


def _stored(out: Path) -> list[Path]:
    return [p for p in out.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_no_command_line_and_no_file_shows_them(launcher: str, tmp_path: Path) -> None:
    if launcher == "openmpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: make test-hosts installs it")
    out = _compiled(tmp_path, launcher)
    before = set(Path("/dev/shm").glob("shardwright-*"))
    with hosts(2, tmp_path / "net") as made, Watched() as watched:
        code, told = _run(made[0], out)
    assert code == 0, told
    assert watched.ranks >= 2 and not watched.shown, watched
    assert SECRET not in told and not _stored(out)
    assert set(Path("/dev/shm").glob("shardwright-*")) == before
    logs = [out / "run/launcher.log", *(out / "run/logs").glob("*.log")]
    assert {stat.S_IMODE(log.stat().st_mode) for log in logs} == {0o600}


def test_a_rank_that_fails_with_one_in_its_words_does_not_tell_it(tmp_path: Path) -> None:
    out = _compiled(tmp_path, "pdsh")
    program = (out / "train.py").read_text()
    (out / "train.py").write_text(
        program.replace("from shardwright", f"{FAILING}\n\nfrom shardwright", 1)
    )
    with hosts(2, tmp_path / "net") as made:
        code, told = _run(made[0], out)
    assert code == 3 and "ValueError: 401 for [TEST_TOKEN]" in told, told
    assert SECRET not in told
    stored = [
        path for path in _stored(out) if path.parent.name != "logs"
    ]  # a rank's own words, readable by it alone
    assert not stored, stored
