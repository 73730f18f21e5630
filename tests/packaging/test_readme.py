"""The README's figures are those of the committed measurements."""

from __future__ import annotations

from tests.proof import BEGIN, ROOT, marked, written


def test_the_table_of_proofs_is_what_benchmarks_say() -> None:
    """Whichever rows it marks as older than the code: `make proof` marks them anew."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert BEGIN in readme
    assert readme == written(readme, marked(readme)), "run `make proof`"
