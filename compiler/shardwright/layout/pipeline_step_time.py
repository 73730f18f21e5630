"""Seconds from the first forward pass of a step to its last backward pass, by the quickest exact
way there is."""

from __future__ import annotations

import functools

import numpy as np

from shardwright.layout import one_f_one_b_closed_form, vectorized_pipeline_simulation
from shardwright.layout.vectorized_pipeline_simulation import Floats

# DualPipeV over more ranks is bounded by its slowest one: reading so many instruction streams takes
# half a second.
MAX_SIMULATED_DUALPIPEV_RANKS = 16


def step_seconds_of_partitions(
    schedule: str,
    micro_batches: int,
    forward_seconds: Floats,
    backward_seconds: Floats,
    send_seconds: float,
) -> Floats:
    """Of each partition. forward, backward (partitions, stages): one micro-batch, recomputation in
    the backward pass; 2 p stages for dualpipev, whose rank r holds r and 2 p - 1 - r, and at least
    2 p micro-batches. send: one message.
    """
    if schedule == "1f1b" and micro_batches >= forward_seconds.shape[1]:
        return one_f_one_b_closed_form.step_seconds(
            micro_batches, forward_seconds, backward_seconds, send_seconds
        )
    return vectorized_pipeline_simulation.simulated_step_seconds(
        schedule, micro_batches, forward_seconds, backward_seconds, send_seconds
    )


@functools.lru_cache(maxsize=8192)
def step_seconds(
    schedule: str,
    micro_batches: int,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    send_seconds: float,
) -> float:
    """Of one partition."""
    forward, backward = np.array([forward_seconds]), np.array([backward_seconds])
    return float(
        step_seconds_of_partitions(schedule, micro_batches, forward, backward, send_seconds)[0]
    )
