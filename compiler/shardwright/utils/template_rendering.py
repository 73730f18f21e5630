"""Jinja2 templates of templates/, filled in."""

from __future__ import annotations

import shlex

from shardwright.utils.installation import templates_folder


def render_template(template: str, **variables: object) -> str:
    """Fill in a template of templates/. Raises jinja2's UndefinedError for a variable that is
    missing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # no plan needs them

    environment = Environment(
        loader=FileSystemLoader(templates_folder()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(template).render(**variables)
