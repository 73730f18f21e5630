"""--fix: what it mends, what it leaves, and that the rest of the text stays as it was."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics.code_explanations import ds_config_explanations
from shardwright.lint.ds_config_document import parse_ds_config
from shardwright.lint.ds_config_linter import fixed, lint, linted_ds_config

BEFORE = """\
{
    // the batch
    "train_batch_size": "64",
    "zero_optimization": {
        "stage": 2,
        "cpu_offload": true,   # as of 2020
        "contigous_gradients": true,
        "allgather_bucket_size": 5e8
    },
    "optimizer": {
        "type": "Adam",
        "params": {"lr": "1e-4", "weight_decay": 0.1, "max_grad_norm": 0.5}
    },
    "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 10}},
    "elasticity": {
        "enabled": false
    },
    "dump_state": "false"
}
"""
AFTER = """\
{
    // the batch
    "gradient_clipping": 0.5,
    "train_batch_size": 64,
    "zero_optimization": {
        "offload_optimizer": {"device": "cpu"},
        "stage": 2,
        # as of 2020
        "contiguous_gradients": true,
        "allgather_bucket_size": 5e8
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.0001, "weight_decay": 0.1}
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "dump_state": false
}
"""


def mended(text: str) -> tuple[str, list[str]]:
    document, found = fixed(parse_ds_config("ds_config.json", text), "deepspeed", None)
    return document.text, [finding.code for finding in found]


def test_text_is_mended_in_place() -> None:
    after, found = mended(BEFORE)
    assert after == AFTER
    expected = [
        "SW4116",
        "SW4122",
        "SW4111",
        "SW4506",
        "SW4116",
        "SW4503",
        "SW4508",
        "SW4121",
        "SW4116",
    ]
    assert sorted(found) == sorted(expected)
    assert mended(after) == (after, [])


@pytest.mark.parametrize(
    "text",
    [
        entry.example
        for entry in ds_config_explanations().values()
        if entry.code >= "SW4111" and entry.example
    ],
)
def test_a_fix_leaves_what_it_does_not_mend(text: str) -> None:
    """Every other key keeps its value, and nothing is left that --fix would mend."""
    document = parse_ds_config("ds_config.json", text)
    changed, _ = fixed(document, None, 8)
    findings = lint(changed, linted_ds_config(changed, None, 8))
    assert [finding.code for finding in findings if finding.fix] == []
    before = {
        finding.code
        for finding in lint(document, linted_ds_config(document, None, 8))
        if not finding.fix
    }
    assert {finding.code for finding in findings} <= before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"train_batch_size": 8, "amp": {"enabled": false}}', '{"train_batch_size": 8}'),
        ('{"amp": false, "train_batch_size": 8}', '{"train_batch_size": 8}'),
        ('{\n  "train_batch_size": 8,\n  "amp": false\n}', '{\n  "train_batch_size": 8\n}'),
        (
            '{"train_batch_size": 8, "optimizer": {"type": "SGD", "lr": 0.1, "params": {}}}',
            '{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}',
        ),
        (
            '{"train_batch_size": 8, "zero_optimization": true}',
            '{"train_batch_size": 8, "zero_optimization": {"stage": 1}}',
        ),
        (
            '{"train_batch_size": 8, "bfloat16": {"enabled": true}}',
            '{"train_batch_size": 8, "bf16": {"enabled": true}}',
        ),
        (
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": false}}',
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
        ),
    ],
)
def test_single_fixes(before: str, after: str) -> None:
    assert mended(before)[0] == after


@pytest.mark.parametrize(
    "text",
    [
        # two misspellings of one key: which of them is meant?
        '{"train_batch_size": 8, "bf16": {"enabled": true}, "bf_16": {"enabled": false}}',
        # a removed feature that is switched on
        '{"train_batch_size": 8, "amp": {"enabled": true}}',
        # Hjson without quotes has no places to edit
        "{train_batch_size: '8'}",
        # the batch sizes: a person knows which of them is wrong
        (
            '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 3, '
            '"gradient_accumulation_steps": 7}'
        ),
    ],
)
def test_what_needs_a_decision_stays(text: str) -> None:
    assert mended(text)[0] == text


def test_file_is_replaced_and_keeps_its_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link = tmp_path / "real.json", tmp_path / "link.json"
    path.write_bytes(b'{"train_batch_size": "8",\r\n "bf16": {"enabled": true}}\r\n')
    path.chmod(0o640)
    link.symlink_to(path)
    assert main(["lint", "--fix", str(link)]) == 0
    assert path.read_bytes() == b'{"train_batch_size": 8,\r\n "bf16": {"enabled": true}}\r\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and link.is_symlink()
    assert capsys.readouterr().out == (
        f"fixed SW4116 train_batch_size: Write 8 without quotes.\nok {link}\n"
    )
    assert os.listdir(tmp_path) == ["real.json", "link.json"] or sorted(os.listdir(tmp_path)) == [
        "link.json",
        "real.json",
    ]


def test_nothing_to_mend_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size":8}')
    before = path.stat().st_mtime_ns
    assert main(["lint", "--fix", str(path)]) == 0
    assert path.stat().st_mtime_ns == before


def test_a_folder_that_may_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for root, which may write anywhere."""

    def refused(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "8"}')
    monkeypatch.setattr("tempfile.mkstemp", refused)
    assert main(["lint", "--fix", str(path)]) == 1
    err = capsys.readouterr().err
    assert "error[SW4010]" in err and "Permission denied" in err
    assert json.loads(path.read_text()) == {"train_batch_size": "8"}


def test_a_replacement_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "8"}')
    monkeypatch.setattr("os.replace", full)
    assert main(["lint", "--fix", str(path)]) == 1
    assert os.listdir(tmp_path) == ["ds.json"] and '"8"' in path.read_text()
