"""What a user can get wrong, through the real command: a code, the place, a way on, exit 1 and
nothing written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.command import GOOD, changed, findings, refused, shardwright, shardwright_many, tree
from tests.privileges import binds

# What `check` can tell: the text and the schema. (recipe, code, line:column, what the caret is
# under)
READING: dict[str, tuple[str | bytes, str, str, str]] = {
    "unknown-key": (
        changed("global_batch_size", "global_batchsize"),
        "SW1101",
        "13:3",
        "global_batchsize",
    ),
    "wrong-type": (changed("nodes: 1", 'nodes: "8"'), "SW1102", "8:10", '"8"'),
    "syntax": (GOOD + "objective: 'cost\n", "SW1005", "17:12", "'"),
    "duplicate-key": (GOOD + "name: again\n", "SW1006", "17:1", "name"),
    "nan": (
        changed("steps: 20", "steps: 20\n  gradient_clipping: .nan"),
        "SW1013",
        "15:22",
        ".nan",
    ),
    "world": (GOOD + "parallelism: {tensor: 3}\n", "SW1203", "17:23", "3"),
    "batch": (GOOD + "parallelism: {micro_batch_size: 3}\n", "SW1204", "13:22", "8"),
    "gpu": (changed("gpu: cpu", "gpu: h100"), "SW3001", "10:8", "h100"),
    "command-in-name": (
        changed("name: tiny", "name: $(touch pwned)"),
        "SW1106",
        "2:7",
        "$(touch pwned)",
    ),
    "newline-in-name": (changed("name: tiny", 'name: "a\\nb"'), "SW1106", "2:7", '"a\\nb"'),
    "newline-in-path": (
        changed("{kind: synthetic}", '{kind: text, path: "a\\nb"}'),
        "SW1106",
        "16:26",
        '"a\\nb"',
    ),
    "empty-path": (changed("{kind: synthetic}", "{kind: text, path: ''}"), "SW1106", "16:26", "''"),
    "folder-as-path": (
        changed("{kind: synthetic}", "{kind: text, path: sub}"),
        "SW1301",
        "16:26",
        "sub",
    ),
    "pipe-as-hostfile": (GOOD + "launch: {hostfile: pipe}\n", "SW1302", "17:20", "pipe"),
    "no-gpus": (changed("gpus_per_node: 4", "gpus_per_node: 0"), "SW1104", "9:18", "0"),
    "negative": (changed("nodes: 1", "nodes: -1"), "SW1104", "8:10", "-1"),
    "billion-nodes": (changed("nodes: 1", "nodes: 1000000000"), "SW1104", "8:10", "1000000000"),
    "nothing-to-predict": (
        changed("sequence_length: 128", "sequence_length: 1"),
        "SW1104",
        "12:20",
        "1",
    ),
    "no-steps": (changed("steps: 20", "steps: 0"), "SW1104", "14:10", "0"),
    "long-warmup": (
        changed("steps: 20", "steps: 20\n  scheduler: {warmup_steps: 30}"),
        "SW1205",
        "15:29",
        "30",
    ),
    "not-utf-8": (b"version: 1\nname: \xff\n", "SW1003", "2:7", ""),
    "crlf": (changed("nodes: 1", 'nodes: "8"').replace("\n", "\r\n"), "SW1102", "8:10", '"8"'),
    "unicode": (changed("name: tiny", "name: 模型\x9b"), "SW1005", "2:9", ""),
    "circle": (GOOD + "extends: circle.yaml\n", "SW1021", "17:10", "circle.yaml"),
    "extends-nothing": (GOOD + "extends: none.yaml\n", "SW1022", "17:10", "none.yaml"),
    "extends-a-folder": (GOOD + "extends: sub\n", "SW1022", "17:10", "sub"),
}


def test_what_check_finds(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, (text, *_) in READING.items():
        (tmp_path / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = set(tmp_path.rglob("*"))
    done = shardwright("check", *(f"{name}.yaml" for name in READING), cwd=tmp_path)
    found = refused(done.returncode, done.stdout, done.stderr)
    wanted = [(code, f"{name}.yaml:{place}", at) for name, (_, code, place, at) in READING.items()]
    for (code, place, at), (wanted_code, wanted_place, wanted_at) in zip(
        found, wanted, strict=True
    ):
        assert (code, place) == (wanted_code, wanted_place), (place, wanted_place)
        assert not wanted_at or at == wanted_at
    assert set(tmp_path.rglob("*")) == before


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.yaml").write_text(GOOD + "# five megabytes\n" * 300_000)
    commands = [
        ["check", name]
        for name in ("none.yaml", ".", "/dev/null", "/dev/zero", "pipe", "large.yaml", "")
    ]
    codes = [refused(*done)[0][0] for done in shardwright_many(commands, cwd=tmp_path)]
    assert codes == ["SW1001", "SW1002", "SW1001", "SW1001", "SW1001", "SW1011", "SW1002"]


def test_set_errors_are_all_told(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "base.yaml").write_text("objective: memory\n")
    sets = [
        "=1",
        ".",
        "a..b=1",
        "",
        "training.steps=[",
        "training",
        "name.x=1",
        "extends=base.yaml",
        "tensor=2",
    ]
    done = shardwright("check", "r.yaml", *(f"--set={text}" for text in sets), cwd=tmp_path)
    found = refused(done.returncode, done.stdout, done.stderr)
    assert [place.split(":")[1] for _, place, _ in found] == [
        str(n) for n in range(1, len(sets) + 1)
    ]
    assert [code for code, *_ in found] == [
        *["SW1031"] * 4,
        "SW1005",
        "SW1031",
        "SW1032",
        "SW1031",
        "SW1101",
    ]


# What only the model or the layout tells.
LAYOUT: dict[str, tuple[str, str, str, str]] = {
    "heads": (
        changed("gpus_per_node: 4", "gpus_per_node: 3")
        .replace("size: 8\n", "size: 9\n")
        .replace(": 128,", ": 192,")
        + "parallelism: {tensor: 3}\n",
        "SW3103",
        "17:23",
        "3",
    ),
    "zero-3": (GOOD + "parallelism: {pipeline: 2, zero_stage: 3}\n", "SW3108", "17:40", "3"),
    "layers": (
        changed("gpus_per_node: 4", "gpus_per_node: 8") + "parallelism: {pipeline: 8}\n",
        "SW3106",
        "17:25",
        "8",
    ),
    "memory": (changed("vocab_size: 256", "vocab_size: 9007199254740992"), "SW3202", "8:10", "1"),
    "depth": (
        changed("num_hidden_layers: 2", "num_hidden_layers: 1000000000"),
        "SW2006",
        "5:31",
        "1000000000",
    ),
    "config-key": (changed("vocab_size: 256", "vocab_sise: 256"), "SW2005", "4:31", "vocab_sise"),
    "assume": (GOOD + "assume: {ignore_memory: true}\n", "SW1914", "17:25", "true"),
    "checkpoints-above": (GOOD + "checkpoint: {directory: ../x}\n", "SW5105", "17:25", "../x"),
    "checkpoints-in-run": (GOOD + "checkpoint: {directory: run/x}\n", "SW5105", "17:25", "run/x"),
    "checkpoints-at-home": (GOOD + "checkpoint: {directory: ~/x}\n", "SW5105", "17:25", "~/x"),
    "too-many-ranks": (
        changed("nodes: 1", "nodes: 100000").replace("size: 8\n", "size: 400000\n"),
        "SW1915",
        "8:10",
        "100000",
    ),
}


def test_what_compile_finds(tmp_path: Path) -> None:
    """Each in its turn onto a folder that does not exist, and onto one that an earlier compile
    wrote."""
    (tmp_path / "good.yaml").write_text(GOOD)
    for name, (text, *_) in LAYOUT.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    first = ["compile", "good.yaml", "-o", "earlier"]
    onto = [
        ["compile", f"{name}.yaml", "-o", where]
        for name in LAYOUT
        for where in ("a/new", "earlier")
    ]
    (code, stdout, stderr), *rest = shardwright_many([first, *onto], cwd=tmp_path)
    assert code == 0, stdout + stderr
    told = [refused(*done) for done in rest]
    for (name, (_, code_wanted, place, at)), found in zip(LAYOUT.items(), told[::2], strict=True):
        assert (code_wanted, f"{name}.yaml:{place}", at) in found, found
    assert told[::2] == told[1::2]
    assert {path.name for path in tmp_path.iterdir()} == {
        "good.yaml",
        "earlier",
        *(f"{n}.yaml" for n in LAYOUT),
    }
    again = tree(tmp_path / "earlier")
    assert shardwright("compile", "good.yaml", "-o", "fresh", cwd=tmp_path).returncode == 0
    assert tree(tmp_path / "fresh") == again


def test_folders_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("years of work")
    before = tree(tmp_path)
    wanted = {
        ".": "SW5102",
        "/": "SW5102",
        "": "SW5102",
        "theirs": "SW5102",
        "r.yaml": "SW5101",
        "r.yaml/x": "SW5101",
    }
    done = shardwright_many([["compile", "r.yaml", "-o", where] for where in wanted], cwd=tmp_path)
    assert [refused(*one)[0][0] for one in done] == list(wanted.values())
    assert tree(tmp_path) == before


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "locked").mkdir(mode=0o500)
    done = shardwright(
        "compile", "../r.yaml", "-o", "out", cwd=tmp_path / "locked", preexec_fn=binds
    )
    assert [code for code, *_ in refused(done.returncode, done.stdout, done.stderr)] == ["SW5103"]
    assert not list((tmp_path / "locked").iterdir())


def test_a_folder_whose_run_is_alive(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "out" / "run").mkdir(parents=True)
    marker = "This folder was written by shardwright compile, which may replace its files.\n"
    (tmp_path / "out" / ".shardwright").write_text(marker)
    with (tmp_path / "out" / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = tree(tmp_path)
        done = shardwright("compile", "r.yaml", "-o", "out", cwd=tmp_path)
        assert [code for code, *_ in refused(done.returncode, done.stdout, done.stderr)] == [
            "SW5106"
        ]
        assert tree(tmp_path) == before


def test_independent_errors_come_together(tmp_path: Path) -> None:
    text = (
        changed("gpu: cpu", "gpu: h100")
        .replace("steps: 20", "step: 20")
        .replace("nodes: 1", "nodes: two")
    )
    (tmp_path / "r.yaml").write_text(text + "launch: {launcher: ssh}\ncheckpoint: {keep: 0}\n")
    found = refused(*shardwright_many([["compile", "r.yaml", "-o", "out"]], cwd=tmp_path)[0])
    assert [(code, place.split(":")[1]) for code, place, _ in found] == [
        ("SW1102", "8"),
        ("SW1101", "14"),
        ("SW1103", "17"),
        ("SW1104", "18"),
    ]
    text = changed("gpu: cpu", "gpu: h100").replace("model_type: llama", "model_type: lama")
    (tmp_path / "r.yaml").write_text(
        text + "target: megatron\nextra: {a: 1}\ncheckpoint: {directory: ../x}\n"
    )
    found = refused(*shardwright_many([["compile", "r.yaml", "-o", "out"]], cwd=tmp_path)[0])
    assert {code for code, *_ in found} >= {"SW1922", "SW2003", "SW3001"}


HOSTILE = "$(touch pwned) `touch pwned` \"q\" 'q' ;touch pwned; é"


def test_nothing_of_a_recipe_is_executed(tmp_path: Path) -> None:
    """Every text that may hold such characters holds them; compile and launch.sh work, and nothing
    was run."""
    here = tmp_path / HOSTILE
    here.mkdir()
    (here / f"{HOSTILE}.txt").write_text("text\n" * 100)
    recipe = json.loads(json.dumps({"version": 1, "name": "tiny"}))  # a JSON recipe works as well
    recipe |= {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 128,
            }
        },
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": 64,
            "global_batch_size": 4,
            "steps": 2,
            "precision": "fp32",
        },
        "data": {"kind": "text", "path": f"{HOSTILE}.txt", "tokenizer": "byte"},
        "launch": {"env": {"HOSTILE": HOSTILE}},
        "checkpoint": {"directory": HOSTILE},
    }
    recipe["model"]["config"] |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    (here / "r.json").write_text(json.dumps(recipe))
    done = shardwright("compile", "r.json", "-o", f"out {HOSTILE}", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "next" in done.stdout
    fake = tmp_path / "bin" / "deepspeed"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$HOSTILE" "$@"\n')
    fake.chmod(0o755)
    env = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    launched = subprocess.run(
        ["bash", f"out {HOSTILE}/launch.sh"],
        cwd=here,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = launched.stdout.splitlines()
    assert lines[:2] == [str(here / f"out {HOSTILE}"), HOSTILE]
    assert lines[-1] == "train.py"
    # The printed command is one that a shell takes as it stands.
    command = next(line for line in done.stdout.splitlines() if line.startswith("next")).split(
        None, 1
    )[1]
    shell = f"shardwright() {{ printf '%s\\n' \"$@\"; }}; {command}"
    printed = subprocess.run(
        ["bash", "-c", shell], cwd=here, capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"run\nout {HOSTILE}\n"
    assert not list(tmp_path.rglob("pwned"))


def test_what_pdsh_would_run_is_refused(tmp_path: Path) -> None:
    """pdsh hands everything to a remote shell, unquoted."""
    (tmp_path / "hosts").write_text("n1 slots=2\n$(touch${IFS}pwned) slots=2\n")
    text = changed("nodes: 1", "nodes: 2").replace("gpus_per_node: 4", "gpus_per_node: 2")
    (tmp_path / "env.yaml").write_text(text + "launch: {env: {A: '$(touch pwned)'}}\n")
    (tmp_path / "hosts.yaml").write_text(text + "launch: {hostfile: hosts}\n")
    env, hosts = shardwright_many(
        [["compile", f"{n}.yaml", "-o", "out"] for n in ("env", "hosts")], cwd=tmp_path
    )
    assert refused(*env) == [("SW5205", "env.yaml:17:19", "'$(touch pwned)'")]
    assert [code for code, *_ in refused(*hosts)] == ["SW5201"]
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("pwned"))


def test_what_must_work(tmp_path: Path) -> None:
    numbers = changed("steps: 20", "tokens: 1e12\n  optimizer: {lr: 2e-5}")
    (tmp_path / "numbers.yaml").write_text(numbers)
    (tmp_path / "crlf.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    (tmp_path / "recipe.json").write_text('{"version": 1, "name": "a", "model": {"source": '
    '"gpt2"}, "cluster": '
        '{"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"}, "training": {"sequence_length": 2, '
        '"global_batch_size": 1, '
        '"steps": 1}}')  # fmt: skip
    names = ["numbers.yaml", "crlf.yaml", "recipe.json"]
    done = shardwright("check", *names, cwd=tmp_path, env={"PYTHONPATH": ":/nowhere:"})
    assert (done.returncode, done.stderr) == (0, "")
    weights = ["random (from scratch)"] * 2 + ["pretrained"]
    assert done.stdout == "".join(
        f"ok {n}: weights {w}\n" for n, w in zip(names, weights, strict=True)
    )
    done = shardwright("check", "-", cwd=tmp_path, input=GOOD)
    assert (done.returncode, done.stdout) == (0, "ok -: weights random (from scratch)\n")


def test_closed_streams_and_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(changed("steps: 20", "steps: 0"))
    wanted = {
        "check r.yaml >&-": 0,
        "check r.yaml 2>&-": 0,
        "check bad.yaml >&- 2>&-": 1,
        "check bad.yaml 2>&-": 1,
        "check r.yaml >/dev/full": 1,
        "schema | head -c 1": 0,
    }
    for command, code in wanted.items():
        line = f"set -o pipefail; '{sys.executable}' -m shardwright {command}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, (command, done.stderr)
        assert (
            "fault" not in done.stderr
            and "Traceback" not in done.stderr
            and "Exception" not in done.stderr
        ), command


def test_interrupted_compile_leaves_nothing(tmp_path: Path) -> None:
    find_spec("torch")  # where it is missing, tests/missing_packages.py skips this test here
    (tmp_path / "r.yaml").write_text(GOOD)
    command = [sys.executable, "-m", "shardwright", "compile", "r.yaml", "-o", "a/out"]
    cache = {"SHARDWRIGHT_CACHE": str(tmp_path.with_name("empty"))}  # no graph: it needs torch
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | cache,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch_cpu" not in maps.read_text():  # then it is within the import of torch
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr, stdout) == (130, "interrupted\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_an_interrupt_that_an_import_would_swallow_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    list(range(1000))\n"
        "except BaseException:\n    pass\n"
        "print('imported')\n"
    )
    (tmp_path / "command.py").write_text(
        "import sys, time\n"
        "from shardwright.cli import main\n"
        "def dispatch(arguments):\n    import swallows\n    time.sleep(60)\n    return 0\n"
        "main._dispatch = dispatch\n"
        "sys.exit(main.main(['compile']))\n"
    )
    done = subprocess.run(
        [sys.executable, "command.py"], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "imported\n")


def test_findings_sees_what_it_should() -> None:
    text = (
        "error[SW1104]: x: 0 is out of range\n --> r.yaml:1:4\n  |\n1 | x: 0\n  |    ^\n  = "
        "help: Give at least 1.\n"
    )
    assert findings(text) == [("SW1104", "r.yaml:1:4", "0")]
    with pytest.raises(AssertionError, match="no useful help"):
        findings("error[SW1104]: x\n --> r.yaml\n")
