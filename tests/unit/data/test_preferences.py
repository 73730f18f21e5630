"""Preference data: TRL's forms of a pair, which tokens are labels, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.data.dataset import Dataset
from shardwright.data.preferences import padding_id, scored_token
from shardwright.data.tokenizers import ByteTokenizer
from shardwright.diagnostics import Refusal
from tests.unit.data.data_plans import opened, part, plan, refused
from tests.unit.data.test_chat import CHATML, REASONING

USER = {"role": "user", "content": "Two and two?"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(folder: Path, *records: Any) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def pairs(folder: Path, *records: Any, length: int = 400, **more: Any) -> Dataset:
    data = part("preference", written(folder, *records), **more)
    return opened(plan(data, length=length, batch=1), folder)


def shown(data: Dataset, number: int = 0) -> list[tuple[str, str]]:
    """(text of the sequence, its labels) of the chosen and of the rejected completion."""
    block = data.train.read(np.asarray([number]))
    assert block.loss_mask is not None and block.lengths is not None
    found = []
    for tokens, labels, length in zip(block.tokens, block.loss_mask, block.lengths, strict=True):
        ids = tokens[:length].astype(np.uint8)
        found.append((bytes(ids).decode(), bytes(ids[labels[:length]]).decode()))
    return found


def test_texts(tmp_path: Path) -> None:
    data = pairs(tmp_path, {"prompt": "Was? ", "chosen": "Schön.", "rejected": "Nein, nichts."})
    assert len(data.train) == 1
    assert shown(data) == [("Was? Schön.", "Schön."), ("Was? Nein, nichts.", "Nein, nichts.")]


def test_a_prompt_that_both_begin_with_is_found(tmp_path: Path) -> None:
    """The space before the word in which they differ is a part of it, as in TRL."""
    data = pairs(tmp_path, {"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert shown(data) == [("The sky is blue.", " blue."), ("The sky is green.", " green.")]


@pytest.mark.parametrize("is_explicit", [True, False])
@pytest.mark.parametrize(
    ("template", "beside"), [(CHATML, ""), (REASONING, "<think>\n\n</think>\n\n")]
)
def test_messages(template: str, beside: str, is_explicit: bool, tmp_path: Path) -> None:
    talks = [[answer("Four.")], [answer("Five, or so.")]]
    record: dict[str, Any] = {"prompt": [USER], "chosen": talks[0], "rejected": talks[1]}
    if not is_explicit:
        record = {"chosen": [USER, *talks[0]], "rejected": [USER, *talks[1]]}
    data = pairs(tmp_path, record, template=template)
    assert [labels for _, labels in shown(data)] == [
        f"{beside}{text}<|im_end|>\n" for text in ("Four.", "Five, or so.")
    ]


def test_a_text_beside_conversations_is_not_their_prompt(tmp_path: Path) -> None:
    """Some data sets repeat the question so."""
    record = {
        "prompt": "Two and two?",
        "chosen": [USER, answer("Four.")],
        "rejected": [USER, answer("Five.")],
    }
    [chosen, _] = shown(pairs(tmp_path, record, template=CHATML))
    assert chosen[0].count("Two and two?") == 1 and chosen[1] == "Four.<|im_end|>\n"


def test_a_pair_is_left_out_whole(tmp_path: Path) -> None:
    """A completion that begins beyond the sequence has no label."""
    long, short = {"prompt": "x" * 30, "chosen": "a", "rejected": "b"}, {"prompt": "Say: "}
    data = pairs(
        tmp_path,
        short | {"chosen": "one", "rejected": "two"},
        long,
        short | {"chosen": "three", "rejected": "f" * 40},
        length=20,
    )
    assert len(data.train) == 2
    assert [labels for _, labels in shown(data, 1)] == ["three", "f" * 15]


def test_empty_completions_are_left_out(tmp_path: Path) -> None:
    """The byte tokenizer has no token that ends an answer."""
    good = {"prompt": "p", "chosen": "c", "rejected": "r"}
    data = pairs(tmp_path, good, {"prompt": "p", "chosen": "", "rejected": "r"})
    assert len(data.train) == 1


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "p", "chosen": "c"}, "there is no 'rejected'; the record has chosen, prompt"),
        ({"prompt": "p", "chosen": "c", "rejected": [answer("r")]}, "one is a text"),
        ({"prompt": "p", "chosen": 3, "rejected": "r"}, "neither a text nor a list of messages"),
        ({"prompt": "p", "chosen": [], "rejected": []}, "neither a text nor a list of messages"),
        ({"prompt": "p", "chosen": ["c"], "rejected": ["r"]}, "message 1 of 'chosen' has no role"),
        ({"chosen": "yes", "rejected": "no"}, "there is no prompt"),
        ({"prompt": "", "chosen": "", "rejected": "r"}, "have no token"),
        ({"chosen": [answer("c")], "rejected": [answer("r")]}, "there is no prompt"),
        ({"prompt": [USER], "chosen": [{"role": "x"}], "rejected": []}, "has no content"),
    ],
)
def test_what_is_no_pair_is_refused(record: Any, words: str, tmp_path: Path) -> None:
    data = part("preference", written(tmp_path, record), template=CHATML)
    code, message = refused(plan(data), tmp_path)
    assert code == "SW6125" and words in message and "pairs.jsonl:1" in message


def test_messages_need_a_template(tmp_path: Path) -> None:
    file = written(tmp_path, {"chosen": [USER, answer("c")], "rejected": [USER, answer("r")]})
    code, message = refused(plan(part("preference", file)), tmp_path)
    assert code == "SW6112" and "chat template" in message


def test_skip_damaged_counts_pairs_that_cannot_be_read(tmp_path: Path) -> None:
    good = {"prompt": "p", "chosen": "c", "rejected": "r"}
    data = pairs(tmp_path, good, {"prompt": "p"}, good, skip_damaged=0.5)
    assert len(data.train) == 2


def test_the_built_in_pairs(tmp_path: Path) -> None:
    data = part("preference", "python-docstrings")
    found = opened(plan(data, length=128, batch=1), tmp_path)
    assert len(found.train) > 400
    for number in range(0, 400, 50):
        chosen, rejected = shown(found, number)
        assert len(chosen[1]) < len(rejected[1]) and chosen[1].endswith("\n")


def labelled(folder: Path, *records: Any, length: int = 400, **more: Any) -> Dataset:
    return pairs(folder, *records, length=length, labelled=True, **more)


def test_labelled_completions_have_another_prompts_beside_them(tmp_path: Path) -> None:
    data = labelled(
        tmp_path,
        {"prompt": "a: ", "completion": "one", "label": True},
        {"prompt": "b: ", "completion": "two", "label": False},
        {"prompt": "c: ", "completion": "three", "label": True},
    )
    texts = [[text for text, _ in shown(data, number)] for number in range(3)]
    assert texts == [["a: one", "a: two"], ["b: two", "b: three"], ["c: three", "c: one"]]
    desirable = data.train.read(np.arange(3)).desirable
    assert desirable is not None and desirable.tolist() == [True] * 2 + [False] * 2 + [True] * 2


def test_labels_stay_with_their_completions_when_others_are_left_out(tmp_path: Path) -> None:
    data = labelled(
        tmp_path,
        {"prompt": "x" * 30, "completion": "no label of it is in the sequence", "label": True},
        {"prompt": "b: ", "completion": "two", "label": False},
        {"prompt": "c: ", "completion": "three", "label": True},
        length=20,
    )
    assert len(data.train) == 2
    assert [shown(data, number)[0][1] for number in range(2)] == ["two", "three"]
    desirable = data.train.read(np.asarray([1, 0])).desirable
    assert desirable is not None and desirable.tolist() == [True] * 2 + [False] * 2


def test_a_pair_is_two_labelled_completions(tmp_path: Path) -> None:
    data = labelled(tmp_path, {"prompt": "p ", "chosen": "good", "rejected": "bad"})
    assert [shown(data, number)[0][1] for number in range(2)] == ["good", "bad"]
    desirable = data.train.read(np.arange(2)).desirable
    assert desirable is not None and desirable[::2].tolist() == [True, False]


def test_labelled_messages(tmp_path: Path) -> None:
    record = {"prompt": [USER], "completion": [answer("Four.")], "label": True}
    data = labelled(tmp_path, record, template=CHATML)
    assert shown(data)[0][1] == "Four.<|im_end|>\n"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "p", "completion": "c"}, "the label is null"),
        ({"prompt": "p", "completion": "c", "label": 1}, "the label is 1"),
        ({"prompt": "p", "label": True}, "there is no 'completion'"),
        ({"prompt": [USER], "completion": "c", "label": True}, "one is a text"),
    ],
)
def test_what_has_no_label_is_refused(record: Any, words: str, tmp_path: Path) -> None:
    data = part("preference", written(tmp_path, record), labelled=True)
    code, message = refused(plan(data), tmp_path)
    assert code == "SW6125" and words in message


def test_parts_of_a_mixture_keep_their_labels(tmp_path: Path) -> None:
    files = []
    for name, label in (("good", True), ("bad", False)):
        (tmp_path / name).mkdir()
        record = {"prompt": "p ", "completion": name, "label": label}
        files.append(written(tmp_path / name, record, record))
    parts = tuple(part("preference", file, labelled=True, weight=1.0) for file in files)
    data = opened(plan(part("mixture", mixture=parts), length=30, batch=2), tmp_path)
    block = data.train.read(np.asarray([3, 0]))
    assert block.tokens.shape == (4, 30) and block.desirable is not None
    assert block.desirable.tolist() == [False] * 2 + [True] * 2


def test_packed_pairs_share_sequences_whole(tmp_path: Path) -> None:
    """Each completion of a pair that is too long keeps half of the sequence, or what the other
    leaves."""
    records = [
        {"prompt": "a", "chosen": "bc", "rejected": "d"},  # 3 + 2 tokens
        {"prompt": "ef", "chosen": "g" * 18, "rejected": "h" * 10},  # cut at 10 + 10
        {"prompt": "x" * 12, "chosen": "y", "rejected": "z"},  # no label in its 10 + 10
        {"prompt": "i", "chosen": "j", "rejected": "k" * 30},  # 2, cut at 18
        {"prompt": "l", "chosen": "mno", "rejected": "p"},  # 4 + 2
    ]
    data = pairs(tmp_path, *records, length=20, packing=True)
    block = data.train.read(np.arange(3))
    assert len(data.train) == 3 and block.completions is not None and block.starts is not None
    assert bytes(block.tokens.ravel().astype(np.uint8)) == (
        b"abcadlmnolp" + bytes(9) + b"ef" + b"g" * 8 + b"ef" + b"h" * 8 + b"iji" + b"k" * 17
    )
    assert block.completions[0].tolist() == [0] * 3 + [1] * 2 + [2] * 4 + [3] * 11
    assert np.flatnonzero(block.starts[0]).tolist() == [0, 3, 5, 9, 11]
    assert np.flatnonzero(block.completions[1:].ravel()).tolist() == [
        *range(10, 20),
        *range(22, 40),
    ]
    assert block.loss_mask is not None and block.lengths is not None
    labels = bytes(block.tokens[block.loss_mask].astype(np.uint8))
    assert labels == b"bcdmnop" + b"g" * 8 + b"h" * 8 + b"j" + b"k" * 17
    assert block.lengths.tolist() == [11, 20, 20]
    kept = data.train.read(np.asarray([1]))
    assert kept.completions is not None and kept.completions.max() == 1


def test_packed_pairs_of_a_mixture_are_apart(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files.append(
            written(tmp_path / name, *[{"prompt": name, "chosen": "c", "rejected": "r"}] * 2)
        )
    parts = tuple(part("preference", file, packing=True, weight=1.0) for file in files)
    data = opened(plan(part("mixture", mixture=parts), length=16, batch=2), tmp_path)
    block = data.train.read(np.asarray([1, 0]))
    assert bytes(block.tokens[:, 0].astype(np.uint8)) == b"to"
    assert block.completions is not None
    assert block.completions.tolist() == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4] * 2


def scored(folder: Path, *records: Any, length: int = 400, **more: Any) -> Dataset:
    return pairs(folder, *records, length=length, scored=True, **more)


def test_a_reward_model_reads_the_last_token(tmp_path: Path) -> None:
    data = scored(tmp_path, {"prompt": "Was? ", "chosen": "Schön.", "rejected": "Nein"})
    assert shown(data) == [("Was? Schön.", "."), ("Was? Nein", "n")]


def test_a_reward_model_needs_no_prompt(tmp_path: Path) -> None:
    """Texts and conversations that begin differently are compared as they are."""
    talks = {"chosen": [USER, answer("c")], "rejected": [answer("r")]}
    data = scored(tmp_path, {"chosen": "yes", "rejected": "no"}, talks, template=CHATML)
    assert [labels for _, labels in shown(data)] == ["s", "o"]
    assert shown(data, 1)[1][0].count("assistant") == 1


def test_a_pair_that_is_cut_is_not_compared(tmp_path: Path) -> None:
    """Its last token would be missing."""
    short = {"prompt": "p", "chosen": "c", "rejected": "r" * 19}
    data = scored(tmp_path, short | {"rejected": "r" * 20}, short, length=20)
    assert len(data.train) == 1 and shown(data)[1] == ("p" + "r" * 19, "r")


def test_the_token_that_is_read_is_not_padding() -> None:
    """transformers reads the last token before the padding, where the end token pads too."""
    ids = np.asarray([5, 2, 7, 8, 2, 2])
    assert scored_token(ids, 2).tolist() == [False, False, False, True, False, False]
    assert scored_token(ids, 9).tolist() == [False] * 5 + [True]
    assert not scored_token(np.asarray([2, 2]), 2).any()


def test_padding_is_chosen_as_trl_does() -> None:
    made: Any = SimpleNamespace(pad=3, end=[2])
    assert padding_id(made) == 3
    assert padding_id(SimpleNamespace(pad=None, end=[2])) == 2  # type: ignore[arg-type]
    assert padding_id(ByteTokenizer()) == 0
    with pytest.raises(Refusal) as refusal:
        padding_id(SimpleNamespace(pad=None, end=[]))  # type: ignore[arg-type]
    [diagnostic] = refusal.value.diagnostics
    assert diagnostic.code == "SW1248" and "pad_token" in str(diagnostic.help)
