"""What a recipe has a run keep track of, beside its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSection:
    project: str
    entity: str | None
    name: str | None  # None: the recipe's


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScaleSection:
    """every_steps: a step in so many is measured. rows: of it, its first ones, up to the end of a
    micro-batch."""

    every_steps: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSection:
    tensorboard: bool
    wandb: WandbSection | None
    noise_scale: NoiseScaleSection | None = None
