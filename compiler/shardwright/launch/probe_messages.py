"""What `doctor` and its probe on each host say to each other, one JSON object a line. A probe
imports it first.

What a probe of another version leaves out has its default, and what it says beside is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from shardwright.utils.json_types import JsonObject

M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """inputs: paths or globs that every host needs. port: the master's; None where any free one
    does. builds: whether DeepSpeed compiles an optimizer on each host."""

    folder: str
    checkpoints: str
    mark: str
    cpu: bool
    inputs: tuple[str, ...]
    port: int | None
    environment: Mapping[str, str]
    builds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """time: of the host's clock, seconds. digest: of the compiled files, None where there is no
    plan. sees_marker: whether the folder is the one that doctor looks at. busy: a sentence for each
    GPU that somebody holds. absent: of the inputs. free_port: None where something listens on the
    master's. missing_tools: what a build needs and is not there. stale_build_locks: that builds
    left behind."""

    time: float = 0.0
    hostname: str = ""
    python: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    digest: str | None = None
    sees_marker: bool = False
    interfaces: tuple[str, ...] = ()
    address: str | None = None
    devices: int = 0
    busy: tuple[str, ...] = ()
    free_bytes: int = 0
    writable: bool = False
    memory_bytes: int = 0
    absent: tuple[str, ...] = ()
    free_port: int | None = None
    missing_tools: tuple[str, ...] = ()
    stale_build_locks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousRequest:
    """address, port: of the first host. seconds: what it may take."""

    rank: int
    world: int
    address: str
    port: int
    seconds: float
    cpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes per second; None where there was nothing to measure."""

    to_next: float | None = None
    all_reduce: float | None = None
    local: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousResult:
    """How the meeting went: unreachable, an error, or a sum over all hosts and the links."""

    unreachable: str | None = None
    error: str | None = None
    sum: int | None = None
    links: LinkRates = LinkRates()


def host_facts_to_json(facts: HostFacts) -> JsonObject:
    return {"kind": "facts", **asdict(facts)}


def rendezvous_result_to_json(met: RendezvousResult) -> JsonObject:
    told = {name: value for name, value in asdict(met).items() if value is not None}
    if met.sum is None:
        del told["links"]
    return {"kind": "met", **told}


def message_from_json(kind: type[M], document: Mapping[str, Any]) -> M:
    """A request, or HostFacts; a list becomes a tuple."""
    values = {f.name: document[f.name] for f in fields(kind) if f.name in document}  # type: ignore[arg-type]
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def rendezvous_result_from_json(document: Mapping[str, Any]) -> RendezvousResult:
    return message_from_json(
        RendezvousResult,
        {**document, "links": message_from_json(LinkRates, document.get("links") or {})},
    )
