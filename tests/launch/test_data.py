"""Data in real launches: held-out loss under every kind of engine, the same batch on each tensor
rank and other rows on each data rank, resume in the middle of an epoch, and conversations against
the plain model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from shardwright.checkpoint.checkpoint_manifest import read_manifest
from shardwright.data.dataset import open_dataset
from shardwright.plan.plan import read_plan
from tests.launch.resume import same_numbers
from tests.parity.harness import (
    LENGTH,
    SEED,
    STEPS,
    Case,
    difference_of,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    reference,
    shardwright,
    write_inputs,
)
from tests.parity.models import MODELS
from tests.parity.reference import initial_model

pytestmark = pytest.mark.launch


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_recipe(case: Case, folder: Path, **sections: Any) -> None:
    (folder / "recipe.yaml").write_text(json.dumps({**recipe(case, folder), **sections}))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))


def plain_loss(
    model: torch.nn.Module, rows: list[tuple[list[int], list[bool]]]
) -> tuple[float, int]:
    """(mean over all labels, their number) of rows that each go through the model alone. A row:
    ids, and which of them are labels."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, trained in rows:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            labels = torch.tensor([i if t else -100 for i, t in zip(ids, trained, strict=True)])[1:]
            total += float(
                F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").double()
            )
            count += int((labels != -100).sum())
    return total / count, count


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(model="llama", pipeline=2, tensor=2, checkpointing="full"),
            marks=pytest.mark.prove,
        ),
        pytest.param(Case(model="llama", data=2, zero_stage=3, micro=1), marks=pytest.mark.prove),
        pytest.param(
            Case(model="gpt2", pipeline=2, schedule="dualpipev", accumulation=4),
            marks=pytest.mark.prove,
        ),
    ],
    ids=["pp2-tp2", "zero3-dp2", "dualpipev"],
)
def test_held_out_loss_is_that_of_one_process_and_leaves_training_alone(
    case: Case, tmp_path: Path
) -> None:
    tokens = write_inputs(case, tmp_path)
    held_out = np.random.default_rng(1).integers(
        0, MODELS[case.model]["vocab_size"], (7, LENGTH), dtype=np.int32
    )
    np.save(tmp_path / "held-out.npy", held_out)
    write_recipe(
        case, tmp_path, validation={"kind": "tokens", "path": "held-out.npy", "every_steps": 3}
    )
    must(shardwright("run", tmp_path / "out"))
    must(shardwright("export", newest_checkpoint(tmp_path / "out"), "-o", tmp_path / "hf"))
    found = lines(tmp_path / "out" / "run" / "evaluation.jsonl")
    assert [f["step"] for f in found] == [3, 6, STEPS]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    wanted, count = plain_loss(trained, [(row.tolist(), [True] * LENGTH) for row in held_out])
    assert found[-1]["tokens"] == count
    assert found[-1]["loss"] == pytest.approx(wanted, abs=1e-5)
    assert found[-1]["perplexity"] == pytest.approx(np.exp(wanted), rel=1e-5)
    difference = difference_of(
        metrics(tmp_path / "out"), dict(trained.named_parameters()), reference(case, tokens)
    )
    assert difference.loss_absolute <= 1e-5 and difference.norm_relative <= 1e-5, difference


RECORDING = """
import hashlib, json, os, sys
from pathlib import Path
from shardwright.parallel import micro_batches as batches
from shardwright.train import training_worker as worker

plain = batches.TrainingBatches.micro_batches

def recorded(self, step, data_rank):
    found = plain(self, step, data_rank)
    rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for m in found for row in m.input_ids]
    labels = hashlib.sha256(b"".join(m.labels.numpy().tobytes() for m in found)).hexdigest()
    line = {"step": step, "data": data_rank, "rows": rows, "labels": labels}
    with open(Path(sys.argv[0]).parent / "run" / f"seen-{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    return found

batches.TrainingBatches.micro_batches = recorded
raise SystemExit(worker.main())
"""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(model="llama", pipeline=2, tensor=2), marks=pytest.mark.prove),
        Case(model="llama", data=2, zero_stage=2, micro=1),
    ],
    ids=["pp2-tp2", "dp2"],
)
def test_ranks_see_the_rows_that_they_should_and_a_resumed_run_goes_on_mid_epoch(
    case: Case, tmp_path: Path
) -> None:
    random = np.random.default_rng(2)
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(90):
            file.write(
                json.dumps({"text": bytes(random.integers(32, 127, 40).tolist()).decode()}) + "\n"
            )
    np.save(tmp_path / "b.npy", random.integers(0, 257, (20, LENGTH), dtype=np.int32))
    data = {
        "mixture": [
            {"kind": "jsonl", "path": "a.jsonl", "tokenizer": "byte", "weight": 3},
            {"kind": "tokens", "path": "b.npy", "weight": 1},
        ],
        "shuffle": True,
    }
    write_recipe(
        case, tmp_path, data=data, checkpoint={"every_steps": 3}, validation={"fraction": 0.1}
    )
    out = tmp_path / "out"
    (out / "train.py").write_text(RECORDING)
    must(shardwright("run", out))
    seen = {rank: lines(out / "run" / f"seen-{rank}.jsonl") for rank in range(case.world)}
    once: list[str] = []
    for step in range(STEPS):
        shares: dict[int, Any] = {}
        for rank in range(case.world):
            line = seen[rank][step]
            assert line["step"] == step + 1
            share = (line["rows"], line["labels"])
            assert shares.setdefault(line["data"], share) == share, (
                "the same batch on every tensor and pipeline rank"
            )
        assert sorted(shares) == list(range(case.data))
        rows = [row for share, _ in shares.values() for row in share]
        assert len(set(rows)) == case.batch, "each row on one data rank"
        once += rows
    first = metrics(out)
    parts = read_manifest(out / "checkpoints" / "step-00000003").rows
    assert parts == open_dataset(read_plan(out), out).parts and len(parts) == 2
    for step in (6, STEPS):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    must(shardwright("run", out))
    for rank in range(case.world):
        again = lines(out / "run" / f"seen-{rank}.jsonl")[STEPS:]
        assert again == seen[rank][3:], "no row is seen twice or skipped"
    assert [m["step"] for m in metrics(out)] == [m["step"] for m in first]
    assert same_numbers(metrics(out), first)
    assert [f["step"] for f in lines(out / "run" / "evaluation.jsonl")] == [STEPS]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</>{% endfor %}{% if "
    "add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.prove)])
def test_conversations_train_as_each_one_alone(packing: bool, tmp_path: Path) -> None:
    case = Case(model="llama", pipeline=2, micro=1)
    random, talks = np.random.default_rng(4), []
    for _ in range(40):
        said = [
            bytes(random.integers(97, 123, random.integers(1, 4)).tolist()).decode()
            for _ in range(2)
        ]
        talks.append(
            [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
        )
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    )
    data = {
        "kind": "chat",
        "path": "a.jsonl",
        "tokenizer": "byte",
        "template": TEMPLATE,
        "packing": packing,
    }
    training = recipe(case, tmp_path)["training"] | {
        "epochs": 1,
        "steps": None,
        "scheduler": {"name": "constant"},
    }
    out = tmp_path / "out"
    write_recipe(case, tmp_path, data=data, training=training)
    told = json.loads(must(shardwright("prepare", out, "--json")).stdout)
    # One step holds every conversation: its loss is that of all of them.
    write_recipe(case, tmp_path, data=data, training=training | {"global_batch_size": told["rows"]})
    must(shardwright("run", out))
    (line,) = metrics(out)
    rows = []
    for user, assistant in talks:
        head, answer = f"<u>{user['content']}</><a>".encode(), f"{assistant['content']}</>".encode()
        rows.append((list(head + answer), [False] * len(head) + [True] * len(answer)))
    wanted, count = plain_loss(initial_model(MODELS[case.model], SEED), rows)
    assert line["loss"] == pytest.approx(wanted, abs=1e-5)
    assert told["trained_tokens"] == count and told["steps"] > 1 and len(told["samples"]) == 3
    padding = told["parts"][0]
    assert (
        padding["padding"] < padding["unpacked_padding"] / 2
        if packing
        else told["rows"] == len(talks)
    )


def test_prepare_and_what_run_leaves_to_it(tmp_path: Path) -> None:
    case = Case(model="llama", micro=1, accumulation=2)
    (tmp_path / "large.txt").write_bytes(b"0123456789abcde\n" * (5 * 2**20))  # 80 MiB
    data = {"kind": "text", "path": "large.txt", "tokenizer": "byte"}
    write_recipe(case, tmp_path, data=data)
    refused = shardwright("run", tmp_path / "out")
    assert (
        refused.returncode == 1
        and "SW6106" in refused.stderr
        and "shardwright prepare" in refused.stderr
    )
    done = must(shardwright("prepare", tmp_path / "out"))
    assert " 83,886,080 " in done.stdout and "sample 3 of 3" in done.stdout and "[[" in done.stdout
    must(shardwright("run", tmp_path / "out"))
    assert len(metrics(tmp_path / "out")) == STEPS
