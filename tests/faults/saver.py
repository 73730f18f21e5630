"""A run of one rank in a forked process: `run`'s choice of a checkpoint, and the runtime's own
saving and loading, around a small Llama that torch's AdamW trains. Starting real ranks takes ten
seconds; this takes one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed import ops
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama  # noqa: F401 (before a process forks)

from shardwright.checkpoint import checkpoint_saver as checkpoint
from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.resume_checkpoint import choose_checkpoint, print_resume_notes
from shardwright.checkpoint.run_history import SaveMetadata
from shardwright.diagnostics import Refusal
from shardwright.engines.deepspeed.deepspeed_trainers import DeepSpeedTrainer
from shardwright.monitor.run_files import MetricsWriter
from shardwright.parallel.model_loading import load_config
from shardwright.plan.plan import Plan, read_plan
from shardwright.train.run_attempt import begin_attempt, hold_run_lease

ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as engines.deepspeed.runtime does

STEPS, EVERY, KEEP = 8, 2, 2


@dataclass(frozen=True)
class Ended:
    """signal: that killed the process, 0 where it ended; refused: codes; said: what the user would
    read."""

    signal: int
    refused: tuple[str, ...]
    said: str


def forked(work: Callable[[], None]) -> Ended:
    """`work` in a process of its own, with one thread and what is imported here. Raises
    AssertionError where it fails otherwise than by a Refusal."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        told: dict[str, Any] = {"refused": [], "failed": ""}
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                work()
        except Refusal as refusal:
            told["refused"] = [d.code for d in refusal.diagnostics]
            out.write("".join(f"error[{d.code}]: {d.message}\n" for d in refusal.diagnostics))
        except BaseException:
            told["failed"] = traceback.format_exc()
        with os.fdopen(writing, "w") as file:
            json.dump({**told, "said": out.getvalue()}, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Ended(os.WTERMSIG(status), (), "")
    found = json.loads(text)
    assert not found["failed"], found["failed"]
    return Ended(0, tuple(found["refused"]), found["said"])


def train(
    out: Path,
    resume: str = "auto",
    before: Callable[[Plan], None] | None = None,
    after: Callable[[int], None] | None = None,
) -> Ended:
    """Every step that is left, in a process of its own. before: what is planted into it; after:
    called behind each step."""

    def work() -> None:
        if before is not None:
            before(read_plan(out))
        run(out, resume, after)

    return forked(work)


def killed(ended: Ended) -> bool:
    return ended.signal == signal.SIGKILL


def run(out: Path, resume: str = "auto", after: Callable[[int], None] | None = None) -> None:
    """Every step that is left, in this process. Raises Refusal."""
    _open_group()
    plan = read_plan(out)
    with hold_run_lease(plan, out):
        chosen = choose_checkpoint(plan, out, resume)
        print_resume_notes(chosen)
        attempt = begin_attempt(plan, out, chosen, fresh=resume == "never")
        checkpoint.prepare_checkpoint_folder(plan, out, attempt.number, attempt.step)
        trainer = _trainer(plan, out)
        done = load_checkpoint(plan, trainer, Path(attempt.resume)) if attempt.resume else 0
        metrics, origin = MetricsWriter(out, attempt.number, done), SaveMetadata(line=attempt.line)
        for step in range(done + 1, STEPS + 1):
            metrics.write(step, *_step(trainer, step), 1e-3, 1, 1.0)
            if step % EVERY == 0:
                checkpoint.save_checkpoint(
                    plan, out, trainer, step, last=step == STEPS, origin=origin
                )
            if after is not None:
                after(step)


def _open_group() -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _trainer(plan: Plan, out: Path) -> Any:
    torch.manual_seed(plan.training.seed)
    model = AutoModelForCausalLM.from_config(load_config(plan, out))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = SimpleNamespace(module=model, optimizer=optimizer, global_steps=0, global_samples=0)
    trainer = DeepSpeedTrainer(plan, frozenset())
    trainer.engine = engine
    return trainer


def _step(trainer: Any, step: int) -> tuple[float, float]:
    """(loss, gradient norm). The batch is the step's own; one random number of the global stream is
    in it."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (2, 16), generator=random)
    ids[0, 0] = int(torch.randint(0, 256, ()))
    model, optimizer = trainer.engine.module, trainer.engine.optimizer
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return float(loss.detach()), norm


def losses(out: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
