"""`make bench-cost`: the cost model against published runs, per project, left out of the fit and in
it.

Two sets: rows.json, and engines.json of other engines and of DeepSpeed itself. Each project, each
engine and each generation of GPUs is left out of the fit in turn. Prints the tables and writes
benchmarks/cost.json, and the errors by regime that `plan` prints to cost/prediction_errors.json.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import shardwright.cost
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.cost.peak_memory import framework_bytes
from shardwright.cost.prediction_errors import error_benchmark, regimes
from shardwright.engines.engine_table import engine_title
from shardwright.layout.layout_estimate import Estimate
from shardwright.search.layout_resolution import with_stages_assigned
from tools.fit_cost import score, score_engines, score_moe
from tools.fit_cost.least_squares_fit import LinearizedFit, as_megatron_run
from tools.fit_cost.published_runs import (
    HARDWARE,
    UNFITTED_ROWS,
    Case,
    allocated_bytes,
    as_scored,
    estimate,
    hardware_of,
    is_engine_row,
    load_cases,
    load_engine_cases,
    load_moe_cases,
    load_own_cases,
    resolved_layout,
)
from tools.prove.proof_results import stamp

FILE = Path(__file__).parents[2] / "benchmarks" / "cost.json"
# What `plan` prints beside its figures.
PACKAGED = Path(shardwright.cost.__file__).with_name("prediction_errors.json")
# What others reach on the same rows (shares; regret and Spearman where their answers could be
# ranked).
PEERS: dict[str, dict[str, float | None]] = {
    "calculon": {"time": 0.27, "memory": 0.36, "regret": 0.043, "spearman": None},
    "llm-analysis (patched)": {"time": 0.187, "memory": 0.34, "regret": None, "spearman": None},
    "one constant efficiency and a bubble": {
        "time": 0.21,
        "memory": 0.32,
        "regret": None,
        "spearman": 0.04,
    },
}


# In the notes of a row: its memory is torch.cuda.max_memory_reserved().
RESERVED = "max reserved"
# Of a regime's runs, what its half-width holds.
HELD_PERCENT = 80


def scored(cases: list[Case], c: Constants) -> dict[str, Any]:
    found = score.score(
        [case.row for case in cases], [as_scored(estimate(case, c)) for case in cases]
    )
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


def project_mean(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
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
        (
            f"{title:38s}    time   (bias)    n   memory   (bias)   n     OOM      fits   regret  "
            "Spearman"
        ),
    ]
    for name, row in rows.items():
        rank = "-" if row["spearman"] is None else f"{row['spearman']:.2f}"
        lines.append(
            f"{name:38s} {share(row['time'])} {share(row['time_bias'])} {row['time_rows']:4d}  "
            f"{share(row['memory'])} {share(row['memory_bias'])} {row['memory_rows']:3d}  "
            f"{row['oom_right'][0]:2d}/{row['oom_right'][1]:<2d} "
            f"{row['fits_right'][0]:4d}/{row['fits_right'][1]:<4d} {share(row['regret'])} "
            f"{rank:>8s}"
        )
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseError:
    """Predicted over measured less 1 of a case whose project was left out of the fit; None: it was
    not measured."""

    case: Case
    time: float | None
    memory: float | None


def off(case: Case, c: Constants) -> CaseError:
    row, found = case.row, estimate(case, c)
    held = None if row["measured"]["oom"] else row["measured"]["peak_mem_GB"]
    seconds = None if row["measured"]["oom"] else _seconds(row)
    return CaseError(
        case=case,
        time=None if not seconds else found.time.step_seconds / seconds - 1,
        memory=None if not held else _reported_memory_gb(case, c, found) / held - 1,
    )


def _reported_memory_gb(case: Case, c: Constants, found: Estimate) -> float:
    """What the row's source would print as GB. nanotron: torch.cuda.max_memory_allocated() / 1024^3
    of the first rank (its create_table_log, "Mem Alloc (GB)"). A row whose notes say that it is
    what the allocator reserved has no CUDA context and no communicators in it."""
    problem = case.problem
    if case.row.get("engine") == "nanotron":
        return allocated_bytes(with_stages_assigned(problem, case.strategy, c)) / 2**30
    if RESERVED in case.row["notes"]:
        return (
            found.memory.peak_bytes
            - framework_bytes(with_stages_assigned(problem, case.strategy, c))
        ) / 1e9
    return found.memory.peak_bytes / 1e9


def _seconds(row: dict[str, Any]) -> float | None:
    seconds: float | None = (
        score_engines.seconds(row) if is_engine_row(row) else score.step_seconds(row)
    )
    return seconds


def moe_scores(found: list[CaseError]) -> dict[str, Any]:
    """Of moe.json's rows: errors of time by regime, of experts' memory, and the regret."""
    times: dict[str, list[float]] = defaultdict(list)
    for o in found:
        if o.time is not None:
            times[score_moe.regime(o.case.row)].append(o.time)
    experts = [o.memory for o in found if o.memory is not None and _has_experts(o.case)]
    predicted = [
        (o.case.row, (1 + o.time) * score_moe.seconds(o.case.row)) for o in found if o.time
    ]
    regrets = score_moe.regrets(predicted)
    return {
        "time": score_moe.summary(times),
        "experts_memory": float(np.mean(np.abs(experts))),
        "regret": float(np.mean(regrets)),
        "groups": len(regrets),
    }


def _has_experts(case: Case) -> bool:
    return "experts" in score_moe.regime(case.row)


def by_regime(cases: list[Case], c: Constants) -> dict[str, Any]:
    """engines.json's scorer, of these of its rows."""
    rows, found = [case.row for case in cases], [as_scored(estimate(case, c)) for case in cases]
    result: dict[str, Any] = score_engines.score(rows, found)
    return result


def engine_of(case: Case) -> str:
    """Whose runs the cost model is asked for."""
    run = as_megatron_run(case).recipe
    return engine_title(run.target, run.assume.kernels)


def left_out(
    cases: list[Case], around: LinearizedFit, group_of: Callable[[Case], str]
) -> dict[str, tuple[list[Case], Constants]]:
    """Group -> its cases, and constants that were fitted to the others."""
    found = {}
    for group in dict.fromkeys(map(group_of, cases)):
        those = {case.row["id"] for case in cases if group_of(case) == group}
        c = around.without(lambda case: case.row["id"] in those)  # noqa: B023
        found[group] = [case for case in cases if case.row["id"] in those], c
    return found


def errors(cases: list[Case], c: Constants) -> dict[str, Any]:
    found = [off(case, c) for case in cases]
    times, memories = (
        [o.time for o in found if o.time is not None],
        [o.memory for o in found if o.memory is not None],
    )

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    return {
        "time": mean([abs(x) for x in times]),
        "time_median": float(np.median(np.abs(times))) if times else None,
        "time_bias": mean(times),
        "time_rows": len(times),
        "memory": mean([abs(x) for x in memories]),
        "memory_bias": mean(memories),
        "memory_rows": len(memories),
    }


def main() -> None:
    first, engines, moe = load_cases(), load_engine_cases(), load_moe_cases()
    cases, c = first + engines + moe + load_own_cases(), default_constants()
    around = LinearizedFit(cases, c)
    projects = left_out(cases, around, lambda case: case.project)
    first_out = {
        name: scored([case for case in those if not is_engine_row(case.row)], found)
        for name, (those, found) in projects.items()
        if not is_engine_row(those[0].row)
    }
    engines_out = {
        name: errors(those, found)
        for name, (those, found) in projects.items()
        if is_engine_row(those[0].row)
    }
    every = [off(case, found) for those, found in projects.values() for case in those]
    # InternEvo is asked as DeepSpeed, whose ZeRO is another.
    every = [
        o for o in every if not (is_engine_row(o.case.row) and o.case.row["engine"] == "InternEvo")
    ]
    PACKAGED.write_text(json.dumps(packaged(every, project_mean(first_out)), indent=1) + "\n")
    error_benchmark.cache_clear()  # what follows is told with these bands
    engine_ids = {case.row["id"] for case in engines}
    deepspeed = [
        (case, found)
        for those, found in projects.values()
        for case in those
        if case.row["id"] in engine_ids and case.row["engine"].startswith("DeepSpeed")
    ]
    by_engine = {
        name: errors(those, found)
        for name, (those, found) in left_out(cases, around, engine_of).items()
    }
    hardware = left_out(first, around, hardware_of)
    moe_ids = {case.row["id"] for case in moe}
    moe_out = [o for o in every if o.case.row["id"] in moe_ids]
    document: dict[str, Any] = {
        "moe_left_out": moe_scores(moe_out),
        "never_in_a_fit": unfitted(c),
        "left_out": first_out,
        "left_out_mean": project_mean(first_out),
        "engines_left_out": engines_out,
        "deepspeed_left_out": _mean_of([off(case, found) for case, found in deepspeed]),
        "engine_left_out": by_engine,
        "hardware_left_out": {name: scored(*hardware[name]) for name in HARDWARE},
        "in_fit": {
            name: scored([case for case in first if case.project == name], c)
            for name in dict.fromkeys(case.project for case in first)
        },
        "in_fit_all_rows": scored(first, c),
        "engines": by_regime(engines, c),
        "peers": PEERS,
    }
    FILE.write_text(
        json.dumps({"command": "make bench-cost", **stamp(), **document}, indent=1) + "\n"
    )
    lines = table(
        "each project left out of the fit",
        {**first_out, "mean of the projects": project_mean(first_out)},
    )
    lines += table("each generation of GPUs left out", document["hardware_left_out"])
    lines += table(
        "constants.json (all rows in the fit)",
        {**document["in_fit"], "all rows": document["in_fit_all_rows"]},
    )
    for title, rows in (
        ("each project of engines.json left out", engines_out),
        ("each engine left out", by_engine),
    ):
        lines += ["", title, *(_line(name, row) for name, row in rows.items())]
    lines += [
        "",
        "DeepSpeed's rows of engines.json, their project left out: "
        f"{document['deepspeed_left_out']:.1%}",
    ]
    lines += ["", "h100.json, never in a fit"]
    lines += [_line(name, row) for name, row in document["never_in_a_fit"].items()]
    lines += ["", "moe.json, each source left out", json.dumps(document["moe_left_out"], indent=1)]
    lines += ["", "engines.json, all rows in the fit"]
    print("\n".join(lines))
    score_engines.show(document["engines"])


def unfitted(c: Constants) -> dict[str, Any]:
    """Return the errors on rows that no fit has: MPT on H100, by the length of a row."""
    cases = load_cases(UNFITTED_ROWS)
    lengths = {
        "up to 4,096 tokens": [case for case in cases if case.row["model"]["seq_len"] <= 4096],
        "8,192 to 65,536 tokens": [case for case in cases if case.row["model"]["seq_len"] > 4096],
    }
    return {name: errors(chosen, c) for name, chosen in lengths.items()}


def _mean_of(found: list[CaseError]) -> float:
    return float(np.mean([abs(o.time) for o in found if o.time is not None]))


def _line(name: str, row: dict[str, Any]) -> str:
    memory = "" if row["memory"] is None else f"; memory n={row['memory_rows']} {row['memory']:.1%}"
    time = (
        "" if row["time"] is None else f"time {row['time']:.1%} (median {row['time_median']:.1%})"
    )
    return f"{name:38s} n={row['time_rows']:4d} {time} bias {row['time_bias'] or 0:+.1%}{memory}"


def packaged(found: list[CaseError], mean: dict[str, Any]) -> dict[str, Any]:
    """prediction_errors.json. mean: of the first set's projects, each left out."""
    return {
        "written_by": "make bench-cost",
        "projects": len({o.case.project for o in found}),
        "time": {
            "error": round(mean["time"], 3),
            **kinds([(o.case, o.time) for o in found if o.time is not None]),
        },
        "memory": {
            "error": round(mean["memory"], 3),
            **kinds([(o.case, o.memory) for o in found if o.memory is not None]),
        },
    }


def kinds(found: list[tuple[Case, float]]) -> dict[str, Any]:
    """Which kinds of layouts these errors stand behind, and the half-width of each regime."""
    recipes = [case.recipe for case, _ in found]
    by_name: dict[str, list[tuple[Case, float]]] = {}
    for case, error in found:
        for name in _names(as_megatron_run(case)):
            by_name.setdefault(name, []).append((case, abs(error)))
    return {
        "runs": len(found),
        "precisions": sorted({recipe.training.precision for recipe in recipes}),
        "schedules": sorted({case.strategy.schedule for case, _ in found}),
        "bands": {name: band(runs) for name, runs in sorted(by_name.items())},
    }


def band(runs: list[tuple[Case, float]]) -> dict[str, Any]:
    """A regime's entry in prediction_errors.json. runs: each with its absolute error."""
    return {
        "runs": len(runs),
        "half_width": half_width([error for _, error in runs]),
        "sources": len({case.project for case, _ in runs}),
    }


def _names(case: Case) -> tuple[str, ...]:
    """Of the regimes that the case belongs to."""
    return tuple(dict.fromkeys(regimes(resolved_layout(case))))


def half_width(errors: list[float]) -> float:
    """The least share that holds HELD_PERCENT of them."""
    return round(float(np.percentile(errors, HELD_PERCENT, method="higher")), 3)


if __name__ == "__main__":
    main()
