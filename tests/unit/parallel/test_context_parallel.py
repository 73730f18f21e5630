"""Rows cut over context ranks compute what one process computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright.parallel.context_parallel import CONTEXT_PARALLEL, contiguous_shard
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.utils.child_processes import free_port
from shardwright.utils.numeric_difference import largest_difference
from tests.unit.parallel.context_parallel_worker import CASES

RANKS = 2


def batch() -> MicroBatch:
    ids = torch.arange(1, 9).view(1, 8)
    return MicroBatch(
        input_ids=ids, labels=ids.clone(), position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    )


def test_the_label_of_a_pieces_last_token_is_the_next_pieces_first() -> None:
    first, second = (contiguous_shard(batch(), rank, 2) for rank in range(2))
    assert first.input_ids.tolist() == [[1, 2, 3, 4]] and first.labels.tolist() == [[2, 3, 4, 5]]
    assert second.input_ids.tolist() == [[5, 6, 7, 8]] and second.labels.tolist() == [
        [6, 7, 8, -100]
    ]
    assert first.predicted + second.predicted == batch().predicted == 7
    assert first.position_ids is not None and second.position_ids is not None
    assert torch.equal(first.position_ids, second.position_ids), (
        "those of the whole row: masks are made of them"
    )


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_token_of_a_packed_pair_goes_with_its_label(is_scored: bool) -> None:
    """The label that a place predicts, or whose score it reads; the counts are of whole ones."""
    completions, tokens = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 3]]), torch.arange(4)
    whole = replace(batch(), completions=completions, tokens=tokens, scored=is_scored)
    shards = [contiguous_shard(whole, rank, 2) for rank in range(2)]
    found = torch.cat([s.completions for s in shards if s.completions is not None], dim=1)
    own = completions if is_scored else completions[:, 1:]
    assert torch.equal(found[:, : own.shape[1]], own)
    assert all(torch.equal(s.tokens, tokens) for s in shards if s.tokens is not None)


def test_one_rank_takes_the_batch_as_it_is() -> None:
    whole = batch()
    assert contiguous_shard(whole, 0, 1) is whole


def test_switched_off_nothing_is_replaced() -> None:
    interface, preprocess = (
        type(ALL_ATTENTION_FUNCTIONS).get_interface,
        masking_utils._preprocess_mask_arguments,
    )
    CONTEXT_PARALLEL.use(None)
    assert type(ALL_ATTENTION_FUNCTIONS).get_interface is interface
    assert masking_utils._preprocess_mask_arguments is preprocess
    ids = torch.ones(1, 4, dtype=torch.long)
    assert CONTEXT_PARALLEL.keywords("sdpa", ids, None) == {}, "a model counts its positions itself"


@pytest.mark.launch
def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    worker, port = Path(__file__).with_name("context_parallel_worker.py"), free_port()
    root = str(Path(__file__).resolve().parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(RANKS), str(port), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    told = [process.communicate(timeout=900)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS, "\n".join(
        text[-3000:] for text in told
    )
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert set(found) == set(CASES)
        assert all(case["gradients"] > 30 for case in found.values()), found
        assert largest_difference(case["loss"] for case in found.values()) <= 5e-6, found
        assert largest_difference(case["gradient"] for case in found.values()) <= 1e-5, found
