"""Under the `deepspeed` launcher: the HF Trainer with DeepSpeed, on the settings of a compiled
folder.

Arguments: the folder, the number of steps, the file for {"step_seconds": [...], "peak_bytes": ...}.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from deepspeed import ops
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        self.rows, self.length, self.vocabulary = rows, length, vocabulary

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Clock(TrainerCallback):
    """Seconds of each step, its launches waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._wait()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self._began)

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def main(folder: Path, steps: int, out: Path) -> None:
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    transformers.logging.set_verbosity_error()
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    strategy, training, on_cpu = plan["strategy"], plan["training"], plan["gpu"] == "cpu"
    recomputes = strategy["activation_checkpointing"] == "full"
    arguments = TrainingArguments(
        output_dir=str(out.parent / "trainer"),
        per_device_train_batch_size=strategy["micro_batch_size"],
        gradient_accumulation_steps=strategy["gradient_accumulation_steps"],
        deepspeed=str(folder / "accelerate" / "ds_config.trainer.json"),
        gradient_checkpointing=recomputes,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recomputes else None,
        bf16=training["precision"] == "bf16",
        fp16=training["precision"] == "fp16",
        learning_rate=1e-4,
        max_grad_norm=training["gradient_clipping"],
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
    )
    config = AutoConfig.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=plan["model"]["attention"])
    model.config.use_cache = False
    rows = steps * training["global_batch_size"]
    data, clock = Tokens(rows, training["sequence_length"], config.vocab_size), Clock()
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock]).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not on_cpu:
        free, total = torch.cuda.mem_get_info()
        peak = total - free + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    out.write_text(
        json.dumps({"step_seconds": clock.seconds, "peak_bytes": peak}), encoding="utf-8"
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    *_, directory, count, result = sys.argv
    main(Path(directory), int(count), Path(result))
