"""The hostfile that travels with the folder."""

from __future__ import annotations

import pytest

from shardwright.diagnostics import Refusal
from shardwright.lower.inputs import parse_hostfile


def test_hosts_in_order_without_comments() -> None:
    assert parse_hostfile("hosts", "# rack 1\nb slots=8\n\n  a.local   slots=8  \n") == (("b", 8), ("a.local", 8))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("b", "SW5201"),
        ("b slots=", "SW5201"),
        ("b slots=-1", "SW5201"),
        ("b slots=8 # eight", "SW5201"),
        ("b;reboot slots=8", "SW5201"),
        ("$(reboot) slots=8", "SW5201"),
        ("-oProxyCommand=reboot slots=8", "SW5201"),
        ("b slots=٨", "SW5201"),
        ("a slots=8", "SW5202"),
    ],
)
def test_bad_line_is_named_with_its_number(line: str, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_hostfile("hosts", f"a slots=8\n\n{line}\n")
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.location is not None and diagnostic.location.line == 3


def test_every_bad_line_at_once() -> None:
    with pytest.raises(Refusal) as caught:
        parse_hostfile("hosts", "a\nb slots=1\nb slots=1\n")
    assert [d.code for d in caught.value.diagnostics] == ["SW5201", "SW5202"]
