"""Why the plan is not some other layout: the rule that forbids all of it, or what its best
completion loses by."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.search.layout_comparison import because
from shardwright.search.layout_search import estimate_pinned_layout, rank_key

CHOSEN, LOSES, WINS, FORBIDDEN, TOO_LARGE = "chosen", "loses", "wins", "forbidden", "does not fit"
MEMORY_CODE = "SW3201"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNotResult:
    """verdict: chosen (it is the plan), loses (it runs, and ranks behind the plan), wins (it ranks
    before the plan, which other pins hold), forbidden (a rule), does not fit (memory).

    estimate: of the best completion, as `estimate` prints it; None where there is nothing to count.
    diagnostics: the rules that it breaks, or what is said of it. because: the part of the step, or
    the memory, that decides.
    """

    verdict: str
    estimate: Estimate | None
    diagnostics: tuple[Diagnostic, ...]
    because: str


def why_not(problem: Problem, chosen: Estimate) -> WhyNotResult:
    """problem: its recipe pins the region that is asked about, and nothing else of the layout."""
    asked = problem.recipe
    try:
        best = estimate_pinned_layout(problem)
    except Refusal as refusal:
        return refused(refusal)
    errors = [d for d in best.diagnostics if d.severity == "error"]
    if errors:
        verdict = TOO_LARGE if all(d.code == MEMORY_CODE for d in errors) else FORBIDDEN
        reason = errors[0].message
    elif best.strategy == chosen.strategy:
        verdict, reason = CHOSEN, ""
    elif not chosen.feasible:
        verdict, reason = WINS, "the plan itself does not run"
    elif rank_key(asked, best) < rank_key(asked, chosen):
        verdict, reason = WINS, because(asked, chosen, best)
    else:
        verdict, reason = LOSES, because(asked, best, chosen)
    return WhyNotResult(
        verdict=verdict, estimate=best, diagnostics=best.diagnostics, because=reason
    )


def refused(refusal: Refusal) -> WhyNotResult:
    """Where nothing multiplies out to the GPUs and the batch."""
    found = refusal.diagnostics
    return WhyNotResult(
        verdict=FORBIDDEN, estimate=None, diagnostics=tuple(found), because=found[0].message
    )
