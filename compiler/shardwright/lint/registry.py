"""Every rule over a document, by its code. Codes that have none of their own here come from reading
the file (document.py), from a named model (memory.py) or from the lowering."""

from __future__ import annotations

from shardwright.lint.rules import batch, keys, optimizer, parallel, precision, values, zero
from shardwright.lint.subject import LintRule

_MODULES = (batch, keys, optimizer, parallel, precision, values, zero)
RULES: dict[str, LintRule] = {
    rule.code: rule
    for module in _MODULES
    for rule in vars(module).values()
    if isinstance(rule, LintRule)
}
