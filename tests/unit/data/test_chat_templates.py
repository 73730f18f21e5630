"""Labels of conversations against an independent oracle: transformers' own mask of the template
with marks, over the shapes of the published families, with tokenizers of three kinds; and without
an oracle, by the text that is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from shardwright.data import conversations
from shardwright.data.chat_format import _Turns
from shardwright.data.chat_template import answer_request
from shardwright.data.source_files import RecordCounts, records
from shardwright.data.tokenizers import TransformersTokenizer
from shardwright.diagnostics import Refusal
from tests.unit.data.chat_families import (
    FAMILIES,
    TALKS,
    Family,
    Message,
    calls,
    result,
    says,
    tokenizers,
    tools_of,
    user,
)

PARTS = ("idefics3", "llava")
"""Families whose templates take parts alone, never a string."""
TEXT_ARGUMENTS = ("deepseek_v3", "deepseek_v3_1", "functionary")
"""Families whose templates take a call's arguments as JSON text alone."""
Mask = npt.NDArray[np.bool_]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TransformersTokenizer]:
    return tokenizers(tmp_path_factory.mktemp("tokenizers"))


def of_family(family: Family, messages: list[Message]) -> list[Message]:
    """Kimi K2 knows a call by its id alone: there its name stands in it, and results are those of
    the id."""
    messages = json.loads(json.dumps(messages))
    for message in messages if family.name == "kimi_k2" else ():
        for number, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"functions.{call['function']['name']}:{number}"
    return messages


def as_the_template_takes_them(family: Family, messages: list[Message]) -> list[Message]:
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if family.name in PARTS:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()) if family.name in TEXT_ARGUMENTS else ():
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
    return messages


def named(tokenizer: TransformersTokenizer, family: Family) -> TransformersTokenizer:
    """With the begin and end tokens of the family."""
    tokenizer._hf.bos_token, tokenizer._hf.eos_token = family.bos, family.eos
    return tokenizer


def labels(
    family: Family, messages: list[Message], tokenizer: TransformersTokenizer, template: str
) -> tuple[list[int], Mask]:
    record = {"messages": messages, "tools": tools_of(messages)}
    ids, trained = conversations.encode(
        conversations.conversation((record, "here:1", 0), "messages"),
        tokenizer,
        template,
        "assistant",
    )
    return ids.tolist(), trained


class Oracle:
    """transformers' ids and mask of a conversation. spans: characters of the marks. Raises jinja2's
    TemplateError."""

    def __init__(
        self, family: Family, messages: list[Message], tokenizer: TransformersTokenizer
    ) -> None:
        hf, taken = tokenizer._hf, as_the_template_takes_them(family, messages)
        more: dict[str, Any] = {"tools": tools_of(messages), "chat_template": family.marked}
        found = hf.apply_chat_template(
            taken, return_dict=True, return_assistant_tokens_mask=True, **more
        )
        (self.text,), (self.spans,) = render_jinja_template(
            [taken], return_assistant_tokens_mask=True, **more, **hf.special_tokens_map
        )
        plain = hf.apply_chat_template(
            taken, **{**more, "chat_template": family.plain}, tokenize=False
        )
        assert plain == self.text, "the marks change no text"
        self.ids: list[int] = found["input_ids"]
        self.mask: Mask = np.asarray(found["assistant_masks"], dtype=np.bool_)
        self.trained = "\n".join(self.text[first:last] for first, last in self.spans)
        self.encoding = hf(self.text, add_special_tokens=False, return_offsets_mapping=True)

    @property
    def is_wrong(self) -> bool:
        """transformers asks char_to_token for the token of a mark's first and last character. Where
        there is none (a space that GPT-2's tokens do not count), it ends the search, or marks
        everything behind. Of several tokens of one character (bytes of an emoji) it takes the first
        as the last one. An empty mark marks what stands beside."""
        wrong = False
        for first, last in self.spans:
            begin, end = self.encoding.char_to_token(first), self.encoding.char_to_token(last - 1)
            wrong |= last <= first or begin is None or not end
            wrong |= not wrong and any(
                a < last for a, _ in self.encoding["offset_mapping"][end + 1 :]
            )
        return wrong

    @property
    def corrected(self) -> Mask:
        """Every token that holds a character of a mark, or stands between two that do."""
        mask = np.zeros(len(self.ids), dtype=np.bool_)
        for first, last in self.spans:
            held = [
                n
                for n, (a, b) in enumerate(self.encoding["offset_mapping"])
                if max(a, first) < min(b, last)
            ]
            spaces = [
                n
                for n, (a, b) in enumerate(self.encoding["offset_mapping"])
                if a == b and first < a <= last
            ]
            mask[held] = mask[spaces] = True
        return mask

    def loses(self, messages: list[Message]) -> bool:
        """Whether a text, or a call, of the assistant's is not what the model is to write."""
        wanted = []
        for message in messages:
            if message["role"] == "assistant":
                wanted.append(message["content"].split("</think>")[-1].strip())
                for call in message.get("tool_calls", ()):
                    wanted += [call["function"]["name"], *scalars(call["function"]["arguments"])]
        return not all(
            words in self.trained or json.dumps(words)[1:-1] in self.trained for words in wanted
        )


def scalars(value: Any) -> list[str]:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (
        [str(value)]
        if isinstance(value, str | float)
        else [word for item in below for word in scalars(item)]
    )


def compared(family: Family, tokenizer: TransformersTokenizer) -> Iterator[tuple[str, bool]]:
    """(the conversation's name, whether transformers' mask had to be corrected) of each that was
    found equal."""
    for name, talk in TALKS.items():
        messages = of_family(family, talk)
        try:
            oracle = Oracle(family, messages, tokenizer)
        except TemplateError:
            with pytest.raises(Refusal, match="SW6112"):
                labels(family, messages, tokenizer, family.plain)
            continue
        if oracle.loses(messages):
            with pytest.raises(Refusal, match="SW6124"):
                labels(family, messages, tokenizer, family.plain)
            continue
        ids, trained = labels(family, messages, tokenizer, family.plain)
        wanted = oracle.corrected if oracle.is_wrong else oracle.mask
        if messages[0]["role"] == "assistant":
            # docs/data.md: no prompt can be rendered for the first message, so that it is trained
            # from its text on, without the space that a template may put in front of it.
            first, last = oracle.spans[0]
            begins = first + len(oracle.text[first:last]) - len(oracle.text[first:last].lstrip())
            early = [b <= begins for _, b in oracle.encoding["offset_mapping"]]
            wanted, trained = wanted & ~np.asarray(early), trained & ~np.asarray(early)
        assert ids == oracle.ids, name
        assert trained.tolist() == wanted.tolist(), (
            name,
            shown(tokenizer, ids, trained),
            oracle.trained,
        )
        yield name, oracle.is_wrong


def shown(tokenizer: TransformersTokenizer, ids: list[int], trained: Mask) -> str:
    return "|".join(tokenizer._hf.convert_ids_to_tokens(np.asarray(ids)[trained].tolist()))


def test_there_are_enough_families() -> None:
    assert len(FAMILIES) >= 75 and all(
        "generation %}" in family.marked for family in FAMILIES.values()
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_labels_are_those_of_transformers(
    name: str, made: dict[str, TransformersTokenizer]
) -> None:
    family = FAMILIES[name]
    for kind, tokenizer in made.items():
        found = list(compared(family, named(tokenizer, family)))
        assert len(found) >= 9, kind
        corrected = sum(wrong for _, wrong in found)
        assert corrected <= (len(found) if kind == "byte-level, trimmed" else 4), kind
        if kind == "byte-level":  # with marks in the template, the same
            for talk in (
                ("turns", "white space", "unicode")
                if name not in ("gemma1", "gemma3")
                else ("turns",)
            ):
                messages = of_family(family, TALKS[talk])
                marked = labels(family, messages, tokenizer, family.marked)
                assert (
                    marked[1].tolist()
                    == labels(family, messages, tokenizer, family.plain)[1].tolist()
                )


OTHER_ENDS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("phi3", "phi3_5", "phi4_mini"), ("<|end|>", 2)),
    "command_a": ("<|END_RESPONSE|>", 2),
    "ernie4_5": ("<|end_of_sentence|>", 2),
    "gpt_oss": ("<|return|>", 1),
    # The next role's token ends a turn, and there is none behind the last one.
    **dict.fromkeys(("glm4", "glm4_5"), ("<|user|>", 1)),
    "nemotron4": ("<extra_id_1>", 1),
    "falcon": ("", 0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_is_the_assistants(
    name: str, made: dict[str, TransformersTokenizer]
) -> None:
    """No oracle: every word of the assistant's, and its turns' ends; no word of anybody else's."""
    family = FAMILIES[name]
    end, times = OTHER_ENDS.get(name, (family.eos or "", 2))
    for tokenizer in made.values():
        named(tokenizer, family)

        def trained_text(
            messages: list[Message], tokenizer: TransformersTokenizer = tokenizer
        ) -> str:
            ids, trained = labels(family, of_family(family, messages), tokenizer, family.plain)
            return tokenizer.decode(np.asarray(ids)[trained])

        turns = [user("alpha"), says("bravo"), user("charlie"), says("delta echo")]
        for talk in ([{"role": "system", "content": "foxtrot"}, *turns], turns):
            try:
                text = trained_text(talk)
            except Refusal as refusal:
                assert refusal.diagnostics[0].code == "SW6112" and talk is not turns
                continue
            assert "bravo" in text and "delta" in text and "echo" in text, text
            assert not any(word in text for word in ("alpha", "charlie", "foxtrot")), text
            written = text.replace("▁", " ").count(
                end.replace("▁", " ")
            )  # SentencePiece decodes it to a space
            assert not end or written == times, (text, end)
        for said in ("bravo", ""):
            call = says(said, tool_calls=calls(("golf", {"hotel": "india juliett"})))
            try:
                text = trained_text([user("alpha"), call, result("kilo"), says("delta")])
            except Refusal:
                continue
            assert all(
                word in text for word in (said, "golf", "hotel", "india", "juliett", "delta")
            ), text
            assert "alpha" not in text and "kilo" not in text, text


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rendering_with_all_stand_ins_says_what_one_each_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations are rendered with a stand-in for one message at a time, too: the answers are
    the same."""
    family = FAMILIES[name]
    special = {"bos_token": family.bos or "", "eos_token": family.eos or ""}
    count = 0

    def found(messages: list[Message]) -> tuple[dict[str, Any], int]:
        nonlocal count
        request = {
            "template": family.plain,
            "messages": messages,
            "tools": tools_of(messages),
            "special": special,
        }
        count = 0
        return answer_request(counted, json.dumps({**request, "turns": True}).encode()), count

    def counted(**options: Any) -> Any:
        nonlocal count
        count += 1
        return render_jinja_template(**options)

    long = [
        message for n in range(6) for message in (user(f" question {n} "), says(f"\n answer {n}\n"))
    ]
    talks = [
        *TALKS.values(),
        long,
        [says("first"), *long],
        [{"role": "system", "content": "a rule"}, *long],
    ]
    found(long)  # the template's form and shape are known then
    fast = [found(of_family(family, talk)) for talk in talks]
    monkeypatch.setattr(_Turns, "_contents", None)
    slow = [found(of_family(family, talk)) for talk in talks]
    assert [answer for answer, _ in fast] == [answer for answer, _ in slow]
    renders = [sum(count for _, count in each) for each in (fast, slow)]
    assert renders[0] <= renders[1] + len(
        talks
    )  # it is in vain where a template changes what it writes
    assert name != "glm4_5" or fast[len(TALKS)][1] < 0.6 * slow[len(TALKS)][1]


@pytest.mark.parametrize(
    "ids", ["OpenAI's", "the same in each turn", "none", "of the calls alone", "Kimi's"]
)
def test_kimis_ids_hold_the_names_of_calls(
    ids: str, made: dict[str, TransformersTokenizer]
) -> None:
    """Kimi K2's template writes a call's id and no name: functions.NAME:INDEX, counted through the
    conversation."""
    family = FAMILIES["kimi_k2"]
    messages: list[Message] = [user("alpha")]
    wanted = [*messages]
    for turn in range(2):
        made_calls = calls(("golf", {"hotel": "a"}), ("india", {"hotel": "b"}))
        results = [
            {"role": "tool", "content": f"result {n} of {turn}"} for n in (2, 1)
        ]  # not in their order
        if ids in ("none", "of the calls alone"):
            results.reverse()
        kimi = [f"functions.golf:{2 * turn}", f"functions.india:{2 * turn + 1}"]
        order = (0, 1) if ids in ("none", "of the calls alone") else (1, 0)
        wanted.append(
            says(
                "",
                tool_calls=[
                    {**call, "id": new} for call, new in zip(made_calls, kimi, strict=True)
                ],
            )
        )
        wanted += [
            {**found, "tool_call_id": kimi[n]} for found, n in zip(results, order, strict=True)
        ]
        own = {
            "OpenAI's": [f"call_{turn}x", f"call_{turn}y"],
            "the same in each turn": ["a", "b"],
            "Kimi's": kimi,
        }
        for n, call in enumerate(made_calls):
            call["id"] = own[ids][n] if ids in own else f"c{n}"
            if ids == "none":
                del call["id"]
        messages.append(says("", tool_calls=made_calls))
        messages += [
            {**found, "tool_call_id": made_calls[n]["id"]} if ids in own else found
            for found, n in zip(results, order, strict=True)
        ]
    tokenizer = named(made["byte-level"], family)
    found, expected = (
        labels(family, messages, tokenizer, family.plain),
        labels(family, wanted, tokenizer, family.marked),
    )
    assert found[0] == expected[0] and found[1].tolist() == expected[1].tolist()
    text = tokenizer.decode(np.asarray(found[0]))
    assert "<|tool_call_begin|>functions.india:3<|tool_call_argument_begin|>" in text
    assert (
        "## Return of functions.india:1\nresult 2 of 0" in text
        and "result 1 of 1<|im_end|>" in text
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_record_in_other_words_is_the_same(
    name: str, made: dict[str, TransformersTokenizer]
) -> None:
    """Parts for text, null for none, JSON text for arguments, calls and tools, a call without
    `function`."""
    family, tokenizer = FAMILIES[name], named(made["byte-level"], FAMILIES[name])
    for messages in (
        of_family(family, TALKS[talk]) for talk in ("turns", "a call alone", "two calls")
    ):
        try:
            wanted = labels(family, messages, tokenizer, family.plain)
        except Refusal:
            continue
        for other in in_other_words(messages):
            found = labels(family, other, tokenizer, family.plain)
            assert found[0] == wanted[0] and found[1].tolist() == wanted[1].tolist(), other


def in_other_words(messages: list[Message]) -> Iterator[list[Message]]:
    yield [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    yield [{**m, "content": [m["content"][:3], {"text": m["content"][3:]}]} for m in messages]
    if not any("tool_calls" in message for message in messages):
        return
    yield [{**m, "content": m["content"] or None} for m in messages]
    yield [{key: value for key, value in m.items() if value != ""} for m in messages]
    as_text, bare = json.loads(json.dumps([messages, messages]))
    for message in as_text:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    yield as_text
    for message in bare:
        if "tool_calls" in message:
            message["tool_calls"] = [
                {"id": c["id"], **c["function"]} for c in message["tool_calls"]
            ]
    yield bare
    yield [
        {**m, **({"tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else {})}
        for m in messages
    ]


def test_arrows_nulls_are_no_arguments(
    tmp_path: Path, made: dict[str, TransformersTokenizer]
) -> None:
    """A column of calls with different arguments is one struct: a call holds the others' keys, as
    nulls."""
    import pyarrow
    import pyarrow.parquet

    talk, family = TALKS["two calls"], FAMILIES["qwen3_2507"]
    rows = [
        {"messages": talk, "tools": tools_of(talk)},
        {"messages": [user("a"), says("b")], "tools": []},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    record = next(records(str(tmp_path / "a.parquet"), RecordCounts()))
    tokenizer = named(made["byte-level"], family)
    ids, trained = conversations.encode(
        conversations.conversation(record, "messages"), tokenizer, family.plain, "assistant"
    )
    wanted = labels(family, talk, tokenizer, family.plain)
    assert ids.tolist() == wanted[0] and trained.tolist() == wanted[1].tolist()
    assert "null" not in tokenizer.decode(ids) and "Zürich" in tokenizer.decode(ids)
