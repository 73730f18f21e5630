"""The task files of SkyPilot and dstack, against their published schemas and programs that only
print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from shardwright.cli import main as cli
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.launch.launchers.launcher_table import check_launch
from shardwright.launch.launchers.task_launcher import TASK_FILE
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.task_options import RESERVED_FIELDS, TASK_SERVICES, task_schema
from tests.unit.launch.launchers.fake_programs import install, shell_warnings, start
from tests.unit.launch.launchers.two_node_recipes import TWO_NODES, Compile

TASK: dict[str, Any] = {
    "directory": "/shared/run",
    "gpu": "A100-80GB",
    "image": "ghcr.io/me/train:1",
    "volumes": {"/shared": "data"},
}
CPU = {"cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "cpu"}, "training.precision": "fp32"}


def read(out: Path, launcher: str) -> dict[str, Any]:
    """Return the task's file, which the published schema takes, as readers of YAML 1.1 see it."""
    loader = YAML(typ="safe")
    loader.version = "1.1"
    task: dict[str, Any] = loader.load((out / TASK_FILE).read_text())
    jsonschema.validate(task, task_schema(launcher))
    return task


def run_node(out: Path, tmp_path: Path, script: str, **env: str) -> str:
    """Start what the task runs on its second node, from another folder than the compiled one."""
    path = install(tmp_path / "bin")
    (out / "launch/of_task.sh").write_text(script)
    return start(out, path, script="launch/of_task.sh", **env).stdout


def test_skypilot(compiled: Compile, tmp_path: Path) -> None:
    task = {**TASK, "directory": str(tmp_path / "out")}
    launch = {
        "launcher": "skypilot",
        "task": task,
        "env": {"NOTE": "it's"},
        "env_from": ["HF_TOKEN"],
        "recovery": {"retries": 5},
    }
    out = compiled(launch)
    found = read(out, "skypilot")
    assert (found["name"], found["num_nodes"]) == ("small", 2)
    assert found["resources"] == {
        "accelerators": {"A100-80GB": 2},
        "image_id": "docker:ghcr.io/me/train:1",
        "job_recovery": {"max_restarts_on_errors": 5, "recover_on_exit_codes": [75]},
    }
    assert (found["volumes"], found["secrets"]) == ({"/shared": "data"}, {"HF_TOKEN": None})
    printed = run_node(
        out, tmp_path, found["run"], SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2"
    )
    assert "<--node_rank><1><--master_addr><10.0.0.1>" in printed and "note=it's" in printed
    submit = (out / "launch.sh").read_text()
    command = "sky jobs launch --yes --detach-run --secret HF_TOKEN launch/task.yaml"
    assert submit.endswith(f"exec {command}\n") and not shell_warnings(submit.encode())


def test_dstack(compiled: Compile, tmp_path: Path) -> None:
    launch = {
        "launcher": "dstack",
        "task": TASK,
        "env_from": ["HF_TOKEN"],
        "recovery": {"on": ["host", "rank"]},
    }
    out = compiled(launch)
    found = read(out, "dstack")
    assert (found["type"], found["name"], found["nodes"]) == ("task", "small", 2)
    assert found["resources"]["gpu"] == {"name": "A100-80GB", "count": 2}
    assert found["volumes"] == [{"name": "data", "path": "/shared"}]
    assert found["env"] == ["HF_TOKEN"] and found["working_dir"] == "/shared/run"
    assert found["retry"] == {"on_events": ["no-capacity", "interruption", "error"]}
    printed = run_node(
        out,
        tmp_path,
        "\n".join([f"cd {out}", *found["commands"]]),  # its working_dir
        DSTACK_NODE_RANK="1",
        DSTACK_MASTER_NODE_IP="10.0.0.1",
    )
    assert "<--node_rank><1><--master_addr><10.0.0.1>" in printed
    assert (
        (out / "launch.sh")
        .read_text()
        .endswith("exec dstack apply --yes --detach --file launch/task.yaml\n")
    )


@pytest.mark.parametrize(
    ("causes", "events"),
    [
        (["host"], ["no-capacity", "interruption"]),
        (["nonfinite"], ["error"]),
    ],
)
def test_dstack_restarts_after_the_recipes_causes(
    causes: list[str], events: list[str], compiled: Compile
) -> None:
    launch = {"launcher": "dstack", "task": TASK, "recovery": {"on": causes}}
    assert read(compiled(launch), "dstack")["retry"] == {"on_events": events}


@pytest.mark.parametrize("launcher", list(TASK_SERVICES))
def test_without_recovery_nothing_restarts_after_an_error(launcher: str, compiled: Compile) -> None:
    found = read(compiled({"launcher": launcher, "task": {"directory": "/d"}}, **CPU), launcher)
    assert "retry" not in found and "volumes" not in found and "secrets" not in found
    if launcher == "skypilot":
        assert found["resources"]["job_recovery"]["max_restarts_on_errors"] == 0
        assert "accelerators" not in found["resources"]


@pytest.mark.parametrize("launcher", list(TASK_SERVICES))
def test_no_secret_is_in_a_file(
    launcher: str, compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell")
    out = compiled({"launcher": launcher, "task": TASK, "env_from": ["HF_TOKEN"]})
    texts = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    assert not any(b"hf_of_the_shell" in text for text in texts)
    assert b"HF_TOKEN" in (out / TASK_FILE).read_bytes()


def test_options_are_merged(compiled: Compile) -> None:
    options = {"resources": {"infra": "aws", "cpus": "32+"}, "setup": "pip install x"}
    found = read(
        compiled({"launcher": "skypilot", "task": {**TASK, "options": options}}), "skypilot"
    )
    assert found["resources"]["infra"] == "aws" and found["resources"]["accelerators"]
    assert found["setup"] == "pip install x"
    options = {"resources": {"shm_size": "64GB"}, "fleets": ["mine"], "max_duration": "1d"}
    found = read(compiled({"launcher": "dstack", "task": {**TASK, "options": options}}), "dstack")
    assert found["resources"]["shm_size"] == "64GB" and found["resources"]["gpu"]["count"] == 2
    assert (found["fleets"], found["max_duration"]) == (["mine"], "1d")


@pytest.mark.parametrize(
    ("launcher", "options", "code", "key"),
    [
        ("skypilot", {"num_nodes": 3}, "SW1254", ("num_nodes",)),
        ("skypilot", {"envs": {"HF_TOKEN": "x"}}, "SW1254", ("envs",)),
        ("skypilot", {"resources": {"image_id": "i"}}, "SW1254", ("resources", "image_id")),
        ("skypilot", {"set_up": "x"}, "SW1255", ("set_up",)),
        ("skypilot", {"resources": {"use_spots": True}}, "SW1255", ("resources", "use_spots")),
        ("dstack", {"env": ["A=b"]}, "SW1254", ("env",)),
        ("dstack", {"resources": {"gpu": 8}}, "SW1254", ("resources", "gpu")),
        ("dstack", {"resources": {"gpus": 8}}, "SW1255", ("resources", "gpus")),
        ("dstack", {"fleet": ["a"]}, "SW1255", ("fleet",)),
    ],
)
def test_options_that_cannot_be(
    launcher: str,
    options: dict[str, Any],
    code: str,
    key: tuple[str, ...],
    write_recipe: Callable[..., Path],
) -> None:
    launch = {"launcher": launcher, "task": {**TASK, "options": options}}
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({**TWO_NODES, "launch": launch}))
    assert [(d.code, d.key) for d in caught.value.diagnostics] == [
        (code, ("launch", "task", "options", *key))
    ]


@pytest.mark.parametrize("launcher", list(TASK_SERVICES))
def test_reserved_keys_are_keys_of_the_service(launcher: str) -> None:
    for place in RESERVED_FIELDS[launcher]:
        schema = task_schema(launcher)
        for name in place.split("."):
            assert name in schema["properties"], place
            schema = schema["properties"][name]
            if "$ref" in schema:
                schema = task_schema(launcher)["$defs"][schema["$ref"].rpartition("/")[2]]


@pytest.mark.parametrize(
    ("launch", "code"),
    [
        ({"launcher": "skypilot"}, "SW1201"),
        ({"task": TASK}, "SW1208"),
        ({"launcher": "pdsh", "task": TASK}, "SW1208"),
        ({"launcher": "dstack", "task": {"directory": "/d"}}, "SW1256"),
    ],
)
def test_the_section_belongs_to_the_launcher(
    launch: dict[str, Any], code: str, write_recipe: Callable[..., Path]
) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({**TWO_NODES, "launch": launch}))
    assert [d.code for d in caught.value.diagnostics] == [code]


@pytest.mark.parametrize(
    ("launcher", "recovery", "keys"),
    [
        ("skypilot", {"retries": 7}, []),
        ("skypilot", {"min_nodes": 1, "spares": 1}, ["min_nodes", "spares"]),
        ("skypilot", {"on": ["rank"]}, ["on"]),
        ("dstack", {"on": ["rank"]}, []),
        ("dstack", {"retries": 7, "skip_batches": 2}, ["retries", "skip_batches"]),
    ],
)
def test_recovery_that_the_service_does_not_have(
    launcher: str, recovery: dict[str, Any], keys: list[str], write_recipe: Callable[..., Path]
) -> None:
    launch = {"launcher": launcher, "task": TASK, "recovery": recovery}
    errors = check_launch(load_recipe(write_recipe({**TWO_NODES, "launch": launch})))
    assert [(d.code, d.key) for d in errors] == [
        ("SW5222", ("launch", "recovery", key)) for key in keys
    ]


def test_what_has_not_run_is_warned_of(write_recipe: Callable[..., Path]) -> None:
    launch = {"launcher": "dstack", "task": TASK, "recovery": {}}
    path = write_recipe({**TWO_NODES, "launch": launch})
    codes = [d.code for d in compile_recipe(load_recipe(path)).warnings]
    assert {"SW5221", "SW5223"} <= set(codes)
    launch = {"launcher": "skypilot", "task": TASK, "recovery": {}}
    codes = [
        d.code
        for d in compile_recipe(load_recipe(write_recipe({**TWO_NODES, "launch": launch}))).warnings
    ]
    assert "SW5221" in codes and "SW5223" not in codes


@pytest.mark.parametrize(("launcher", "program"), [("skypilot", "sky"), ("dstack", "dstack")])
def test_run_submits_and_doctor_asks(
    launcher: str,
    program: str,
    compiled: Compile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = compiled({"launcher": launcher, "task": TASK})
    assert cli.main(["doctor", str(out)]) == 1
    assert f"no `{program}` command" in capfd.readouterr().out
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / program).write_text('#!/bin/bash\necho "ran ${0##*/} $*"\n')
    (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert cli.main(["doctor", str(out)]) == 0
    assert "/shared/run there is this folder" in capfd.readouterr().out
    assert cli.main(["run", str(out)]) == 0
    printed = capfd.readouterr().out
    assert f"ran {program} " in printed and "launch/task.yaml" in printed and "watch " in printed
    assert cli.main(["run", str(out), "--resume", "never"]) == 1
    assert "SW5208" in capfd.readouterr().err
