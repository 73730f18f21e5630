"""A chat template comes from a stranger: whatever it does ends as a diagnostic that names it and
the row."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwright.data import conversations
from shardwright.data.chat_format import TemplateError
from shardwright.data.chat_template import ChatTemplateRenderer, RenderLimitExceeded
from tests.unit.data.data_plans import part, plan, refused

pytest.importorskip("transformers", reason="the process that renders templates imports it")

TALK = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
QUICK = {
    "a division by zero": ("{{ 1/0 }}", "line 1: ZeroDivisionError"),
    "an endless macro": (
        "\n{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "line 2: RecursionError",
    ),
    "a huge range": ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
    "much memory": ("{{ 'x' * 10**12 }}", "MemoryError"),
    "much text": ("{{ 'x' * 80 * 10**6 }}", "80,000,000 characters"),
    "a deep expression": ("{{ " + "(" * 2_000 + "1" + ")" * 2_000 + " }}", "RecursionError"),
    "a way out of the sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "no text": ("{{ messages }}{{ messages.pop() }}", "unsafe"),
}
ENDLESS = {
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a huge power": "{{ 7 ** (10 ** 9) }}",  # inside of C code, where no Python runs
}


def prepared(template: str, tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    return refused(plan(part("chat", tmp_path / "a.jsonl", template=template)), tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_what_a_template_raises_names_it_and_the_row(name: str, tmp_path: Path) -> None:
    template, cause = QUICK[name]
    code, message = prepared(template, tmp_path)
    assert code == "SW6112" and cause in message and "\n" not in message
    assert "a.jsonl:1: the chat template (data.template)" in message


@pytest.mark.prove
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_ended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_RENDERER", ChatTemplateRenderer(seconds=1))
    begun = time.process_time()
    code, message = prepared(ENDLESS[name], tmp_path)
    assert (
        code == "SW6112"
        and "a.jsonl:1" in message
        and "it used more than 1 s of CPU time" in message
    )
    assert time.process_time() - begun < 1, "and this process only waits"


def render(renderer: ChatTemplateRenderer, template: str, messages: Any = TALK) -> str:
    return renderer.render(template, messages, None, {}, turns=False)[0]


def test_the_next_conversation_is_rendered_after_any_of_them() -> None:
    renderer = ChatTemplateRenderer(seconds=1)
    with pytest.raises(RenderLimitExceeded):
        render(renderer, ENDLESS["a huge power"])
    for name in ("a division by zero", "an endless macro", "a huge range"):
        with pytest.raises(TemplateError):
            render(renderer, QUICK[name][0])
    for _ in range(3):
        assert render(renderer, "{{ messages[0].content }} \ud800") == "Two and two? \ud800"
    renderer.close()


def test_the_seconds_are_those_of_one_conversation() -> None:
    """Not of all of them together: a process's CPU time adds up over millions of rows."""
    renderer = ChatTemplateRenderer(seconds=1)
    render(renderer, "")
    assert renderer._process is not None
    process = psutil.Process(renderer._process.pid)
    begun = process.cpu_times().user
    while process.cpu_times().user < begun + 2.5:
        render(
            renderer, "{% for i in range(33) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
        )
    renderer.close()
