"""`make bench-cost`: the cost model against published runs, per project, left out of the fit and in it.

Prints the table and writes benchmarks/cost.json, and the errors that `plan` prints to cost/measured.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import shardwright.cost
from shardwright.cost.constants import Constants, default_constants
from shardwright.cost.measured import collectives_of
from tools.fit_cost import score
from tools.fit_cost.cases import (
    HARDWARE,
    ROWS,
    Case,
    Row,
    as_scored,
    estimate,
    hardware_of,
    is_megatron,
    load_cases,
    project_of,
)
from tools.fit_cost.fit import fit, priors
from tools.prove.ledger import stamp

FILE = Path(__file__).parents[2] / "benchmarks" / "cost.json"
# What `plan` prints beside its figures.
PACKAGED = Path(shardwright.cost.__file__).with_name("measured.json")
# What others reach on the same rows (shares; regret and Spearman where their answers could be ranked).
PEERS: dict[str, dict[str, float | None]] = {
    "calculon": {"time": 0.27, "memory": 0.36, "regret": 0.043, "spearman": None},
    "llm-analysis (patched)": {"time": 0.187, "memory": 0.34, "regret": None, "spearman": None},
    "one constant efficiency and a bubble": {"time": 0.21, "memory": 0.32, "regret": None, "spearman": 0.04},
}


def scored(cases: list[Case], c: Constants) -> dict[str, Any]:
    found = score.score([case.row for case in cases], [as_scored(estimate(case, c)) for case in cases])
    return {
        "time": found["time_mape"] if found["n_time"] else None,
        "time_bias": found["time_bias"] if found["n_time"] else None,
        "time_rows": found["n_time"],
        "memory": found["mem_mape"] if found["n_mem"] else None,
        "memory_bias": found["mem_bias"] if found["n_mem"] else None,
        "memory_rows": found["n_mem"],
        "oom_right": [found["oom_right"], found["oom_all"]],
        "fits_right": [found["fit_right"], found["fit_all"]],
        "regret": found["regret_mean"] if found["groups"] else None,
        "spearman": found["spearman"] if found["groups"] else None,
        "groups": found["groups"],
    }


def macro(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over projects of what each has; counts added up."""
    result: dict[str, Any] = {}
    for key in ("time", "time_bias", "memory", "memory_bias", "regret", "spearman"):
        values = [row[key] for row in rows.values() if row[key] is not None]
        result[key] = sum(values) / len(values) if values else None
    for key in ("time_rows", "memory_rows", "groups"):
        result[key] = sum(row[key] for row in rows.values())
    for key in ("oom_right", "fits_right"):
        result[key] = [sum(row[key][i] for row in rows.values()) for i in (0, 1)]
    return result


def table(title: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    def share(value: float | None) -> str:
        return "      -" if value is None else f"{value:7.1%}"

    lines = [
        "",
        f"{title:38s}    time   (bias)    n   memory   (bias)   n     OOM      fits   regret  Spearman",
    ]
    for name, row in rows.items():
        rank = "-" if row["spearman"] is None else f"{row['spearman']:.2f}"
        lines.append(
            f"{name:38s} {share(row['time'])} {share(row['time_bias'])} {row['time_rows']:4d}  {share(row['memory'])} "
            f"{share(row['memory_bias'])} {row['memory_rows']:3d}  {row['oom_right'][0]:2d}/{row['oom_right'][1]:<2d} "
            f"{row['fits_right'][0]:4d}/{row['fits_right'][1]:<4d} {share(row['regret'])} {rank:>8s}"
        )
    return lines


def main() -> None:
    cases = load_cases()
    projects = list(dict.fromkeys(case.project for case in cases))
    within = {p: scored([case for case in cases if case.project == p], default_constants()) for p in projects}
    left_out: dict[str, dict[str, Any]] = {}
    for project in projects:
        c = fit([case for case in cases if case.project != project], priors())
        left_out[project] = scored([case for case in cases if case.project == project], c)
    other_hardware: dict[str, dict[str, Any]] = {}
    for hardware in HARDWARE:
        c = fit([case for case in cases if hardware_of(case) != hardware], priors())
        other_hardware[hardware] = scored([case for case in cases if hardware_of(case) == hardware], c)
    everything = scored(cases, default_constants())
    lines = table("each project left out of the fit", {**left_out, "mean of the projects": macro(left_out)})
    lines += table("each generation of GPUs left out", other_hardware)
    lines += table(
        "constants.json (all rows in the fit)",
        {**within, "mean of the projects": macro(within), "all rows": everything},
    )
    lines += ["", "others on these rows                      time   memory   regret  Spearman"]
    for name, peer in PEERS.items():
        cells = [f"{'-' if v is None else f'{v:.0%}' if k in ('time', 'memory') else v:>8}" for k, v in peer.items()]
        lines.append(f"{name:38s}" + " ".join(cells))
    print("\n".join(lines))
    FILE.write_text(
        json.dumps(
            {
                "command": "make bench-cost",
                **stamp("cost"),
                "left_out": left_out,
                "left_out_mean": macro(left_out),
                "hardware_left_out": other_hardware,
                "in_fit": within,
                "in_fit_mean": macro(within),
                "in_fit_all_rows": everything,
                "peers": PEERS,
            },
            indent=1,
        )
        + "\n"
    )
    mean = macro(left_out)
    PACKAGED.write_text(json.dumps(packaged(score.rows(ROWS), mean), indent=1) + "\n")


def packaged(rows: list[Row], mean: dict[str, Any]) -> dict[str, Any]:
    """measured.json. mean: of the projects, each left out."""
    ran = [row for row in rows if score.usable(row) and not row["measured"]["oom"]]
    return {
        "written_by": "make bench-cost",
        "projects": len({project_of(row) for row in ran}),
        "time": {"error": round(mean["time"], 3), **kinds([row for row in ran if score.step_seconds(row)])},
        "memory": {"error": round(mean["memory"], 3), **kinds([row for row in ran if row["measured"]["peak_mem_GB"]])},
    }


def kinds(rows: list[Row]) -> dict[str, Any]:
    """Which kinds of layouts these runs stand behind. All are dense, with nothing offloaded (score.usable)."""
    recipes = [score.recipe(row) for row in rows]
    most: dict[tuple[int, bool, str], int] = {}
    for row, recipe in zip(rows, recipes, strict=True):
        nodes, zero_stage = recipe["cluster"]["nodes"], recipe["parallelism"]["zero_stage"]
        target = "megatron" if is_megatron(row) else recipe["target"]
        kind = (zero_stage, nodes > 1, collectives_of(target, recipe["assume"]["kernels"], zero_stage))
        most[kind] = max(most.get(kind, 0), nodes)
    return {
        "runs": len(rows),
        "gpus": sorted({row["hardware"]["gpu"].partition("-")[0].lower() for row in rows}),
        "precisions": sorted({recipe["training"]["precision"] for recipe in recipes}),
        "schedules": sorted({recipe["parallelism"]["schedule"] for recipe in recipes}),
        "zero": [
            {"stage": stage, "several_nodes": several, "engine": engine, "most_nodes": nodes}
            for (stage, several, engine), nodes in sorted(most.items())
        ],
    }


if __name__ == "__main__":
    main()
