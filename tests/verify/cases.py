"""What `verify` is tried on: published families, and faults that it has to find."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shardwright.verify.tiny_copy import TEMPLATE

Pins = dict[str, int | str]
PIPELINE: Pins = {"pipeline": 4, "schedule": "1f1b"}
TENSOR: Pins = {"tensor": 4}
BOTH: Pins = {"tensor": 2, **PIPELINE, "micro_batch_size": 2}
EXPERTS: Pins = {"data": 4, "expert": 4, "zero_stage": 2}
CONTEXT: Pins = {"context": 4, "zero_stage": 2}

FAMILIES: dict[str, tuple[str, Pins]] = {
    "llama": ("meta-llama/Llama-3.1-8B", BOTH),
    "qwen2": ("Qwen/Qwen2.5-7B", {"data": 4, "zero_stage": 3}),
    "qwen3": ("Qwen/Qwen3-8B", PIPELINE),
    "gpt2": ("openai-community/gpt2", BOTH),
    "gpt_neox": ("EleutherAI/gpt-neox-20b", BOTH),
    "bloom": ("bigscience/bloom-7b1", PIPELINE),
    "mistral": (
        "mistralai/Mistral-7B-v0.3",
        {**TENSOR, "data": 2, "zero_stage": 2, "activation_checkpointing": "full"},
    ),
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", PIPELINE),
    "gemma2": ("google/gemma-2-9b", PIPELINE),
    "phi": ("microsoft/phi-2", TENSOR),
    "olmo2": ("allenai/OLMo-2-1124-7B", {**PIPELINE, "schedule": "dualpipev"}),
    "opt": ("facebook/opt-6.7b", TENSOR),
    "mixtral, experts shared out": ("mistralai/Mixtral-8x7B-v0.1", EXPERTS),
    "mistral, rows cut": ("mistralai/Mistral-7B-v0.1", CONTEXT),
}
"""family -> (hub id, parallelism). The configurations come with the package: no network."""
SAMPLE = ("gpt2",)
ADAPTED: dict[str, tuple[str, Pins]] = {
    "gpt2": ("openai-community/gpt2", {"data": 4, "zero_stage": 2}),
    "qwen2": ("Qwen/Qwen2.5-7B", {"data": 4, "zero_stage": 3, "activation_checkpointing": "full"}),
}
"""Under LoRA: data ranks alone."""

# Each is put into the ranks that the launcher starts, by a sitecustomize.py on their PYTHONPATH.
FAULTS: dict[str, tuple[str, Pins, str]] = {
    "a fused qkv that is cut as one block": (
        "openai-community/gpt2",
        TENSOR,
        """
import dataclasses
from shardwright.parallel.tensor_parallel import TensorSplitter
plain = TensorSplitter._cut
def as_one_block(self, parameter, planned):
    plain(self, parameter, dataclasses.replace(planned, blocks=(sum(planned.blocks),)))
TensorSplitter._cut = as_one_block
""",
    ),
    "a dropped all-reduce": (
        "Qwen/Qwen3-8B",
        TENSOR,
        """
from shardwright.parallel import tensor_parallel_collectives as regions
regions._ReduceFromTensorRegion.forward = staticmethod(lambda ctx, x, group: x.clone())
""",
    ),
    "a tied gradient that stays on its stage": (
        "openai-community/gpt2",
        PIPELINE,
        """
from shardwright.engines.deepspeed.pipeline_module import HfPipelineModule
HfPipelineModule.get_tied_weights_and_groups = lambda self: []
""",
    ),
    "a head scale that is applied twice": (
        "CohereForAI/c4ai-command-r-v01",
        PIPELINE,
        """
from shardwright.models.model_skeleton import Skeleton
head = Skeleton.head
Skeleton.head = lambda self, state: head(self, state) * self.model.logit_scale
""",
    ),
    "a wrong expert group": (
        "mistralai/Mixtral-8x7B-v0.1",
        EXPERTS,
        """
from shardwright.engines.deepspeed import deepspeed_groups as experts
from deepspeed.utils import groups
plain = experts._mark_expert
def summed_over_other_experts(name, parameter):
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = groups._EXPERT_PARALLEL_GROUP[name]
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = groups._EXPERT_PARALLEL_GROUP_RANKS[name]
    plain(name, parameter)
experts._mark_expert = summed_over_other_experts
""",
    ),
    "experts without an all-to-all in the backward pass": (
        "mistralai/Mixtral-8x7B-v0.1",
        EXPERTS,
        """
from shardwright.parallel import expert_parallel as dispatch
def own_rows(ctx, gradient):
    kept = gradient.new_zeros(sum(ctx.sent), gradient.shape[1])
    rows = min(len(kept), len(gradient))
    kept[:rows] = gradient[:rows]
    return kept, None, None, None
dispatch._TokenAllToAll.backward = staticmethod(own_rows)
""",
    ),
    "attention without an all-to-all in the backward pass": (
        "meta-llama/Llama-3.1-8B",
        CONTEXT,
        """
import torch
from shardwright.parallel import context_parallel as exchange
def own_piece(ctx, gradient):
    split, join, group = ctx.back
    return torch.cat(gradient.chunk(2, dim=split), dim=join), None, None, None
exchange._HeadsAllToAll.backward = staticmethod(own_piece)
""",
    ),
    "labels shifted after the cut": (
        "meta-llama/Llama-3.1-8B",
        CONTEXT,
        """
import torch.nn.functional as F
from dataclasses import replace
from shardwright.engines.deepspeed import deepspeed_trainers as base
plain = base.contiguous_shard
def shifted_late(batch, rank, ranks):
    piece = plain(batch, rank, ranks)
    labels = batch.labels.chunk(ranks, dim=1)[rank]
    return replace(piece, labels=F.pad(labels[:, 1:], (0, 1), value=-100))
base.contiguous_shard = shifted_late
""",
    ),
    "a mask made for the local piece": (
        "mistralai/Mistral-7B-v0.1",
        CONTEXT,
        """
from shardwright.parallel import context_parallel as ranks
plain = ranks.ulysses_attention
ranks.ContextParallel._mask_arguments = lambda self, inner, *args, **kwargs: inner(*args, **kwargs)
def of_each_piece(inner, group, module, query, key, value, mask, *args, **kwargs):
    mask = None if mask is None else mask.repeat(1, 1, 2, 2)
    return plain(inner, group, module, query, key, value, mask, *args, **kwargs)
ranks.ulysses_attention = of_each_piece
""",
    ),
}
DOCUMENTS: dict[str, Any] = {"kind": "text", "path": "python-stdlib", "tokenizer": "byte"}
LONG_ROPE: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 8,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * i for i in range(48)],
        "long_factor": [1.0 + 0.5 * i for i in range(48)],
    },
}
"""Phi-3.5's, shallow: beyond 4,096 tokens its long factors count."""
TALKS: dict[str, Any] = {
    "kind": "chat",
    "path": str(Path(__file__).with_name("talks.jsonl")),
    "tokenizer": "byte",
    "template": TEMPLATE,
}
PACKED_AND_VALIDATED: dict[str, Any] = {
    "data": {**DOCUMENTS, "packing": True},
    "validation": {"fraction": 0.01, "every_steps": 100},
}

# What a recipe may ask for beside its layout, and a fault that shows nowhere else.
FEATURES: dict[str, tuple[str, Pins, dict[str, Any], str]] = {
    "validation": (
        "openai-community/gpt2",
        {"pipeline": 4, "schedule": "dualpipev"},
        {
            "data": {**DOCUMENTS, "packing": False},
            "validation": {"fraction": 0.01, "every_steps": 100},
        },
        """
from shardwright.parallel.micro_batches import MicroBatch
MicroBatch.without_labels = lambda self, rows: self
""",
    ),
    "dropout": (
        "openai-community/gpt2",
        {"pipeline": 4, "activation_checkpointing": "full"},
        {
            "data": {**DOCUMENTS, "packing": False},
            "validation": {"fraction": 0.01, "every_steps": 100},
        },
        """
from shardwright.engines.deepspeed.pipeline_module import HfPipelineModule
from deepspeed.pipe import PipelineModule
from torch.nn import Dropout
def goes_on(self, mode=True):
    for module in self.__dict__["stage_model"].skeleton.model.modules():
        if isinstance(module, Dropout) and not mode:
            module.p = min(0.9, 5 * module.p)  # 0.1 changes the mean of many tokens by little
    return PipelineModule.train(self, mode)
HfPipelineModule.train = goes_on
""",
    ),
    "padding and a balance loss": (
        "mistralai/Mixtral-8x7B-v0.1",
        {"pipeline": 2, "data": 2, "activation_checkpointing": "full"},
        {"model": {"router_aux_loss": 0.5}, "data": {**TALKS, "packing": False}},
        """
from shardwright.data.sequences import DocumentSequences
from dataclasses import replace
plain = DocumentSequences.read
DocumentSequences.read = lambda self, indices: replace(plain(self, indices), lengths=None)
""",
    ),
    "padding and packed conversations": (
        "mistralai/Mixtral-8x7B-v0.1",
        {"context": 4, "data": 2, "expert": 2},
        {"model": {"router_aux_loss": 0.5}, "data": {**TALKS, "packing": True}},
        """
from shardwright.parallel import expert_parallel as balance
plain = balance.RouterAuxLoss
balance.RouterAuxLoss = lambda model, coefficient, affinity, pieces, piece, summed: plain(
    model, coefficient, affinity, pieces, 0, summed
)
""",
    ),
    "a rotary embedding that follows the length": (
        "Phi-3.5",
        CONTEXT,
        {"model": {"config": LONG_ROPE}, "training": {"sequence_length": 8192}},
        """
from shardwright.parallel.context_parallel import ContextParallel
plain = ContextParallel.use
ContextParallel.use = lambda self, group, model=None: plain(self, group)
""",
    ),
    "packing": (
        "Qwen/Qwen2.5-7B",
        {"data": 4, "zero_stage": 3},
        {"data": {**DOCUMENTS, "packing": True}},
        """
import dataclasses, torch
from shardwright.parallel import micro_batches as batches
plain = batches._micro_batch
def joined(block, *how, **more):
    m = plain(block, *how, **more)
    return dataclasses.replace(m, position_ids=torch.arange(m.input_ids.shape[1]).expand_as(m.input_ids).contiguous())
batches._micro_batch = joined
""",  # noqa: E501
    ),
    "chunked loss": (
        "Qwen/Qwen3-8B",
        TENSOR,
        {"model": {"loss": "chunked"}},
        """
from shardwright.parallel.distributed_losses import ChunkedLoss
plain = ChunkedLoss.__call__
ChunkedLoss.__call__ = lambda self, hidden, labels: plain(self, (hidden + hidden.detach()) / 2, labels)
""",  # noqa: E501
    ),
    "offload": (
        "openai-community/gpt2",
        {"data": 4, "zero_stage": 2, "offload": "optimizer"},
        {},
        """
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
plain = DeepSpeedZeroOptimizer._optimizer_step
def first_group_alone(self, group):
    return None if self.cpu_offload and group else plain(self, group)
DeepSpeedZeroOptimizer._optimizer_step = first_group_alone
""",
    ),
    "lora": (
        "openai-community/gpt2",
        {"data": 4, "zero_stage": 2},
        {"lora": {"rank": 16, "alpha": 32, "dropout": 0.1}},
        """
import dataclasses
from shardwright.models import lora_target_paths as lora
plain = lora.lora_config
lora.lora_config = lambda plan, **more: plain(dataclasses.replace(plan, alpha=2 * plan.alpha), **more)
""",  # noqa: E501
    ),
    "lora on a mixture": (
        "deepseek-ai/DeepSeek-V3",
        {"data": 4, "zero_stage": 3},
        {"lora": {"rank": 16, "alpha": 32, "dropout": 0.1}},
        """
from shardwright.parallel import lora_adapters as lora
plain = lora.inject_lora
def doubled_in_shared_experts(model, section, paths):
    plain(model, section, paths)
    for name, module in model.named_modules():
        if "shared_experts" in name and hasattr(module, "scaling"):
            module.scaling = {key: 2 * scale for key, scale in module.scaling.items()}
lora.inject_lora = doubled_in_shared_experts
""",
    ),
    "freeze": (
        "Qwen/Qwen3-8B",
        {"tensor": 2, "data": 2, "zero_stage": 2},
        {"model": {"freeze": ["model.layers.1?.*", "*norm*", "model.embed_tokens"]}},
        """
from shardwright.plan.plan import PlanModel
from shardwright.train import training_session as session
PlanModel.is_frozen = lambda self, parameter: "norm" in parameter
session.check_parameters = lambda *_: None
""",
    ),
}
PAIRS: dict[str, Any] = {"kind": "preference", "path": "python-docstrings", "tokenizer": "byte"}
HELD_OUT: dict[str, Any] = {"validation": {"fraction": 0.1, "every_steps": 100}}

# objective -> (hub id, parallelism, keys of the objective, further sections, a fault of its own)
OBJECTIVES: dict[str, tuple[str, Pins, dict[str, Any], dict[str, Any], str]] = {
    "dpo": (
        "openai-community/gpt2",
        {"pipeline": 2, "schedule": "1f1b"},
        {"beta": 0.1},
        {"data": PAIRS},
        """
from dataclasses import replace
from shardwright.data.sequences import ScoredSequences
plain = ScoredSequences.read
def of_the_other_completion(self, indices):
    batch = plain(self, indices)
    return replace(batch, reference=batch.reference.reshape(-1, 2)[:, ::-1].ravel())
ScoredSequences.read = of_the_other_completion
""",
    ),
    "ipo": (
        "Qwen/Qwen3-8B",
        {"data": 4, "zero_stage": 3},
        {"beta": 0.2},
        {"data": PAIRS, **HELD_OUT},
        """
from shardwright.parallel.preference_loss import PreferenceLoss
plain = PreferenceLoss.__call__
PreferenceLoss.__call__ = lambda self, *given: plain(self, *given[:-1], given[-1] / 2)
""",
    ),
    "simpo": (
        "Qwen/Qwen3-8B",
        {"tensor": 4},
        {},
        {"data": PAIRS},
        """
from shardwright.models.tasks.preference import Completions
Completions.means = property(lambda self: self.scores / (self.tokens + 1))
""",
    ),
    "orpo": (
        "meta-llama/Llama-3.1-8B",
        CONTEXT,
        {},
        {"data": PAIRS, **HELD_OUT},
        """
from shardwright.parallel.preference_loss import PreferenceLoss
plain = PreferenceLoss.__init__
PreferenceLoss.__init__ = lambda self, objective, device, group=None: plain(self, objective, device)
""",
    ),
    "kto": (
        "openai-community/gpt2",
        {"tensor": 2, "data": 2, "zero_stage": 1},
        {},
        {"data": PAIRS, **HELD_OUT},
        """
from shardwright.parallel import preference_loss
plain = preference_loss.kto
preference_loss.kto = lambda o, own, labels, others: plain(o, own, labels, others + 1)
""",
    ),
    "reward": (
        "Qwen/Qwen3-8B",
        {"tensor": 2, "pipeline": 2},
        {"center_coefficient": 0.01},
        {"data": PAIRS, **HELD_OUT},
        """
import dataclasses
from shardwright.parallel import micro_batches as batches
plain = batches._micro_batch
def a_token_early(*arguments, **more):
    m = plain(*arguments, **more)
    return dataclasses.replace(m, labels=m.labels.roll(-1, dims=1))
batches._micro_batch = a_token_early
""",
    ),
    "distill": (
        "Qwen/Qwen3-8B",
        {"tensor": 2, "pipeline": 2},
        {"teacher": "./teacher-that-is-not-scored-yet", "teacher_weight": 0.7},
        {"data": {**DOCUMENTS, "packing": True}, **HELD_OUT},
        """
from shardwright.parallel import distributed_losses
plain = distributed_losses.top_k_divergence
distributed_losses.top_k_divergence = lambda *arguments, **more: plain(
    *arguments, **{**more, "first": 0}
)
""",
    ),
}
OBJECTIVE_IN_TEST = "kto"
FAULT_IN_TEST = "a tied gradient that stays on its stage"

IN_RANKS = """
import os
if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
    os.environ["DS_ACCELERATOR"] = "cpu"
"""


def recipe(source: str, parallelism: Pins, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """A layout of GPUs that are not there. more: further sections; the model's has its source."""
    degrees = {"tensor": 1, "pipeline": 1, "data": 1, "context": 1, **parallelism}
    more = dict(more or {})
    model: dict[str, Any] = {"weights": "random", **more.pop("model", {})}
    if "config" not in model:
        model["source"] = source
    training = {"sequence_length": 512, "global_batch_size": 64, "steps": 1000, "precision": "bf16"}
    return {
        "version": 1,
        "name": "verify",
        "model": model,
        "cluster": {
            "nodes": 1,
            "gpus_per_node": math.prod(
                int(degrees[key]) for key in ("tensor", "pipeline", "data", "context")
            ),
            "gpu": "h200-sxm-141gb",
        },
        "training": {**training, **more.pop("training", {})},
        "parallelism": {"activation_checkpointing": "none", **degrees},
        "assume": {"ignore_memory": True},
        **more,
    }
