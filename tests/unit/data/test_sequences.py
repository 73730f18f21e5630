"""Packing, order and mixtures: functions of their arguments alone, checked by what they have to
hold."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from shardwright.data.dataset import epochs_to_steps, with_resolved_epochs
from shardwright.data.indexed_dataset import Documents, open_megatron
from shardwright.data.sequences import (
    ArraySequences,
    ConcatSequences,
    DocumentSequences,
    EpochSampler,
    MixtureSampler,
    pack,
)
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import PlanScheduler
from shardwright.recipe.recipe_types import ValidationSection
from tests.unit.data.data_plans import opened, part, plan, refused


def test_packed_documents_are_all_there_and_fit() -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(1, 65, 5000)
    documents = np.arange(5000) * 2
    members, bounds = pack(lengths, documents, 64)
    assert sorted(members) == documents.tolist()
    size = dict(zip(documents.tolist(), lengths.tolist(), strict=True))
    rows = [members[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    filled = [sum(size[d] for d in row) for row in rows]
    assert max(filled) <= 64 and min(map(len, rows)) >= 1
    assert all(row == sorted(row) for row in rows) and rows == sorted(rows)
    assert sum(filled) / (64 * len(rows)) > 0.99, "little padding is left"
    again = pack(lengths, documents, 64)
    assert np.array_equal(again[0], members) and np.array_equal(again[1], bounds)


def test_packing_of_edges() -> None:
    for lengths, rows in (([], 0), ([8], 1), ([8, 8], 2), ([1] * 8, 1), ([5, 4, 3, 4], 2)):
        members, bounds = pack(np.asarray(lengths, dtype=np.int64), np.arange(len(lengths)), 8)
        assert (len(members), len(bounds) - 1) == (len(lengths), rows)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_tell_where_their_padding_begins(packed: bool) -> None:
    """Beside rows without documents, too, which have none."""
    ends = np.cumsum([5, 9, 2])
    documents = Documents(tokens=np.arange(1, 17), ends=ends, trained=None)
    bounds = np.array([0, 2, 3] if packed else [0, 1, 2, 3])
    rows = DocumentSequences(documents, 8, packed, np.array([0, 2, 1]), bounds)
    wanted = [7, 8] if packed else [5, 2, 8]  # what is longer than a row is cut
    lengths = rows.read(np.arange(len(rows))).lengths
    assert lengths is not None and lengths.tolist() == wanted
    joined = ConcatSequences((ArraySequences(np.ones((2, 8), dtype=np.int64)), rows))
    lengths = joined.read(np.array([2, 0, 3])).lengths
    assert lengths is not None and lengths.tolist() == [wanted[0], 8, wanted[1]]
    assert joined.read(np.array([0, 1])).lengths is None


def test_unshuffled_step_takes_its_block_of_rows() -> None:
    order = EpochSampler(30, 12, 3, shuffle=False)
    assert order.indices(1).tolist() == list(range(12))
    assert order.indices(2).tolist() == list(range(12, 24))
    assert order.indices(3).tolist() == list(range(12)), (
        "rows 24-29 are no full batch: a new epoch starts"
    )


def test_shuffle_visits_each_row_once_an_epoch_and_differs_between_epochs() -> None:
    order = EpochSampler(24, 12, 3, shuffle=True)
    epochs = [np.concatenate([order.indices(s) for s in (2 * e + 1, 2 * e + 2)]) for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0].tolist() != epochs[1].tolist()
    fresh = EpochSampler(24, 12, 3, shuffle=True)
    assert fresh.indices(3).tolist() == epochs[1][:12].tolist(), (
        "no state in the order: a resumed run goes on"
    )


def test_each_seed_and_each_part_has_an_order_of_its_own() -> None:
    orders = [EpochSampler(24, 24, seed, shuffle=True).indices(1).tolist() for seed in (0, 1, 2)]
    assert (
        all(sorted(order) == list(range(24)) for order in orders)
        and len({tuple(o) for o in orders}) == 3
    )
    mixtures = []
    for seed in (0, 1):
        rows = MixtureSampler((24, 24), (1.0, 1.0), 48, seed, shuffle=True).indices(1)
        parts = [rows[rows < 24].tolist(), (rows[rows >= 24] - 24).tolist()]
        assert sorted(parts[0]) == sorted(parts[1]) == list(range(24))
        mixtures += parts
    assert len({tuple(part) for part in mixtures}) == 4


def test_an_epoch_of_a_mixture_has_as_many_rows_as_its_parts() -> None:
    assert MixtureSampler((10, 17), (1.0, 3.0), 8, 1, shuffle=True).steps_per_epoch == 3
    unshuffled = MixtureSampler((4, 4), (1.0, 1.0), 4, 1, shuffle=False)
    assert sorted(unshuffled.indices(1)) == [0, 1, 4, 5] and sorted(unshuffled.indices(2)) == [
        2,
        3,
        6,
        7,
    ]


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.2, 0.5, 0.3), (1.0,), (5.0, 1e-3)])
def test_a_mixture_has_its_weights_in_every_stretch(weights: tuple[float, ...]) -> None:
    counts = [10 + 7 * n for n in range(len(weights))]
    order = MixtureSampler(counts, weights, 8, 1, shuffle=True)
    firsts = np.cumsum([0, *counts])
    rows = np.concatenate([order.indices(s) for s in range(1, 101)])
    owner = np.searchsorted(firsts, rows, side="right") - 1
    for part_number, weight in enumerate(weights):
        share = weight / sum(weights)
        taken = np.cumsum(owner == part_number)
        wanted = np.arange(1, len(rows) + 1) * share
        assert np.abs(taken - wanted).max() <= len(weights), "never further off than a row a part"
        own = rows[owner == part_number] - firsts[part_number]
        n = counts[part_number]
        for epoch in range(len(own) // n):
            assert sorted(own[epoch * n : (epoch + 1) * n]) == list(range(n)), (
                "each part goes through its own rows"
            )
    fresh = MixtureSampler(counts, weights, 8, 1, shuffle=True)
    assert np.array_equal(fresh.indices(77), order.indices(77))


def test_a_mixture_of_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 4)
    np.save(tmp_path / "b.npy", np.full((6, 4), 7))
    parts = (
        part("text", tmp_path / "a.txt", weight=1.0),
        part("tokens", tmp_path / "b.npy", weight=2.0),
    )
    data = opened(plan(part("mixture", mixture=parts), length=4, batch=6), tmp_path)
    block = data.train.read(data.order.indices(1))
    assert int((block.tokens == 7).all(axis=1).sum()) == 4
    assert block.starts is not None and block.starts.sum() == 1


def test_epochs_become_steps(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.zeros((23, 4), dtype=np.uint8))
    data = part("tokens", tmp_path / "b.npy")
    for epochs, steps in ((1, 4), (2, 8), (0.5, 2), (0.1, 1), (2.3, 10)):
        assert (
            opened(plan(data, batch=5, epochs=epochs), tmp_path).steps
            == steps
            == epochs_to_steps(epochs, 4)
        )


def test_a_schedule_is_resolved_or_too_long() -> None:
    ratio = PlanScheduler(name="wsd", warmup_steps=0, min_lr=0.0, decay_steps=5, warmup_ratio=0.25)
    p = dataclasses.replace(plan(part("synthetic"), epochs=2), scheduler=ratio)
    done = with_resolved_epochs(p, 20)
    assert (done.training.steps, done.scheduler.warmup_steps) == (20, 5)
    with pytest.raises(Refusal) as caught:
        with_resolved_epochs(p, 6)
    assert caught.value.diagnostics[0].code == "SW6122"


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5])
def test_held_out_rows_are_never_trained_on(tmp_path: Path, fraction: float) -> None:
    np.save(tmp_path / "a.npy", np.repeat(np.arange(50)[:, None], 4, axis=1))
    held = ValidationSection(every_steps=1, fraction=fraction, data=None)
    p = plan(part("tokens", tmp_path / "a.npy", shuffle=True), validation=held)
    data = opened(p, tmp_path)
    assert data.validation is not None
    count = max(1, round(50 * fraction))
    held_out = data.validation.read(np.arange(len(data.validation))).tokens[:, 0].tolist()
    seen = {
        int(t) for s in range(1, 200) for t in data.train.read(data.order.indices(s)).tokens[:, 0]
    }
    assert (
        len(held_out) == count
        and not seen & set(held_out)
        and seen | set(held_out) == set(range(50))
    )


def test_no_validation_data(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("ab")
    held = ValidationSection(every_steps=1, fraction=None, data=part("text", tmp_path / "v.txt"))
    assert refused(plan(part("synthetic"), validation=held), tmp_path)[0] == "SW6123"


def test_megatron_files_are_rows_of_documents(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], documents=[0, 1, 3, 4])
    data = opened(plan(part("megatron", tmp_path / "m", tokenizer=None), batch=1), tmp_path)
    block = data.train.read(np.arange(2))
    assert block.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert block.starts is not None and block.starts.astype(int).tolist() == [
        [1, 0, 0, 1],
        [0, 0, 1, 0],
    ]
    for name, damage in (
        ("m.bin", b"x"),
        ("m.idx", b"MMIDIDX\0\0" + bytes(20)),
        ("m.idx", b"no index"),
    ):
        (tmp_path / name).write_bytes(damage)
        assert (
            refused(plan(part("megatron", tmp_path / "m", tokenizer=None)), tmp_path)[0] == "SW6119"
        )


WRITTEN: dict[str, tuple[str, str]] = {
    "int32": (
        """4d4d49444944580000 0100000000000000 04 0300000000000000 0300000000000000 03000000 02000000 01000000
        0000000000000000 0c00000000000000 1400000000000000 0000000000000000 0200000000000000 0300000000000000""",  # noqa: E501
        "01000000 02000000 03000000 04000000 05000000 06000000",
    ),
    "uint16": (
        """4d4d49444944580000 0100000000000000 08 0300000000000000 0300000000000000 03000000 02000000 01000000
        0000000000000000 0600000000000000 0a00000000000000 0000000000000000 0200000000000000 0300000000000000""",  # noqa: E501
        "0100 0200 0300 0400 0500 0600",
    ),
}
"""The .idx and .bin that megatron-core 0.16.1's IndexedDatasetBuilder wrote, of add_document([1, 2,
3, 4, 5], [3, 2]) and add_document([6], [1])."""


@pytest.mark.parametrize("dtype", WRITTEN)
def test_what_megatron_core_wrote(dtype: str, tmp_path: Path) -> None:
    for ending, text in zip((".idx", ".bin"), WRITTEN[dtype], strict=True):
        (tmp_path / f"m{ending}").write_bytes(bytes.fromhex(text))
    documents = open_megatron(str(tmp_path / "m"))
    assert documents.tokens.dtype == dtype
    assert documents.tokens.tolist() == [1, 2, 3, 4, 5, 6] and documents.ends.tolist() == [5, 6]


def write_megatron(path: Path, sequences: list[list[int]], documents: list[int]) -> None:
    """As megatron-core's _IndexWriter does, uint16."""
    lengths = np.asarray([len(s) for s in sequences], dtype=np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * 2
    with path.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([8]))
        file.write(len(lengths).to_bytes(8, "little") + len(documents).to_bytes(8, "little"))
        file.write(
            lengths.tobytes() + pointers.tobytes() + np.asarray(documents, dtype=np.int64).tobytes()
        )
    path.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(np.uint16).tobytes())
