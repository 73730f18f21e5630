"""The commands `lint` and `explain`: formats, exit codes, bad input, speed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics.code_registry import CODES
from tests.cli.command import shardwright
from tests.cli.test_speed import RUNS, light, seconds, within

GOOD = '{"train_batch_size": 8}'
BAD = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 2},\n  "foo, 100%": 1\n}\n'


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "good.json").write_text(GOOD)
    return str(tmp_path / "good.json")


@pytest.fixture
def bad(tmp_path: Path) -> str:
    (tmp_path / "a,b:bad.json").write_text(BAD)
    return str(tmp_path / "a,b:bad.json")


def test_text(good: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", good]) == 0
    assert capsys.readouterr() == (f"ok {good}\n", "")
    assert main(["lint", bad, good]) == 1
    out, err = capsys.readouterr()
    assert out == f"ok {good}\n"
    assert err.startswith("error[SW4112]: `zero_optimisation` is not a key of DeepSpeed")
    assert f" --> {bad}:3:3\n" in err and "^^^^^^^^^^^^^^^^^^^" in err
    assert "1 of these can be mended with --fix" in err


def test_json(good: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--format", "json", good, bad]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"file": good, "ok": True, "diagnostics": []}
    assert second["file"] == bad and second["ok"] is False
    assert second["diagnostics"][0] == {
        "code": "SW4112",
        "severity": "error",
        "message": "`zero_optimisation` is not a key of DeepSpeed, which ignores it silently",
        "help": "Did you mean `zero_optimization`?",
        "line": 3,
        "column": 3,
        "key": "zero_optimisation",
        "fix": True,
    }
    assert [(d["code"], d["severity"], d["fix"]) for d in second["diagnostics"][1:]] == [
        ("SW4113", "warning", False)
    ]


def test_json_of_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--format", "json", str(tmp_path / "none.json")]) == 1
    (found,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert (found["code"], found["line"], found["key"]) == ("SW4001", 0, None)


def test_github(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--format", "github", bad]) == 1
    first, second = capsys.readouterr().out.splitlines()
    escaped = bad.replace(":", "%3A").replace(",", "%2C")
    assert first == (
        f"::error file={escaped},line=3,col=3,endColumn=22,title=SW4112::`zero_optimisation` is "
        "not a key of DeepSpeed, which ignores it silently. Did you mean `zero_optimization`?"
    )
    assert (
        second.startswith(f"::warning file={escaped},line=4,col=3,") and "`foo, 100%25`" in second
    )


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "SW4004"),
        (b" \n\t", "SW4004"),
        (b"\xef\xbb\xbf", "SW4004"),
        (b'{"a": "\xff"}', "SW4003"),
        (b"[1]", "SW4007"),
        (b'"text"', "SW4007"),
        (b"8", "SW4007"),
        (b"{", "SW4005"),
        (b'{"a": NaN}', "SW4005"),
        (b'{"a": 1e999}', "SW4005"),
        (b'{"a": 1, "a": 2}', "SW4006"),
        (b'{"b": {"a": [{"x": 1, "x": 2}]}}', "SW4006"),
        (b"[" * 100_000, "SW4009"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "SW4009"),
        (b" " * 600_000, "SW4009"),
        (b'{"a": ' + b"9" * 6000 + b"}", "SW4005"),
    ],
)
def test_bad_files(
    content: bytes, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    assert main(["lint", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (
        out == "" and err.startswith(f"error[{code}]: ") and "= help: " in err and len(err) < 2000
    )


def test_folder_and_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path), str(tmp_path / "none.json")]) == 1
    assert re.findall(r"error\[(\w+)\]", capsys.readouterr().err) == ["SW4002", "SW4001"]


def test_standard_input(tmp_path: Path) -> None:
    done = shardwright("lint", "-", cwd=tmp_path, input=BAD)
    assert done.returncode == 1 and "--> <stdin>:3:3" in done.stderr
    assert shardwright("lint", "-", cwd=tmp_path, input=GOOD).stdout == "ok <stdin>\n"
    done = shardwright("lint", "-", "--fix", cwd=tmp_path, input=BAD)
    assert done.returncode == 1 and "--fix needs a file" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--world-size", "0"], ["--for", "keras"], ["--gpu", "h100-sxm-80gb"], []]
)
def test_usage(arguments: list[str], good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", *arguments, *([good] if arguments else [])]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "shardwright: " in err and "Traceback" not in err


def test_bom_and_line_ends_keep_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{\r\n\t"train_batch_size": 8,\r\n\t"foo": 1\r\n}')
    assert main(["lint", "--format", "json", str(path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert (found["line"], found["column"]) == (3, 2)


class TestMemory:
    CONFIG = (
        '{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
    )

    def lint(self, tmp_path: Path, config: str, *arguments: str) -> int:
        (tmp_path / "ds.json").write_text(config)
        return main(["lint", str(tmp_path / "ds.json"), *arguments])

    def test_states_by_the_formula(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """8.03 B parameters over 8 ranks at stage 3: (2 + 2 + 12) bytes each (arXiv 1910.02054)."""
        assert (
            self.lint(
                tmp_path, self.CONFIG, "--world-size", "8", "--model", "meta-llama/Meta-Llama-3-8B"
            )
            == 0
        )
        out = capsys.readouterr().out
        assert (
            f"{8_030_261_248 * 16 / 8 / 2**30:.1f} GiB of model states" in out
            and "8 ranks, ZeRO stage 3" in out
        )
        assert re.search(r"with activation checkpointing it fits on .*b200-sxm-180gb", out)

    def test_a_model_that_does_not_fit(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ("--world-size", "8", "--model", "Llama-3.1-70B", "--gpu", "a100-sxm4-80gb")
        assert self.lint(tmp_path, self.CONFIG.replace("3}", "2}"), *arguments) == 0
        assert "warning[SW4801]: about" in capsys.readouterr().err

    def test_offload_leaves_the_gpu_less(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        offloaded = self.CONFIG.replace("3}", '3, "offload_optimizer": {"device": "cpu"}}')
        assert (
            self.lint(
                tmp_path, offloaded, "--world-size", "8", "--model", "meta-llama/Meta-Llama-3-8B"
            )
            == 0
        )
        assert "optimizer 0.0" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (CONFIG, "give --world-size N"),
            (CONFIG.replace("3}", '"auto"}'), "the ZeRO stage is filled in later"),
            (
                CONFIG.replace("3}", "1}").replace("{", '{"pipeline": {}, ', 1),
                "the pipeline's degree",
            ),
        ],
    )
    def test_what_the_file_leaves_open(
        self, config: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.lint(tmp_path, config, "--for", "trainer", "--model", "meta-llama/Meta-Llama-3-8B")
        assert f"memory   not predicted: {words}" in capsys.readouterr().out

    def test_unknown_gpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("--world-size", "8", "--model", "meta-llama/Meta-Llama-3-8B", "--gpu")
        assert self.lint(tmp_path, self.CONFIG, *arguments, "h100-sxm2") == 1
        assert "error[SW3001]" in capsys.readouterr().err

    def test_short_name_of_a_gpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ("--world-size", "8", "--model", "meta-llama/Meta-Llama-3-8B", "--gpu")
        long = self.lint(tmp_path, self.CONFIG, *arguments, "h100-sxm-80gb")
        expected = capsys.readouterr()
        assert self.lint(tmp_path, self.CONFIG, *arguments, "h100") == long
        found = capsys.readouterr()
        assert found.out == expected.out
        assert found.err == f"shardwright: --gpu h100: taken as h100-sxm-80gb\n{expected.err}"


def test_explain_every_code(capsys: pytest.CaptureFixture[str]) -> None:
    for code, title in CODES.items():
        assert main(["explain", code.lower()]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{code}: {title}\n")
        assert max(map(len, out.splitlines())) <= 120
        if code.startswith("SW41"):
            assert "Source: " in out
    assert main(["explain", "SW4112", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["instead"].endswith("}")


@pytest.mark.parametrize(
    ("word", "answer"), [("SW9999", "there is no code SW9999"), ("lr", "is no code")]
)
def test_explain_nothing(word: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 1
    assert answer in capsys.readouterr().err


def test_lint_and_explain_import_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(GOOD)
    assert light("lint", "ds.json", folder=tmp_path) == "ok ds.json\n"
    assert light("explain", "SW4112", folder=tmp_path).startswith("SW4112")


@pytest.mark.prove
def test_lint_takes_0_3_seconds(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(GOOD)
    command = [sys.executable, "-m", "shardwright", "lint", "ds.json"]
    seconds(command, tmp_path)  # the byte code is written once
    assert within(0.3, RUNS, command, tmp_path)
