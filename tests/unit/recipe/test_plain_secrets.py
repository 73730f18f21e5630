"""Secrets that a recipe holds in plain text: warned of, masked where they are printed, and written
to files for this user alone."""

from __future__ import annotations

import argparse
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.checkpoint_storage import CheckpointStore
from shardwright.cli.compile_commands import run_compile
from shardwright.cli.diff_command import recipe_changes
from shardwright.cli.recipe_commands import findings
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import render_diagnostics
from shardwright.diagnostics.secret_values import (
    is_secret_name,
    masked_line,
    url_credentials,
    without_credentials,
)
from shardwright.recipe.plain_secrets import secrets_of_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.train.secret_environment import secret_redactor
from tests.unit.launch.launchers.two_node_recipes import KUBERNETES, TWO_NODES

CANARY = "canary-it's{0}\"x"
URL = "memory://user:canary-url@bucket/run?sig=canary-sig"
SECRET_RECIPE: dict[str, Any] = {
    "launch": {"env": {"HF_TOKEN": CANARY, "NCCL_DEBUG": "WARN"}},
    "checkpoint": {"directory": "checkpoints", "upload_to": URL},
}


def test_names_of_secrets() -> None:
    secret = (
        "HF_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN "
        "DB_PASSWORD MY_SECRET OPENAI_API_KEY AZURE_STORAGE_CONNECTION_STRING"
    )
    plain = (
        "TOKENIZERS_PARALLELISM HF_TOKEN_PATH NCCL_DEBUG GOOGLE_APPLICATION_CREDENTIALS "
        "PATH CUDA_VISIBLE_DEVICES"
    )
    assert all(map(is_secret_name, secret.split()))
    assert not any(map(is_secret_name, plain.split()))


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("s3://bucket/run", "s3://bucket/run", ()),
        ("abfs://box@account.dfs.core.windows.net/x", None, ()),
        ("file:///mnt/a:b@c", None, ()),
        ("sftp://me:pw@host/x", "sftp://***@host/x", ("me:pw", "pw")),
        ("https://h/x?sv=1&sig=a%2Fb", "https://h/x?sv=1&sig=***", ("a%2Fb",)),
    ],
)
def test_credentials_of_a_url(url: str, shown: str | None, secrets: tuple[str, ...]) -> None:
    assert (without_credentials(url), url_credentials(url)) == (shown or url, secrets)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("    HF_TOKEN: hf_abc # mine", "    HF_TOKEN: ****** # mine"),
        ("  env: {HF_TOKEN: hf_abc, B: c}", "  env: {HF_TOKEN: ******, B: c}"),
        ("""  "MY_SECRET": "a b\\"c", x""", """  "MY_SECRET": "* **"*", x"""),
        ("pad_token: hf_abc", "pad_token: hf_abc"),
        ("upload_to: sftp://me:pw@host/x", "upload_to: sftp://*****@host/x"),
    ],
)
def test_a_line_that_is_shown(line: str, shown: str) -> None:
    assert masked_line(line) == shown and len(shown) == len(line)


def test_each_secret_is_a_warning_that_does_not_print_it(write_recipe: Callable[..., Path]) -> None:
    recipe = load_recipe(write_recipe(SECRET_RECIPE))
    warnings = compile_recipe(recipe).warnings
    secrets = [d for d in warnings if d.code in ("SW5210", "SW5211")]
    assert [(d.code, d.key, d.severity) for d in secrets] == [
        ("SW5210", ("launch", "env", "HF_TOKEN"), "warning"),
        ("SW5211", ("checkpoint", "upload_to"), "warning"),
    ]
    assert "env_from: [HF_TOKEN]" in secrets[0].help
    text = render_diagnostics(secrets, recipe.source, color=False)
    assert "HF_TOKEN" in text and "memory://***@bucket/run?sig=***" in text
    assert "canary" not in text
    assert {"SW5210", "SW5211"} <= {d.code for d in findings(recipe)}


def test_no_warning_without_a_secret(write_recipe: Callable[..., Path]) -> None:
    launch = {"env": {"NCCL_DEBUG": "WARN", "HF_TOKEN": ""}, "env_from": ["WANDB_API_KEY"]}
    found = compile_recipe(load_recipe(write_recipe({"launch": launch}))).warnings
    assert not [d for d in found if d.code in ("SW5210", "SW5211")]


def test_secrets_of_a_pod_patch_and_of_urls_in_variables(write_recipe: Callable[..., Path]) -> None:
    variables = [{"name": "WANDB_API_KEY", "value": "canary"}, {"name": "A", "value": "b"}]
    patch = {"spec": {"containers": [{"name": "ranks", "env": variables}]}}
    launch = {
        "kubernetes": {**KUBERNETES, "pod_patch": patch},
        "env": {"HTTPS_PROXY": "http://me:canary@proxy"},
    }
    compiled = compile_recipe(load_recipe(write_recipe({**TWO_NODES, "launch": launch})))
    found = [d for d in compiled.warnings if d.code == "SW5210"]
    where = ("launch", "kubernetes", "pod_patch", "spec", "containers", 0, "env", 0, "value")
    assert [d.key for d in found] == [("launch", "env", "HTTPS_PROXY"), where]
    assert "canary" not in str(found)


@pytest.mark.parametrize("value", [12345678, "canary\\nline"])
def test_a_secret_that_is_refused_is_not_printed(
    value: object, write_recipe: Callable[..., Path]
) -> None:
    value = value.replace("\\n", "\n") if isinstance(value, str) else value
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({"launch": {"env": {"HF_TOKEN": value}}}))
    (error,) = caught.value.diagnostics
    assert "***" in error.message and "canary" not in str(error) and "12345678" not in str(error)


def test_a_secret_that_pdsh_cannot_pass_is_not_printed(write_recipe: Callable[..., Path]) -> None:
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(write_recipe({**TWO_NODES, **SECRET_RECIPE})))
    assert [d.code for d in caught.value.diagnostics] == ["SW5205"]
    text = render_diagnostics(caught.value.diagnostics, caught.value.source, color=False)
    assert "HF_TOKEN" in text and "canary" not in text


def test_files_that_hold_a_secret_are_this_users_alone(
    write_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, previous = tmp_path / "out", os.umask(0o022)
    try:
        for _ in range(2):  # the second onto the first one's output
            arguments = argparse.Namespace(
                recipe=write_recipe(SECRET_RECIPE), output=out, overrides=[], json=False
            )
            assert run_compile(arguments) == 0
            modes = {
                path.relative_to(out).as_posix(): stat.S_IMODE(path.stat().st_mode)
                for path in out.rglob("*")
                if path.is_file()
            }
            holders = {
                name for name in modes if any(w in (out / name).read_text() for w in ("canary",))
            }
            assert holders == {"plan.json", "recipe.resolved.json", "launch.sh"}
            assert {name for name, mode in modes.items() if not mode & 0o044} == holders
            assert modes["launch.sh"] & 0o700 == 0o700 and modes["plan.json"] == 0o600
    finally:
        os.umask(previous)
    printed = capsys.readouterr()
    assert "SW5210" in printed.err and "canary" not in printed.out + printed.err
    environment, _, _ = (out / "launch.sh").read_text().partition("signals=0\n")
    (out / "l.sh").write_text(f'{environment}echo "$HF_TOKEN"\n')
    told = subprocess.run(["bash", str(out / "l.sh")], capture_output=True, text=True)
    assert told.stdout == f"{CANARY}\n"  # the run still gets it


def test_what_a_run_prints_holds_no_secret(write_recipe: Callable[..., Path]) -> None:
    plan = compile_recipe(load_recipe(write_recipe(SECRET_RECIPE))).plan
    redact = secret_redactor((), secrets_of_plan(plan.launch, plan.checkpoint))
    text = redact(f"cmd = pdsh export HF_TOKEN={CANARY}; GET {URL}")
    assert "canary" not in text and "[HF_TOKEN]" in text and "WARN" not in text


def test_diff_masks_secrets(write_recipe: Callable[..., Path]) -> None:
    other = {**SECRET_RECIPE, "launch": {"env": {"HF_TOKEN": "canary-2", "NCCL_DEBUG": "INFO"}}}
    a, b = (load_recipe(write_recipe(r)).document for r in (SECRET_RECIPE, other))
    rows = {key: (ours, theirs) for key, ours, theirs in recipe_changes(a, b)}
    assert rows["launch.env.HF_TOKEN"] == ("***", "***")
    assert rows["launch.env.NCCL_DEBUG"] == ("WARN", "INFO") and "canary" not in str(rows)


def test_a_storage_that_fails_prints_no_credentials() -> None:
    with pytest.raises(Refusal) as caught:
        CheckpointStore("nosuchprotocol://me:canary@host/x")
    assert "canary" not in str(caught.value) and "://***@host/x" in str(caught.value)
