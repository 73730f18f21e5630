"""Plans with nothing but what the data reads of them, and tiny tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import Dataset, resolve
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import PlanScheduler, PlanTraining
from shardwright.recipe.recipe_types import DataSection, ValidationSection


def part(kind: str, path: object = None, **more: Any) -> DataSection:
    defaults: dict[str, Any] = {"tokenizer": "byte", "shuffle": False}
    defaults["packing"] = kind != "preference"
    return DataSection(kind=kind, path=None if path is None else str(path), **(defaults | more))


def plan(
    data: DataSection,
    *,
    length: int = 4,
    vocabulary: int = 256,
    batch: int = 2,
    epochs: float | None = None,
    validation: ValidationSection | None = None,
) -> Any:
    training = PlanTraining(
        sequence_length=length,
        global_batch_size=batch,
        steps=0 if epochs else 3,
        precision="fp32",
        gradient_accumulation_dtype="fp32",
        gradient_clipping=1.0,
        seed=7,
        epochs=epochs,
    )
    scheduler = PlanScheduler(name="cosine", warmup_steps=0, min_lr=0.0, decay_steps=None)
    return PlanLike(
        data=data,
        training=training,
        scheduler=scheduler,
        model=SimpleNamespace(vocabulary_size=vocabulary),
        validation=validation,
    )


@dataclass(frozen=True)
class PlanLike:
    data: DataSection
    training: PlanTraining
    scheduler: PlanScheduler
    model: Any
    validation: ValidationSection | None

    @property
    def sequences_per_step(self) -> int:
        return self.training.global_batch_size


def opened(p: Any, folder: Path, *, limit: int | None = None) -> Dataset:
    prepare(p, folder, limit_bytes=limit)
    return resolve(p, folder)[1]


def refused(p: Any, folder: Path, *, limit: int | None = None) -> tuple[str, str]:
    """(code, message); every refusal says how to go on."""
    with pytest.raises(Refusal) as refusal:
        opened(p, folder, limit=limit)
    first = refusal.value.diagnostics[0]
    assert first.help
    left = [path.name for path in (folder / "run" / "data").glob(".partial*")]
    assert not left, "nothing half-written is left"
    return first.code, first.message
