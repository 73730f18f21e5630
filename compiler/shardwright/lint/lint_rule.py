"""What a rule sees, and what it says."""

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

Audience = Literal["deepspeed", "trainer"]
"""Who hands the file to DeepSpeed: a script of one's own, or the HF Trainer or Accelerate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """set: `path` gets `value`. rename: the key `path` becomes `name`. remove: `path` goes. add: a
    new key `path`."""

    kind: Literal["set", "rename", "remove", "add"]
    path: KeyPath
    value: JsonValue = None
    name: str = ""


class RuleViolation(NamedTuple):
    """What a rule's function yields. help, severity: "" for the rule's own. fix: edits that mend
    it; () where a person has to decide."""

    key: KeyPath
    message: str
    help: str = ""
    fix: tuple[Edit, ...] = ()
    severity: Severity | Literal[""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """A fault under its rule's code. at: whether the key or its value is to be shown."""

    code: str
    key: KeyPath
    message: str
    help: str
    severity: Severity = "error"
    at: Literal["key", "value"] = "value"
    fix: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LintedDsConfig:
    """declared: `--for` was given. world_size: ranks, or None. is_json: no Hjson in the file."""

    config: JsonObject
    schema_mismatches: tuple[SchemaMismatch, ...]
    ds_config_schema: DsConfigSchema
    audience: Audience
    is_audience_given: bool
    world_size: int | None
    is_plain_json: bool

    def get(self, *path: str) -> JsonValue:
        """None where there is nothing."""
        value: JsonValue = self.config
        for part in path:
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def has(self, *path: str) -> bool:
        return path[-1] in self.section(*path[:-1])

    def section(self, *path: str) -> JsonObject:
        """{} where there is none."""
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
        """ "" where it is none; small letters, for DeepSpeed compares most texts so."""
        value = self.get(*path)
        return value.lower() if isinstance(value, str) else ""

    def is_on(self, *path: str) -> bool:
        """True as DeepSpeed's models read it."""
        value = self.get(*path)
        if isinstance(value, str):
            return value.lower() in TRUE_WORDS
        return bool(value)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None where it is filled in later (auto) or is none."""
        zero = self.get("zero_optimization")
        if isinstance(zero, bool):
            return int(zero)
        value = self.section("zero_optimization").get("stage", 0)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        return int(value) if isinstance(value, int | float) and value in (0, 1, 2, 3) else None

    @property
    def has_pipeline(self) -> bool:
        """A `pipeline` section: only a PipelineModule reads it."""
        return isinstance(self.get("pipeline"), Mapping)

    def offload(self, what: Literal["offload_optimizer", "offload_param"]) -> str:
        """The device, "none" where nothing is offloaded."""
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
    """help: of faults that bring none of their own."""
    return lambda violations: LintRule(
        code=code, severity=severity, at=at, help=help, violations=violations
    )


def dotted(path: KeyPath) -> str:
    """("a", 0, "b") -> a[0].b"""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def json_snippet(value: JsonValue) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
