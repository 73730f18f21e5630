"""Preference training through the commands equals TRL's own trainer, which renders, tokenizes,
scores and trains by itself."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from shardwright.utils.numeric_difference import (
    max_abs_diff,
    max_series_diff,
    state_dict_max_abs_diff,
)
from tests.parity.harness import BETAS, DECAY, EPS, LENGTH, LR, SEED, metrics, must, shardwright
from tests.parity.models import MODELS
from tests.parity.reference import initial_model
from tests.unit.data.test_chat import CHATML

pytestmark = pytest.mark.launch

BATCH, STEPS, WARMUP, BETA = 4, 6, 2, 0.3
WHOLE = 48
"""Tokens of a sequence that no record exceeds."""
PAIRS = {"kind": "preference", "path": "pairs.jsonl"}
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
    start: Path,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, Any]],
    folder: Path,
    name: str = "DPO",
    length: int = LENGTH,
    module: str = "trl",
    models: Mapping[str, str] | None = None,
    **own: Any,
) -> tuple[list[float], list[dict[str, Any]], Any]:
    """(losses, TRL's log lines, the trained model). start: the starting weights. name: of TRL's
    trainer and its configuration in the module. models: folders of the trainer's other models."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    losses: list[float] = []
    trl = importlib.import_module(module)

    class InOrder(getattr(trl, f"{name}Trainer")):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(dataset or self.train_dataset)

        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            found = super().compute_loss(*arguments, **more)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    trainer = InOrder(
        model=str(start),
        **(models or {}),
        args=getattr(trl, f"{name}Config")(
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
            max_length=length,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            **own,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return losses, trainer.state.log_history, trainer.model


def exported_run(
    folder: Path,
    model: dict[str, Any],
    objective: dict[str, Any],
    layout: dict[str, int],
    length: int = LENGTH,
    data: Mapping[str, Any] = PAIRS,
    score: tuple[object, ...] = (),
) -> Path:
    """Compile, run and export a recipe; the exported folder. score: arguments of a `shardwright
    score` of the recipe's data before, if any."""
    recipe = {
        "version": 1,
        "name": "preference",
        "model": model,
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": length,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "objective": objective,
            "optimizer": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY},
            "scheduler": {"name": "cosine", "warmup_steps": WARMUP, "first_step": 0},
            "gradient_clipping": 0.5,
            "seed": SEED,
        },
        "data": {**data, "tokenizer": "./tokenizer", "shuffle": False},
        "parallelism": {"micro_batch_size": 1, **layout},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    if score:
        must(shardwright("score", folder / "recipe.yaml", *score))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    must(shardwright("run", folder / "out"))
    [step] = (folder / "out" / "checkpoints").glob("step-*")
    must(shardwright("export", step, "-o", folder / "hf"))
    return folder / "hf"


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
    exported = exported_run(
        tmp_path, {"config": config, "weights": "random"}, {**objective, "beta": BETA}, layout
    )
    initial_model(config, SEED).save_pretrained(tmp_path / "start")
    losses, logs, trained = trl_run(
        tmp_path / "start", tokenizer, rows, tmp_path / "trl", beta=BETA, **own
    )
    same_training(tmp_path / "out", exported, losses, logs, trained)


def same_training(
    out: Path,
    exported: Path,
    losses: list[float],
    logs: list[dict[str, Any]],
    trained: Any,
    logged: Mapping[str, str] = METRICS,
) -> None:
    """Losses, norms, weights and metrics of a run are TRL's. logged: TRL's name of each metric."""
    lines = metrics(out)
    steps = [log for log in logs if "grad_norm" in log]
    norms = [log["grad_norm"] for log in steps]
    after = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    weights = {name: p.detach() for name, p in trained.named_parameters()}
    found = {
        "loss": max_series_diff([line["loss"] for line in lines], losses),
        "norm": max_series_diff([line["grad_norm"] for line in lines], norms, relative=True),
        "weight": state_dict_max_abs_diff(dict(after.named_parameters()), weights),
    } | {
        ours: max_series_diff([line[ours] for line in lines], [log[theirs] for log in steps])
        for ours, theirs in logged.items()
    }
    print(found)
    # TRL rounds its logs.
    limits = dict.fromkeys(("loss", "norm", "weight"), 1e-5) | dict.fromkeys(logged, 1e-4)
    assert all(found[name] <= limit for name, limit in limits.items()), found


SAME_LENGTH = 7
"""Tokens of each chosen completion: ORPOTrainer's mean over tokens is then the mean over pairs."""


def records_of_one_token_prompts() -> list[dict[str, Any]]:
    """Pairs of which ORPOTrainer's likelihood term has no token of a prompt, as the first token is
    not predicted."""
    random = np.random.default_rng(SEED)

    def text(length: int) -> str:
        return "".join(random.choice(list("abcdefgh."), length))

    return [
        {
            "prompt": text(1),
            "chosen": text(SAME_LENGTH),
            "rejected": text(int(random.integers(1, 9))),
        }
        for _ in range(BATCH * STEPS)
    ]


def records_in_turns() -> list[dict[str, Any]]:
    """Completions that take turns: the one before, which KTOTrainer takes for z0, is the next
    one's, which `prepare` takes. Each batch has both labels, or KTOTrainer logs no reward."""
    random = np.random.default_rng(SEED)
    labels = [[True, *(random.random(BATCH - 2) < 0.5), False] for _ in range(STEPS)]
    return [
        {
            "prompt": f"{QUESTIONS[number % len(QUESTIONS)]} {number} ",
            "completion": ("an oak", "forty-two?")[number % 2],
            "label": bool(labels[number // BATCH][number % BATCH]),
        }
        for number in range(BATCH * STEPS)
    ]


@pytest.mark.prove
@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, {"data": 2, "zero_stage": 3}], ids=["tp2", "zero3"]
)
@pytest.mark.parametrize("name", ["simpo", "orpo", "kto"])
def test_trains_as_the_trainer_of_its_own(
    name: str, layout: dict[str, int], tmp_path: Path
) -> None:
    """The settings, and for ORPO and KTO the data, with which TRL's loss is the paper's."""
    by_name: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
        "simpo": (
            {"name": "simpo", "beta": 2.0, "gamma": 0.7},
            {
                "name": "CPO",
                "module": "trl.experimental.cpo",
                "loss_type": "simpo",
                "cpo_alpha": 0.0,
                "beta": 2.0,
                "simpo_gamma": 0.7,
            },
            records(of_messages=False),
        ),
        "orpo": (
            {"name": "orpo", "beta": 0.4},
            {"name": "ORPO", "module": "trl.experimental.orpo", "beta": 0.4},
            records_of_one_token_prompts(),
        ),
        "kto": (
            {"name": "kto", "beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.9},
            {
                "name": "KTO",
                "beta": 0.4,
                "desirable_weight": 1.2,
                "undesirable_weight": 0.9,
                "train_sampling_strategy": "sequential",
            },
            records_in_turns(),
        ),
    }
    objective, own, rows = by_name[name]
    config = {**MODELS["llama"], "vocab_size": 260}
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exported = exported_run(
        tmp_path, {"config": config, "weights": "random"}, objective, layout, WHOLE
    )
    initial_model(config, SEED).save_pretrained(tmp_path / "start")
    losses, logs, trained = trl_run(
        tmp_path / "start", tokenizer, rows, tmp_path / "trl", length=WHOLE, **own
    )
    assert name != "kto" or any(log.get("kl", 0) > 1e-3 for log in logs), "z0 is not always 0"
    same_training(tmp_path / "out", exported, losses, logs, trained)


@pytest.mark.parametrize(
    ("model", "coefficient", "layout", "of_messages", "padding"),
    [
        pytest.param("llama", 0.05, {"pipeline": 2}, False, "<pad>", id="pp2-texts"),
        pytest.param("qwen3_moe", 0.0, {"data": 2, "expert": 2}, True, "<pad>", id="ep2-messages"),
        # The token before the end is read, as transformers finds it.
        pytest.param("llama", 0.0, {"tensor": 2}, False, None, id="tp2-end-as-padding"),
    ],
)
@pytest.mark.prove
def test_trains_a_reward_model_as_trl(
    model: str,
    coefficient: float,
    layout: dict[str, int],
    of_messages: bool,
    padding: str | None,
    tmp_path: Path,
) -> None:
    config = {**MODELS[model], "vocab_size": 260}
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    tokenizer.pad_token = padding
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = records(of_messages=of_messages)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = dict(config)
    own = AutoConfig.for_model(own.pop("model_type"), num_labels=1, **own)
    torch.manual_seed(SEED)
    start = AutoModelForSequenceClassification.from_config(own, dtype=torch.float32)
    start.save_pretrained(tmp_path / "start")
    exported = exported_run(
        tmp_path,
        {"source": "./start", "weights": "pretrained"},
        {"name": "reward", "center_coefficient": coefficient},
        layout,
        WHOLE,
    )
    losses, logs, trained = trl_run(
        tmp_path / "start",
        tokenizer,
        rows,
        tmp_path / "trl",
        name="Reward",
        length=WHOLE,
        center_rewards_coefficient=coefficient or None,
    )
    lines = metrics(tmp_path / "out")
    assert max_series_diff([line["loss"] for line in lines], losses) <= 1e-5
    steps = [log for log in logs if "grad_norm" in log]
    norms = [log["grad_norm"] for log in steps]
    assert max_series_diff([line["grad_norm"] for line in lines], norms, relative=True) <= 1e-5
    for ours, theirs in {"margin": "margin", "accuracy": "accuracy"}.items():
        found = [line[ours] for line in lines]
        assert max_series_diff(found, [log[theirs] for log in steps]) <= 1e-4, ours
    after = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    weights = {name: p.detach() for name, p in trained.named_parameters()}
    assert state_dict_max_abs_diff(dict(after.named_parameters()), weights) <= 1e-5
    assert after.config.pad_token_id == trained.config.pad_token_id
    texts = [f"{row['prompt']}{row['chosen']}<|im_end|>" for row in rows if "prompt" in row]
    batch = tokenizer(texts or ["a", "bcd"], padding=True, return_tensors="pt")
    batch = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        assert max_abs_diff(after(**batch).logits, trained.eval()(**batch).logits) <= 1e-5
