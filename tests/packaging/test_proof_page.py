"""The figures of docs/proof.md are those of the committed measurements."""

from __future__ import annotations

from tools.generate.proof_page import BEGIN, PAGE, marked, written


def test_the_table_of_proofs_is_what_benchmarks_say() -> None:
    """Whichever rows it marks as older than the code: `make generated` marks them anew."""
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page
    assert page == written(page, marked(page)), "run `make generated`"


def test_a_mark_that_was_wrapped_onto_the_next_line_is_not_written_twice() -> None:
    page = PAGE.read_text(encoding="utf-8")
    older = marked(page) | {"schedule"}
    page = written(page, older)
    wrapped = page.replace(
        "](../benchmarks/schedule.json) †", "](../benchmarks/schedule.json)\n  †"
    )
    assert wrapped.count("\n  †") > page.count("\n  †")
    assert written(wrapped, older) == wrapped and marked(wrapped) == older
