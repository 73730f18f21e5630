"""A user's own script: a plain HF Trainer. It knows nothing of the plan but the two numbers that it
repeats."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from deepspeed import ops
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Report(TrainerCallback):
    """Writes what DeepSpeed's engine really does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, args, state, control, **kwargs) -> None:  # type: ignore[no-untyped-def]
        engine = trainer.model_wrapped
        if int(os.environ["RANK"]) == 0:
            found = {
                "engine": type(engine).__name__,
                "zero": int(engine.zero_optimization_stage()),
                "micro": engine.train_micro_batch_size_per_gpu(),
                "accumulation": engine.gradient_accumulation_steps(),
                "batch": engine.train_batch_size(),
                "bucket": engine.zero_reduce_bucket_size(),
                "lr": engine.optimizer.param_groups[0]["initial_lr"],
                "steps": engine.global_steps,
                "losses": [line["loss"] for line in state.log_history if "loss" in line],
            }
            self.path.write_text(json.dumps(found))


config, result, micro, accumulation, deepspeed = sys.argv[-5:]
arguments = TrainingArguments(
    output_dir=str(Path(result).parent / "trainer"),
    per_device_train_batch_size=int(micro),
    gradient_accumulation_steps=int(accumulation),
    deepspeed=None if deepspeed == "none" else deepspeed,
    learning_rate=2e-3,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
trainer = Trainer(
    model=model, args=arguments, train_dataset=Tokens(), callbacks=[Report(Path(result))]
)
trainer.train()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
