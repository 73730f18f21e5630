"""One parity case: a recipe through `shardwright compile` and `run`, against the plain Hugging Face
run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from shardwright.utils.numeric_difference import (
    difference,
    max_series_diff,
    state_dict_max_abs_diff,
)
from shardwright.verify.reference_run import Rows, add_reference_lora
from tests import warm
from tests.figures import lines_apart
from tests.parity.models import MIXTURES, MODELS
from tests.parity.reference import Reference, initial_model, token_rows, train
from tests.parity.router_aux_loss import add_balance

STEPS, LENGTH, SEED, WARMUP = 8, 32, 11, 3
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-3, 0.1
LORA_ALPHA = 12
LOSS_ABSOLUTE, NORM_RELATIVE, WEIGHT_ABSOLUTE = 1e-5, 1e-5, 2e-5
BF16_RELATIVE = 2e-2


@dataclass(frozen=True)
class Case:
    """accumulation x data x micro = the global batch. `training` overrides keys of the recipe's
    training section."""

    model: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero_stage: int = 1
    micro: int = 2
    accumulation: int = 2
    checkpointing: str | dict[str, int] | list[str] = "none"
    schedule: str = "1f1b"
    precision: str = "fp32"
    accumulation_dtype: str = "auto"
    clipping: float = 0.5
    pretrained: bool = False
    offload: str = "none"
    loss: str = "auto"
    kernels: str = "hf"
    lora_rank: int = 0
    lora_dropout: float = 0.0
    nodes: int = 1
    launcher: str = "auto"
    context: int = 1
    expert: int = 1
    expert_tensor: int | str = "tensor"
    sequence_parallel: bool = False
    virtual_stages: int = 1
    expert_overlap: bool = False
    target: str = "deepspeed"
    balance: float = 0.0
    freeze: tuple[str, ...] = ()
    low_precision: str = "none"
    low_precision_keep: tuple[str, ...] = ()
    optimizer: str = "adamw"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def batch(self) -> int:
        return self.accumulation * self.data * self.micro


AnyCase = TypeVar("AnyCase", bound=Case)


def over_data_ranks(case: AnyCase) -> AnyCase:
    """The same batch over data ranks alone, at ZeRO-1: what another layout resumes."""
    return dataclasses.replace(
        case,
        data=case.world,
        tensor=1,
        pipeline=1,
        context=1,
        expert=1,
        zero_stage=1,
        accumulation=case.batch // case.world // case.micro,
    )


def recipe(case: Case, folder: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"config": MODELS[case.model], "weights": "random"}
    if case.pretrained:
        model = {"source": "./weights", "weights": "pretrained"}
    model |= {"loss": case.loss, "kernels": case.kernels}
    if case.freeze:
        model["freeze"] = list(case.freeze)
    if case.balance:
        model["router_aux_loss"] = case.balance
    return {
        "version": 1,
        "name": "parity",
        "target": case.target,
        "model": model,
        "cluster": {"nodes": case.nodes, "gpus_per_node": case.world // case.nodes, "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": case.batch,
            "steps": STEPS,
            "precision": case.precision,
            "gradient_accumulation_dtype": case.accumulation_dtype,
            "low_precision": case.low_precision,
            "low_precision_keep": list(case.low_precision_keep),
            "optimizer": {
                "name": "adamw",
                "lr": LR,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": DECAY,
            },
            "scheduler": {"name": "cosine", "warmup_steps": WARMUP, "min_lr": 0},
            "gradient_clipping": case.clipping,
            "seed": SEED,
        },
        "data": {"kind": "tokens", "path": "tokens.npy", "shuffle": False, "packing": False},
        "parallelism": {
            "tensor": case.tensor,
            "pipeline": case.pipeline,
            "context": case.context,
            "expert": case.expert,
            "expert_tensor": case.expert_tensor,
            "data": case.data,
            "zero_stage": case.zero_stage,
            "micro_batch_size": case.micro,
            "activation_checkpointing": case.checkpointing,
            "schedule": case.schedule,
            "offload": case.offload,
            "sequence_parallel": case.sequence_parallel,
            "virtual_stages": case.virtual_stages,
            "expert_overlap": case.expert_overlap,
        },
        "launch": {"launcher": case.launcher},
        "lora": {"rank": case.lora_rank, "alpha": LORA_ALPHA, "dropout": case.lora_dropout}
        if case.lora_rank
        else None,
    }


def shardwright(*arguments: object, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """The command itself, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "shardwright", *map(str, arguments)],
        env=warm.environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def must(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, (
        f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    )
    return result


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def newest_checkpoint(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("step-*"))[-1]


def write_inputs(case: Case, folder: Path) -> np.ndarray:
    """tokens.npy, recipe.yaml and, for pretrained weights, a Hugging Face folder; returns the
    tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = MODELS[case.model]["vocab_size"]
    tokens = np.random.default_rng(SEED).integers(
        0, vocabulary, (STEPS * case.batch, LENGTH), dtype=np.int32
    )
    np.save(folder / "tokens.npy", tokens)
    (folder / "recipe.yaml").write_text(json.dumps(recipe(case, folder), indent=1))
    if case.pretrained:
        initial_model(MODELS[case.model], SEED).save_pretrained(folder / "weights")
    return tokens


def run_here(out: Path) -> None:
    must(shardwright("run", out))


def run_case(
    case: Case, folder: Path, start: Callable[[Path], None] = run_here
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """compile, start, export: the metrics and the trained weights. start: trains the compiled
    folder."""
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    start(folder / "out")
    must(shardwright("export", newest_checkpoint(folder / "out"), "-o", folder / "hf"))
    trained = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    return metrics(folder / "out"), dict(trained.named_parameters())


def check_live_split(folder: Path) -> None:
    """Every rank holds, byte for byte, what plan.json says, and tensor parallelism really cuts the
    layers."""
    plan = json.loads((folder / "plan.json").read_text())
    for rank in plan["ranks"]:
        live = json.loads((folder / "run" / "ranks" / f"rank-{rank['rank']:05d}.json").read_text())
        assert live["parameter_bytes"] == rank["parameter_bytes"], (rank, live)
    degree = plan["tensor_parallel"]["degree"]
    if degree == 1:
        return
    whole = {
        p["name"]: p["shape"] for m in plan["tensor_parallel"]["modules"] for p in m["parameters"]
    }
    layers, experts = plan["model"]["cut"]["stack"] + ".", plan["strategy"]["expert"]
    cut = total = 0
    for path in (folder / "run" / "ranks").iterdir():
        for name, shape in json.loads(path.read_text())["shapes"].items():
            if name.startswith(layers) and len(shape) in (
                2,
                3,
            ):  # a matrix, or a stack of experts' matrices
                ranks = degree * (experts if len(shape) == 3 else 1)
                total += np.prod(whole[name])
                cut += np.prod(whole[name]) * (np.prod(shape) * ranks == np.prod(whole[name]))
    assert cut / total >= 0.95
    assert plan["tensor_parallel"]["sharded_fraction"] >= 0.95


def reference(case: Case, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> Reference:
    model = initial_model(MODELS[case.model], SEED)
    blocks = [token_rows(tokens, k, case.batch) for k in range(1, STEPS + 1)]
    if case.balance:
        add_balance(model, case.balance)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, each) for each in case.freeze))
    if case.lora_rank:
        model = with_adapters(model, case)
    if case.low_precision != "none":
        from tests.parity.low_precision import add_reference_low_precision

        stack = "transformer.h" if hasattr(model, "transformer") else "model.layers"
        tensor = case.tensor if case.low_precision == "fp8_tensorwise" else 1
        torchao_name = case.low_precision.removeprefix("fp8_")
        assert add_reference_low_precision(
            model, stack, torchao_name, case.low_precision_keep, tensor
        )
    if case.lora_dropout:
        draw_in_turns(model, case.data)
    if case.lora_dropout or case.low_precision != "none":  # as the ranks: a micro-batch at a time
        blocks = [
            [
                {n: x[i : i + case.micro] for n, x in b.items()}
                for i in range(0, case.batch, case.micro)
            ]
            for [b] in blocks
        ]
    return train_in_one_process(model, blocks, case.clipping, dtype=dtype)


def train_in_one_process(
    model: torch.nn.Module,
    blocks: list[Rows],
    clipping: float,
    *,
    own_loss: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Reference:
    """Train a plain model with the optimizer and the schedule of recipe().

    blocks: the rows of each step
    """
    return train(
        model,
        blocks,
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        warmup=WARMUP,
        clipping=clipping,
        own_loss=own_loss,
        dtype=dtype,
    )


def with_adapters(model: torch.nn.Module, case: Case, task: str = "CAUSAL_LM") -> torch.nn.Module:
    """Add adapters to every linear of the decoder layers, as peft does. A mixture of experts gets
    them by forward hooks, because peft leaves out its dense and shared layers."""
    from peft import LoraConfig, get_peft_model

    if case.model in MIXTURES:
        add_reference_lora(
            model, "model.layers", None, rank=case.lora_rank, alpha=LORA_ALPHA, seed=SEED
        )
        return model
    torch.manual_seed(SEED)
    turned = MODELS[case.model]["model_type"] == "gpt2"
    config = LoraConfig(
        r=case.lora_rank,
        lora_alpha=LORA_ALPHA,
        lora_dropout=case.lora_dropout,
        target_modules="all-linear",
        fan_in_fan_out=turned,
        task_type=task,
    )
    adapted: torch.nn.Module = get_peft_model(model, config)
    return adapted


def draw_in_turns(model: torch.nn.Module, ranks: int) -> None:
    """Each data rank draws from a stream of its own; here the micro-batches of all ranks follow
    each other."""
    states, count = [], itertools.count()
    for rank in range(ranks):
        torch.manual_seed(SEED + 1 + rank)
        states.append(torch.get_rng_state())
    at = 0

    def begin(*_: object) -> None:
        nonlocal at
        at = next(count) % ranks
        torch.set_rng_state(states[at])

    def end(*_: object) -> None:
        states[at] = torch.get_rng_state()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


@dataclass(frozen=True)
class Difference:
    """The largest over the steps (over the elements, for weights)."""

    loss_absolute: float
    norm_relative: float
    weight_absolute: float


def compare(case: Case, folder: Path, start: Callable[[Path], None] = run_here) -> Difference:
    """Runs the case and raises AssertionError where it trains otherwise than the plain process, too
    far."""
    tokens = write_inputs(case, folder)
    lines, weights = run_case(case, folder, start)
    check_live_split(folder / "out")
    assert [m["step"] for m in lines] == list(range(1, STEPS + 1))
    assert all(m["tokens"] == case.batch * LENGTH for m in lines)
    wanted = reference(case, tokens)
    rates = [m["learning_rate"] for m in lines]
    assert max_series_diff(rates, wanted.learning_rates) <= 1e-12, (rates, wanted.learning_rates)
    difference = difference_of(lines, weights, wanted)
    if case.precision == "fp32":
        assert difference.loss_absolute <= LOSS_ABSOLUTE, difference
        assert difference.norm_relative <= NORM_RELATIVE, difference
        assert difference.weight_absolute <= WEIGHT_ABSOLUTE, difference
        return difference
    check_half_precision(lines, wanted, reference(case, tokens, torch.bfloat16))
    return difference


def check_half_precision(lines: list[dict[str, Any]], wanted: Reference, low: Reference) -> None:
    """wanted, low: the plain runs in fp32 and in bf16."""
    losses = [m["loss"] for m in lines]
    assert max_series_diff(losses, wanted.losses, relative=True) <= BF16_RELATIVE, (
        losses,
        wanted.losses,
    )
    assert max_series_diff(losses, low.losses, relative=True) <= BF16_RELATIVE, (losses, low.losses)
    for m, full, half in zip(lines, wanted.grad_norms, low.grad_norms, strict=True):
        nearest = min(difference(m["grad_norm"], plain, relative=True) for plain in (full, half))
        assert nearest <= BF16_RELATIVE, (m, full, half)


def difference_of(
    lines: list[dict[str, Any]], weights: dict[str, torch.Tensor], wanted: Reference
) -> Difference:
    off = lines_apart(lines, wanted)
    return Difference(
        loss_absolute=off["loss"],
        norm_relative=off["norm"],
        weight_absolute=state_dict_max_abs_diff(weights, wanted.weights),
    )
