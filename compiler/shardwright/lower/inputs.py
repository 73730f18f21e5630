"""Files of the user's that travel with the compiled folder: the tokenizer's and the hostfile."""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Location, Refusal
from shardwright.ir.cluster import Cluster
from shardwright.ir.recipe import Recipe
from shardwright.ir.weights import TOKENIZER_PATTERNS
from shardwright.plan.build import HOSTFILE, TOKENIZER_DIRECTORY

# DeepSpeed's own pattern (launcher/runner.py) also accepts text after the slots; that text would be ignored in silence.
_HOST_LINE = re.compile(r"([A-Za-z0-9_@%+=:,.-]+)\s+slots=([0-9]{1,6})")


def copied_inputs(recipe: Recipe, cluster: Cluster, tokenizer: Path | None) -> dict[str, bytes]:
    """Relative path in the compiled folder -> content. tokenizer: the folder that holds it, where one is needed.

    Raises Refusal for what cannot be read or used.
    """
    files: dict[str, bytes] = {}
    errors: list[Diagnostic] = []
    try:
        if tokenizer is not None:
            files |= _tokenizer(tokenizer, str(recipe.data.tokenizer if recipe.data else ""))
    except Refusal as refusal:
        errors.extend(refusal.diagnostics)
    try:
        files |= _hostfile(recipe, cluster)
    except Refusal as refusal:
        errors.extend(refusal.diagnostics)
    if errors:
        raise Refusal(*errors)
    return files


def _tokenizer(folder: Path, name: str) -> dict[str, bytes]:
    found = {path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    if found:
        return {f"{TOKENIZER_DIRECTORY}/{path.name}": path.read_bytes() for path in sorted(found)}
    cause = "holds no tokenizer files" if folder.is_dir() else "is not a folder on this machine"
    raise Refusal(
        Diagnostic(
            code="SW1911",
            message=f"data.tokenizer: {name!r} {cause}",
            help="Save it with `save_pretrained` and give that folder (as ./path), or write `tokenizer: byte`.",
            key=("data", "tokenizer"),
            valid=("byte",),
        )
    )


def _hostfile(recipe: Recipe, cluster: Cluster) -> dict[str, bytes]:
    """The recipe's hostfile, every line checked, comments dropped; {} where none is given."""
    path = recipe.launch.hostfile
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Refusal(
            Diagnostic(
                code="SW5204",
                message=f"launch.hostfile: {path!r} cannot be read: {cause}",
                help="Give a text file with a line `name slots=N` for each node.",
                key=("launch", "hostfile"),
            )
        ) from None
    hosts = parse_hostfile(path, text)
    errors = _cluster_errors(hosts, cluster)
    if errors:
        raise Refusal(*errors)
    return {HOSTFILE: "".join(f"{host} slots={slots}\n" for host, slots in hosts).encode("utf-8")}


def parse_hostfile(path: str, text: str) -> tuple[tuple[str, int], ...]:
    """(host, slots) in order. Raises Refusal naming every bad line."""
    hosts: dict[str, int] = {}
    errors: list[Diagnostic] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        place = Location(file=path, line=number, column=1, length=max(1, len(line.rstrip())))
        match = _HOST_LINE.fullmatch(stripped)
        if match is None or match[1].startswith("-"):
            errors.append(
                Diagnostic(
                    code="SW5201",
                    message=f"hostfile line {number}: {stripped!r} is not `name slots=N`",
                    help="One host a line: its name, a space and slots=N; comments on lines of their own.",
                    location=place,
                )
            )
        elif match[1] in hosts:
            errors.append(
                Diagnostic(
                    code="SW5202",
                    message=f"hostfile line {number}: {match[1]!r} is there already",
                    help="Give each host one line; slots=N is the number of its GPUs.",
                    location=place,
                )
            )
        else:
            hosts[match[1]] = int(match[2])
    if errors:
        raise Refusal(*errors)
    return tuple(hosts.items())


def _cluster_errors(hosts: tuple[tuple[str, int], ...], cluster: Cluster) -> tuple[Diagnostic, ...]:
    found = []
    if len(hosts) != cluster.nodes:
        found.append(f"{len(hosts)} hosts, cluster.nodes is {cluster.nodes}")
    wrong = [f"{host} slots={slots}" for host, slots in hosts if slots != cluster.gpus_per_node]
    if wrong:
        found.append(f"{', '.join(wrong[:3])}, cluster.gpus_per_node is {cluster.gpus_per_node}")
    return tuple(
        Diagnostic(
            code="SW5203",
            message=f"launch.hostfile has {what}",
            help="Make the hostfile and the cluster agree.",
            key=("launch", "hostfile"),
        )
        for what in found
    )
