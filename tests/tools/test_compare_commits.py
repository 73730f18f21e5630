"""What compare_commits.py calls a difference."""

from __future__ import annotations

from tools.compare_commits import differences


def test_every_kind_of_difference_is_told() -> None:
    before = {"same": "1", "other": "1", "gone": "1"}
    assert differences(before, {"same": "1", "other": "2", "new": "1"}) == [
        "gone     gone",
        "new      new",
        "changed  other",
    ]
    assert not differences(before, dict(before))
