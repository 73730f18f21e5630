"""The set-up script, and variables of `launch.env` that look as if a shell expanded them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.launch.launchers.launcher_table import short_stop_warning, unexpanded_variables
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.launch.launchers.fake_programs import install, start
from tests.unit.launch.launchers.two_node_recipes import KUBERNETES, TWO_NODES, Compile

STARTS = {
    "no_ssh": "launch.sh",
    "slurm": "launch/job.sh",
    "kubernetes": "launch/node.sh",
    "openmpi": "launch/rank.sh",
    "pdsh": "launch/pdsh_setup.sh",
}
ENVIRONMENT = {
    "NODE_RANK": "0",
    "MASTER_ADDR": "a",
    "JOB_COMPLETION_INDEX": "0",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n",
}


def started(launcher: str, setup: str, compiled: Compile, folder: Path) -> tuple[bool, str]:
    """(whether something behind the set-up script was started, standard error)."""
    (folder / "setup.sh").write_text(setup)
    section: dict[str, Any] = {"launcher": launcher, "setup_script": "setup.sh"}
    if launcher == "kubernetes":
        section["kubernetes"] = KUBERNETES
    out = compiled(section)
    if launcher == "pdsh":  # as DeepSpeed's command on a host
        done = subprocess.run(
            ["bash", "-c", f"source {out}/launch/pdsh_setup.sh; echo deepspeed:"],
            capture_output=True,
            text=True,
        )
    else:
        script = STARTS[launcher]
        if launcher == "slurm":  # which starts it in the folder
            (folder / "go").write_text(f"cd out && exec bash {script}\n")
            script = "../go"
        done = start(out, install(folder / "bin"), script=script, **ENVIRONMENT)
    return any(f"{name}:" in done.stdout for name in ("deepspeed", "python", "srun")), done.stderr


@pytest.mark.parametrize("launcher", STARTS)
def test_a_module_that_does_not_load_stops_the_job(
    launcher: str, compiled: Compile, tmp_path: Path
) -> None:
    lines = "module() { echo no such module >&2; return 1; }\nmodule load cuda/12\n"
    began, error = started(launcher, lines + "true\n", compiled, tmp_path)
    assert not began
    assert "'module load cuda/12' failed with exit code 1; the ranks are not started" in error
    began, error = started(launcher, "conda activate nowhere\n", compiled, tmp_path)
    assert not began and "'conda activate nowhere' failed with exit code 127" in error


@pytest.mark.parametrize("launcher", STARTS)
def test_other_commands_may_fail(launcher: str, compiled: Compile, tmp_path: Path) -> None:
    lines = (
        "module() { [[ $2 == there ]]; }\nmodule load there\nmodule load here || true\n"
        "false\ngrep -q x /dev/null\ncd /\n: $undefined\nfalse\n"
    )
    began, error = started(launcher, lines, compiled, tmp_path)
    assert began, error


def test_no_file_for_pdsh_without_a_set_up_script(compiled: Compile) -> None:
    assert not (compiled({"launcher": "pdsh"}) / "launch" / "pdsh_setup.sh").exists()


@pytest.mark.parametrize(
    ("name", "value", "shown", "help"),
    [
        ("PATH", "/opt/bin:$PATH", "$PATH", "export PATH="),
        ("CACHE", "${HOME}/c", "${HOME}", "export CACHE="),
        ("CACHE", "~/c", "~", "export CACHE="),
        ("HF_TOKEN", "$HF_TOKEN", "$HF_TOKEN", "env_from: [HF_TOKEN]"),
        ("NOTE", "costs $5 or a~b", None, ""),
        ("NCCL_DEBUG_FILE", "/tmp/%h.%p", None, ""),
    ],
)
def test_a_variable_that_nothing_expands_is_a_warning(
    name: str, value: str, shown: str | None, help: str, write_recipe: Callable[..., Path]
) -> None:
    recipe = load_recipe(write_recipe({"launch": {"env": {name: value}}}))
    found = unexpanded_variables(recipe)
    codes = [d.code for d in compile_recipe(recipe).warnings]
    assert codes.count("SW5212") == len(found) == (shown is not None) and "SW5210" not in codes
    for warning in found:
        assert f"launch.env.{name}: {shown} is not expanded" in warning.message
        assert warning.severity == "warning" and help in warning.help
        assert warning.key == ("launch", "env", name)


def test_a_signal_that_leaves_no_time_for_a_save(write_recipe: Callable[..., Path]) -> None:
    launch = {"slurm": {"signal_seconds": 60}}
    compiled = compile_recipe(load_recipe(write_recipe({**TWO_NODES, "launch": launch})))
    plan = compiled.plan
    assert "SW5213" not in [d.code for d in compiled.warnings]
    left = 60 - plan.predicted.time.step_seconds
    assert short_stop_warning(plan, left) == ()
    (warning,) = short_stop_warning(plan, left + 1)
    assert warning.key == ("launch", "slurm", "signal_seconds") and "to 122 or more" in warning.help
    launch = {"slurm": {"signal_seconds": 1}}
    changes = {"launch": launch, "cluster.checkpoint_gbytes_per_second": 1e-6}
    compiled = compile_recipe(load_recipe(write_recipe({**TWO_NODES, **changes})))
    assert "SW5213" in [d.code for d in compiled.warnings]
