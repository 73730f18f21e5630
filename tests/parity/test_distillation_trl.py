"""Distillation through the commands equals TRL's GKDTrainer, which runs the teacher each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.parity.harness import SEED, metrics
from tests.parity.models import MODELS
from tests.parity.reference import initial_model
from tests.parity.test_preference_trl import (
    WHOLE,
    exported_run,
    records,
    same_training,
    trl_run,
    write_tokenizer,
)

pytestmark = [pytest.mark.launch, pytest.mark.prove]

VOCABULARY = 260
NOTHING_AFTER_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""GKDTrainer's labels are all that the template writes after the last prompt, white space too."""


def write_teacher(config: dict[str, object], folder: Path) -> None:
    """Other weights, whose logits are far from equal."""
    teacher = initial_model(config, SEED + 1)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(9)
    teacher.save_pretrained(folder)


def with_template(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = NOTHING_AFTER_THE_END
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("llama", {"tensor": 2}, id="llama-tp2"),
        pytest.param("qwen3_moe", {"data": 2, "zero_stage": 3}, id="qwen3-moe-zero3"),
        pytest.param("llama", {"pipeline": 2}, id="llama-pp2"),
    ],
)
def test_trains_as_generalized_knowledge_distillation(
    model: str, layout: dict[str, int], tmp_path: Path
) -> None:
    """Compare with no text of the student's own, by forward KL, over the whole vocabulary."""
    config = {**MODELS[model], "vocab_size": VOCABULARY}
    tokenizer = with_template(write_tokenizer(tmp_path / "tokenizer"), tmp_path / "tokenizer")
    rows = [{"messages": record["chosen"]} for record in records(of_messages=True)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_teacher(config, tmp_path / "teacher")
    scores = tmp_path / "teacher-scores"
    exported = exported_run(
        tmp_path,
        {"config": config, "weights": "random"},
        {"name": "distill", "teacher": str(scores)},
        layout,
        WHOLE,
        {"kind": "chat", "path": "talks.jsonl", "packing": False},
        ("--weights", tmp_path / "teacher", "--top", VOCABULARY, "-o", scores),
    )
    initial_model(config, SEED).save_pretrained(tmp_path / "start")
    losses, logs, trained = trl_run(
        tmp_path / "start",
        tokenizer,
        rows,
        tmp_path / "trl",
        name="GKD",
        length=WHOLE,
        module="trl.experimental.gkd",
        models={"teacher_model": str(tmp_path / "teacher")},
        lmbda=0.0,
        beta=0.0,
    )
    same_training(tmp_path / "out", exported, losses, logs, trained, {})
    kl = [line["kl"] for line in metrics(tmp_path / "out")]
    assert kl[0] > 0.1, "the teacher's logits are not the student's"
    assert kl[-1] < kl[0]
