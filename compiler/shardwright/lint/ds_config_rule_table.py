"""Every rule over a document, by its code. Codes that have none of their own here come from reading
the file (document.py), from a named model (memory.py) or from the lowering."""

from __future__ import annotations

from shardwright.lint import (
    ds_config_batch_rules,
    ds_config_key_rules,
    ds_config_optimizer_rules,
    ds_config_parallelism_rules,
    ds_config_precision_rules,
    ds_config_value_rules,
    ds_config_zero_rules,
)
from shardwright.lint.lint_rule import LintRule

_MODULES = (
    ds_config_batch_rules,
    ds_config_key_rules,
    ds_config_optimizer_rules,
    ds_config_parallelism_rules,
    ds_config_precision_rules,
    ds_config_value_rules,
    ds_config_zero_rules,
)
RULES: dict[str, LintRule] = {
    rule.code: rule
    for module in _MODULES
    for rule in vars(module).values()
    if isinstance(rule, LintRule)
}
