"""`--fix`: edits in the text itself, so that comments, order and indentation stay. One finding at a
time, and the document is read and linted anew after each, for one edit moves the others.

Mended are only findings whose rule gives edits: a misspelt key with one near name that is not
given, a key beside the section that it belongs to, a number or boolean in quotes, what is
deprecated and has another spelling, a removed feature that is switched off, a key without effect
that DeepSpeed names. What needs a choice is left to a person.
"""

from __future__ import annotations

import json
import re

from shardwright.diagnostics import KeyPath
from shardwright.lint.ds_config_document import Document, parse_ds_config
from shardwright.lint.ds_config_linter import lint, linted_ds_config
from shardwright.lint.lint_rule import Audience, Edit, LintFinding

MOST_FIXES = 200


def fixed(
    document: Document, audience: Audience | None, world_size: int | None
) -> tuple[Document, tuple[LintFinding, ...]]:
    """The document with every fix applied, and what was mended. Hjson without quotes has no places
    and stays."""
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
    """None where the text has no place for an edit."""
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
    """As the section's first key, on a line of its own where the first one is."""
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
    """The entry with one comma, and its line where nothing else stands on it."""
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
