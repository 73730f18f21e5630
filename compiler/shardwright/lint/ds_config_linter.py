"""Lint a document: return its faults in the order of the file."""

from __future__ import annotations

import json
import re

from shardwright.diagnostics import Diagnostic, KeyPath, Location
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema, schema_mismatches
from shardwright.lint import (
    ds_config_key_rules,
    ds_config_parallelism_rules,
    ds_config_training_rules,
)
from shardwright.lint.ds_config_document import Document, parse_ds_config
from shardwright.lint.ds_config_key_rules import TRAINER_AUTO_KEYS
from shardwright.lint.lint_rule import Audience, Edit, LintedDsConfig, LintFinding, LintRule, dotted

# Every rule over a document, by its code. Codes that have none of their own here come from reading
# the file (document.py), from a named model (memory.py) or from the lowering.


_MODULES = (
    ds_config_training_rules,
    ds_config_key_rules,
    ds_config_training_rules,
    ds_config_parallelism_rules,
    ds_config_training_rules,
    ds_config_key_rules,
    ds_config_parallelism_rules,
)
RULES: dict[str, LintRule] = {
    rule.code: rule
    for module in _MODULES
    for rule in vars(module).values()
    if isinstance(rule, LintRule)
}


def linted_ds_config(
    document: Document, audience: Audience | None = None, world_size: int | None = None
) -> LintedDsConfig:
    """Prepare a document; audience None: the Trainer's where the file has an "auto" for it to
    fill in."""
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
    """Return the findings by position in the file, errors first."""

    def order(found: LintFinding) -> tuple[int, int, bool, str]:
        place = _location(document, found)
        return place.line, place.column, found.severity != "error", found.code

    found = (finding for rule in RULES.values() for finding in rule.check(ds_config))
    return tuple(sorted(found, key=order))


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
    """Return the position of the key or value, of its nearest section, or of the first line."""
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


# `--fix`: edits in the text itself, so that comments, order and indentation stay. One finding at a
# time, and the document is read and linted anew after each, for one edit moves the others.
#
# Mended are only findings whose rule gives edits: a misspelt key with one near name that is not
# given, a key beside the section that it belongs to, a number or boolean in quotes, what is
# deprecated and has another spelling, a removed feature that is switched off, a key without effect
# that DeepSpeed names. What needs a choice is left to a person.


MOST_FIXES = 200


def fixed(
    document: Document, audience: Audience | None, world_size: int | None
) -> tuple[Document, tuple[LintFinding, ...]]:
    """Return the document with every fix applied, and the findings that were fixed.

    Hjson without quotes has no positions and stays unchanged.
    """
    applied_fixes: list[LintFinding] = []
    while len(applied_fixes) < MOST_FIXES:
        findings = lint(document, linted_ds_config(document, audience, world_size))
        changed = next(
            filter(None, (_apply(document, found) for found in findings if found.fix)), None
        )
        if changed is None:
            break
        document, found = changed
        applied_fixes.append(found)
    return document, tuple(applied_fixes)


def _apply(document: Document, found: LintFinding) -> tuple[Document, LintFinding] | None:
    """Apply one fix; None where the text has no position for it."""
    current = document
    for edit in found.fix:
        text = _edit(current, edit)
        if text is None or text == current.text:
            return None
        current = parse_ds_config(current.name, text)
    return current, found


def _edit(document: Document, edit: Edit) -> str | None:
    text = document.text
    if edit.kind == "add":
        return _add(document, edit.path, json.dumps(edit.value))
    if edit.path not in document.values:
        return None
    start, end = document.values[edit.path]
    if edit.kind == "set":
        return text[:start] + json.dumps(edit.value) + text[end:]
    if edit.kind == "rename":
        start, end = document.keys[edit.path]
        return text[:start] + json.dumps(edit.name) + text[end:]
    return _remove(document, edit.path)


def _add(document: Document, path: KeyPath, value: str) -> str | None:
    """Add a section's first key, on a line of its own where the first key has one."""
    section = document.values.get(path[:-1])
    if section is None or document.uncommented[section[0]] != "{":
        return None
    entry = f"{json.dumps(path[-1])}: {value}"
    inside = [span[0] for key, span in document.keys.items() if key[:-1] == path[:-1]]
    at = min(inside, default=section[0] + 1)
    if not inside:
        return document.text[:at] + entry + document.text[at:]
    before = re.search(r"\s*\Z", document.text[:at])
    gap = before[0] if before and "\n" in before[0] else " "
    return document.text[:at] + f"{entry},{gap}" + document.text[at:]


def _remove(document: Document, path: KeyPath) -> str:
    """Remove an entry with one comma, and its line where nothing else is on it."""
    text, uncommented = document.text, document.uncommented
    start, end = document.keys[path][0], document.values[path][1]
    following = re.compile(r"\s*,").match(uncommented, end)
    if following:
        end = following.end()
    else:
        before = re.search(r",\s*\Z", uncommented[:start])
        start = before.start() if before else start
        return text[:start] + text[end:]
    line_start = text.rfind("\n", 0, start) + 1
    rest = re.compile(r"[ \t]*(\r\n|\n|\r)").match(text, end)
    if rest and not text[line_start:start].strip():
        return text[:line_start] + text[rest.end() :]
    spaces = re.compile(r"[ \t]*").match(text, end)
    return text[:start] + text[spaces.end() if spaces else end :]
