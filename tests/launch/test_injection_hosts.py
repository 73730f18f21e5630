"""No text of a recipe runs as a command on any host, with the real `deepspeed`, pdsh and sshd
between them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from tests.launch.hosts import hosts, why_not
from tests.parity.harness import Case, recipe, write_inputs
from tests.unit.launch.launchers.test_shell_injection import HOSTILE

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

TWO = Case(model="gpt2", pipeline=2, nodes=2)
FIELDS = (
    "data.path",
    "checkpoint.directory",
    "launch.setup_script",
    "launch.env",
    "launch.master_addr",
    "name",
)


def hostile_recipe(folder: Path, text: str, fields: tuple[str, ...]) -> Path:
    """One step of training, `text` in each of the fields."""
    document = recipe(TWO, folder)
    document["training"]["steps"] = 1
    document["training"]["scheduler"]["warmup_steps"] = 0
    document["launch"] = {"launcher": "pdsh"}
    for field in fields:
        section, _, key = field.partition(".")
        if field == "name":
            document["name"] = text
        elif key == "env":
            document["launch"]["env"] = {"NOTE": text}
        else:
            document.setdefault(section, {})[key] = text
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return folder / "recipe.yaml"


def pwned(folder: Path) -> list[Path]:
    """Where a hostile command can have been: the folder, where ssh lands, and here."""
    return [
        *folder.rglob("pwned"),
        *(p for p in (Path.home() / "pwned", Path("pwned"), Path("/pwned")) if p.exists()),
    ]


def test_no_text_runs_on_any_host(tmp_path: Path) -> None:
    ran = 0
    with hosts(2, tmp_path / "net") as made:
        (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
        for number, text in enumerate(HOSTILE):
            folder = tmp_path / f"case-{number}"
            write_inputs(TWO, folder)
            if "/" not in text and "\n" not in text:  # what a file can be called
                shutil.copy(folder / "tokens.npy", folder / text)
                (folder / "a").write_text("true\n")
            taken = []
            for field in FIELDS:
                if field == "launch.setup_script" and (folder / text).exists():
                    (folder / text).write_text("true\n")
                try:
                    compile_recipe(load_recipe(hostile_recipe(folder, text, (field,))))
                    taken.append(field)
                except Refusal as refusal:
                    assert refusal.diagnostics
            assert not {"launch.env", "launch.master_addr", "name"} & set(taken), (text, taken)
            if (folder / text).exists() and "data.path" in taken:
                shutil.copy(folder / "tokens.npy", folder / text)
                taken = [field for field in taken if field != "launch.setup_script"]
            if not taken:
                continue
            compiled = compile_recipe(load_recipe(hostile_recipe(folder, text, tuple(taken))))
            write_folder(folder / "out", compiled.files)
            done = made[0].run(
                sys.executable,
                "-m",
                "shardwright",
                "run",
                folder / "out",
                "--hostfile",
                tmp_path / "hostfile",
            )
            status = json.loads((folder / "out" / "run" / "status.json").read_text())
            assert (done.returncode, status["status"]) == (0, "done"), (text, taken, done.stderr)
            assert not pwned(tmp_path), (text, taken)
            ran += 1
    assert ran >= 5


def test_the_canary_sings_over_pdsh(tmp_path: Path) -> None:
    """DeepSpeed's own command line does run such a text, on every host: the test above would see
    it."""
    (tmp_path / "script.py").write_text("print('here')\n")
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    with hosts(2, tmp_path / "net") as made:
        options = [
            "--hostfile",
            tmp_path / "hostfile",
            "--no_ssh_check",
            "--master_addr",
            made[0].address,
        ]
        command = [
            *options,
            tmp_path / "script.py",
            f"--note=$(touch {tmp_path}/pwned-$(hostname))",
        ]
        environment = ["env", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"]
        made[0].run(*environment, launcher, *command, timeout=120)
    assert {path.name for path in tmp_path.glob("pwned-*")} == {"pwned-a", "pwned-b"}
