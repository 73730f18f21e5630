"""`shardwright status DIR` of several islands: the whole, and each island that is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli import status_command
from shardwright.plan.plan import Plan, load_plan
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import format_number

if TYPE_CHECKING:
    from shardwright.launch.run_state import RunState


def run(plan: Plan, folder: Path, islands: Sequence[Path], *, as_json: bool) -> int:
    local_islands = {k: each for k, each in enumerate(islands) if each.is_dir()}
    states = {
        k: status_command.read_run_state_and_save_seconds(load_plan(each), each)
        for k, each in local_islands.items()
    }
    outer = {k: status_command.last_outer_step(each) for k, each in local_islands.items()}
    whole = all_islands_json(
        plan, folder, local_islands, {k: state for k, (state, _) in states.items()}
    )
    if as_json:
        objects = [
            {"island": k, **asdict(state), "predicted_save_seconds": predicted, "outer": outer[k]}
            for k, (state, predicted) in states.items()
        ]
        print(strict_json({"whole": whole, "islands": objects}))
        return 0
    parts = [all_islands_text(whole, states)]
    for k, (state, predicted) in states.items():
        text = f"island {k}\n{status_command.as_text(state, local_islands[k], predicted)}"
        last_outer = outer[k]
        parts.append(
            text
            if last_outer is None
            else f"{text}\nouter    {_outer_words(last_outer)}, {last_outer['seconds']:.3g} s"
        )
    print("\n\n".join(parts))
    return 0


def all_islands_json(
    plan: Plan, folder: Path, local_islands: Mapping[int, Path], states: Mapping[int, RunState]
) -> dict[str, Any]:
    """here: the islands that are on this machine. step, islands, loss, tokens_per_second: of the
    newest step that all of those have made who took part in the last outer step. tokens: trained
    until then. None where there is none."""
    from shardwright.diloco.island_metrics import (
        effective_rounds,
        merged_steps,
        missing,
        read_rounds,
    )

    rounds = effective_rounds(read_rounds(folder))
    steps = merged_steps(local_islands, rounds, plan.diloco.every_steps)
    absent = missing(plan.diloco.islands, rounds)
    participants = {k for k in local_islands if k not in absent and states[k].step > 0}
    newest = next(
        (each for each in reversed(steps) if participants and participants <= set(each.islands)),
        None,
    )
    rates = [rate for k in participants if (rate := states[k].tokens_per_second) is not None]
    return {
        "step": None if newest is None else newest.step,
        "steps": max((state.steps for state in states.values()), default=None),
        "islands": [] if newest is None else list(newest.islands),
        "loss": None if newest is None else newest.loss,
        "tokens": None
        if newest is None
        else sum(each.tokens for each in steps if each.step <= newest.step),
        "tokens_per_second": sum(rates) if newest is not None and rates else None,
        "outer_steps": len(rounds),
        "last_outer_step": rounds[-1] if rounds else None,
        "missing": [{"island": k, "outer_steps": count} for k, count in absent.items()],
    }


def all_islands_text(
    whole: Mapping[str, Any], states: Mapping[int, tuple[RunState, float | None]]
) -> str:
    rows = []
    if whole["step"] is not None:
        rows.append(("step", f"{whole['step']} of {whole['steps']}"))
        rows.append(
            ("loss", f"{whole['loss']:.4f}, of islands {_listed(whole['islands'])} by their tokens")
        )
        rows.append(("trained", f"{whole['tokens']:,} tokens"))
    if whole["tokens_per_second"] is not None:
        rows.append(("speed", f"{whole['tokens_per_second']:,.0f} tokens/s"))
    last = whole["last_outer_step"]
    rows.append(
        (
            "outer",
            "none yet, or the store is elsewhere" if last is None else _round_words(whole, last),
        )
    )
    for each in whole["missing"]:
        rows.append(
            (
                "missing",
                f"island {each['island']}, for {_steps(each['outer_steps'])}{_why(each, states)}",
            )
        )
    return "\n".join(["all islands", *(f"{name:<9}{text}" for name, text in rows)])


def _round_words(whole: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    joined = f"; {_listed(last['joined'])} took their state" if last["joined"] else ""
    made = _steps(whole["outer_steps"])
    return (
        f"{made}, the last at {_outer_words(last)}, {format_number(last['seconds'])} s in the "
        f"store{joined}"
    )


def _outer_words(line: Mapping[str, Any]) -> str:
    return f"step {line['step']}, " + (
        f"islands {_listed(line['members'])}" if line["members"] else "another island's state taken"
    )


def _why(each: Mapping[str, Any], states: Mapping[int, tuple[RunState, float | None]]) -> str:
    state = states.get(each["island"])
    return " (elsewhere)" if state is None else f" ({state[0].status})"


def _steps(count: int) -> str:
    return f"{count} outer step{'' if count == 1 else 's'}"


def _listed(islands: Sequence[int]) -> str:
    return ", ".join(map(str, islands))
