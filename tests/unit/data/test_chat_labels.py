"""Checks of a rendered conversation: the same words at another place do not stand in for what a
template leaves out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shardwright.data.chat_format import SENTINEL, detect_turn_format, find_turns
from shardwright.data.conversations import MissingLabel, conversation, encode
from shardwright.data.tokenizers import ByteTokenizer
from shardwright.diagnostics import Refusal

pytest.importorskip("transformers", reason="the process that renders templates imports it")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3.1's: a call, or a text.
ONE_OF_BOTH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ "
    "m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_CALL = ONE_OF_BOTH.replace(
    "{% else %}{{ m.content }}{% endif %}", "{% endif %}{{ m.content }}"
)
PRINTS_ARGUMENTS = FIRST_CALL.replace(
    "{{ m.tool_calls[0].function | tojson }}",
    (
        "{% set f = m.tool_calls[0].function %}{{ f.name }}({{ f.arguments.keys() | list | length "
        "}}) {{ f.arguments }}"
    ),
)
Message = dict[str, Any]


def labels(template: str, messages: list[Message]) -> list[str]:
    """Each stretch of the text that is trained."""
    talk = conversation(({"messages": messages}, "here:1", 0), "messages")
    ids, trained = encode(talk, ByteTokenizer(), template, "assistant")
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    raw = ids.astype(np.uint8).tobytes()
    return [raw[a:b].decode() for a, b in itertools.pairwise(borders) if trained[a]]


def call(name: str, **arguments: Any) -> Message:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def talk_of(answer: Message, last: str = "It is sunny.") -> list[Message]:
    return [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", **answer},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": last},
    ]


LOST = {
    "a call that the text speaks of": (
        CHATML,
        talk_of({"content": "Let me ask for the weather.", "tool_calls": [call("weather")]}),
        "message 2: .* the call of 'weather'",
        "call",
    ),
    "a call that the next answer speaks of": (
        CHATML,
        talk_of({"content": "", "tool_calls": [call("weather")]}, "The weather is fine."),
        "message 2: .* the call of 'weather'",
        "call",
    ),
    "a text that the arguments hold": (
        ONE_OF_BOTH,
        talk_of({"content": "Paris", "tool_calls": [call("weather", city="Paris")]}),
        "message 2: .* the text 'Paris'",
        "text",
    ),
    "the second call of the same function": (
        FIRST_CALL,
        talk_of(
            {
                "content": "",
                "tool_calls": [call("weather", city="Paris"), call("weather", city="Paris")],
            }
        ),
        "message 2: .* the call of 'weather'",
        "call",
    ),
    "parts that the template prints": (
        CHATML,
        talk_of(
            {
                "content": [
                    {"type": "thinking", "thinking": "Hm."},
                    {"type": "text", "text": "Sunny."},
                ]
            }
        ),
        "message 2: .* the content as Python prints it",
        "printed",
    ),
    "a user's parts that the template prints": (
        CHATML,
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
            *talk_of({"content": "b"}),
        ],
        "message 1: .* the content as Python prints it",
        "printed",
    ),
    "arguments that the template prints": (
        PRINTS_ARGUMENTS,
        talk_of({"content": "", "tool_calls": [call("weather", city="Paris")]}),
        "message 2: .* arguments as Python prints them",
        "printed",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_template_leaves_out_is_not_found_elsewhere(name: str) -> None:
    template, messages, words, reason = LOST[name]
    with pytest.raises(Refusal, match=f"SW6124.*{words}") as lost:
        labels(template, messages)
    assert (
        isinstance(lost.value.__context__, MissingLabel)
        and lost.value.__context__.args[1] == reason
    )


def test_words_that_stand_twice_are_found_twice() -> None:
    calls = [call("weather", city="Paris", a="Par"), call("weather", city="Paris")]
    every = FIRST_CALL.replace(
        "{{ m.tool_calls[0].function | tojson }}",
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}",
    )
    for text in ("Paris", "a", "weather", "The weather in Paris: {'city': 'Paris'}"):
        (first, _) = labels(every, talk_of({"content": text, "tool_calls": calls}))
        assert first.endswith(text + "<|im_end|>") and first.count('"weather"') == 2


def test_openais_older_form_of_a_call() -> None:
    older = {
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    wanted = labels(
        FIRST_CALL, talk_of({"content": "", "tool_calls": [call("weather", city="Paris")]})
    )
    assert labels(FIRST_CALL, talk_of(older)) == wanted and '{"city": "Paris"}' in wanted[0]
    with pytest.raises(Refusal, match="the call of 'weather'"):
        labels(CHATML, talk_of(older))


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        ({"arguments": '"{\\"city\\": \\"Paris\\"}"'}, '{"city": "Paris"}'),
        ({"parameters": {"city": "Paris"}}, '{"city": "Paris"}'),
        ({"arguments": None, "parameters": '{"city": "Paris"}'}, '{"city": "Paris"}'),
        ({"arguments": ""}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
        ({"arguments": "Paris, today"}, '"Paris, today"'),
        ({"arguments": "21"}, '"21"'),
    ],
)
def test_a_calls_arguments_are_an_object(function: Message, wanted: str) -> None:
    """JSON text of JSON text; Llama's own word for them; none at all; what is no object stays as it
    is."""
    answer = {"content": "", "tool_calls": [{"function": {"name": "weather", **function}}]}
    assert (
        labels(FIRST_CALL, talk_of(answer))[0]
        == f'{{"name": "weather", "arguments": {wanted}}}<|im_end|>'
    )


def test_a_conversation_may_hold_the_stand_in() -> None:
    # Written in another way than alone, so that the turn is looked for with a stand-in.
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ '' if loop.last else '!' }}")
    messages = [
        {"role": "user", "content": SENTINEL},
        {"role": "assistant", "content": f"It is {SENTINEL}."},
        {"role": "user", "content": f"{SENTINEL}, {SENTINEL}?"},
        {"role": "assistant", "content": SENTINEL},
    ]
    assert labels(template, messages) == [f"It is {SENTINEL}.!<|im_end|>", f"{SENTINEL}<|im_end|>"]


def test_a_call_that_is_named_by_its_id_alone() -> None:
    template = FIRST_CALL.replace("m.tool_calls[0].function | tojson", "m.tool_calls[0].id")
    answer = {"content": "", "tool_calls": [{**call("weather"), "id": "call_17"}]}
    with pytest.raises(
        Refusal,
        match="the call of 'weather' as a label: it names the call only by its id 'call_17'",
    ):
        labels(template, talk_of(answer))
    named = {"content": "", "tool_calls": [{**call("weather"), "id": "weather:17"}]}
    assert labels(template, talk_of(named))[0].startswith("weather:17")


@pytest.mark.parametrize("turns", [1, 6])
def test_a_turn_takes_two_renderings(turns: int) -> None:
    """Of what a chat template writes as one text that only grows: rendering is most of the time."""
    messages: list[Any] = [
        {"role": role, "content": "words"} for _ in range(turns) for role in ("user", "assistant")
    ]
    count = 0

    def render(messages: list[Any], *, prompt: bool) -> str:
        nonlocal count
        count += 1
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        return text + "<assistant>" * prompt

    shape = detect_turn_format(render)
    count = 0
    _, spans = find_turns(render, messages, shape)
    assert len(spans) == turns and count == 2 * turns
