"""Score files: what is written is read back by sequence, and what is damaged or of something else
is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from shardwright.data.score_files import (
    FORMAT,
    MANIFEST,
    TRAIN,
    ScoreFile,
    ScoreManifest,
    is_score_file,
    pack_block,
    part_manifest,
    read_block,
    write_block,
    write_manifest,
)
from shardwright.diagnostics import Refusal

LENGTH, TOP, SEQUENCES, OF_A_BLOCK = 6, 3, 7, 4
DIGESTS = {"weights": "a" * 32, "data": "b" * 32}


def labels_and_values(top: int) -> tuple[np.ndarray, np.ndarray]:
    """is_label (7, 6) and the values that a trainer returns; the sequence 5 has no label."""
    random = np.random.default_rng(0)
    is_label = random.random((SEQUENCES, LENGTH)) < 0.5
    is_label[:, 0] = is_label[5] = False
    width = (2 + 2 * top,) if top else ()
    values = -random.random((SEQUENCES, LENGTH, *width)).astype(np.float32)
    if top:
        values[..., 2 : 2 + top] = random.integers(0, 100_000, (SEQUENCES, LENGTH, top))
    return is_label, values


def written(folder: Path, top: int) -> tuple[np.ndarray, np.ndarray]:
    is_label, values = labels_and_values(top)
    blocks = []
    for start in range(0, SEQUENCES, OF_A_BLOCK):
        own = slice(start, start + OF_A_BLOCK)
        arrays = pack_block(is_label[own], values[own], top)
        blocks.append(write_block(folder / f"train-{start:05d}.safetensors", start, arrays))
    manifest = ScoreManifest(
        format=FORMAT,
        digests=DIGESTS,
        top=top,
        sequence_length=LENGTH,
        sequences_per_example=1,
        parts={TRAIN: part_manifest(blocks)},
    )
    write_manifest(folder, manifest)
    return is_label, values


@pytest.mark.parametrize("top", [0, TOP])
def test_scores_are_read_by_sequence(top: int, tmp_path: Path) -> None:
    is_label, values = written(tmp_path, top)
    assert is_score_file(tmp_path)
    file = ScoreFile(tmp_path)
    part, chosen = file.part(TRAIN), np.array([6, 0, 5, 3])
    own = np.where(is_label, values[..., 0] if top else values, 0)
    assert np.array_equal(part.label_log_probabilities(chosen), own[chosen])
    assert np.allclose(part.sums()[0], own.astype(np.float64).sum(1), rtol=1e-15)
    manifest = file.manifest.parts[TRAIN]
    assert len(part) == SEQUENCES
    assert manifest.tokens == is_label.sum()
    assert math.isclose(manifest.loss, -own.astype(np.float64).sum() / is_label.sum())
    assert math.isclose(manifest.perplexity, math.exp(manifest.loss))
    if not top:
        with pytest.raises(Refusal, match="SW6270"):
            part.top(chosen)
        return
    found, kept = part.top(chosen), np.where(is_label[..., None], values, 0)[chosen]
    assert np.array_equal(found.is_label, is_label[chosen])
    assert np.array_equal(found.normalizers, kept[..., 1])
    assert found.ids.dtype == np.int32
    assert np.array_equal(found.ids, kept[..., 2 : 2 + TOP])
    assert np.array_equal(found.log_probabilities, kept[..., 2 + TOP :])


def test_a_block_is_a_safetensors_file(tmp_path: Path) -> None:
    arrays = pack_block(*labels_and_values(TOP), TOP)
    write_block(tmp_path / "block", 0, arrays)
    found = load_file(tmp_path / "block")
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_a_damaged_block_is_refused(tmp_path: Path) -> None:
    written(tmp_path, TOP)
    path = tmp_path / "train-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # of the last sequence's checksum
    path.write_bytes(content)
    assert read_block(path) is None
    part = ScoreFile(tmp_path).part(TRAIN)
    with pytest.raises(Refusal, match=r"SW6270.*train-00000"):
        part.sums()
    with pytest.raises(Refusal, match=rf"SW6270.*train-00000.* at sequence {OF_A_BLOCK - 1}:"):
        part.top(np.array([OF_A_BLOCK - 1]))
    # Of the other sequences nothing is damaged.
    part.top(np.array([0, OF_A_BLOCK]))


def test_each_damaged_byte_is_found(tmp_path: Path) -> None:
    written(tmp_path, TOP)
    path, every = tmp_path / "train-00000.safetensors", np.arange(OF_A_BLOCK)
    content = path.read_bytes()
    intact = ScoreFile(tmp_path).part(TRAIN).top(every)
    found = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            read = ScoreFile(tmp_path).part(TRAIN).top(every)
        except Refusal as refused:
            found += refused.diagnostics[0].code == "SW6270"
        else:
            assert np.array_equal(read.ids, intact.ids)
            assert np.array_equal(read.log_probabilities, intact.log_probabilities)
            assert np.array_equal(read.normalizers, intact.normalizers)
    assert found > 0.9 * len(content)


def test_headers_tell_missing_and_other_blocks(tmp_path: Path) -> None:
    written(tmp_path, TOP)
    path = tmp_path / "train-00000.safetensors"
    content = path.read_bytes()
    assert list(ScoreFile(tmp_path).check_blocks()) == [(1, 2), (2, 2)]
    other = (tmp_path / "train-00004.safetensors").read_bytes()
    for damaged in (b"", content[:40], content[:-1], content + b"0", other):
        path.write_bytes(damaged)
        with pytest.raises(Refusal, match=r"SW6270.*train-00000"):
            list(ScoreFile(tmp_path).check_blocks())
    path.unlink()
    with pytest.raises(Refusal, match=r"SW6270.*train-00000"):
        list(ScoreFile(tmp_path).check_blocks())


def test_another_block_of_the_same_name_is_refused(tmp_path: Path) -> None:
    is_label, values = written(tmp_path, 0)
    write_block(
        tmp_path / "train-00000.safetensors", 0, pack_block(is_label[:4], values[:4] * 2, 0)
    )
    with pytest.raises(Refusal, match="SW6270"):
        ScoreFile(tmp_path).part(TRAIN).sums()


def test_scores_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, 0)
    file = ScoreFile(tmp_path)
    file.check(DIGESTS)
    file.check({"data": DIGESTS["data"]})
    with pytest.raises(Refusal, match=r"SW6271.*the model's weights \(weights aaaaaaaaaaaa") as e:
        file.check({**DIGESTS, "weights": "c" * 32})
    assert "the data" not in str(e.value)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 9}'])
def test_another_folder_is_no_score_file(text: str, tmp_path: Path) -> None:
    assert not is_score_file(tmp_path)
    (tmp_path / MANIFEST).write_text(text)
    assert not is_score_file(tmp_path)
    with pytest.raises(Refusal, match="SW6270"):
        ScoreFile(tmp_path)


def test_a_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 0)
    path = tmp_path / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(Refusal, match=r"SW6270.*format"):
        ScoreFile(tmp_path)
