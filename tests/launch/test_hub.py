"""A model by its hub id, from the cache alone: compiled, trained in a pipeline, equal to the plain
process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    WEIGHT_ABSOLUTE,
    Case,
    difference_of,
    reference,
    run_case,
    write_inputs,
)

pytestmark = pytest.mark.launch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_pretrained_weights_of_the_cache_train_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(model="llama", pipeline=2, pretrained=True)
    tokens = write_inputs(case, tmp_path)
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    shutil.move(tmp_path / "weights", repository / "snapshots" / COMMIT)
    document = json.loads((tmp_path / "recipe.yaml").read_text())
    document["model"]["source"] = "org/tiny"
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    lines, weights = run_case(case, tmp_path)

    model = json.loads((tmp_path / "out" / "plan.json").read_text())["model"]
    assert (model["revision"], model["weights_path"]) == (
        COMMIT,
        str(repository / "snapshots" / COMMIT),
    )
    difference = difference_of(lines, weights, reference(case, tokens))
    assert difference.loss_absolute <= LOSS_ABSOLUTE, difference
    assert difference.norm_relative <= NORM_RELATIVE, difference
    assert difference.weight_absolute <= WEIGHT_ABSOLUTE, difference
