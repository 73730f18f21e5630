"""Read preference data: records of a prompt with a chosen and a rejected completion, or of single
completions with labels.

The columns and their forms are those of TRL (https://huggingface.co/docs/trl/dataset_formats):
`prompt`, `chosen` and `rejected`, each a text or a list of messages. Without a prompt it is what
`chosen` and `rejected` begin with. Single completions have `prompt`, `completion` and `label`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from shardwright.data.chat_format import Message, TemplateError, normalize_message, normalize_tools
from shardwright.data.chat_template import ChatTemplateRenderer, RenderLimitExceeded
from shardwright.data.indexed_dataset import DocumentWriter
from shardwright.data.sequences import DESIRABLE_FILE
from shardwright.data.source_files import ReadingProgress, Record, RecordCounts, records
from shardwright.data.tokenizers import ByteTokenizer, Ids, Tokenizer, document_prefix
from shardwright.diagnostics import Refusal, refusal
from shardwright.recipe.recipe_types import DataSection
from shardwright.utils.json_values import JsonObject, JsonValue

COMPLETIONS = ("chosen", "rejected")
_FORM = (
    'Write {"prompt": "...", "chosen": "...", "rejected": "..."}, each a text, or each a list of '
    'messages; for kto {"prompt": "...", "completion": "...", "label": true}. '
    "`skip_damaged: 0.01` leaves out up to that share of the records, and `prepare` "
    "counts them."
)

Completion = str | list[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Hold a record: the prompt, and (chosen, rejected) without it; all text, or all messages."""

    prompt: Completion
    completions: tuple[Completion, Completion]
    tools: JsonValue
    where: str


def read_pair(record: Record, *, needs_prompt: bool = True) -> Pair:
    """Read a pair of completions. Raises SW6125."""
    document, where, _ = record
    chosen, rejected = (_completion(document, name, where) for name in COMPLETIONS)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise _malformed(where, "of chosen and rejected, one is a text and one is messages")
    given = _completion(document, "prompt", where) if document.get("prompt") is not None else None
    # TRL too: a text beside whole conversations repeats what both begin with.
    if given is None or isinstance(given, str) != isinstance(chosen, str):
        given, chosen, rejected = _split_prompt(chosen, rejected)
        if not given and needs_prompt:
            raise _malformed(where, "there is no prompt, and chosen and rejected begin differently")
    return Pair(
        prompt=given,
        completions=(chosen, rejected),
        tools=normalize_tools(document.get("tools")),
        where=where,
    )


def _completion(document: JsonObject, name: str, where: str) -> Completion:
    value = document.get(name)
    if isinstance(value, str):
        return value
    if value is None:
        names = ", ".join(sorted(map(str, document))[:8])
        raise _malformed(where, f"there is no {name!r}; the record has {names or 'no keys'}")
    if not isinstance(value, list) or not value:
        raise _malformed(where, f"{name!r} is neither a text nor a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _malformed(where, f"message {number} of {name!r} has no role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise _malformed(where, f"message {number} of {name!r} has no content")
    return [normalize_message(dict(cast(JsonObject, message))) for message in value]


def _malformed(where: str, why: str) -> Refusal:
    return refusal("SW6125", f"{where}: {why}", _FORM)


def _split_prompt(
    chosen: Completion, rejected: Completion
) -> tuple[Completion, Completion, Completion]:
    """Split off what both begin with: whole messages, or text up to a space before a word."""
    shared = _shared_length(chosen, rejected)
    if shared and chosen[shared - 1] == " ":
        shared -= 1  # the space belongs to the word after it, as tokenizers have it
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _shared_length(one: Completion, other: Completion) -> int:
    """Return how many characters, or messages, both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Hold a completion of a prompt, and whether it is desirable."""

    prompt: Completion
    completion: Completion
    is_desirable: bool
    tools: JsonValue
    where: str


def read_labelled(record: Record) -> tuple[Labelled, ...]:
    """Read a completion with its label; a pair is two. Raises SW6125."""
    document, where, _ = record
    tools = normalize_tools(document.get("tools"))
    if "label" not in document and "chosen" in document:
        pair = read_pair(record)
        return tuple(
            Labelled(
                prompt=pair.prompt,
                completion=completion,
                is_desirable=is_desirable,
                tools=tools,
                where=where,
            )
            for completion, is_desirable in zip(pair.completions, (True, False), strict=True)
        )
    label = document.get("label")
    if not isinstance(label, bool):
        raise _malformed(where, f"the label is {json.dumps(label)[:40]}, not true or false")
    prompt, completion = (_completion(document, name, where) for name in ("prompt", "completion"))
    if isinstance(prompt, str) != isinstance(completion, str):
        raise _malformed(where, "of prompt and completion, one is a text and one is messages")
    return (
        Labelled(
            prompt=prompt, completion=completion, is_desirable=label, tools=tools, where=where
        ),
    )


class PreferenceReader:
    """Write two documents for each example, whose completions' tokens are labels: of a pair the
    prompt with both completions; of a labelled completion its prompt with it, and with the next
    example's completion. For a reward model the token whose score is read is the only label. Raises
    SW1248, SW6112 and SW6125."""

    def __init__(
        self,
        part: DataSection,
        tokenizer: Tokenizer,
        writer: DocumentWriter,
        report: RecordCounts,
    ) -> None:
        self.part, self.tokenizer, self.writer, self.report = part, tokenizer, writer, report
        self._template = part.template or tokenizer.template
        self._renderer = ChatTemplateRenderer()
        self._padding = padding_id(tokenizer) if part.scored else None
        self._first: Labelled | None = None
        self._waiting: tuple[Labelled, tuple[Ids, npt.NDArray[np.bool_]]] | None = None
        self._desirable: list[bool] = []

    def read(self, files: tuple[str, ...], shown: ReadingProgress) -> Iterator[None]:
        """Yield after each record."""
        every = (record for name in files for record in records(name, self.report))
        write = self._write_labelled if self.part.labelled else self._write_pair
        for record in every:
            shown.add(record[2])
            try:
                write(record)
            except Refusal as problem:
                self.report.skip_record(problem)
                continue
            yield
        if self.part.labelled:
            self._end_labelled()

    def _write_pair(self, record: Record) -> None:
        pair = read_pair(record, needs_prompt=not self.part.scored)
        for ids, trained in [self._encode(pair, own) for own in pair.completions]:
            self.writer.add(ids, trained)

    def _write_labelled(self, record: Record) -> None:
        examples = read_labelled(record)
        encoded = [self._encode(example, example.completion) for example in examples]
        for example, own in zip(examples, encoded, strict=True):
            if self._waiting is None:
                self._first = example
            else:
                self._write_before(example)
            self._waiting = example, own

    def _write_before(self, following: Labelled) -> None:
        """Write the example that waits for a completion of another prompt."""
        assert self._waiting is not None
        example, own = self._waiting
        is_alike = isinstance(example.prompt, str) == isinstance(following.completion, str)
        # Texts and messages do not mix: a file of both has the example's own completion here.
        other = following.completion if is_alike else example.completion
        for ids, trained in (own, self._encode(example, other)):
            self.writer.add(ids, trained)
        self._desirable.append(example.is_desirable)

    def _end_labelled(self) -> None:
        """Write the last example, whose other completion is the first one's, and the labels."""
        if self._first is not None:
            self._write_before(self._first)
        np.save(self.writer.folder / DESIRABLE_FILE, np.asarray(self._desirable, dtype=np.bool_))

    def _encode(
        self, pair: Pair | Labelled, completion: Completion
    ) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return (ids, label mask): a token with a character of the completion is a label."""
        if isinstance(pair.prompt, str) and isinstance(completion, str):
            text, start = pair.prompt + completion, len(pair.prompt)
            before = document_prefix(self.tokenizer, self.part.add_bos_token)
            after = self.tokenizer.end
        else:
            text, start = self._rendered(pair, cast("list[Message]", completion))
            before, after = [], []
        encoded = self.tokenizer.encode_with_offsets(text)
        ids, trained = encoded.ids, encoded.last > start
        if not len(ids) + len(before) + len(after):  # it would be no document, and shift the others
            raise _malformed(pair.where, "prompt and completion have no token")
        if after and ids[-len(after) :].tolist() == after:
            after = []  # the text may end with these ids
        if before and ids[: len(before)].tolist() == before:
            before = []
        whole = np.concatenate([np.asarray(x, dtype=np.int32) for x in (before, ids, after)])
        if self._padding is not None:
            return whole, scored_token(whole, self._padding)
        return whole, np.concatenate(
            [np.zeros(len(before), np.bool_), trained, np.ones(len(after), np.bool_)]
        )

    def _rendered(self, pair: Pair | Labelled, completion: list[Message]) -> tuple[str, int]:
        """Return (text of the conversation, character at which the completion starts): where it
        leaves the prompt for an answer."""
        if self._template is None:
            raise refusal(
                "SW6112",
                f"{pair.where}: the record has messages, and the tokenizer has no chat template",
                "Set data.template, or use the tokenizer of the model's instruction-tuned version.",
            )
        prompt = cast("list[Message]", pair.prompt)
        # A reward model reads the whole conversation: where its answer starts, does not matter.
        conversations = [] if self.part.scored else [(prompt, True)]
        try:
            texts = [
                self._renderer.render(
                    self._template,
                    messages,
                    pair.tools,
                    self.tokenizer.special(),
                    turns=False,
                    asks=asks,
                )[0]
                for messages, asks in (*conversations, ([*prompt, *completion], False))
            ]
        except (TemplateError, RenderLimitExceeded) as error:
            raise refusal(
                "SW6112",
                f"{pair.where}: the chat template refuses the conversation: {error}",
                "Correct the record, or set another data.template.",
            ) from None
        return texts[-1], 0 if self.part.scored else _shared_length(*texts)


def padding_id(tokenizer: Tokenizer) -> int:
    """Return the id that pads sequences of a reward model, as TRL chooses it: the tokenizer's
    pad_token, else its eos_token; of bytes 0, which no text has. Raises SW1248."""
    if isinstance(tokenizer, ByteTokenizer):
        return 0
    if tokenizer.pad is None and not tokenizer.end:
        raise refusal(
            "SW1248",
            "the tokenizer has neither a pad_token nor an eos_token: transformers finds the token "
            "whose score it reads by the padding after it",
            "Set pad_token in the tokenizer's tokenizer_config.json, and compile again.",
        )
    return tokenizer.end[0] if tokenizer.pad is None else tokenizer.pad


def scored_token(ids: Ids, padding: int) -> npt.NDArray[np.bool_]:
    """Mark the token whose score transformers reads: the last one that is not the padding id
    (modeling_layers.py, GenericForSequenceClassification). Where padding is the end token, that is
    the token before the end."""
    marks = np.zeros(len(ids), dtype=np.bool_)
    marks[np.flatnonzero(ids != padding)[-1:]] = True
    return marks
