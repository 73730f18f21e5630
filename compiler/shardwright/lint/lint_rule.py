"""Define lint rules, their input and their findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.diagnostics import KeyPath, Severity
from shardwright.engines.deepspeed.ds_config_schema import (
    TRUE_WORDS,
    DsConfigSchema,
    SchemaMismatch,
)
from shardwright.utils.json_values import JsonObject, JsonValue

Audience = Literal["deepspeed", "trainer", "lightning"]
"""Tells who passes the file to DeepSpeed: a script, the HF Trainer or Accelerate, or PyTorch
Lightning's DeepSpeedStrategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Describes one edit. set: `path` gets `value`. rename: the key `path` becomes `name`. remove:
    `path` goes. add: a new key `path` with `value`."""

    kind: Literal["set", "rename", "remove", "add"]
    path: KeyPath
    value: JsonValue = None
    name: str = ""


class RuleViolation(NamedTuple):
    """Holds what a rule's function yields.

    help, severity: "" for the rule's own
    fix: edits that repair the fault; () where a person must decide
    """

    key: KeyPath
    message: str
    help: str = ""
    fix: tuple[Edit, ...] = ()
    severity: Severity | Literal[""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """Hold a fault with its rule's code; at: whether its key or its value is shown."""

    code: str
    key: KeyPath
    message: str
    help: str
    severity: Severity = "error"
    at: Literal["key", "value"] = "value"
    fix: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LintedDsConfig:
    """Holds the file that rules check.

    is_audience_given: `--for` was given
    world_size: ranks, or None
    is_plain_json: JSON without Hjson's additions
    """

    config: JsonObject
    schema_mismatches: tuple[SchemaMismatch, ...]
    ds_config_schema: DsConfigSchema
    audience: Audience
    is_audience_given: bool
    world_size: int | None
    is_plain_json: bool

    def get(self, *path: str) -> JsonValue:
        """Return the value at a path; None where there is none."""
        value: JsonValue = self.config
        for part in path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def has(self, *path: str) -> bool:
        return path[-1] in self.section(*path[:-1])

    def section(self, *path: str) -> JsonObject:
        """Return the section at a path; {} where there is none."""
        value = self.get(*path)
        return value if isinstance(value, Mapping) else {}

    def integer(self, *path: str) -> int | None:
        value = self.get(*path)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, *path: str) -> float | None:
        value = self.get(*path)
        return (
            float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        )

    def text(self, *path: str) -> str:
        """Return the text in lower case, as DeepSpeed compares most texts; "" where there is
        none."""
        value = self.get(*path)
        return value.lower() if isinstance(value, str) else ""

    def is_on(self, *path: str) -> bool:
        """Return whether the value is true for DeepSpeed's models."""
        value = self.get(*path)
        if isinstance(value, str):
            return value.lower() in TRUE_WORDS
        return bool(value)

    @property
    def stage(self) -> int | None:
        """Return the ZeRO stage; None where it is filled in later (auto) or is missing."""
        zero = self.get("zero_optimization")
        if isinstance(zero, bool):
            return int(zero)
        value = self.section("zero_optimization").get("stage", 0)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        return int(value) if isinstance(value, int | float) and value in (0, 1, 2, 3) else None

    @property
    def has_pipeline(self) -> bool:
        """Return whether there is a `pipeline` section, which only a PipelineModule reads."""
        return isinstance(self.get("pipeline"), Mapping)

    def offload(self, what: Literal["offload_optimizer", "offload_param"]) -> str:
        """Return the offload device, or "none"."""
        if what == "offload_optimizer" and self.get("zero_optimization", "cpu_offload") is True:
            return "cpu"
        return self.text("zero_optimization", what, "device") or "none"


RuleFunction = Callable[[LintedDsConfig], Iterator[RuleViolation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule:
    code: str
    severity: Severity
    at: Literal["key", "value"]
    help: str
    violations: RuleFunction

    def check(self, ds_config: LintedDsConfig) -> Iterator[LintFinding]:
        for key, message, help, fix, severity in self.violations(ds_config):
            severity, help = severity or self.severity, help or self.help
            yield LintFinding(
                code=self.code,
                key=key,
                message=message,
                help=help,
                severity=severity,
                at=self.at,
                fix=fix,
            )


def rule(
    code: str, severity: Severity = "error", at: Literal["key", "value"] = "value", help: str = ""
) -> Callable[[RuleFunction], LintRule]:
    """Register a rule; help: for faults without help of their own."""
    return lambda violations: LintRule(
        code=code, severity=severity, at=at, help=help, violations=violations
    )


def dotted(path: KeyPath) -> str:
    """Format a path: ("a", 0, "b") -> a[0].b."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def json_snippet(value: JsonValue) -> str:
    """Return a value as shortened JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
