"""What `prepare` prints: a table of the sources, what was left out, and samples around their
labels; and --check."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from tests.cli.command import GOOD, refused, tree
from tests.cpu_time import cpu_seconds_at_most

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BAD: list[Any] = [
    {"talk": 1},
    {"messages": []},
    {"messages": [{"role": "user", "content": "no answer"}]},
]


def talk(number: int, lines: int = 1) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number}?"}
    return {
        "messages": [question, {"role": "assistant", "content": f"A number, {number}.\n" * lines}]
    }


def compiled(folder: Path, records: list[Any], **data: Any) -> Path:
    """A compiled folder whose data is of these records, beside its recipe."""
    (folder / "talks.jsonl").write_text(
        "\n".join(map(json.dumps, records)) + "\n", encoding="utf-8"
    )
    source = {"kind": "chat", "path": "talks.jsonl", "tokenizer": "byte", **data}
    source |= {"template": TEMPLATE} if source["kind"] == "chat" else {}
    recipe = GOOD.replace("data: {kind: synthetic}", f"data: {json.dumps(source)}").replace(
        "gpus_per_node: 4", "gpus_per_node: 1"
    )
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    assert main(["compile", str(folder / "recipe.yaml"), "-o", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [talk(n, 1 + n % 3) for n in range(40)]
    records[3], records[5], records[7] = BAD
    return compiled(tmp_path_factory.mktemp("prepare"), records, skip_damaged=0.5)


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["prepare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def on_terminal(*arguments: object, columns: int, **environment: str) -> str:
    """What the command writes to a terminal so wide."""
    master, slave = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "prepare", *map(str, arguments)],
        stdout=slave,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env={**variables, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40", **environment},
    )
    os.close(slave)
    found = b""
    try:
        while piece := os.read(master, 2**16):
            found += piece
    except OSError:  # Linux's way to say that nobody writes any more
        pass
    os.close(master)
    assert process.wait() == 0
    return found.decode("utf-8").replace("\r\n", "\n")


def test_a_pipe_gets_plain_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = called(capsys, folder)
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "source" and "\x1b" not in text
    name = f"chat {folder.parent / 'talks.jsonl'}"
    (row,) = (line for line in lines if line.startswith(f"{name} "))
    said = json.loads(called(capsys, folder, "--json"))
    (part,) = said["parts"]
    share = f"{part['trained_tokens'] / part['tokens']:.1%}"
    assert row.removeprefix(name).split() == [
        str(part["sequences"]),
        f"{part['tokens']:,}",
        share,
        "0",
        "3",
    ]
    at = lines.index("  left out, of 40 records:")
    assert lines[at + 1 : at + 6] == [
        "    1: a record without the field that is trained on (SW6110)",
        f"       {folder.parent / 'talks.jsonl'}:4: there is no 'messages'",
        "    1: a conversation that cannot be read (SW6111)",
        f"       {folder.parent / 'talks.jsonl'}:6: the conversation has no messages",
        "    1: no label within training.sequence_length",
    ]
    assert text.count("labels in [[ ]]:") == 3 and re.search(
        r"\?</><assistant>\[\[A number, \d+\.\n", text
    )
    assert lines[-1] == f"next: shardwright run {folder}"
    assert (
        said["rows"] == part["sequences"] and len(said["samples"]) == 3 and said["checked"] is None
    )


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_gets_colours_within_its_width(folder: Path, columns: int) -> None:
    text = on_terminal(folder, "--check", 20, columns=columns)
    assert "labels in green:" in text and "[[" not in text
    assert "<assistant>\x1b[4;32mA number, 0.\x1b[0m\n\x1b[4;32m</>\x1b[0m" in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    wide = [
        line for line in plain if len(line) > columns and str(folder.parent) not in line
    ]  # a path is not broken
    assert wide == [] and any("─" in line for line in plain)


def test_no_color_is_heard_on_a_terminal(folder: Path) -> None:
    text = on_terminal(folder, "--check", 20, columns=80, NO_COLOR="1")
    assert "\x1b" not in text and "<assistant>[[A number, 0.\n</>]]" in text


def test_check_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = tree(folder.parent)
    text = called(capsys, folder, "--check", 8)
    assert (
        text.startswith("the first 8 records of each source\n")
        and "left out, of 8 records:" in text
    )
    said = json.loads(called(capsys, folder.parent / "recipe.yaml", "--check", 2, "--json"))
    assert said["checked"] == 2 and said["documents"] == 2 and "steps" not in said
    assert tree(folder.parent) == before


def test_check_fails_where_prepare_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows all bad records, not the first one alone; a good beginning passes."""
    out = compiled(tmp_path, [talk(0), *BAD, *(talk(n) for n in range(40))])
    capsys.readouterr()
    assert main(["prepare", str(out), "--check", "1"]) == 0
    capsys.readouterr()
    code = main(["prepare", str(out), "--check", "10"])
    found = capsys.readouterr()
    ((number, _, _),) = refused(code, "", found.err)
    assert number == "SW6153" and "2 of the first 10 records cannot be used" in found.err
    assert "talks.jsonl:2: there is no 'messages'; " in found.err and "sample 1 of 3" in found.out
    code = main(["prepare", str(out)])
    found = capsys.readouterr()
    assert [number for number, _, _ in refused(code, found.out, found.err)] == ["SW6110"]


def test_check_of_records_of_no_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = compiled(tmp_path, BAD[:2] * 3, skip_damaged=0.5)
    capsys.readouterr()
    code = main(["prepare", str(out), "--check", "4"])
    found = capsys.readouterr()
    assert [number for number, _, _ in refused(code, found.out, found.err)] == ["SW6116"]
    assert "no usable record among 4" in found.err


@pytest.mark.prove
def test_check_reads_a_long_file_no_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compiled(tmp_path, [talk(0)])
    line = json.dumps(talk(7)) + "\n"
    (tmp_path / "talks.jsonl").write_text(line * 10**6, encoding="utf-8")
    called(capsys, out, "--check", 1)  # what is imported is paid
    with cpu_seconds_at_most(1):
        said = json.loads(called(capsys, out, "--check", 5, "--json"))
    assert said["parts"][0]["records"] == 5


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_check_of_other_kinds(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their documents are shown, though they fill no sequence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [{"text": f"text {n}"} for n in range(9)]
    out = compiled(tmp_path, records, kind=kind)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "talks.jsonl")
    said = json.loads(called(capsys, out, "--check", 3, "--json"))
    first = said["samples"][0]
    text = "".join(piece["text"] for piece in first)
    assert [piece["trained"] for piece in first][:2] == [False, True]
    if kind == "text":
        assert said["documents"] == 1 and text.startswith('{"text": "text 0"}\n')
    else:
        assert (
            said["documents"] == 3
            and said["parts"][0]["sequences"] == 0
            and text.startswith("text 0")
        )
