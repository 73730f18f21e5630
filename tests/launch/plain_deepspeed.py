"""What one writes by hand for one Llama on DeepSpeed: a ZeRO-3 engine, or a pipeline of two stages.
No line of shardwright's: what its steps are measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

Step = Callable[[list[tuple[torch.Tensor, torch.Tensor]]], float]
"""(input ids, labels) of each micro-batch -> loss."""


def config_of(zero_stage: int, micro: int, accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage},
        "steps_per_print": 10**9,
    }


def plain_zero3(model: dict[str, Any], micro: int, accumulation: int) -> Step:
    config = config_of(3, micro, accumulation)
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**model), dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=llama, model_parameters=llama.parameters(), config=config
    )

    def step(micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        total = 0.0
        for inputs, labels in micro_batches:
            loss = engine(input_ids=inputs, labels=labels, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / len(micro_batches)

    return step


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, index: int, length: int) -> None:
        super().__init__()
        self.layer = LlamaDecoderLayer(config, index)
        positions = torch.arange(length)[None]
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, position_embeddings=(self.cos, self.sin))
        return output


class Head(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plain_pipeline(model: dict[str, Any], micro: int, accumulation: int, length: int) -> Step:
    config = LlamaConfig(**model, attn_implementation="sdpa")
    module = PipelineModule(
        [
            LayerSpec(nn.Embedding, config.vocab_size, config.hidden_size),
            *(LayerSpec(Block, config, i, length) for i in range(config.num_hidden_layers)),
            LayerSpec(Head, config),
        ],
        num_stages=2,
        loss_fn=loss_of,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=config_of(1, micro, accumulation),
    )

    def step(micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        return float(engine.train_batch(data_iter=iter(micro_batches)))

    return step
