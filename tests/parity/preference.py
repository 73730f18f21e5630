"""Preference training in one plain process: the losses written from the papers, over pairs of texts
that the file itself makes and tokenizes."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.parity.harness import (
    LENGTH,
    SEED,
    STEPS,
    Case,
    recipe,
    with_adapters,
)
from tests.parity.models import MODELS
from tests.parity.plain_training import HELD_OUT, PlainObjective, train_by_objective
from tests.parity.reference import initial_model
from tests.parity.router_aux_loss import add_balance

METRICS = ("rewards_chosen", "rewards_rejected", "accuracy", "margin")


@dataclass(frozen=True)
class PreferenceCase(Case):
    """objective: of the recipe. resumed: saved at a step under ZeRO-1, and goes on under the
    case's layout. starts: of pretrained weights, the folder's model. packed: whole pairs share
    sequences, which the batch counts."""

    starts: str = "causal-lm"
    objective: dict[str, Any] = field(default_factory=lambda: {"name": "dpo", "beta": 0.3})
    resumed: bool = False
    packed: bool = False

    @property
    def is_reward(self) -> bool:
        return bool(self.objective["name"] == "reward")


@dataclass(frozen=True)
class PlainRun(PlainObjective):
    """scores: (pairs, 2) of the starting weights. held_out_rewards: (HELD_OUT, 2) of a reward
    model, after training. held_out_count: what the held-out loss is a mean over."""

    held_out_count: int
    scores: np.ndarray
    held_out_rewards: np.ndarray


def texts(pairs: int, longest: int = 40) -> list[dict[str, str]]:
    """Records of odd lengths; some completions end beyond the sequence, and one prompt fills it.

    longest: rejected completion
    """
    random, letters = np.random.default_rng(SEED), "abcdefgh ijklmnopäqrstuvwxyz.\n"

    def words(least: int, most: int) -> str:
        count = int(random.integers(least, most))
        return "".join(random.choice(list(letters), count).tolist())

    records = [
        {"prompt": words(1, 12), "chosen": words(1, 9), "rejected": words(1, longest)}
        for _ in range(pairs)
    ]
    too_long = {"prompt": words(LENGTH + 1, LENGTH + 9), "chosen": "yes", "rejected": "no"}
    return [*records[:3], too_long, *records[3:]]


def short_texts(pairs: int) -> list[dict[str, str]]:
    """Records of which two or three fill a sequence, and some that are cut to fit into one."""
    random, letters = np.random.default_rng(SEED), list("abcdefgh ijklmnopqrstuvwxyz.")

    def words(least: int, most: int) -> str:
        return "".join(random.choice(letters, int(random.integers(least, most))).tolist())

    records = [
        {"prompt": words(1, 5), "chosen": words(1, 7), "rejected": words(1, 9)}
        for _ in range(pairs)
    ]
    one_cut = {"prompt": "a", "chosen": words(3, 5), "rejected": words(LENGTH, LENGTH + 9)}
    both_cut = {"prompt": "bc", "chosen": words(20, 30), "rejected": words(20, 30)}
    too_long = {"prompt": words(LENGTH, LENGTH + 9), "chosen": "yes", "rejected": "no"}
    return [*records[:3], one_cut, too_long, both_cut, *records[3:]]


def records(case: PreferenceCase) -> list[dict[str, Any]]:
    """Pairs, or for kto a completion of each, with its label."""
    if case.packed:
        return list(short_texts(4 * STEPS * case.batch))
    pairs = texts(STEPS * case.batch, 20 if case.is_reward else 40)
    if case.is_reward:  # a pair of which one is cut is left out, too
        cut = {"prompt": "a", "chosen": "b", "rejected": "c" * LENGTH}
        return [*pairs[:2], cut, *pairs[2:]]
    if case.objective["name"] != "kto":
        return list(pairs)
    random = np.random.default_rng(SEED + 1)
    return [
        {
            "prompt": pair["prompt"],
            "completion": pair["chosen" if is_desirable else "rejected"],
            "label": is_desirable,
        }
        for pair in pairs
        for is_desirable in [bool(random.random() < 0.6)]
    ]


def write_pairs(case: PreferenceCase, folder: Path) -> None:
    """pairs.jsonl and recipe.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in records(case)]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    document = recipe(case, folder)
    document["training"]["objective"] = case.objective
    document["data"] = {
        "kind": "preference",
        "path": "pairs.jsonl",
        "tokenizer": "byte",
        "shuffle": False,
        "packing": case.packed,
    }
    (folder / "recipe.yaml").write_text(json.dumps(document, indent=1))
    if case.pretrained and case.starts == "causal-lm":
        initial_model(MODELS[case.model], SEED).save_pretrained(folder / "weights")
    elif case.pretrained:
        reward_model(case, random=True).save_pretrained(folder / "weights")


def reward_model(case: PreferenceCase, *, random: bool = False) -> Any:
    """Random, as transformers makes it; or of a language model, with a head that is drawn as
    docs/preference.md says."""
    config = dict(MODELS[case.model])
    config = AutoConfig.for_model(config.pop("model_type"), num_labels=1, **config)
    torch.manual_seed(SEED)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    if random or not case.pretrained or case.starts != "causal-lm":
        return model
    language_model = initial_model(MODELS[case.model], SEED)
    model.base_model.load_state_dict(language_model.base_model.state_dict())
    seed = hashlib.sha256(f"{SEED} score".encode()).digest()[:7]
    torch.manual_seed(int.from_bytes(seed, "big"))
    model._init_weights(model.score)
    return model


def rewards(model: Any, rows: list[tuple[torch.Tensor, torch.Tensor, bool]]) -> torch.Tensor:
    """(n, 2), chosen first: of each text alone, without padding, as transformers pools it."""
    found = [
        model(
            input_ids=ids[place : place + 1, : int(is_label[place].nonzero()) + 1], use_cache=False
        )
        for ids, is_label, _ in rows
        for place in range(2)
    ]
    return torch.stack([each.logits[0, 0] for each in found]).view(-1, 2)


def rows(case: PreferenceCase) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(ids (2, S), whether a token is a label (2, S), whether it is desirable) of each pair or
    labelled completion: the chosen completion and the rejected one; or the completion and that of
    the next record."""
    return list(rows_by_record(case).values())


def rows_by_record(
    case: PreferenceCase,
) -> dict[int, tuple[torch.Tensor, torch.Tensor, bool]]:
    """Record -> its rows, without records that are left out."""
    found, every = {}, records(case)
    for number, record in enumerate(every):
        if case.objective["name"] == "kto":
            following = every[(number + 1) % len(every)]
            completions = (record["completion"], following["completion"])
        else:
            completions = (record["chosen"], record["rejected"])
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        is_label = torch.zeros(2, LENGTH, dtype=torch.bool)
        prompt = record["prompt"].encode()
        sizes = [len(prompt + completion.encode()) for completion in completions]
        for row, completion in enumerate(completions):
            # Of packed pairs each has half of a sequence, or what the other leaves.
            room = max(LENGTH // 2, LENGTH - sizes[1 - row]) if case.packed else LENGTH
            whole = (prompt + completion.encode())[:room]
            ids[row, : len(whole)] = torch.tensor(list(whole))
            is_label[row, len(prompt) : len(whole)] = True
            if case.is_reward:
                is_label[row] = False
                is_label[row, sizes[row] - 1 :][:1] = len(whole) == sizes[row]
        if is_label[:, 1:].any(dim=1).all():
            found[number] = ids, is_label, record.get("label", True)
    return found


def log_probabilities(
    model: Any, ids: torch.Tensor, is_label: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over the labels (B,) in fp64, their number (B,))."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    labels = is_label[:, 1:]
    return (each * labels).double().sum(1), labels.sum(1)


def pair_loss(
    o: dict[str, Any], found: torch.Tensor, tokens: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses (n,), rewards (n, 2)). found, tokens, reference: (n, 2), chosen first."""
    name = o["name"]
    if name == "dpo":
        rewards = o["beta"] * (found - reference)
        logits = rewards[:, 0] - rewards[:, 1]
        wrong = o.get("label_smoothing", 0.0)
        losses = -(1 - wrong) * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)
    elif name == "ipo":
        ratio = (found - reference) / (tokens if o.get("average") else 1)
        losses = (ratio[:, 0] - ratio[:, 1] - 1 / (2 * o["beta"])) ** 2
        rewards = o["beta"] * (found - reference)
    elif name == "simpo":
        rewards = o["beta"] * found / tokens
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - o["gamma"])
    else:
        p = (found / tokens).exp()
        odds = p / (1 - p)
        losses = -(found / tokens)[:, 0] - o["beta"] * F.logsigmoid((odds[:, 0] / odds[:, 1]).log())
        rewards = o["beta"] * found / tokens
    return losses, rewards


def reward_loss(o: dict[str, Any], found: torch.Tensor) -> torch.Tensor:
    """(n,) of rewards (n, 2), chosen first."""
    compared = F.logsigmoid(found[:, 0] - found[:, 1])
    centered: torch.Tensor = o["center_coefficient"] * found.sum(1).square()
    return centered - compared


def pair_metrics(found: torch.Tensor) -> dict[str, float]:
    """found: rewards (n, 2), chosen first."""
    chosen, rejected = found.unbind(1)
    values = (chosen, rejected, (chosen > rejected).float(), chosen - rejected)
    return {n: float(v.mean()) for n, v in zip(METRICS, values, strict=True)}


def kto_loss(
    o: dict[str, Any], found: torch.Tensor, reference: torch.Tensor, is_desirable: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """(losses (n,), the metrics). found, reference: (n, 2), of the completion and of the other."""
    ratios = found - reference
    z0 = ratios[:, 1].mean().clamp(min=0).detach()
    r = ratios[:, 0]
    value = torch.where(
        is_desirable,
        o["desirable_weight"] * torch.sigmoid(o["beta"] * (r - z0)),
        o["undesirable_weight"] * torch.sigmoid(o["beta"] * (z0 - r)),
    )
    weight = torch.where(is_desirable, o["desirable_weight"], o["undesirable_weight"])
    rewards = (o["beta"] * r).detach()

    def mean(values: torch.Tensor) -> float:
        return float(values.mean()) if len(values) else 0.0

    metrics = {
        "rewards_chosen": mean(rewards[is_desirable]),
        "rewards_rejected": mean(rewards[~is_desirable]),
        "accuracy": mean(((rewards > 0) == is_desirable).double()),
    }
    margin = metrics["rewards_chosen"] - metrics["rewards_rejected"]
    return weight - value, {**metrics, "margin": margin}


def plain_run(case: PreferenceCase, packed: list[list[int]] | None = None) -> PlainRun:
    """packed: the records of each sequence, where pairs are packed."""
    model = reward_model(case) if case.is_reward else initial_model(MODELS[case.model], SEED)
    if case.balance:
        add_balance(model, case.balance)
    base = copy.deepcopy(model)
    if case.lora_rank:
        model = with_adapters(model, case, "SEQ_CLS" if case.is_reward else "CAUSAL_LM")
    pairs, groups = rows(case), [[i] for i in range(len(rows(case)))]
    if packed is not None:
        by_record = rows_by_record(case)
        groups = list(packed)
        assert sorted(i for own in groups for i in own) == list(by_record), "each pair is packed"
        assert max(map(len, groups)) > min(map(len, groups)), "sequences differ in their pairs"
        # In the order of the sequences.
        pairs = [by_record[i] for own in groups for i in own]
        ends = np.cumsum([len(own) for own in groups]).tolist()
        groups = [list(range(end - len(own), end)) for own, end in zip(groups, ends, strict=True)]
    scores = torch.zeros(0, 2)
    if not case.is_reward:
        with torch.no_grad():
            scores = torch.stack([log_probabilities(base, pair[0], pair[1])[0] for pair in pairs])

    def measured(examples: range) -> tuple[torch.Tensor, dict[str, float]]:
        """(mean loss, the metrics) of the pairs, or completions, of these examples."""
        here = [i for example in examples for i in groups[example]]
        if case.is_reward:
            found = rewards(model, [pairs[i] for i in here])
            each, found = reward_loss(case.objective, found), found.detach()
            return each.mean(), pair_metrics(found)
        ids, is_label = (
            torch.cat(part) for part in zip(*(pairs[i][:2] for i in here), strict=True)
        )
        found, tokens = (x.view(-1, 2) for x in log_probabilities(model, ids, is_label))
        if case.objective["name"] == "kto":
            is_desirable = torch.tensor([pairs[i][2] for i in here])
            each, own = kto_loss(case.objective, found, scores[here], is_desirable)
            return each.mean(), own
        each, found_rewards = pair_loss(case.objective, found, tokens, scores[here])
        return each.mean(), pair_metrics(found_rewards.detach())

    found = train_by_objective(model, case, measured)
    with torch.no_grad():
        last = rewards(model, rows(case)[:HELD_OUT]) if case.is_reward else torch.zeros(0, 2)
    return PlainRun(
        trained=found.trained,
        metrics=found.metrics,
        held_out_loss=found.held_out_loss,
        held_out_count=sum(map(len, groups[:HELD_OUT])),
        scores=scores.numpy(),
        held_out_rewards=last.numpy(),
    )
