"""Mutated training data, chat templates and tokenizer files through `prepare`: rows or a refusal,
never a traceback and never a wait."""

from __future__ import annotations

import copy
import datetime
import decimal
import gzip
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from shardwright.data.data_preparation import prepare
from shardwright.data.data_summary import marked, samples, summarize
from shardwright.data.dataset import resolve
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import (
    escape_control_characters,
    render_diagnostics,
)
from tests.unit.data.chat_families import FAMILIES, TALKS, TOOLS, tools_of
from tests.unit.data.data_plans import part, plan

Place = tuple[str | int, ...]
SECONDS_AT_MOST = 5.0
"""Of this process's own computing, for one input; a template's process has a limit of its own."""
TEMPLATES = (
    "chatml",
    "qwen3",
    "llama3_1",
    "gemma3",
    "deepseek_v3",
    "glm4_5",
    "llava",
    "mistral_v3",
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 0.5, -0.0, 1e308, 2**63, 10**400, float("nan"), float("inf")),
    *(
        "",
        " ",
        "\n\n",
        "None",
        "nan",
        "\x00",
        "\u202e",
        "字",
        "🙂" * 300,
        "\ud83d",
        "a\udc00b",
        "\ufeff",
        "x" * 70_000,
    ),
    *(
        "<|im_end|>",
        "{{ 1/0 }}",
        "{% for %}",
        "system",
        "assistant",
        "tool",
        "developer",
        "ASSISTANT",
    ),
    *([], [1], [[]], [None], {}, {"type": "text"}, {"type": "text", "text": None}, {"": ""}),
    *(
        [{"type": "text", "text": "a"}, {"type": "text", "text": 1}],
        [{"type": "image"}],
        [{"type": "audio", "audio": ""}],
    ),
    *(
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        ["a", "b"],
        [{"text": "\ud800"}],
    ),
    *(
        [{"function": None}],
        [{"function": {"name": None, "arguments": "{"}}],
        [{"name": "f", "arguments": "[1]"}],
        '{"a":',
    ),
)
PIECES = (
    "",
    "{",
    "}",
    "[",
    "]",
    ",",
    '"',
    "\\",
    "\\ud83d",
    "\x00",
    "null",
    "é",
    "\n",
    "\r",
    "\u2028",
    "NaN",
    "1e999",
    "//",
)


class Attempts:
    """kinds: how often each ending was seen: "rows", or a refusal's code."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.kinds: dict[str, int] = {}

    def read(self, what: object, **data: Any) -> None:
        """Prepare `data`, and show it as the command does. what: told with a failure."""
        self.number += 1
        here = self.folder / "out" / str(self.number)
        here.mkdir(parents=True)
        began = time.process_time()
        try:
            ending = self._read(plan(part(**data), length=256, batch=1, vocabulary=2**17), here)
        except Refusal as refusal:
            ending = refusal.diagnostics[0].code
            text = render_diagnostics(refusal.diagnostics, refusal.source, color=False)
            assert len(text) < 20_000, (what, text[:500])
            text.encode("utf-8", "backslashreplace")
        except BaseException as error:
            error.add_note(f"of {what!r}"[:2000])
            raise
        assert time.process_time() - began < SECONDS_AT_MOST, what
        self.kinds[ending] = self.kinds.get(ending, 0) + 1

    def _read(self, p: Any, here: Path) -> str:
        prepare(p, here, limit_bytes=None)
        p, found = resolve(p, here, check_all_ids=True)
        summarize(p, here)
        for pieces in samples(p, here, found):
            escape_control_characters(marked(pieces, "[[", "]]")).encode(
                "utf-8", "backslashreplace"
            )
        return "rows"


def places(value: Any, at: Place = ()) -> list[Place]:
    found: list[Place] = [at] if at else []
    items: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, below in items:
        found += places(below, (*at, key))
    return found


def mutated(rng: random.Random, record: Any) -> Any:
    """A copy with one to three places changed: another value, none, twice, renamed, or nested
    deeply."""
    record = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = places(record)
        if not found:
            break
        *path, key = rng.choice(found)
        parent = record
        for step in path:
            parent = parent[step]
        kind = rng.choice(("odd", "odd", "odd", "drop", "twice", "rename", "deep", "swap"))
        if kind == "odd":
            parent[key] = copy.deepcopy(rng.choice(ODD))
        elif kind == "drop":
            parent.pop(key)
        elif kind == "twice":
            parent[key] = [parent[key], copy.deepcopy(parent[key])]
        elif kind == "rename" and isinstance(parent, dict):
            parent[rng.choice(("from", "value", "text", "", "\ud800", "role", "content"))] = (
                parent.pop(key)
            )
        elif kind == "deep":
            for _ in range(rng.choice((3, 70, 300))):
                parent[key] = rng.choice(({"a": parent[key]}, [parent[key]]))
            return record  # Python copies no deeper value
        else:
            parent[key] = copy.deepcopy(record)
    return record


def scrambled(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    piece = rng.choice((*PIECES, text[: rng.randrange(40)]))
    return text[:at] + piece + text[at + rng.choice((0, 1, 5)) :]


def scrambled_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    piece = rng.choice(
        (b"", b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r\n", b"{", data[:9])
    )
    whole = data[:at] + piece + data[at + rng.choice((0, 1, 9)) :]
    return rng.choice(
        (
            whole,
            whole,
            whole,
            whole[:at],
            gzip.compress(whole),
            b"\xef\xbb\xbf" + whole,
            whole[::-1],
        )
    )


def talks(rng: random.Random) -> Any:
    messages = rng.choice(list(TALKS.values()))
    return {"messages": messages} | (
        {"tools": TOOLS} if tools_of(messages) or rng.random() < 0.1 else {}
    )


def fuzz_chat(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Conversations in JSON Lines: values, and now and then the line's text."""
    rng, attempts = random.Random(seed), Attempts(folder)
    for number in range(count):
        line = json.dumps(mutated(rng, talks(rng)), ensure_ascii=rng.random() < 0.7)
        if rng.random() < 0.15:
            line = scrambled(rng, line)
        file = folder / f"chat-{number}.jsonl"
        file.write_text(
            line + "\n" + json.dumps(talks(rng)), encoding="utf-8", errors="surrogatepass"
        )
        name = rng.choice(TEMPLATES)
        more = {"train_on": "all"} if rng.random() < 0.1 else {}
        attempts.read(
            (name, line[:1500]), kind="chat", path=file, template=FAMILIES[name].plain, **more
        )
        file.unlink()
    return {"mutations": count, **attempts.kinds}


_CELLS: tuple[Any, ...] = (
    *(
        None,
        1,
        1.5,
        True,
        b"\xff\x00",
        "text",
        "🙂",
        datetime.datetime(2024, 1, 2),
        datetime.date(1, 1, 1),
    ),
    *(
        datetime.timedelta(days=9),
        decimal.Decimal("1.5"),
        [1, None],
        {"a": None},
        [],
        [{"role": "user", "content": "a"}],
    ),
)


def fuzz_parquet(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Conversations and columns of text, and the bytes of the files. Arrow itself refuses some
    mixtures of types."""
    import pyarrow
    import pyarrow.parquet

    rng, attempts, made = random.Random(seed), Attempts(folder), 0
    while made < count:
        rows = (
            [talks(rng), mutated(rng, talks(rng))]
            if rng.random() < 0.7
            else [{"text": rng.choice(_CELLS)}] * 2
        )
        file = folder / f"rows-{made}.parquet"
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError, UnicodeEncodeError):
            continue
        made += 1
        if rng.random() < 0.2:
            file.write_bytes(scrambled_bytes(rng, file.read_bytes()))
        kind = rng.choice(("chat", "chat", "chat", "parquet"))
        more = (
            {"template": FAMILIES[rng.choice(TEMPLATES)].plain}
            if kind == "chat"
            else {"field": "text"}
        )
        attempts.read(rows, kind=kind, path=file, **more)
        file.unlink()
    return {"mutations": count, **attempts.kinds}


def fuzz_files(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Text, JSON Lines and what only looks like them."""
    rng, attempts = random.Random(seed), Attempts(folder)
    lines = "\n".join(
        json.dumps({"text": f"Zeile {n}: schön 🙂 " * 5, "id": n}, ensure_ascii=False)
        for n in range(6)
    )
    for number in range(count):
        kind = rng.choice(("text", "jsonl", "jsonl", "chat"))
        data = (json.dumps(talks(rng)) if kind == "chat" else lines).encode()
        for _ in range(rng.randrange(1, 4)):
            data = scrambled_bytes(rng, data) if data else b"\n"
        if rng.random() < 0.1:
            record = json.dumps(mutated(rng, {"text": "a", "more": {"b": [1]}}))
            data = record.encode("utf-8", "surrogatepass")
        file = folder / f"file-{number}.{rng.choice(('jsonl', 'txt', 'json', 'jsonl.gz', 'zst'))}"
        file.write_bytes(data)
        more = {"template": FAMILIES["chatml"].plain} if kind == "chat" else {"field": "text"}
        attempts.read((kind, data[:400]), kind=kind, path=file, **more)
        file.unlink()
    return {"mutations": count, **attempts.kinds}


_BLOCKS = (
    *(
        "{% for i in range(9999999) %}",
        "{% endfor %}",
        "{% if",
        "{{",
        "}}",
        "{% generation %}",
        "{% endgeneration %}",
    ),
    *(
        "{% set messages = [] %}",
        "{{ messages }}",
        "{{ raise_exception('\ud800') }}",
        "{% break %}",
        "{% macro a() %}",
        "| tojson",
    ),
    *(
        "| upper",
        "| reverse | list",
        "[::-1]",
        "{{ 'x' * 10**9 }}",
        "{{ ''.__class__ }}",
        "{% include 'a' %}",
        "{# ",
        "\x00",
    ),
    *(
        "{{ strftime_now('%Y') }}",
        "{{ namespace() }}",
        "{{ range }}",
        "{{ 10**9999 }}",
        "{{ messages[99].content }}",
        "loop.last",
    ),
)


def fuzz_templates(count: int, seed: int, folder: Path) -> dict[str, int]:
    """The families' templates, with and without marks, with pieces put in, taken out and
    exchanged."""
    rng, attempts = random.Random(seed), Attempts(folder)
    file = folder / "a.jsonl"
    for _ in range(count):
        family = FAMILIES[rng.choice(list(FAMILIES))]
        template = family.marked if rng.random() < 0.3 else family.plain
        for _ in range(rng.choice((1, 1, 2, 4))):
            if rng.random() < 0.5:
                at = rng.randrange(len(template))
                template = (
                    template[:at] + rng.choice(_BLOCKS) + template[at + rng.choice((0, 0, 3, 30)) :]
                )
            elif rng.random() < 0.5:
                words = (
                    "content",
                    "role",
                    "user",
                    "assistant",
                    "message",
                    "messages",
                    "loop",
                    "tools",
                    "+",
                    "==",
                    "'",
                )
                template = template.replace(rng.choice(words), rng.choice(words), 1)
            else:
                template = scrambled(rng, template)
        file.write_text(json.dumps(talks(rng)))
        attempts.read(template, kind="chat", path=file, template=template)
    return {"mutations": count, **attempts.kinds}


_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {
        "content": "</s>",
        "lstrip": False,
        "normalized": False,
        "special": True,
        "__type": "AddedToken",
    },
    "pad_token": None,
    "add_bos_token": True,
    "added_tokens_decoder": {
        "1": {"content": "</s>", "special": True, "lstrip": False, "rstrip": False}
    },
    "additional_special_tokens": ["<|im_end|>"],
    "extra_special_tokens": {"image_token": "<image>"},
    "chat_template": [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": ""},
    ],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
    "padding_side": "left",
    "split_special_tokens": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
_CLASSES = (
    "LlamaTokenizerFast",
    "GPT2TokenizerFast",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "T5Tokenizer",
    "BertTokenizer",
)


def fuzz_tokenizers(count: int, seed: int, folder: Path, saved: Path) -> dict[str, int]:
    """saved: a folder of tokenizer folders. Loaded, and used where loading works."""
    rng, attempts = random.Random(seed), Attempts(folder)
    sources = [path for path in sorted(saved.iterdir()) if (path / "tokenizer.json").is_file()]
    (folder / "a.jsonl").write_text(json.dumps(talks(rng)))
    for number in range(count):
        source, here = rng.choice(sources), folder / f"tokenizer-{number}"
        here.mkdir()
        texts = {"tokenizer.json": (source / "tokenizer.json").read_text("utf-8")}
        config = (
            _CONFIG if rng.random() < 0.7 else {**_CONFIG, "tokenizer_class": rng.choice(_CLASSES)}
        )
        texts["tokenizer_config.json"] = json.dumps(config)
        name = rng.choice(list(texts))
        if rng.random() < 0.3:
            texts[name] = scrambled(rng, texts[name])
        elif name == "tokenizer.json":
            texts[name] = json.dumps(_changed_tokenizer(rng, json.loads(texts[name])))
        else:
            texts[name] = json.dumps(mutated(rng, config))
        for file, text in texts.items():
            (here / file).write_text(text, encoding="utf-8", errors="surrogatepass")
        template = FAMILIES["chatml"].plain if rng.random() < 0.7 else None
        path = folder / "a.jsonl"
        attempts.read(
            (name, texts[name][:1500]),
            kind="chat",
            path=path,
            template=template,
            tokenizer=str(here),
        )
        shutil.rmtree(here)
    return {"mutations": count, **attempts.kinds}


def _changed_tokenizer(rng: random.Random, document: Any) -> Any:
    """With its pieces and merges as they are, mostly: thousands of places, and all of one kind."""
    model = document["model"]
    kept = {
        key: model.pop(key) for key in ("vocab", "merges") if key in model and rng.random() < 0.8
    }
    document = mutated(rng, document)
    if isinstance(document.get("model"), dict):
        document["model"] |= kept
    return document
