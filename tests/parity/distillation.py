"""Distillation in one plain process: a document at a time, from a teacher's most probable tokens,
by the formula of K + 1 outcomes over the whole vocabulary in fp64."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardwright.data.sequences import SequenceBatch
from tests.parity.harness import (
    LENGTH,
    SEED,
    STEPS,
    Case,
    recipe,
    with_adapters,
    write_inputs,
)
from tests.parity.models import MODELS
from tests.parity.plain_training import PlainObjective, train_by_objective
from tests.parity.reference import initial_model
from tests.parity.router_aux_loss import add_balance

TOP = 7
TopTokens = tuple[np.ndarray, np.ndarray]
"""ids and log-probabilities, (B, S, K) each."""
METRICS = ("kl", "next_token_loss")


@dataclass(frozen=True)
class DistillationCase(Case):
    """weight: of the teacher. top: its tokens. packed: texts of odd lengths share sequences.
    resumed: saved at a step under ZeRO-1, and goes on under the case's layout."""

    weight: float = 1.0
    top: int = TOP
    packed: bool = False
    resumed: bool = False


def write_recipe(case: DistillationCase, folder: Path) -> None:
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"]["objective"] = {
        "name": "distill",
        "teacher": "teacher",
        "teacher_weight": case.weight,
    }
    if case.packed:
        random, letters = np.random.default_rng(SEED), list("abcdefgh ijklmnopäqrstuvwxyz.\n")
        lengths = random.integers(2, LENGTH, 4 * STEPS * case.batch)
        texts = ("".join(random.choice(letters, length).tolist()) for length in lengths)
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
        data = {"kind": "jsonl", "path": "texts.jsonl", "tokenizer": "byte"}
        document["data"] = {**data, "shuffle": False, "packing": True}
    (folder / "recipe.yaml").write_text(json.dumps(document, indent=1))


@dataclass(frozen=True)
class Document:
    """A part of a sequence from `start`. ids: (1, n)."""

    row: int
    start: int
    ids: torch.Tensor


def documents(batch: SequenceBatch) -> list[Document]:
    """Return the parts of each sequence that attend to themselves alone."""
    found = []
    for row, tokens in enumerate(batch.tokens.astype(np.int64)):
        cuts = [0] if batch.starts is None else np.flatnonzero(batch.starts[row]).tolist()
        cuts = sorted({0, *cuts})
        for start, stop in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
            found.append(Document(row, start, torch.from_numpy(tokens[None, start:stop])))
    return found


def teacher_tokens(case: DistillationCase, batch: SequenceBatch) -> TopTokens:
    """Return what another model of the type finds most probable, in the place of the token that it
    foretells; nonsense where nothing is foretold."""
    model = initial_model(MODELS[case.model], SEED + 1)
    shape = (*batch.tokens.shape, case.top)
    ids, values = np.full(shape, 3, dtype=np.int32), np.full(shape, -2.0, dtype=np.float32)
    with torch.no_grad():
        for each in documents(batch):
            logits = 9 * model(input_ids=each.ids).logits[0, :-1].double()
            top = logits.log_softmax(-1).topk(case.top, dim=-1)
            here = slice(each.start + 1, each.start + each.ids.shape[1])
            ids[each.row, here], values[each.row, here] = top.indices, top.values
    return ids, values


def plain_run(case: DistillationCase, batch: SequenceBatch, teacher: TopTokens) -> PlainObjective:
    """batch, teacher: of all steps."""
    model = initial_model(MODELS[case.model], SEED)
    if case.balance:
        add_balance(model, case.balance)
    if case.lora_rank:
        model = with_adapters(model, case)
    by_row: dict[int, list[Document]] = {}
    for document in documents(batch):
        by_row.setdefault(document.row, []).append(document)
    ids, values = torch.from_numpy(teacher[0]).long(), torch.from_numpy(teacher[1]).double()

    def measured(rows: range) -> tuple[torch.Tensor, dict[str, float]]:
        """(mean loss, the metrics) of these sequences."""
        kl, cross, labels = [], [], 0
        for each in (document for row in rows for document in by_row[row]):
            student = model(input_ids=each.ids).logits[0, :-1].double().log_softmax(-1)
            here = slice(each.start + 1, each.start + each.ids.shape[1])
            own, top = ids[each.row, here], values[each.row, here]
            divergence = (top.exp() * (top - student.gather(-1, own))).sum()
            if case.top < student.shape[-1]:
                rest = 1 - top.exp().sum(-1)
                others = student.exp().scatter(-1, own, 0).sum(-1)
                divergence = divergence + (rest * (rest.log() - others.log())).sum()
            kl.append(divergence)
            cross.append(-student.gather(-1, each.ids[0, 1:, None]).sum())
            labels += each.ids.shape[1] - 1
        means = torch.stack(kl).sum() / labels, torch.stack(cross).sum() / labels
        loss = case.weight * means[0] + (1 - case.weight) * means[1]
        return loss, {n: float(v.detach()) for n, v in zip(METRICS, means, strict=True)}

    return train_by_objective(model, case, measured)
