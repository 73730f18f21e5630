"""Which documents share a row: best fit decreasing, as in arXiv 2404.10830 (Fewer Truncations Improve Language
Modeling): the longest first, each into the fullest row that still has room for it."""

from __future__ import annotations

import numpy as np

from shardwright.data.rows import Indices


def pack(lengths: Indices, documents: Indices, room: int) -> tuple[Indices, Indices]:
    """(members, bounds) of rows.DocumentRows. lengths: of `documents`, each 1 to room.

    Rows stand in the order of their first document, and documents in their own order within a row.
    """
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(room + 1)]  # free tokens -> rows
    spaces = 0  # bit i: some row has i tokens free
    for place in np.argsort(-lengths, kind="stable"):
        size = int(lengths[place])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = room, len(rows)
            rows.append([])
        rows[row].append(int(documents[place]))
        left = space - size
        if left:
            by_space[left].append(row)
            spaces |= 1 << left
    ordered = sorted(sorted(row) for row in rows)
    return (
        np.asarray([d for row in ordered for d in row], dtype=np.int64),
        np.cumsum([0, *(len(row) for row in ordered)], dtype=np.int64),
    )
