"""What stands in front of a document of text: as the tokenizer's own post-processor does it, as the
recipe says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.data.data_summary import summarize
from shardwright.data.tokenizers import load_tokenizer
from shardwright.models.tokenizer_packages import missing_packages, missing_packages_warning
from tests.unit.data.data_plans import opened, part, plan, refused

WORDS = {"</s>": 0, "<unk>": 1, "<s>": 2, "the": 3, "cat": 4, "sat": 5, "<g>": 6}


def tokenizer(folder: Path, single: str = "", bos: str | None = "<s>") -> None:
    """single: of the post-processor, as "<s> $A </s>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if single:
        special = [(word, WORDS[word]) for word in ("<s>", "</s>", "<g>")]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    words = {"eos_token": "</s>", "unk_token": "<unk>"} | ({"bos_token": bos} if bos else {})
    PreTrainedTokenizerFast(tokenizer_object=made, **words).save_pretrained(folder)


@pytest.mark.parametrize(
    ("single", "setting", "begin"),
    [
        ("<s> $A", "auto", [2]),
        ("<s> $A </s>", "auto", [2]),
        ("<g> <s> $A", "auto", [6, 2]),
        ("$A </s>", "auto", []),
        ("", "auto", []),
        ("", True, [2]),
        ("<g> <s> $A", True, [6, 2]),
        ("<s> $A", False, []),
    ],
)
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_each_document_begins_as_the_tokenizer_says(
    tmp_path: Path, kind: str, single: str, setting: bool | str, begin: list[int]
) -> None:
    tokenizer(tmp_path / "tokenizer", single)
    texts = ["the cat sat", "", "the cat", "<s> sat"]
    if kind == "text":
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.text").write_text(text)
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    data = part(
        kind, tmp_path / f"*.{kind}", tokenizer="tokenizer", packing=False, add_bos_token=setting
    )
    p = plan(data, length=1, vocabulary=7, batch=1)
    rows = opened(p, tmp_path).train
    found = rows.read(range(len(rows))).tokens.reshape(-1).tolist()  # type: ignore[arg-type]
    last = [2, 5, 0] if begin in ([], [2]) else [*begin, 2, 5, 0]
    assert found == [*begin, 3, 4, 5, 0, *begin, 3, 4, 0, *last], (
        "no begin for an empty one, and none twice"
    )
    assert (
        summarize(p, tmp_path)[0].begin
        == "".join(f"{word} " for n in begin for word in WORDS if WORDS[word] == n)[:-1]
    )


def test_long_text_begins_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.data.source_files.PIECE_BYTES", 4)
    tokenizer(tmp_path / "tokenizer", "<s> $A")
    (tmp_path / "a.txt").write_text("the\ncat\nsat\n")
    p = plan(
        part("text", tmp_path / "a.txt", tokenizer="tokenizer"), length=1, vocabulary=7, batch=1
    )
    assert opened(p, tmp_path).train.read(range(5)).tokens.reshape(-1).tolist() == [2, 3, 4, 5, 0]  # type: ignore[arg-type]


def test_another_setting_is_other_data(tmp_path: Path) -> None:
    tokenizer(tmp_path / "tokenizer", "<s> $A")
    (tmp_path / "a.txt").write_text("the cat sat")
    for setting, count in ((False, 4), ("auto", 5), (True, 5)):
        data = part("text", tmp_path / "a.txt", tokenizer="tokenizer", add_bos_token=setting)
        p = plan(data, length=1, vocabulary=7, batch=1)
        assert len(opened(p, tmp_path).train) == count


@pytest.mark.parametrize("name", ["byte", "tokenizer"])
def test_a_tokenizer_without_a_bos_token(tmp_path: Path, name: str) -> None:
    tokenizer(tmp_path / "tokenizer", bos=None)
    (tmp_path / "a.txt").write_text("the cat sat")
    data = part("text", tmp_path / "a.txt", tokenizer=name, add_bos_token=True)
    assert refused(plan(data), tmp_path)[0] == "SW6152"
    assert load_tokenizer(name, tmp_path).begin == []


@pytest.mark.parametrize(
    ("content", "package"),
    [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\nIg== 1\n", "tiktoken")],
)
def test_a_tokenizer_model_names_the_package_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, package: str
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.model").write_bytes(content)
    (tmp_path / "a.txt").write_text("the cat sat")
    monkeypatch.setattr(
        "shardwright.models.tokenizer_packages._is_installed", lambda name: name == "protobuf"
    )
    assert missing_packages(tmp_path / "tokenizer") == (package,)
    (told,) = missing_packages_warning(tmp_path / "tokenizer", ("data", "tokenizer"))
    assert told.code == "SW1454" and told.severity == "warning" and package in told.message
    (tmp_path / "tokenizer" / "tokenizer.model").write_bytes(content[:1] + b"x y z\n")
    code, message = refused(plan(part("text", tmp_path / "a.txt", tokenizer="tokenizer")), tmp_path)
    assert code == "SW6121" and f"needs the package {package}" in message
    tokenizer(tmp_path / "tokenizer")
    assert not missing_packages(tmp_path / "tokenizer"), "a tokenizer.json needs neither"


def test_a_tokenizer_of_sentencepiece_alone(tmp_path: Path) -> None:
    """As Llama 2 and Mistral were published."""
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "a.txt"), model_prefix=str(tmp_path / "tokenizer" / "tokenizer"), vocab_size=290,  # noqa: E501
        model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps(config | {"unk_token": "<unk>"})
    )
    (tmp_path / "tokenizer" / "tokenizer.vocab").unlink()
    assert not missing_packages(tmp_path / "tokenizer")
    p = plan(
        part("text", tmp_path / "a.txt", tokenizer="tokenizer"), length=8, vocabulary=300, batch=1
    )
    opened(p, tmp_path)
    (found,) = summarize(p, tmp_path)
    assert found.begin == "<s>" and found.tokens > 20
