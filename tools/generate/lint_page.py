"""Writes the table of rules into docs/lint.md."""

from __future__ import annotations

from pathlib import Path

from shardwright.diagnostics.code_explanations import (
    ds_config_explanations,
    megatron_args_explanations,
)
from tools.generate.sections import replace_section

PAGE = Path(__file__).resolve().parents[2] / "docs/lint.md"
BEGIN, END = "<!-- made by `make generated` -->", "<!-- end -->"
GROUPS = {
    "40": "The file",
    "41": "Keys and values",
    "42": "Batch sizes and groups",
    "43": "Precision",
    "44": "ZeRO",
    "45": "Optimizer and scheduler",
    "46": "Pipeline, tensor parallelism, activation checkpointing",
    "47": "Other sections",
    "48": "Memory",
    "49": "Arguments of Megatron-LM (`--for megatron`)",
}


def written(page: str) -> str:
    """`page` with the table as it should be."""
    return replace_section(page, BEGIN, END, table())


def table() -> str:
    lines: list[str] = []
    for digits, title in GROUPS.items():
        lines += [f"### {title}", "", "| code | finds | from |", "|---|---|---|"]
        for code, entry in {**ds_config_explanations(), **megatron_args_explanations()}.items():
            if code[2:4] == digits:
                lines.append(f"| {code} | {_cell(entry.title)} | {_cell(entry.source)} |")
        lines.append("")
    return "\n".join(lines[:-1])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
