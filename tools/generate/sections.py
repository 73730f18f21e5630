"""The sections of pages that generators write."""

from __future__ import annotations


def replace_section(page: str, begin: str, end: str, body: str) -> str:
    """Return the page with `body` between its lines `begin` and `end`."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{body}\n{end}{after}"
