"""`shardwright doctor DIR`: try the hosts before anything is started on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.diagnostics import Diagnostic, Refusal

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan
    from shardwright.runtime.meeting import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a folder that `shardwright compile` wrote")
    parser.add_argument("--hostfile", type=Path, help="hosts to try, a line `name slots=N` each")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from shardwright.cluster.resolve import resolve_cluster
    from shardwright.recipe.load import load_recipe
    from shardwright.runtime.doctor import examine
    from shardwright.runtime.launcher import load_plan
    from shardwright.runtime.meeting import Assumed

    plan = load_plan(args.folder)
    hosts = read_hosts(plan, args.folder, args.hostfile)
    cluster = resolve_cluster(load_recipe(args.folder / "recipe.resolved.json").cluster)
    assumed = Assumed(
        intra_node_bytes_per_second=cluster.intra_node_bytes_per_second,
        inter_node_bytes_per_second=cluster.inter_node_bytes_per_second,
        is_cpu=cluster.gpu.is_cpu,
    )
    checks = examine(plan, args.folder, hosts, assumed, local=plan.nodes == 1, shared=cluster.shared_filesystem)
    print(as_json(checks) if args.json else as_text(checks))
    return 1 if any(is_red(check) for check in checks) else 0


def read_hosts(plan: Plan, folder: Path, hostfile: Path | None) -> list[str]:
    """Raises Refusal where the hostfile is missing, cannot be read, or is not the plan's cluster."""
    from shardwright.plan.hosts import read_hosts as hosts_of

    if plan.nodes == 1:
        return ["localhost"]
    path = hostfile or folder / "launch" / "hostfile"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise Refusal(
            Diagnostic(
                code="SW6003",
                message=f"the plan is for {plan.nodes} nodes and no hostfile says which",
                help="Give `--hostfile FILE` with a line `name slots=N` for each node.",
            )
        ) from None
    return [host.name for host in hosts_of(str(path), text, plan.nodes, plan.gpus_per_node)]


def is_red(check: Check) -> bool:
    """Whether a run would fail; a warning (a slow link) is told and does not stop one."""
    return any(problem.severity == "error" for problem in check.problems)


def as_text(checks: Sequence[Check]) -> str:
    from shardwright.diagnostics.render import visible

    lines = []
    for check in checks:
        if not is_red(check):
            lines.append(f"ok   {check.name:<13}{visible(check.told)}")
        for problem in check.problems:
            label = "red " if problem.severity == "error" else "warn"
            lines.append(f"{label} {check.name:<13}{problem.code} {visible(problem.message)}")
            lines.append(f"     {'':<13}{visible(problem.help)}")
    red = sum(problem.severity == "error" for check in checks for problem in check.problems)
    lines.append("all is well: `shardwright run`" if not red else f"{red} found; nothing was started")
    return "\n".join(lines)


def as_json(checks: Sequence[Check]) -> str:
    return json.dumps(
        {
            "ok": not any(is_red(check) for check in checks),
            "checks": [
                {
                    "name": check.name,
                    "ok": not is_red(check),
                    "told": check.told,
                    "problems": [
                        {"code": p.code, "severity": p.severity, "message": p.message, "help": p.help}
                        for p in check.problems
                    ],
                }
                for check in checks
            ],
        }
    )
