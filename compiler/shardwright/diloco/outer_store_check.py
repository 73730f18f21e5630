"""The link between an island and the outer store, beside the rate that the recipe gives it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal, found
from shardwright.diagnostics.host_check import MIN_BANDWIDTH_FRACTION, HostCheck, red
from shardwright.diloco.link_probe import MeasuredLink, measure_link
from shardwright.diloco.outer_store_channel import ChannelError, WrongSecret
from shardwright.diloco.outer_store_secret import read_secret
from shardwright.plan.island_plans import plan_digest
from shardwright.plan.plan import Plan

NAME = "outer store"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLink:
    """outer_seconds: of an outer step at that rate; between_seconds: of the steps between two of
    them."""

    gbits_per_second: float
    outer_seconds: float
    between_seconds: float


def check_outer_store_link(plan: Plan, folder: Path, planned: PlannedLink) -> HostCheck:
    """From this host. folder: an island's."""
    address = str(plan.launch.outer_store)
    try:
        measured = measure_link(
            address, read_secret(folder), plan_digest(plan), plan.strategy.world_size
        )
    except Refusal as refusal:
        return _failed(*refusal.diagnostics)
    except WrongSecret:
        help = (
            "Copy run/outer.secret of the folder that `shardwright outer-store` runs on to the "
            "same place here."
        )
        return _failed(red("SW6313", f"the outer store at {address} has another secret", help))
    except ChannelError as broken:
        help = (
            f"Start `shardwright outer-store DIR` where {address} leads to, on the compiled folder "
            "of all islands, and see that this host reaches that port (launch.outer_store)."
        )
        return _failed(
            red("SW6314", f"the outer store is not reached at {address}: {broken}", help)
        )
    if not measured.has_same_plan:
        help = "Compile once, and copy DIR/island-K to each site."
        return _failed(
            red("SW6316", f"the outer store at {address} was started for another plan", help)
        )
    return _compare_with_recipe(str(plan.launch.outer_store), measured, planned)


def _failed(*problems: Diagnostic) -> HostCheck:
    return HostCheck(name=NAME, told="", problems=problems)


def _compare_with_recipe(address: str, measured: MeasuredLink, planned: PlannedLink) -> HostCheck:
    slowest = min(measured.up_bytes_per_second, measured.down_bytes_per_second) * 8 / 1e9
    up, down = (
        _gbits(rate) for rate in (measured.up_bytes_per_second, measured.down_bytes_per_second)
    )
    seconds = planned.outer_seconds * planned.gbits_per_second / slowest
    told = (
        f"{address} answers in {measured.round_trip_seconds * 1e3:.3g} ms; {up} Gbit/s up, {down} "
        f"down, {planned.gbits_per_second:g} planned; an outer step takes {seconds:.3g} s, "
        f"{planned.outer_seconds:.3g} planned, every {planned.between_seconds:.3g} s; islands "
        f"there: {', '.join(map(str, measured.connected_islands)) or 'none'}"
    )
    if slowest >= MIN_BANDWIDTH_FRACTION * planned.gbits_per_second:
        return HostCheck(name=NAME, told=told)
    message = (
        f"the link to the outer store at {address} gives {slowest:.3g} Gbit/s, the recipe says "
        f"{planned.gbits_per_second:g}: an outer step takes {seconds:.3g} s, not "
        f"{planned.outer_seconds:.3g}"
    )
    key = f"cluster.inter_island_gbits_per_second={slowest:.3g}"
    help = (
        f"If this is what the link gives, compile again with --set {key}. With a larger "
        "training.outer.every_steps training waits less often."
    )
    return HostCheck(
        name=NAME, told=told, problems=(found("SW5312", None, message, help, severity="warning"),)
    )


def _gbits(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e9:.3g}"
