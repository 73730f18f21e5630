"""1F1B over uneven stages in closed form, for at least as many micro-batches as stages; exact,
messages included.

DeepSpeed's schedule is a grid: in step t, stage s goes forward where t + s is even, after an
exchange with the stage before, and backward where it is odd, after one with the stage behind. A
rank waits for its partner in each exchange, so the step is the longest walk through the grid that,
from one step to the next, stays on its stage or crosses to the partner: rightwards into its forward
pass, leftwards into its backward pass.

- While t + s <= 2 p - 2 there are no gradients yet: backward places are empty. Any walk makes p
  forward passes there: one on each stage that it reaches, the others on the slowest of those.
  `_fill` is the longest to each stage.
- From t - s = 2 m - 1 on forward places are empty: the same backwards in time, forward and backward
  exchanged.
- Between, staying on a stage costs its forward and backward pass every two steps. Of two such
  stages the slower one costs more for all the time there is, so the longest walk goes straight to
  one stage k, stays, and goes straight on.

The step is the largest over k, with the stages c and e where the walk comes out of the first part
and into the last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def step_seconds(
    micro_batches: int, forward: Floats, backward: Floats, send_seconds: float
) -> Floats:
    """Seconds of each row's step. forward, backward: (partitions, stages), of one micro-batch;
    send: one message."""
    ranks = forward.shape[1]
    if ranks == 1:
        return micro_batches * (forward + backward)[:, 0]
    stage = np.arange(ranks)
    # A message over the boundary behind each stage, and over the one before it.
    behind: Floats = np.where(stage < ranks - 1, send_seconds, 0.0)
    before: Floats = np.where(stage > 0, send_seconds, 0.0)
    ahead, back = (
        forward + 2 * before,
        backward + 2 * behind,
    )  # a gradient and an activation in each exchange
    cycle = ahead + back
    entered = _fill(forward, before, behind)
    left = _fill(backward, before, behind) + 2 * behind
    ahead_to, back_to = np.cumsum(ahead, axis=1), np.cumsum(back, axis=1)
    back_below = back_to - back
    rounds = micro_batches - ranks

    # Axes: partition, k, and c or e. To come from a stage c to the left of k leaves c rounds more
    # for k than to come from the right, and so does e.
    share = stage * cycle[:, :, None]
    lower = stage[:, None] >= stage
    comes_right = (
        np.where(lower, (entered - ahead_to)[:, None, :] + share, -np.inf) + ahead_to[:, :, None]
    )
    leaves_left = np.where(stage[:, None] > stage, (left - back_to)[:, None, :] + share, -np.inf)
    leaves_left += back_below[:, :, None]
    comes_left = _largest_behind(entered + back_to) - back_below
    leaves_right = _largest_behind(ahead_to + left) - ahead_to
    right, left_out = comes_right.max(axis=2), leaves_left.max(axis=2)
    if rounds >= ranks:
        over_top = right + left_out
    else:
        # Rounds + c + e - k of them: e has to be at least k - rounds - c.
        least = np.clip(stage[:, None] - rounds - stage, 0, None)
        reach = np.take_along_axis(
            _largest_behind(leaves_left), np.broadcast_to(least, leaves_left.shape), axis=2
        )
        over_top = (comes_right + reach).max(axis=2)
    walks = (
        right + leaves_right + rounds * cycle,
        comes_left + left_out + rounds * cycle,
        over_top + back + (rounds - stage) * cycle,
        np.where(
            rounds + stage > 0,
            comes_left + ahead + leaves_right + (rounds + stage - 1) * cycle,
            -np.inf,
        ),
    )
    result: Floats = np.max(walks, axis=(0, 2))
    return result


def _fill(forward: Floats, before: Floats, behind: Floats) -> Floats:
    """The longest walk of p forward passes that ends on each stage: up to some stage h, the passes
    that are left on the slowest so far, and back through empty places. An exchange there is one
    message."""
    ranks = forward.shape[1]
    stage = np.arange(ranks)
    passes = forward + before
    slowest = np.maximum.accumulate(passes + behind, axis=1)
    reached = np.cumsum(passes, axis=1) + (ranks - 1 - stage) * slowest
    # From h back to c: the empty places of c + 1 to h.
    empty = np.cumsum(behind)
    return _largest_behind(reached + empty) - empty


def _largest_behind(values: Floats) -> Floats:
    """Of each place and those after it, on the last axis."""
    result: Floats = np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    return result
