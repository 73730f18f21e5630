"""What reading a source left out or changed: counted, with the first records, and kept beside the tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Refusal, refusal

REPORT_FILE = "records.json"
MOST_EXAMPLES = 3
_OF_ONE_RECORD = frozenset(
    ["SW6107", "SW6109", "SW6110", "SW6111", "SW6112", "SW6113", "SW6124", "SW6130", "SW6131", "SW6136", "SW6138"]
)
"""Codes that speak of a single record: the next one may be good."""


@dataclass(slots=True, kw_only=True)
class ReadReport:
    """Counts of one source. share: of the records that may be left out; 0: the first bad record is refused.

    records: read; left_out: code of the diagnostic -> records; examples: the first diagnostics' messages; replaced:
    records in which half of a surrogate pair became U+FFFD. Of conversations: without_reasoning: those whose reasoning
    the template does not write; without_end: those whose last turn ends without a token that says so.
    """

    share: float = 0.0
    records: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    replaced: int = 0
    without_reasoning: int = 0
    without_end: int = 0

    def leave_out(self, problem: Refusal) -> None:
        """Counts a record that has no use. Raises `problem` where none may be left out, or it speaks of all of them."""
        first = problem.diagnostics[0]
        if not self.share or first.code not in _OF_ONE_RECORD:
            raise problem
        self.left_out[first.code] = self.left_out.get(first.code, 0) + 1
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(first.message)

    def check(self, damaged: int = 0) -> None:
        """damaged: records left out for a picture. Raises Refusal (SW6153): more were left out than `share` allows."""
        count = sum(self.left_out.values()) + damaged
        if count > self.share * self.records:
            raise refusal(
                "SW6153",
                f"{count:,} of {self.records:,} records cannot be used, more than `skip_damaged: {self.share:g}` "
                f"allows: {'; '.join(self.examples)}",
                "Correct or delete them, or raise skip_damaged.",
            )

    def write(self, folder: Path) -> None:
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_report(folder: Path) -> ReadReport:
    """folder: of prepared data. Empty for what an earlier version made."""
    try:
        document: Any = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        return ReadReport(**document)
    except (OSError, ValueError, TypeError):
        return ReadReport()
