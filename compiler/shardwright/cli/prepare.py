"""`shardwright prepare DIR`: tokenize a compiled folder's data ahead of its run; no GPU, no process group."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.arguments import add_json
from shardwright.cli.console import shell_word, use_color
from shardwright.diagnostics.render import visible
from shardwright.strict_json import strict_json

if TYPE_CHECKING:
    from shardwright.data.dataset import Dataset
    from shardwright.data.picture_rate import PictureRate
    from shardwright.data.summary import PartSummary, TextSpan
    from shardwright.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shardwright.data.dataset import resolve
    from shardwright.data.picture_rate import picture_rate
    from shardwright.data.prepare import prepare
    from shardwright.data.summary import samples, summarize
    from shardwright.plan.islands import island_folders
    from shardwright.plan.serialize import load_plan

    folder = args.folder
    plan = load_plan(folder)
    for island in island_folders(plan, folder):  # each reads its own folder
        if island.is_dir():
            prepare(load_plan(island), island, limit_bytes=None)
    prepare(plan, folder, limit_bytes=None)
    plan, data = resolve(plan, folder, check_all=True)
    parts, shown = summarize(plan, folder), samples(plan, folder, data)
    rate = picture_rate(plan, folder) if plan.model.sees else None
    told = Prepared(plan=plan, folder=folder, data=data, parts=parts, shown=shown, rate=rate)
    print(as_json(told) if args.json else summary(told))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the run will read. parts: of each source; shown: a few samples; rate: of a model that sees."""

    plan: Plan
    folder: Path
    data: Dataset
    parts: tuple[PartSummary, ...]
    shown: list[list[TextSpan]]
    rate: PictureRate | None


def as_json(told: Prepared) -> str:
    t, data, parts = told.plan.training, told.data, told.parts
    return strict_json(
        {
            "directory": str(told.folder),
            "steps": t.steps,
            "epochs": t.epochs,
            "steps_per_epoch": data.order.steps_per_epoch,
            "documents": sum(p.documents for p in parts),
            "tokens": sum(p.tokens for p in parts) or len(data.train) * t.sequence_length,
            "trained_tokens": sum(p.trained_tokens for p in parts) or len(data.train) * (t.sequence_length - 1),
            "rows": len(data.train),
            "validation_rows": 0 if data.validation is None else len(data.validation),
            "parts": [asdict(p) for p in parts],
            "pictures": None if told.rate is None else asdict(told.rate),
            "samples": [[asdict(piece) for piece in pieces] for pieces in told.shown],
        }
    )


def summary(told: Prepared) -> str:
    """What the run will read, in a few lines, and three samples of it."""
    from shardwright.data.summary import marked

    t, data = told.plan.training, told.data
    rows = [("data", _part(p, t.sequence_length)) for p in told.parts]
    rows.append(("sequences", f"{len(data.train):,} of {t.sequence_length} tokens to train on"))
    if data.validation is not None:
        rows.append(("", f"{len(data.validation):,} held out for validation"))
    if told.rate is not None:
        rows.append(("pictures", _rate(told.rate)))
    epochs = t.steps / data.order.steps_per_epoch
    rows.append(("training", f"{t.steps:,} steps of {t.global_batch_size} sequences, {epochs:.3g} epochs"))
    rows.append(("next", f"shardwright run {shell_word(str(told.folder))}"))
    begin, end = ("\x1b[32m", "\x1b[0m") if use_color(sys.stdout) else ("[[", "]]")
    lines = [f"{name:<11}{visible(text)}" for name, text in rows]
    for number, pieces in enumerate(told.shown, 1):
        cleaned = [type(p)(text=_printable(p.text), trained=p.trained) for p in pieces]
        lines += ["", f"sample {number}, {'green' if begin != '[[' else 'in [[ ]]'}: what is trained on"]
        lines.append(marked(cleaned, begin, end))
    return "\n".join(lines)


def _rate(r: PictureRate) -> str:
    per_core, wanted = (f"{x:,.0f}" if x >= 10 else f"{x:.2g}" for x in (r.per_core, r.wanted))
    need = f"{r.cores:,} {'core' if r.cores == 1 else 'cores'} in all, for {r.ranks:,} of the first stage's ranks"
    return f"a core of this machine decodes and prepares {per_core} a second; the planned steps take {wanted}: {need}"


def _part(p: PartSummary, length: int) -> str:
    name = p.kind if p.path is None else f"{p.kind} {p.path}"
    if not p.documents:
        return f"{name}: read as it lies"
    text = f"{name}: {p.documents:,} documents, {p.tokens:,} tokens, {p.trained_tokens:,} of them trained on"
    text += f"; padding {p.padding_alone:.1%} with one document a sequence, {p.padding:.1%} as they are put together"
    if p.cut:
        text += f"; {p.cut:,} are cut at {length} tokens"
    if p.left_out:
        text += f"; {p.left_out:,} without a label in {length} tokens are left out"
    if p.pictures:
        text += f"; {p.pictures:,} pictures"
    for count, why in (
        (p.too_long, f"longer than {length} tokens"),
        (p.crowded, "with more pictures than images.per_row"),
        (p.damaged, "with a damaged picture"),
    ):
        if count:
            text += f"; {count:,} {why} are left out"
    if p.without_reasoning:
        text += f"; the chat template leaves out the reasoning of {p.without_reasoning:,}"
    if p.without_end:
        text += f"; the chat template closes the last answer of {p.without_end:,} with nothing"
    if p.begin is not None:
        text += f"; each begins with {p.begin}" if p.begin else "; nothing is put in front of them (data.add_bos_token)"
    if p.replaced:
        text += f"; half a surrogate pair became U+FFFD in {p.replaced:,}"
    if p.unusable:
        from shardwright.diagnostics.codes import CODES

        reasons = ", ".join(f"{count:,} {CODES[code]} ({code})" for code, count in sorted(p.unusable.items()))
        text += f"; left out of {p.records:,} records: {reasons}; the first: {'; '.join(p.examples)}"
    if p.empty:
        text += f"; {p.empty:,} empty ones skipped"
    return text


def _printable(text: str) -> str:
    """Line ends stay; what would move a terminal's cursor or change its colours does not."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
