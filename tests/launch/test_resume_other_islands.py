"""A training goes on with more islands, with fewer and as one world: as one process that does the
same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.utils.numeric_difference import state_dict_max_abs_diff
from shardwright.verify.reference_run import cosine, mean_loss
from tests.parity import harness
from tests.parity.harness import LR, SEED, WARMUP, must, shardwright
from tests.parity.islands import (
    EVERY,
    OUTER,
    island_losses,
    mix,
    moved,
    one_island,
    outer_step,
    plain,
    rounds,
    write_inputs,
)
from tests.parity.models import MODELS
from tests.parity.reference import initial_model, token_rows

pytestmark = pytest.mark.launch
BATCH, STEPS = 12, 12
CASE = one_island(data=1, accumulation=BATCH // 2)


def compile_anew(folder: Path, islands: int, steps: int) -> Path:
    """The same recipe for so many islands of one rank, to so many steps."""
    recipe: dict[str, Any] = json.loads((folder / "recipe.yaml").read_text())
    cluster, training, launch = (dict(recipe[name]) for name in ("cluster", "training", "launch"))
    cluster |= {"islands": islands, "nodes": islands}
    training |= {"steps": steps}
    if islands == 1:
        del (
            cluster["islands"],
            cluster["inter_island_gbits_per_second"],
            training["outer"],
            launch["outer_store"],
        )
    (folder / "changed.yaml").write_text(
        json.dumps({**recipe, "cluster": cluster, "training": training, "launch": launch})
    )
    must(shardwright("compile", folder / "changed.yaml", "-o", folder / "out"))
    return folder / "out"


class Process:
    """What the islands and then the one world do. Its learning rate follows the steps of each
    compile."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens
        self.models = [initial_model(MODELS[CASE.model], SEED) for _ in range(3)]
        self.optimizers = [plain(model, CASE) for model in self.models]
        self.anchor = {name: p.detach().clone() for name, p in self.models[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.anchor.items()}
        self.losses: dict[int, list[float]] = {}

    def train(self, step: int, islands: int, taking: int, steps: int) -> None:
        """`taking`: the first so many of `islands`, among whom the rows are divided."""
        [block] = token_rows(self.tokens, step, BATCH)
        share = BATCH // islands
        rate = LR * step / WARMUP if step <= WARMUP else cosine(LR, step, WARMUP, steps)
        self.losses[step] = []
        for k in range(taking):
            loss = mean_loss(
                self.models[k],
                [{n: v[k * share : (k + 1) * share] for n, v in block.items()}],
                own_loss=True,
            )
            loss.backward()
            self.optimizers[k].accumulate_master_gradients()
            self.optimizers[k].step(rate)
            self.losses[step].append(float(loss.detach()))

    def meet(self, taking: int, joins: int | None = None) -> None:
        deltas = [moved(model, self.anchor, OUTER["nesterov"]) for model in self.models[:taking]]
        outer_step(deltas, self.anchor, self.momentum, OUTER["nesterov"])
        for model in self.models[:taking]:
            mix(model, self.anchor, 1.0)
        if joins is not None:
            self.models[joins].load_state_dict(self.models[0].state_dict())
            self.optimizers[joins] = plain(self.models[joins], CASE)
            self.optimizers[joins].base.load_state_dict(
                copy.deepcopy(self.optimizers[0].base.state_dict())
            )


@pytest.mark.prove
def test_two_islands_then_three_then_one_world_then_two(tmp_path: Path) -> None:
    write_inputs(CASE, tmp_path, OUTER["nesterov"], deadline=30.0)
    shape = ((STEPS + EVERY) * BATCH, harness.LENGTH)
    tokens = np.random.default_rng(SEED).integers(
        0, MODELS[CASE.model]["vocab_size"], shape, dtype=np.int32
    )
    np.save(tmp_path / "tokens.npy", tokens)
    wanted = Process(tokens)
    out = compile_anew(tmp_path, 2, EVERY)
    must(shardwright("run", out, "--island", "all"))
    for step in range(1, EVERY + 1):
        wanted.train(step, 2, 2, EVERY)
    wanted.meet(2)

    # A third one: it waits for the others' outer step, and takes the weights, momentum and moments
    # of island 0.
    compile_anew(tmp_path, 3, 2 * EVERY)
    told = must(shardwright("run", out, "--island", "all"))
    assert "SW6207" not in told.stdout + told.stderr, "the rows come in the same order"
    assert [(r["step"], r["members"], r["joined"]) for r in rounds(out)] == [
        (4, [0, 1], []),
        (8, [0, 1], [2]),
    ]
    for step in range(EVERY + 1, 2 * EVERY + 1):
        wanted.train(step, 3, 2, 2 * EVERY)
    wanted.meet(2, joins=2)
    for k in range(2):
        assert max(abs(island_losses(out, k)[s] - wanted.losses[s][k]) for s in range(1, 9)) <= 1e-5

    # One world: nothing starts anew in silence, and nothing goes on from the middle of a round.
    compile_anew(tmp_path, 1, STEPS)
    refused = shardwright("run", out)
    newest = harness.newest_checkpoint(out / "island-0")
    assert refused.returncode == 1 and "SW6218" in refused.stderr and str(newest) in refused.stderr
    must(shardwright("run", out, "--resume", newest))
    for step in range(2 * EVERY + 1, STEPS + 1):
        wanted.train(step, 1, 1, STEPS)
    found = {line["step"]: line["loss"] for line in harness.metrics(out)}
    assert list(found) == list(range(2 * EVERY + 1, STEPS + 1))
    assert max(abs(loss - wanted.losses[step][0]) for step, loss in found.items()) <= 1e-5
    must(shardwright("export", harness.newest_checkpoint(out), "-o", tmp_path / "hf"))
    trained = dict(
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", dtype=torch.float32
        ).named_parameters()
    )
    assert state_dict_max_abs_diff(trained, dict(wanted.models[0].named_parameters())) <= 1e-5
    must(shardwright("run", out))  # it remembers what it went on from

    # Two islands again: their own checkpoints are older than the one world's.
    compile_anew(tmp_path, 2, STEPS + EVERY)
    assert "SW6218" in shardwright("run", out, "--island", 0).stderr
    must(shardwright("run", out, "--island", "all", "--resume", harness.newest_checkpoint(out)))
    wanted.models[1].load_state_dict(wanted.models[0].state_dict())
    wanted.optimizers[1] = plain(wanted.models[1], CASE)
    wanted.optimizers[1].base.load_state_dict(copy.deepcopy(wanted.optimizers[0].base.state_dict()))
    for step in range(STEPS + 1, STEPS + EVERY + 1):
        wanted.train(step, 2, 2, STEPS + EVERY)
    assert rounds(out)[-1]["step"] == STEPS + EVERY and rounds(out)[-1]["members"] == [0, 1]
    for k in range(2):
        found = island_losses(out, k)
        assert (
            max(abs(found[s] - wanted.losses[s][k]) for s in range(STEPS + 1, STEPS + EVERY + 1))
            <= 1e-5
        )
