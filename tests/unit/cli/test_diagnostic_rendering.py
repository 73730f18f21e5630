"""The renderer's text, exactly."""

from __future__ import annotations

import pytest

from shardwright.diagnostics import Diagnostic, Location, Severity, Source
from shardwright.diagnostics.diagnostic_rendering import (
    WIDEST,
    diagnostic_to_json,
    escape_control_characters,
    render_diagnostics,
    width,
)


def at(
    line: str,
    column: int,
    length: int,
    *,
    number: int = 3,
    severity: Severity = "error",
    help: str = "",
) -> str:
    source = Source(file="r.yaml", texts={"r.yaml": "\n" * (number - 1) + line + "\nnext"})
    place = Location(file="r.yaml", line=number, column=column, length=length)
    diagnostic = Diagnostic(
        code="SW1104", message="too small", severity=severity, help=help, location=place
    )
    return render_diagnostics([diagnostic], source, color=False)


def test_an_error() -> None:
    assert at("  steps: 0", 10, 1, help="Give more.\nMany more.") == (
        "error[SW1104]: too small\n"
        " --> r.yaml:3:10\n"
        "  |\n"
        "3 |   steps: 0\n"
        "  |          ^\n"
        "  = help: Give more.\n"
        "          Many more.\n"
    )


def test_a_warning_and_a_wide_line_number() -> None:
    assert at("steps: 0", 8, 1, number=123, severity="warning") == (
        "warning[SW1104]: too small\n   --> r.yaml:123:8\n    |\n123 | steps: 0\n    |        ^\n"
    )


@pytest.mark.parametrize(
    ("line", "column", "length", "shown", "carets"),
    [
        ("\tsteps:\t0", 9, 1, "    steps:    0", "              ^"),
        ("name: 字字 x", 7, 2, "name: 字字 x", "      ^^^^"),
        ("é字: 0", 5, 1, "é字: 0", "     ^"),
        ("e\u0301: 0", 5, 1, "e\u0301: 0", "   ^"),
        ("a: \x1b[31m", 4, 5, "a: ␛[31m", "   ^^^^^"),
        ("a: \x7f\x9b\u202eb\u2066", 4, 5, "a: ␡\ufffd\ufffdb\ufffd", "   ^^^^^"),
        ("a: b", 5, 1, "a: b", "    ^"),
        ("", 1, 1, "", "^"),
    ],
)
def test_odd_lines(line: str, column: int, length: int, shown: str, carets: str) -> None:
    lines = at(line, column, length).splitlines()
    assert lines[3:] == [f"3 | {shown}".rstrip(), f"  | {carets}"]


@pytest.mark.parametrize("character", ["x", "字"])
@pytest.mark.parametrize(("column", "length"), [(1, 4), (5000, 1), (5000, 3000), (9998, 3)])
def test_long_lines_are_cut_around_the_caret(character: str, column: int, length: int) -> None:
    line = character * 10_000
    source, carets = (row.partition("| ")[2] for row in at(line, column, length).splitlines()[3:5])
    assert width(source) <= WIDEST + 8 and source.count("...") >= 1
    start, end = carets.index("^"), len(carets)
    assert end <= width(source)
    if length < 10:
        assert end - start == length * width(character)


def test_the_key_or_the_value_or_the_section_above() -> None:
    source = Source(
        file="r.yaml",
        texts={"r.yaml": "a:\n  b: 1\n"},
        locations={
            ("a",): Location(file="r.yaml", line=1, column=1),
            ("a", "b"): Location(file="r.yaml", line=2, column=6),
        },
        key_locations={
            ("a",): Location(file="r.yaml", line=1, column=1),
            ("a", "b"): Location(file="r.yaml", line=2, column=3),
        },
    )
    rows = [
        ("SW1104", ("a", "b")),
        ("SW1101", ("a", "b")),
        ("SW1105", ("a", "c")),
        ("SW1105", ("a", "c", 0, "d")),
    ]
    found = [
        diagnostic_to_json(Diagnostic(code=code, message="m", key=key), source)
        for code, key in rows
    ]
    assert [(row["line"], row["column"]) for row in found] == [(2, 6), (2, 3), (1, 1), (1, 1)]
    assert (
        diagnostic_to_json(Diagnostic(code="SW1104", message="m", key=("z",)), source)["line"] == 0
    )


def test_json() -> None:
    diagnostic = Diagnostic(code="SW1104", message="m", help="h", key=("a",))
    assert diagnostic_to_json(diagnostic) == {
        "code": "SW1104",
        "severity": "error",
        "message": "m",
        "help": "h",
        "file": None,
        "line": None,
        "column": None,
    }


def test_the_users_text_cannot_reach_the_terminal_raw() -> None:
    evil = "\x1b]0;title\x07\r\n\u202e\ud800"
    place = Location(file=f"a{evil}", line=1, column=1)
    source = Source(file=place.file, texts={place.file: evil})
    diagnostic = Diagnostic(
        code="SW1104", message=evil, help=evil, valid=(f"v{evil}",), location=place
    )
    text = render_diagnostics([diagnostic], source, color=False)
    assert not any(escape_control_characters(c) != c for c in text if c != "\n")
    text.encode("utf-8")


def test_color_only_when_asked() -> None:
    diagnostic = Diagnostic(code="SW1104", message="m", help="h", key=("a",))
    assert "\x1b[1;31merror[SW1104]" in render_diagnostics([diagnostic], None, color=True)
    assert "\x1b" not in render_diagnostics([diagnostic], None, color=False)


def test_valid_values_are_listed_once() -> None:
    assert "= valid: 1, 2" in render_diagnostics(
        [Diagnostic(code="SW1104", message="m", help="h", valid=("1", "2"))], None, color=False
    )
    text = render_diagnostics(
        [Diagnostic(code="SW1104", message="m", help="Write `one`.", valid=("one",))],
        None,
        color=False,
    )
    assert "valid" not in text


def test_a_blank_line_between() -> None:
    diagnostic = Diagnostic(code="SW1104", message="m")
    assert (
        render_diagnostics([diagnostic, diagnostic], None, color=False)
        == "error[SW1104]: m\n\nerror[SW1104]: m\n"
    )
    assert render_diagnostics([], None, color=False) == ""
