"""No text of a recipe runs as a command: it is refused, or it reaches every script and manifest as
plain text.

Each hostile text would create a file called `pwned`. Whatever compiles is started, with the
programs that the scripts call replaced by ones that go on as the real ones would.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.launch.launchers.fake_programs import install, start

HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "a; touch pwned #",
    "a' ; touch pwned ; '",
    'a" ; touch pwned ; "',
    "a\n#SBATCH --wrap=x\ntouch pwned\n",
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "{% raw %}$(touch pwned)",
    'a", "b": !!python/object/apply:os.system ["touch pwned"]',
    "a: b\n- command: [touch, pwned]",
    "-oProxyCommand=touch pwned",
    "${x:-$(touch pwned)}",
    "a\\' $(touch pwned)",
)
KUBERNETES = {"image": "i", "volume_claim": "v", "directory": "/shared/run", "secret": "s"}
LAUNCH: dict[str, dict[str, Any]] = {
    "local": {},
    "no_ssh": {},
    "pdsh": {},
    "openmpi": {},
    "slurm": {"slurm": {}},
    "kubernetes": {"kubernetes": KUBERNETES},
}
SLURM_MORE = ("extra-value", "extra-name", "container-image", "container-mounts")
WORDS = {
    "slurm": (
        *SLURM_MORE,
        "account",
        "partition",
        "qos",
        "time",
        "gres",
        "mem",
        "exclude",
        "constraint",
        "reservation",
    ),
    "kubernetes": (
        "label-name",
        "label-value",
        "image",
        "volume_claim",
        "directory",
        "mount_path",
        "namespace",
        "secret",
        "gpu_resource",
    ),
}


def changes_of(launcher: str, field: str, text: str) -> dict[str, Any]:
    """The recipe with one field hostile."""
    launch: dict[str, Any] = {
        "launcher": launcher,
        **{k: dict(v) for k, v in LAUNCH[launcher].items()},
    }
    nodes = 1 if launcher == "local" else 2
    changes: dict[str, Any] = {
        "cluster": {"nodes": nodes, "gpus_per_node": 4 // nodes, "gpu": "cpu"}
    }
    match field.split("."):
        case ["env"]:
            launch["env"] = {"NOTE": text}
        case ["env-name"]:
            launch["env"] = {text: "1"}
        case ["env_from"]:
            launch["env_from"] = [text]
        case ["slurm", "extra-value"]:
            launch["slurm"]["extra"] = [f"--comment={text}"]
        case ["slurm", "extra-name"]:
            launch["slurm"]["extra"] = {text: "1"}
        case ["slurm", "container-image"]:
            launch["slurm"]["container"] = {"image": text}
        case ["slurm", "container-mounts"]:
            launch["slurm"]["container"] = {"image": "i", "mounts": [f"/{text}"]}
        case ["kubernetes", "label-name"]:
            launch["kubernetes"]["labels"] = {text: "1"}
        case ["kubernetes", "label-value"]:
            launch["kubernetes"]["labels"] = {"a": text}
        case ["kubernetes", "pod-patch"]:
            container = {"name": text, "image": text, "args": [text]}
            patch = {"metadata": {"annotations": {text: text}}, "spec": {"containers": [container]}}
            launch["kubernetes"]["pod_patch"] = patch
        case [section, key] if section in WORDS:
            launch[section][key] = text
        case ["launch", key]:
            launch[key] = text
        case _:
            changes[field] = text
    return {**changes, "launch": launch}


def run_everything(out: Path, path: str) -> None:
    """Each script of the folder, with an environment in which it goes as far as it can."""
    hosts = out.parent / "two-hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    env = {"NODE_RANK": "0", "MASTER_ADDR": "a", "JOB_COMPLETION_INDEX": "0", "SLURM_NODEID": "0"}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n"}
    mpi = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    (out / "run").mkdir(exist_ok=True)
    for script in sorted(out.rglob("*.sh")):
        name = str(script.relative_to(out))
        if name != "launch/setup.sh":
            start(
                out,
                path,
                *([] if "local" in out.name else [str(hosts)]),
                script=name,
                **env,
                **slurm,
                **mpi,
            )
    for manifest in out.rglob("*.yaml"):
        YAML(typ="safe").load(manifest.read_text())  # safe: constructs no objects


GENERAL = (
    "name",
    "env",
    "env-name",
    "env_from",
    "launch.master_addr",
    "launch.hostfile",
    "launch.setup_script",
    "data.path",
    "checkpoint.directory",
    "model.source",
)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(name, marks=() if name in ("local", "slurm") else pytest.mark.prove)
        for name in LAUNCH
    ],
)
def test_nothing_runs(launcher: str, write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    path = install(tmp_path / "bin")
    reached, refused = set(), set()
    free = ("kubernetes.pod-patch",) if launcher == "kubernetes" else ()
    for field in (*GENERAL, *free, *(f"{launcher}.{key}" for key in WORDS.get(launcher, ()))):
        for text in HOSTILE:
            changes = changes_of(launcher, field, text)
            if (
                field in ("launch.setup_script", "data.path")
                and "/" not in text
                and "\n" not in text
            ):
                (tmp_path / text).write_text("true\n")  # so that it is not refused for being absent
                changes["data"] = {"kind": "text", "path": text, "tokenizer": "byte"}
            try:
                compiled = compile_recipe(load_recipe(write_recipe(changes)))
            except Refusal as refusal:
                assert refusal.diagnostics
                refused.add(field)
                continue
            reached.add(field)
            out = tmp_path / f"out-{launcher}"
            write_folder(out, compiled.files)
            run_everything(out, path)
            shutil.rmtree(out)
            assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists(), (field, text)
    # The test would prove nothing if every recipe died of something else.
    assert {"data.path", "launch.setup_script", "checkpoint.directory", *free} <= reached
    assert ("env" in reached) == (launcher not in ("pdsh", "openmpi"))
    assert {"name", "env-name", "env_from", "launch.master_addr"} <= refused - reached
    words = {f"{launcher}.{key}" for key in WORDS.get(launcher, ())}
    # Two words of letters and = are an option's value; they reach the script in quotes, in a
    # comment.
    assert words <= refused and words & reached <= {"slurm.extra-value"}


def test_the_canary_sings(tmp_path: Path) -> None:
    """A script that does run its text is seen."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "launch.sh").write_text(f"deepspeed {HOSTILE[0]}\n")
    run_everything(tmp_path / "out", install(tmp_path / "bin"))
    assert list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("text", ["$(touch pwned)", "a; touch pwned", "'", '"', "new\nline", "a b"])
@pytest.mark.parametrize("launcher", LAUNCH)
def test_no_folder_name_runs(
    launcher: str, text: str, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    compiled = compile_recipe(load_recipe(write_recipe(changes_of(launcher, "env", "1"))))
    out = tmp_path / f"local {text}" if launcher == "local" else tmp_path / text
    write_folder(out, compiled.files)
    run_everything(out, install(tmp_path / "bin"))
    assert not list(tmp_path.rglob("pwned"))
