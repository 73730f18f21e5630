"""The launch files: launch.sh, train.py and, where the hosts are known, hostfile."""

from __future__ import annotations

import re
import shlex

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardwright.diagnostics import Diagnostic
from shardwright.ir.recipe import LaunchSection, Recipe
from shardwright.plan.plan import Plan
from shardwright.resources import templates_dir

SAFE_FOR_PDSH = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")
"""pdsh hands values to a remote shell unquoted (DeepSpeed launcher/multinode_runner.py)."""

TEMPLATES: dict[str, str] = {
    "local": "launch/local.sh.j2",
    "pdsh": "launch/pdsh.sh.j2",
    "no_ssh": "launch/no_ssh.sh.j2",
}
"""launcher -> template of launch.sh"""


def launch_files(plan: Plan) -> dict[str, bytes]:
    files = {
        "launch.sh": _render(TEMPLATES[plan.launch.launcher], plan),
        "train.py": _render("launch/train.py.j2", plan),
    }
    if plan.launch.hostfile is not None and plan.nodes == 1:
        files[plan.launch.hostfile] = _render("launch/hostfile.j2", plan)
    return {name: text.encode("utf-8") for name, text in files.items()}


def check_launch(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """What the chosen launcher cannot do with these values."""
    launch, nodes, found = recipe.launch, recipe.cluster.nodes or 1, list[Diagnostic]()
    if launch.launcher == "local" and nodes > 1:
        found.append(
            Diagnostic(
                code="SW5206",
                message=f"launch.launcher: local starts one node, the cluster has {nodes}",
                help="Write `launcher: auto`: pdsh for several nodes.",
                key=("launch", "launcher"),
                valid=("auto", "pdsh", "no_ssh"),
            )
        )
    if launch.launcher == "pdsh" or (launch.launcher == "auto" and nodes > 1):
        found.extend(_pdsh_errors(launch))
    return tuple(found)


def _pdsh_errors(launch: LaunchSection) -> list[Diagnostic]:
    values: list[tuple[tuple[str, ...], str]] = [(("launch", "env", k), v) for k, v in sorted(launch.env.items())]
    if launch.master_addr is not None:
        values.append((("launch", "master_addr"), launch.master_addr))
    return [
        Diagnostic(
            code="SW5205",
            message=f"{'.'.join(key)}: {value!r} cannot pass through pdsh, which does not quote",
            help="Letters, digits and _ @ % + = : , . / - can. Set other values in the nodes' own environment.",
            key=key,
        )
        for key, value in values
        if not SAFE_FOR_PDSH.fullmatch(value)
    ]


def _render(template: str, plan: Plan) -> str:
    environment = Environment(
        loader=FileSystemLoader(templates_dir()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(template).render(plan=plan, launch=plan.launch)
