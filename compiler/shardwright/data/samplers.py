"""Says which rows a step takes, as a function of the seed and the step alone, so that a resumed run
goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.data.sequences import Indices


class EpochShuffle:
    """Puts the rows of one part in an order of its own each epoch; without shuffle it is the
    file's."""

    def __init__(self, count: int, seed: Sequence[int], *, shuffle: bool) -> None:
        self.count, self.seed, self.shuffle = count, tuple(seed), shuffle
        self._order: tuple[int, Indices] | None = None

    def epoch(self, number: int) -> Indices:
        if self._order is None or self._order[0] != number:
            random = np.random.default_rng([*self.seed, number])
            self._order = (
                number,
                random.permutation(self.count) if self.shuffle else np.arange(self.count),
            )
        return self._order[1]


class EpochSampler:
    """Step k of an epoch takes the k-th block of global_batch_size rows; the remainder of an epoch
    is dropped."""

    def __init__(self, count: int, batch: int, seed: int, *, shuffle: bool) -> None:
        self._shuffle, self.batch = EpochShuffle(count, [seed], shuffle=shuffle), batch
        self.steps_per_epoch = count // batch

    def indices(self, step: int) -> Indices:
        """Returns the rows of the global batch of `step` (from 1)."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        return self._shuffle.epoch(epoch)[position * self.batch : (position + 1) * self.batch]


class MixtureSampler:
    """Takes row by row from the part that is owed most, so that every stretch of rows has the
    weights' shares, to a row.

    Each part goes through its own rows, epoch after epoch. An epoch of the mixture has as many rows
    as all parts together: within it a part with more than its share of weight is repeated, and one
    with less is seen in part.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        batch: int,
        seed: int,
        *,
        shuffle: bool,
    ) -> None:
        self.counts, self.batch = list(counts), batch
        self.firsts = np.cumsum([0, *counts])
        # What is left of the whole when the parts before have taken theirs: each part is drawn
        # against the rest of it.
        rests = np.cumsum(np.asarray(weights, dtype=np.float64)[::-1])[::-1]
        self.shares = [w / rest for w, rest in zip(weights, rests, strict=True)]
        self._parts = [
            EpochShuffle(n, [seed, part], shuffle=shuffle) for part, n in enumerate(counts)
        ]
        self.steps_per_epoch = sum(counts) // batch

    def indices(self, step: int) -> Indices:
        """Returns what EpochSampler's does."""
        rest = np.arange((step - 1) * self.batch, step * self.batch, dtype=np.int64)
        out, places = np.empty(self.batch, dtype=np.int64), np.arange(self.batch)
        for part, share in enumerate(self.shares):
            before, after = (
                np.floor((rest + more) * share + 0.5).astype(np.int64) for more in (0, 1)
            )
            mine = (
                after > before
                if part < len(self.shares) - 1
                else np.ones(len(rest), dtype=np.bool_)
            )
            taken = before[mine] if part < len(self.shares) - 1 else rest[mine]
            epochs, positions = np.divmod(taken, self.counts[part])
            rows = np.empty(len(taken), dtype=np.int64)
            for epoch in np.unique(epochs):
                rows[epochs == epoch] = self._parts[part].epoch(int(epoch))[
                    positions[epochs == epoch]
                ]
            out[places[mine]] = rows + self.firsts[part]
            rest, places = (rest - before)[~mine], places[~mine]
        return out


Sampler = EpochSampler | MixtureSampler
