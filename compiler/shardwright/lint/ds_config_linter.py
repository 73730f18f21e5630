"""A document -> what is wrong with it, in the order of the file."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, Location
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema
from shardwright.engines.deepspeed.ds_config_validation import schema_mismatches
from shardwright.lint.ds_config_document import Document
from shardwright.lint.ds_config_rule_table import RULES
from shardwright.lint.ds_config_value_rules import TRAINER_AUTO_KEYS
from shardwright.lint.lint_rule import Audience, LintedDsConfig, LintFinding, dotted


def linted_ds_config(
    document: Document, audience: Audience | None = None, world_size: int | None = None
) -> LintedDsConfig:
    """audience None: the Trainer's where the file holds an "auto" that the Trainer fills in."""
    known = ds_config_schema()
    found = schema_mismatches(document.config, known)
    guessed: Audience = "deepspeed"
    if any(misfit.kind == "auto" and dotted(misfit.path) in TRAINER_AUTO_KEYS for misfit in found):
        guessed = "trainer"
    return LintedDsConfig(
        config=document.config,
        schema_mismatches=found,
        ds_config_schema=known,
        audience=audience or guessed,
        is_audience_given=audience is not None,
        world_size=world_size,
        is_plain_json=document.is_plain_json,
    )


def lint(document: Document, ds_config: LintedDsConfig) -> tuple[LintFinding, ...]:
    """By place in the file; at one place errors first."""
    found = [finding for rule in RULES.values() for finding in rule.check(ds_config)]
    return tuple(sorted(found, key=lambda f: _order(document, f)))


def diagnostic(document: Document, found: LintFinding) -> Diagnostic:
    return Diagnostic(
        code=found.code,
        message=found.message,
        severity=found.severity,
        help=found.help,
        key=found.key,
        location=_location(document, found),
    )


def _location(document: Document, found: LintFinding) -> Location:
    """That of the key or value; of the nearest section that the file has; of its first line."""
    tables = (document.source.key_locations, document.source.locations)
    for table in tables if found.at == "key" else reversed(tables):
        if found.key and found.key in table:
            return table[found.key]
    key = found.key
    while key:
        key = key[:-1]
        for table in tables:
            if key and key in table:
                return table[key]
    return Location(
        file=document.name, line=1 if document.values else 0, column=1 if document.values else 0
    )


def _order(document: Document, found: LintFinding) -> tuple[int, int, bool, str]:
    place = _location(document, found)
    return place.line, place.column, found.severity != "error", found.code
