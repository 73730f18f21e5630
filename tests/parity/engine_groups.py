"""Many engines in one launch."""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist


def share_groups() -> None:
    """One process group per set of ranks: every engine makes its own, and their threads poll."""
    made: dict[tuple[int, ...], Any] = {}
    new_group = dist.new_group

    def shared(ranks: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = new_group(list(key))
        return made[key]

    dist.new_group = shared
