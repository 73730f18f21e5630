"""launch.sh, run for real against a `deepspeed` that only prints what it was given."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe

FAKE = """#!/usr/bin/env bash
printf '<%s>' "$@"; echo
echo "cwd=$PWD port=${MASTER_PORT:-} note=${NOTE:-}"
[[ -z ${DS_ENV_FILE:-} ]] || cat "$DS_ENV_FILE"
[[ ${MASTER_PORT:-} != fails ]] || exit 7
"""
SSH = """#!/usr/bin/env bash
printf '%s\n' "$(printf '%q ' "$@")" >>"${0%/*}/ssh.called"
exec bash -c "${!#}"
"""
"""Every host is this one."""
TWO_NODES: dict[str, Any] = {
    "cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "a100-sxm4-80gb"},
    "training.precision": "bf16",
}


@pytest.fixture
def launch(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def start(
        changes: dict[str, Any], folder: str = "out", arguments: tuple[str, ...] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        write_folder(tmp_path / folder, compile_recipe(load_recipe(write_recipe(changes))).files)
        program = tmp_path / "bin" / "deepspeed"
        program.parent.mkdir(exist_ok=True)
        python = f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n'
        programs = {"deepspeed": FAKE, "ssh": SSH, "python3": python}
        for path, text in ((program.with_name(name), text) for name, text in programs.items()):
            path.write_text(text)
            path.chmod(0o755)
        return subprocess.run(
            [str(tmp_path / folder / "launch.sh"), *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PATH": f"{program.parent}:/usr/bin:/bin", **env},
        )

    return start


@pytest.mark.parametrize(
    "folder", ["out", "with space", "$(touch pwned)", "quote'\"", "new\nline\n"]
)
def test_one_node_under_any_folder_name(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, folder: str
) -> None:
    done = launch({"launch": {"env": {"NOTE": "it's $(touch pwned) `x` \" \\"}}}, folder)
    assert done.returncode == 0, done.stderr
    expected = "<--hostfile><launch/hostfile><--no_ssh_check><--master_addr><127.0.0.1><--master_port><29500><train.py>"  # noqa: E501
    assert (
        done.stdout
        == f"{expected}\ncwd={tmp_path / folder} port= note=it's $(touch pwned) `x` \" \\\n"
    )
    assert (tmp_path / folder / "launch/hostfile").read_text() == "localhost slots=4\n"
    assert not list(tmp_path.rglob("pwned"))


def test_port_of_the_recipe_or_of_the_environment(
    launch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert "<29511>" in launch({"launch": {"master_port": 29511}}, MASTER_PORT="1").stdout
    assert "<1234>" in launch({}, MASTER_PORT="1234").stdout


def test_pdsh_passes_env_by_file(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """What the recipe stores in the file that deepspeed reads; what it takes from here in each
    host's memory."""
    (tmp_path / "hosts").write_text("# two\na slots=2\n\nb slots=2\n")
    changes = {**TWO_NODES, "launch": {"env": {"NOTE": "x=1"}, "env_from": ["TOKEN", "UNSET"]}}
    hostile = "secret $(touch pwned) `touch pwned` \" ' \\ ;\nline two"
    done = launch(changes, arguments=("hosts",), TOKEN=hostile, SHARDWRIGHT_TOKEN="by-hand")
    assert done.returncode == 0, done.stderr
    assert (
        "<--launcher><pdsh><--force_multi><--hostfile>" in done.stdout
        and f"<{tmp_path}/hosts>" in done.stdout
    )
    note, line = done.stdout.splitlines()[-2:]
    name, _, path = line.partition("=")
    assert note == "NOTE=x=1" and name == "SHARDWRIGHT_ENV_FILE" and "secret" not in done.stdout
    sent = Path(path)
    assert sent.parent == Path("/dev/shm") and sent.stat().st_mode & 0o777 == 0o600
    assert sent.read_text() == f"SHARDWRIGHT_TOKEN=by-hand\0TOKEN={hostile}\0"
    sent.unlink()
    called = (tmp_path / "bin/ssh.called").read_text().splitlines()
    assert sorted(re.findall("-- ([ab]) ", "".join(called))) == [
        "a",
        "b",
    ] and "secret" not in "".join(called)
    assert not list(tmp_path.rglob("pwned"))
    assert not any(
        b"secret" in p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()
    )


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_the_interfaces_that_nccl_leaves_out_pass(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, launcher: str
) -> None:
    """`^docker0,lo`, the form that NCCL recommends, needs no quotes in any shell."""
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    env = {"NCCL_SOCKET_IFNAME": "^docker0,lo"}
    done = launch({**TWO_NODES, "launch": {"launcher": launcher, "env": env}}, arguments=("hosts",))
    assert done.returncode == 0, done.stderr
    assert "NCCL_SOCKET_IFNAME=^docker0,lo" in done.stdout


def test_pdsh_hands_the_interfaces_to_a_shell_unchanged() -> None:
    """Runs what DeepSpeed builds for pdsh in the shells that a host may log in with."""
    runner = pytest.importorskip("deepspeed.launcher.multinode_runner")
    arguments = argparse.Namespace(
        user_args=[], user_script="train.py", ssh_port=None, launcher_args="", master_addr="a",
        master_port=1, venv_script=None, no_python=False, module=False, no_local_rank=False,
        save_pid=False, enable_each_rank_log=None,
    )  # fmt: skip
    pdsh = runner.PDSHRunner(arguments, "e30=")
    pdsh.add_export("NCCL_SOCKET_IFNAME", "^docker0,lo")
    command, *_ = pdsh.get_cmd({}, {"a": [0]})
    exports = next(word for word in command if "export " in word)
    for shell in filter(shutil.which, ("sh", "bash", "dash", "zsh")):
        script = f'{exports} printf %s "$NCCL_SOCKET_IFNAME"'
        done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == "^docker0,lo", shell


def test_what_was_sent_is_removed_where_no_rank_took_it(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    changes = {**TWO_NODES, "launch": {"env_from": ["TOKEN"]}}
    assert (
        launch(changes, arguments=("hosts",), TOKEN="secret", MASTER_PORT="fails").returncode == 7
    )
    called = (tmp_path / "bin/ssh.called").read_text()
    (path,) = set(re.findall("/dev/shm/shardwright-[0-9a-f]{32}", called))
    assert not Path(path).exists() and called.count("rm") == 2


def test_pdsh_refuses_what_it_cannot_quote(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    changes = {**TWO_NODES, "launch": {"env_from": ["TOKEN"]}}
    for done in (
        launch(changes, "with space", ("hosts",)),
        launch(changes),
        launch(changes, arguments=("nowhere",)),
    ):
        assert done.returncode != 0 and "launch.sh" in done.stderr and done.stdout == ""


def test_no_ssh_needs_to_know_its_node(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    changes = {**TWO_NODES, "launch": {"launcher": "no_ssh"}}
    assert "number of this node" in launch(changes).stderr
    done = launch(changes, NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert "<--hostfile><launch/hostfile><--node_rank><1><--master_addr><10.0.0.1>" in done.stdout
    # The names mean nothing: with the number of its node, DeepSpeed looks none of them up.
    assert (tmp_path / "out/launch/hostfile").read_text() == "node-0 slots=2\nnode-1 slots=2\n"


@pytest.mark.parametrize(
    ("launch_section", "code"),
    [
        ({"env": {"NOTE": "two words"}}, "SW5205"),
        ({"env": {"NOTE": "$(reboot)"}}, "SW5205"),
        ({"launcher": "local"}, "SW5206"),
        ({"hostfile": "one-host"}, "SW5203"),
        ({"hostfile": "wrong-slots"}, "SW5203"),
        ({"hostfile": "binary"}, "SW5204"),
        ({"launcher": "openmpi", "env": {"NOTE": "two words"}}, "SW5205"),
        ({"launcher": "slurm", "hostfile": "one-host"}, "SW5207"),
    ],
)
def test_refused_for_two_nodes(
    write_recipe: Callable[..., Path], tmp_path: Path, launch_section: dict[str, Any], code: str
) -> None:
    (tmp_path / "one-host").write_text("a slots=2\n")
    (tmp_path / "wrong-slots").write_text("a slots=2\nb slots=4\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(write_recipe({**TWO_NODES, "launch": launch_section})))
    assert [d.code for d in caught.value.diagnostics] == [code]
    assert caught.value.source is not None
