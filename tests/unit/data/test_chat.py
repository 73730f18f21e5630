"""Conversations: what the assistant says is trained on, whatever the template; what a template
refuses is told."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.conversations import conversation, encode
from shardwright.data.data_summary import marked, record_samples, samples, summarize
from shardwright.data.tokenizers import ByteTokenizer, TransformersTokenizer
from shardwright.diagnostics import Refusal
from tests.unit.data.data_plans import opened, part, plan, refused

pytest.importorskip("transformers", reason="the process that renders templates imports it")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GENERATION_MARK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation "
    "%}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% "
    "endfor %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% "
    "endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
# As Qwen3's: the reasoning of earlier turns is dropped, and the last turn has an empty one where it
# has none.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1].lstrip() %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if "
    "'</think>' in "
    "m.content else '' }}\n</think>\n\n{{ c }}{% else %}{{ c }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Four."},
    {"role": "assistant", "content": "Four. Schön, ja."},
]


def trained_texts(
    template: str, messages: list[dict[str, Any]], train_on: str = "assistant"
) -> tuple[str, list[str]]:
    """(the rendered text, each stretch of it that is trained)."""
    ids, trained = encode(
        conversation(({"messages": messages}, "here:1", 0), "messages"),
        ByteTokenizer(),
        template,
        train_on,
    )
    text = bytes(ids.astype(np.uint8)).decode()
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    raw = bytes(ids.astype(np.uint8))
    return text, [raw[a:b].decode() for a, b in itertools.pairwise(borders) if trained[a]]


@pytest.mark.parametrize("template", [CHATML, GENERATION_MARK], ids=["chatml", "marked"])
def test_the_assistants_turns_and_their_ends_are_trained(template: str) -> None:
    text, trained = trained_texts(template, TALK)
    assert trained == ["Four.<|im_end|>", "Four. Schön, ja.<|im_end|>"]
    assert text.count("<|im_start|>") == 5, "the generation prompt is not part of it"


def test_a_template_without_a_generation_prompt() -> None:
    _, trained = trained_texts(LLAMA2, TALK[1:])
    assert trained == [" Four. </s>", " Four. Schön, ja. </s>"]


def test_a_template_that_renders_earlier_turns_in_another_way() -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>hm</think>1"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>well</think>2"},
    ]
    text, trained = trained_texts(REASONING, messages)
    assert "hm" not in text and "well" in text
    assert (
        len(trained) == 2
        and trained[0].endswith("1<|im_end|>")
        and trained[1].endswith("2<|im_end|>")
    )
    assert not any(re.search("im_start|user|one|two", t) for t in trained)


def test_an_answer_that_repeats_the_question_is_found_in_its_own_place() -> None:
    text, trained = trained_texts(
        CHATML, [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "aa"}]
    )
    assert trained == ["aa<|im_end|>"] and text.endswith("aa<|im_end|>\n")


def test_a_conversation_that_the_assistant_begins() -> None:
    messages = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Hi."}]
    assert trained_texts(CHATML, messages)[1] == ["Hello!<|im_end|>"]


def test_train_on_all() -> None:
    text, trained = trained_texts(CHATML, TALK, "all")
    assert trained == [text]


def test_a_template_that_hides_the_answer_is_refused() -> None:
    with pytest.raises(Refusal) as caught:
        trained_texts(
            "{% for m in messages | reverse %}{{ m.content | upper }}|{% endfor %}", TALK[3:]
        )
    assert caught.value.diagnostics[0].code == "SW6113"
    assert "message 2" in caught.value.diagnostics[0].message


def test_a_template_without_a_system_role(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": TALK[1:]}) + "\n" + json.dumps({"messages": TALK})
    )
    code, message = refused(plan(part("chat", tmp_path / "a.jsonl", template=LLAMA2)), tmp_path)
    assert code == "SW6112" and "a.jsonl:2" in message and "System role not supported" in message


def test_a_template_that_is_no_jinja(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    assert (
        refused(plan(part("chat", tmp_path / "a.jsonl", template="{% for %}")), tmp_path)[0]
        == "SW6112"
    )


def test_too_few_conversations_are_told_what_helps(tmp_path: Path) -> None:
    """A shorter sequence would leave out more of them: it is no advice for whole conversations."""
    talk = [{"role": "user", "content": "u" * 60}, {"role": "assistant", "content": "late"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    for length, words in ((20, "raise training.sequence_length"), (100, "`packing: false`")):
        p = plan(part("chat", tmp_path / "a.jsonl", template=template), length=length, batch=2)
        with pytest.raises(Refusal) as refusal:
            opened(p, tmp_path)
        (found,) = refusal.value.diagnostics
        assert (
            found.code == "SW6104"
            and words in found.help
            and "lower training.sequence" not in found.help
        )


def test_conversations_stay_whole_and_padding_is_no_label(tmp_path: Path) -> None:
    talks = [
        [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * n}]
        for n in (1, 2, 3, 30)
    ]
    talks.append(
        [{"role": "user", "content": "u" * 60}, {"role": "assistant", "content": "too late"}]
    )
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": t}) for t in talks))
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    for packing in (True, False):
        p = plan(
            part("chat", tmp_path / "a.jsonl", template=template, packing=packing),
            length=20,
            batch=1,
        )
        rows = opened(p, tmp_path).train
        block = rows.read(np.arange(len(rows)))
        raw = block.tokens.astype(np.uint8)
        assert block.loss_mask is not None and (block.starts is not None) == packing
        answers = "".join(bytes(t[m]).decode() for t, m in zip(raw, block.loss_mask, strict=True))
        assert len(rows) == (2 if packing else 3)
        # The answer of the fourth is cut off at 20 tokens, and it is left out, like the fifth.
        assert sorted(bytes(raw).replace(b"\0", b"").decode()) == sorted("uq.aa.uqq.aaa.uqqq.aaaa.")
        assert sorted(answers) == sorted("a.aa.aaa.")


@pytest.mark.parametrize("template", [CHATML, GENERATION_MARK], ids=["chatml", "marked"])
def test_the_same_labels_as_transformers_gives_for_marks(template: str, tmp_path: Path) -> None:
    """A byte-level BPE, whose tokens take a space in front and split characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([m["content"] for m in TALK] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    fast.chat_template = GENERATION_MARK
    fast.save_pretrained(tmp_path / "tokenizer")
    wanted = fast.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    ids, trained = encode(
        conversation(({"messages": TALK}, "here:1", 0), "messages"),
        TransformersTokenizer(tmp_path / "tokenizer"),
        template,
        "assistant",
    )
    assert ids.tolist() == wanted["input_ids"]
    assert trained.astype(int).tolist() == wanted["assistant_masks"] and 0 < trained.sum() < len(
        ids
    )


CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}


def test_a_call_that_the_template_does_not_write_is_refused_or_left_out(tmp_path: Path) -> None:
    called = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    lines = [json.dumps({"messages": messages}) for messages in (TALK, TALK, TALK, called)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    code, message = refused(plan(part("chat", tmp_path / "a.jsonl", template=CHATML)), tmp_path)
    assert (
        code == "SW6124"
        and "a.jsonl:4: message 2" in message
        and "the call of 'weather'" in message
    )
    for share, fits in ((0.2, False), (0.25, True)):
        p = plan(
            part("chat", tmp_path / "a.jsonl", template=CHATML, skip_damaged=share),
            length=300,
            batch=1,
        )
        if fits:
            opened(p, tmp_path)
            (found,) = summarize(p, tmp_path)
            assert (
                found.documents == 3
                and found.unusable == {"SW6124": 1}
                and found.reasoning_not_rendered == 0
            )
        else:
            assert refused(p, tmp_path)[0] == "SW6153"


def test_reasoning_that_the_template_leaves_out_is_counted(tmp_path: Path) -> None:
    talk = [TALK[1], {"role": "assistant", "content": "Four.", "reasoning_content": "Twice two."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    p = plan(part("chat", tmp_path / "a.jsonl", template=CHATML), length=200, batch=1)
    opened(p, tmp_path)
    assert summarize(p, tmp_path)[0].reasoning_not_rendered == 1


@pytest.mark.parametrize("content", [{}, {"content": None}, {"text": "Four."}])
def test_a_message_without_content_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="SW6111"):
        trained_texts(CHATML, [TALK[1], {"role": "assistant", **content}])


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "cut \ud83d"},
        {"role": "assistant", "content": "an emoji \ud83d here"},
    ]
    text, trained = trained_texts(CHATML, talk)
    assert trained == ["an emoji \ufffd here<|im_end|>"] and "cut \ufffd<" in text


def test_the_sample_shows_the_first_answer(tmp_path: Path) -> None:
    """Behind a system prompt that is longer than a sample, and without the padding behind the
    row."""
    talk = [{"role": "system", "content": "s" * 500}, *TALK[1:3]]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for _ in range(3)))
    p = plan(
        part("chat", tmp_path / "a.jsonl", template=CHATML, packing=False), length=900, batch=1
    )
    data = opened(p, tmp_path)
    for pieces in samples(p, tmp_path, data):
        text = marked(pieces, "[[", "]]")
        assert (
            text.startswith("... sss")
            and text.endswith("assistant\n[[Four.<|im_end|>]]\n")
            and "\0" not in text
        )


def test_the_sample_of_a_long_answer_shows_how_it_ends(tmp_path: Path) -> None:
    talk = [
        TALK[1],
        {"role": "assistant", "content": f"Begin{'a' * 500}end."},
        TALK[1],
        *[TALK[2], TALK[1]] * 4,
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk}))
    p = plan(
        part("chat", tmp_path / "a.jsonl", template=CHATML, packing=False), length=1200, batch=1
    )
    opened(p, tmp_path)
    (pieces,) = record_samples(p, tmp_path)
    text = marked(pieces, "[[", "]]")
    assert (
        "assistant\n[[Beginaaa" in text
        and "aaa ... aaa" in text
        and "aaaend.<|im_end|>]]\n" in text
    )
    assert text.count("[[") == 3 and text.endswith("<|im_start|>assistant\n ...")


def test_an_answer_that_the_template_does_not_close_is_counted(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"messages": talk}) for talk in (TALK, TALK[:4]))
    )
    p = plan(part("chat", tmp_path / "a.jsonl", template=template), length=300, batch=1)
    opened(p, tmp_path)
    assert summarize(p, tmp_path)[0].unclosed_conversations == 1
    assert trained_texts(template, TALK)[1] == ["Four.<user>", "Four. Schön, ja."]
