"""`shardwright models [TYPE]`: what was verified for each model type, as the tests measured it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardwright.cli.command_options import add_json
from shardwright.cli.terminal import use_color
from shardwright.diagnostics import Refusal
from shardwright.recipe.literal_types import TaskName
from shardwright.utils.json_values import strict_json

if TYPE_CHECKING:
    from shardwright.models.model_support import Cell, Support

_COLORS = {"verified": "\x1b[32m", "refused": "\x1b[31m", "untested": "\x1b[2m"}
_RESET = "\x1b[0m"
IMAGE_TEXT: TaskName = "image-text-to-text"

# column -> what it means in words
_TITLES: dict[str, str] = {
    "layer_split": "split into layers bit for bit",
    "zero": "ZeRO over data ranks",
    "pipeline": "pipeline",
    "tensor_sharded": "tensor parallel, sharded",
    "tensor_fallback": "tensor parallel, gathered outputs",
    "pipeline_tensor": "pipeline x tensor parallel",
    "expert": "expert ranks over data ranks",
    "context": "context ranks",
}


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "type", nargs="?", metavar="TYPE", help="a model_type of config.json, or a model's name"
    )
    parser.add_argument(
        "--task",
        choices=("causal-lm", IMAGE_TEXT),
        help="of the types that are trained for it; without it a TYPE is looked for under both",
    )
    add_json(parser, "print one JSON object: the whole matrix, or one type")


def run_models(args: argparse.Namespace) -> int:
    from shardwright.models.model_support import support, support_text

    table = support(args.task or "causal-lm")
    if args.type is None:
        text = support_text(args.task or "causal-lm")
        sys.stdout.write(text if args.json else overview(table, color=use_color(sys.stdout)))
        return 0
    if args.task is None and (pairs := contrastive_type(args.type)) is not None:
        sys.stdout.write(
            contrastive_type_json(pairs) if args.json else contrastive_type_text(pairs, table)
        )
        return 0
    name = known_model_type(args.type, table, support(IMAGE_TEXT) if args.task is None else table)
    table = table if name in table.types else support(IMAGE_TEXT)
    sys.stdout.write(as_json(name, table) if args.json else details(name, table))
    return 0


def known_model_type(text: str, table: Support, second: Support) -> str:
    """Return a type's own name, or that of a model that comes with shardwright. Raises Refusal:
    SW2003, SW2004, SW2017, SW2019."""
    from shardwright.models.model_sources import catalog_config, match_catalog_id

    known = {*table.types, *second.types}
    if text in known:
        return text
    config = None if text in table.others else catalog_config(match_catalog_id(text) or "")
    if config is not None and config["model_type"] in known:
        return str(config["model_type"])
    raise _unknown_type_refusal(text if config is None else str(config["model_type"]), table)


def contrastive_type(text: str) -> str | None:
    """Return a type that learns from pairs of an image and a caption, or the type of such a model
    that comes with shardwright; None elsewhere."""
    from shardwright.models.model_sources import catalog_config, match_catalog_id
    from shardwright.recipe.literal_types import CONTRASTIVE_MODEL_CLASSES

    config = catalog_config(match_catalog_id(text) or "") or {"model_type": text}
    name = str(config["model_type"])
    return name if name in CONTRASTIVE_MODEL_CLASSES else None


_CONTRASTIVE_TESTS = "tests/parity/test_contrastive.py"


def contrastive_type_text(model_type: str, table: Support) -> str:
    lines = [
        f"{model_type} (transformers {table.transformers})",
        "",
        "contrastive, on pairs of an image and a caption",
        f"    ZeRO 0 to 3 over data ranks: verified ({_CONTRASTIVE_TESTS})",
        "",
        "in a recipe",
        "    zero_stage: 0 to 3",
        "    tensor, pipeline, context, expert: 1",
        "    micro_batch_size: each data rank's share of the batch, at once",
    ]
    return "\n".join(lines) + "\n"


def contrastive_type_json(model_type: str) -> str:
    proof = {"verdict": "verified", "tests": _CONTRASTIVE_TESTS}
    return strict_json({"type": model_type, "task": "contrastive", "zero": proof}) + "\n"


def _unknown_type_refusal(text: str, table: Support) -> Refusal:
    from shardwright.models.model_support import (
        encoder_decoder,
        support,
        unknown_type_error,
        untrained_task_error,
    )

    if _takes_images(table):
        causal = support()
        is_known = text in causal.types or text in causal.others
        return Refusal(
            untrained_task_error("image-text-to-text", text, table.types, None)
            if is_known
            else unknown_type_error(text, table.types, None)
        )
    if text not in table.others:
        return Refusal(unknown_type_error(text, table.types, None))
    if table.others[text] == "encoder-decoder":
        return Refusal(encoder_decoder(text, None, decoder_alone=False))
    return Refusal(untrained_task_error("causal-lm", text, table.types, None))


def overview(table: Support, *, color: bool) -> str:
    """Return a row a type, the counts last; in a pipe the same text without colours."""
    names = list(table.columns)
    width = max(map(len, table.types))
    widths = [max(len(name), len("refused SW0000")) for name in names]
    lines = [_row("type", width, names, widths)]
    for model_type, cells in table.types.items():
        shown = [_short(cells[name]) for name in names]
        verdicts = [cells[name].verdict for name in names] if color else None
        lines.append(_row(model_type, width, shown, widths, verdicts))
    lines.append("")
    for verdict in _COLORS:
        counts = [
            str(sum(cells[name].verdict == verdict for cells in table.types.values()))
            for name in names
        ]
        lines.append(_row(verdict, width, counts, widths))
    lines.append("")
    what = IMAGE_TEXT if _takes_images(table) else "causal-LM"
    lines.append(
        f"{len(table.types)} {what} types of transformers {table.transformers}, each a tiny "
        "model against"
    )
    lines.append(
        "one plain process. `shardwright models TYPE` tells the reasons and the differences "
        "measured."
    )
    return "\n".join(lines) + "\n"


def _row(
    first: str, width: int, cells: list[str], widths: list[int], verdicts: list[str] | None = None
) -> str:
    padded = [cell.ljust(w) for cell, w in zip(cells, widths, strict=True)]
    if verdicts is not None:
        padded = [f"{_COLORS[v]}{cell}{_RESET}" for v, cell in zip(verdicts, padded, strict=True)]
    return f"{first.ljust(width)}  {'  '.join(padded)}".rstrip()


def _short(cell: Cell) -> str:
    return f"{cell.verdict} {cell.code}".rstrip()


def details(model_type: str, table: Support) -> str:
    cells = table.types[model_type]
    lines = [f"{model_type} (transformers {table.transformers})", ""]
    for name, column in table.columns.items():
        cell = cells[name]
        lines.append(f"{_TITLES[name]} ({column.layout}): {_short(cell)}")
        if cell.reason:
            lines.append(f"    {cell.reason}")
        if cell.loss is not None:
            lines.append(
                f"    worst differences: loss {cell.loss:g}, norm {cell.norm:g} relative, weights "
                f"{cell.weights:g}"
            )
        if cell.sharded and cell.verdict == "verified":
            lines.append(f"    {cell.sharded:.0%} of its layers' matrices is cut")
    keys = (
        vlm_recipe_lines(cells)
        if _takes_images(table)
        else [*causal_lm_recipe_lines(cells), _engines(model_type)]
    )
    lines += ["", "in a recipe", *(f"    {line}" for line in keys)]
    return "\n".join(lines) + "\n"


def _takes_images(table: Support) -> bool:
    return "layer_split" in table.columns


def vlm_recipe_lines(cells: dict[str, Cell]) -> list[str]:
    """Return what the verdicts mean for a recipe that trains a vision-language model."""
    verified = {name for name, cell in cells.items() if cell.verdict == "verified"}
    if not verified:
        return ["no layout of this type is verified"]
    return [
        f"task: {IMAGE_TEXT}",
        "zero_stage: 0 to 3 with pipeline: 1"
        if "zero" in verified
        else "zero_stage: 3 is not verified over data ranks",
        "pipeline: up to one stage a layer, with zero_stage: 1"
        if "pipeline" in verified
        else "pipeline: 1",
        "expert: 1",
        "context: 1",
    ]


def _engines(model_type: str) -> str:
    """Other engines than the default one that have modules of their own for types."""
    from shardwright.engines.engine_table import ENGINES

    others = [e for e in ENGINES.values() if e.types is not None]
    taken = [e.name for e in others if e.types is not None and model_type in e.types]
    words = " or ".join(taken)
    if not taken:
        return f"target: not {' or '.join(e.name for e in others)}"
    return f"target: {words} too; each compile verifies the configuration"


def causal_lm_recipe_lines(cells: dict[str, Cell]) -> list[str]:
    """Return what the verdicts mean for the keys of `parallelism`."""
    verified = {name for name, cell in cells.items() if cell.verdict == "verified"}
    if not verified:
        return ["no layout of this type is verified"]
    lines = [
        "zero_stage: 0 to 3 with pipeline: 1"
        if "zero" in verified
        else "zero_stage: not verified over data ranks",
        "pipeline: up to one stage a layer, with zero_stage: 1"
        if "pipeline" in verified
        else "pipeline: 1",
    ]
    if "tensor_sharded" in verified:
        lines.append("tensor: a degree that divides its heads and its feed-forward size")
    elif "tensor_fallback" in verified:
        lines.append(
            "tensor: by gathered outputs; the attention itself is computed whole on every rank"
        )
    else:
        lines.append("tensor: 1")
    if {"pipeline", "tensor_sharded"} <= verified and "pipeline_tensor" not in verified:
        lines.append("pipeline and tensor together: not verified")
    lines.append(
        "expert: a degree that divides data x context and the experts"
        if "expert" in verified
        else "expert: 1"
    )
    divides = "context: a degree that divides the sequence and a tensor rank's heads"
    lines.append(divides if "context" in verified else "context: 1")
    return lines


def as_json(model_type: str, table: Support) -> str:
    cells = {
        name: {key: value for key, value in asdict(cell).items() if value not in (None, "")}
        for name, cell in table.types[model_type].items()
    }
    return strict_json({"type": model_type, "transformers": table.transformers, **cells}) + "\n"
