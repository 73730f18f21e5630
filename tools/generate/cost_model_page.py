"""The tables of docs/cost-model.md, from benchmarks/cost.json, cost/constants.json and
cost/goodput.json."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from tools.generate.sections import replace_section

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/cost-model.md"
ERRORS = (
    "<!-- errors: made by `make generated` from benchmarks/cost.json -->",
    "<!-- end of errors -->",
)
GOODPUT = (
    "<!-- goodput: made by `make generated` from cost/goodput.json -->",
    "<!-- end of goodput -->",
)
CONSTANTS = (
    "<!-- constants: made by `make generated` from cost/constants.json -->",
    "<!-- end of constants -->",
)


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    tables = (
        (ERRORS, errors()),
        (GOODPUT, constants("goodput.json")),
        (CONSTANTS, constants("constants.json")),
    )
    for (begin, end), body in tables:
        text = replace_section(text, begin, end, body)
    return text


def errors() -> str:
    bench = json.loads((ROOT / "benchmarks/cost.json").read_text(encoding="utf-8"))
    lines = [
        f"Measured {bench['date']} by `{bench['command']}`.",
        "",
        (
            "| project or GPU left out of the fit | timed runs | step time error | bias | "
            "runs with memory | memory error | bias |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for kind in ("left_out", "hardware_left_out"):
        lines += [_row(name, entry) for name, entry in bench[kind].items()]
    lines += [_row("**the mean of the projects**", bench["left_out_mean"]), ""]
    mean = bench["left_out_mean"]
    right, runs = mean["fits_right"]
    died, of = mean["oom_right"]
    lines += [
        f"In {mean['groups']} groups of runs of one model on the same GPUs, the layout with the "
        f"fastest predicted step is {mean['regret']:.1%} slower than the best one. The rank "
        f"correlation of predicted and measured times is {mean['spearman']:.2f} (Spearman). Of "
        f"{runs} runs that fitted, {right} are predicted to fit. Of {of} that ran out of memory, "
        f"{died} are predicted to.",
        "",
        *_engines(bench),
    ]
    return "\n".join(lines)


def _engines(bench: dict[str, Any]) -> list[str]:
    """engines.json: its projects left out, then its regimes with all rows in the fit."""
    lines = [
        "Runs of other engines and of DeepSpeed, by project and then by engine:",
        "",
        "| project or engine left out of the fit | timed runs | step time error | median | bias |",
        "|---|---|---|---|---|",
    ]
    for kind, what in (("engines_left_out", ""), ("engine_left_out", "engine: ")):
        lines += [
            (
                f"| {what}{name} | {e['time_rows']} | {e['time']:.1%} | {e['time_median']:.1%} | "
                f"{e['time_bias']:+.1%} |"
            )
            for name, e in bench[kind].items()
        ]
    lines += [
        "",
        "The runs of `tools/fit_cost/engines.json` in groups. Here the constants are fitted to "
        "all runs; the ± is the one that `plan` prints, from predictions without the run's "
        "project:",
        "",
        "| group of runs | timed runs | step time error | bias | inside the printed ± |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        (
            f"| {name} | {e['n']} | {e['time_mape']:.1%} | {e['time_bias']:+.1%} | "
            f"{_share(e['in_band'])} |"
        )
        for name, e in bench["engines"]["regimes"].items()
    ]


def _share(value: float | None) -> str:
    return "not calibrated" if value is None else f"{value:.0%}"


def _row(name: str, entry: dict[str, Any]) -> str:
    def share(key: str, *, signed: bool = False) -> str:
        value = entry.get(key)
        return "" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"

    cells = (
        name,
        str(entry["time_rows"]),
        share("time"),
        share("time_bias", signed=True),
        str(entry["memory_rows"] or ""),
        share("memory"),
        share("memory_bias", signed=True),
    )
    return f"| {' | '.join(cells)} |"


def constants(file: str) -> str:
    text = resources.files("shardwright.cost").joinpath(file).read_text("utf-8")
    lines = ["| constant | value | unit | meaning | source |", "|---|---|---|---|---|"]
    for name, entry in json.loads(text)["constants"].items():
        cells = (
            f"`{name}`",
            f"{entry['value']:.4g}",
            entry["unit"],
            entry["meaning"],
            entry["source"],
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)
