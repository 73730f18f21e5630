"""Preference training through the commands equals TRL's own trainer, which renders, tokenizes,
scores and trains by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardwright.utils.numeric_difference import max_series_diff, state_dict_max_abs_diff
from tests.parity.harness import BETAS, DECAY, EPS, LENGTH, LR, SEED, metrics, must, shardwright
from tests.parity.models import MODELS
from tests.parity.reference import initial_model
from tests.unit.data.test_chat import CHATML

pytestmark = pytest.mark.launch

BATCH, STEPS, WARMUP, BETA = 4, 6, 2, 0.3
QUESTIONS = ("Wie geht es?", "What is 7 x 6?", "Name a tree.")
METRICS = {
    "rewards_chosen": "rewards/chosen",
    "rewards_rejected": "rewards/rejected",
    "margin": "rewards/margins",
}


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A token a byte, an end, padding, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHATML
    )
    made.save_pretrained(folder)
    return made


def records(*, of_messages: bool) -> list[dict[str, Any]]:
    random = np.random.default_rng(SEED)
    found: list[dict[str, Any]] = []
    for number in range(BATCH * STEPS):
        question = QUESTIONS[number % len(QUESTIONS)]
        answers = [
            "".join(random.choice(list("abcdefg ü."), int(n))) for n in random.integers(1, 9, 2)
        ]
        if of_messages:
            own = [{"role": "user", "content": question[:4]}]
            talks = [[*own, {"role": "assistant", "content": each}] for each in answers]
            found.append({"chosen": talks[0], "rejected": talks[1]})
        else:
            found.append({"prompt": f"{question} ", "chosen": answers[0], "rejected": answers[1]})
    return found


def trl_run(
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, Any]],
    folder: Path,
    **own: Any,
) -> tuple[list[float], list[dict[str, Any]], Any]:
    """(losses, TRL's log lines, the trained model)."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            found = super().compute_loss(*arguments, **more)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    initial_model(config, SEED).save_pretrained(folder / "start")
    trainer = InOrder(
        model=str(folder / "start"),
        args=DPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            learning_rate=LR,
            lr_scheduler_type="cosine",
            warmup_steps=WARMUP,
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            max_grad_norm=0.5,
            max_length=LENGTH,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=BETA,
            model_init_kwargs={"dtype": "float32"},
            **own,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return losses, trainer.state.log_history, trainer.model


@pytest.mark.parametrize(
    ("model", "objective", "own", "layout", "of_messages"),
    [
        pytest.param(
            "llama",
            {"name": "dpo"},
            {"loss_type": ["sigmoid"]},
            {"pipeline": 2},
            False,
            id="dpo-pp2-texts",
            marks=pytest.mark.prove,
        ),
        pytest.param(
            "gpt2",
            {"name": "dpo"},
            {"loss_type": ["sigmoid"]},
            {"tensor": 2},
            True,
            id="dpo-tp2-messages",
        ),
        pytest.param(
            "llama",
            {"name": "ipo", "average": True},
            {"loss_type": ["ipo"]},
            {"data": 2, "zero_stage": 3},
            True,
            id="ipo-zero3-messages",
            marks=pytest.mark.prove,
        ),
    ],
)
def test_trains_as_trl(
    model: str,
    objective: dict[str, Any],
    own: dict[str, Any],
    layout: dict[str, int],
    of_messages: bool,
    tmp_path: Path,
) -> None:
    config = {**MODELS[model], "vocab_size": 260}
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    rows = records(of_messages=of_messages)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "version": 1,
        "name": "preference",
        "model": {"config": config, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "objective": {**objective, "beta": BETA},
            "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
            "scheduler": {"name": "cosine", "warmup_steps": WARMUP, "first_step": 0},
            "gradient_clipping": 0.5,
            "seed": SEED,
        },
        "data": {
            "kind": "preference",
            "path": "pairs.jsonl",
            "tokenizer": "./tokenizer",
            "shuffle": False,
        },
        "parallelism": {"micro_batch_size": 1, **layout},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "out"))
    must(shardwright("run", tmp_path / "out"))
    [step] = (tmp_path / "out" / "checkpoints").glob("step-*")
    must(shardwright("export", step, "-o", tmp_path / "hf"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    losses, logs, trained = trl_run(config, tokenizer, rows, tmp_path / "trl", **own)
    lines = metrics(tmp_path / "out")
    assert max_series_diff([line["loss"] for line in lines], losses) <= 1e-5
    steps = [log for log in logs if "grad_norm" in log]
    norms = [log["grad_norm"] for log in steps]
    assert max_series_diff([line["grad_norm"] for line in lines], norms, relative=True) <= 1e-5
    for ours, theirs in METRICS.items():
        found = [line[ours] for line in lines]
        assert max_series_diff(found, [log[theirs] for log in steps]) <= 1e-4, ours
    weights = {name: p.detach() for name, p in trained.named_parameters()}
    assert state_dict_max_abs_diff(dict(exported.named_parameters()), weights) <= 1e-5
