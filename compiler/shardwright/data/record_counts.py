"""Counts what reading a source left out or changed, with the first records; the counts are kept
beside the tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Refusal, refusal

REPORT_FILE = "records.json"
MAX_EXAMPLES = 3
_SINGLE_RECORD_CODES = frozenset(
    [
        "SW6107",
        "SW6109",
        "SW6110",
        "SW6111",
        "SW6112",
        "SW6113",
        "SW6124",
        "SW6130",
        "SW6131",
        "SW6136",
        "SW6138",
    ]
)
"""Holds the codes that speak of a single record: the next one may be good."""


@dataclass(slots=True, kw_only=True)
class RecordCounts:
    """Counts the records of one source.

    share: of the records that may be left out; 0: the first bad record is refused. most: records
    that are read; None: all. records: read so far; left_out: code of the diagnostic -> records;
    first: code -> messages of the first ones; replaced: records in which half of a surrogate pair
    became U+FFFD. Of conversations: reasoning_not_rendered: those whose reasoning the template does
    not write; unclosed_conversations: those whose last turn ends without a token that says so.
    """

    share: float = 0.0
    most: int | None = None
    records: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first: dict[str, list[str]] = field(default_factory=dict)
    replaced: int = 0
    reasoning_not_rendered: int = 0
    unclosed_conversations: int = 0

    @property
    def is_full(self) -> bool:
        """Says whether as many records were read as may be."""
        return self.records == self.most

    def skip_record(self, problem: Refusal) -> None:
        """Counts a record that has no use. Raises `problem` where none may be left out, or it
        speaks of all of them."""
        first = problem.diagnostics[0]
        if not self.share or first.code not in _SINGLE_RECORD_CODES:
            raise problem
        self.left_out[first.code] = self.left_out.get(first.code, 0) + 1
        messages = self.first.setdefault(first.code, [])
        if len(messages) < MAX_EXAMPLES:
            messages.append(first.message)

    def check(self, share: float, damaged: int = 0, told: Sequence[str] = ()) -> None:
        """Raises Refusal (SW6153) where more records were left out than `share` of those that were
        read.

        damaged: records left out for an image; told: messages of the first of these.
        """
        count = sum(self.left_out.values()) + damaged
        if count > share * self.records:
            read = f"{'the first ' if self.is_full else ''}{self.records:,} records"
            raise refusal(
                "SW6153",
                f"{count:,} of {read} cannot be used, more than `skip_damaged: {share:g}` allows: "
                f"{self.examples(told)}",
                "Correct or delete them, or raise skip_damaged.",
            )

    def examples(self, told: Sequence[str] = ()) -> str:
        """Returns the first messages of what was left out, in one line. told: of records left out
        for an image."""
        messages = [message for found in self.first.values() for message in found]
        return "; ".join([*messages, *told][:MAX_EXAMPLES])

    def write(self, folder: Path) -> None:
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_record_counts(folder: Path) -> RecordCounts:
    """Returns the counts in a folder of prepared data; empty ones for what an earlier version
    made."""
    try:
        document: Any = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        return RecordCounts(**document)
    except (OSError, ValueError, TypeError):
        return RecordCounts()
