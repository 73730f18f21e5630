"""Probes that need two ranks: both are this program, with the port and the rank as arguments.

stdin: as probe_worker.py, `at` is ranks; "stages" says into how many the four layers are cut.
stdout of rank 0: the outcomes, whose facts are the losses and those of a plain torch loop; with
"gather" what Accelerate saves of a model that AutoTP has cut; with "sequence" how far a step of
sequence-parallel ranks goes; with "ulysses" how far off the logits of DeepSpeed's wrapper for
Hugging Face models are, where ranks share a row out.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": sys.argv[1],
}
os.environ |= {"RANK": sys.argv[2], "LOCAL_RANK": sys.argv[2], "OMP_NUM_THREADS": "1"}

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups, logger, safe_get_full_fp32_param
from torch import nn
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
STEPS, CLIPPING = 4, 0.01
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 16,
}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(4)]


def loss_of(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (output - wanted).pow(2).mean()


def plain(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """One process, clipped by the norm of all parameters."""
    model = nn.Sequential(*layers())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(STEPS):
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_sgd(case: dict[str, Any], clipping: float) -> dict[str, Any]:
    """The case's configuration with the optimizer that plain() has."""
    config = copy.deepcopy(case["config"])
    del config["train_batch_size"]
    changed: dict[str, Any] = config | {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clipping,
    }
    return changed


def probe(case: dict[str, Any], facts: dict[str, Any]) -> None:
    config = with_sgd(case, CLIPPING)
    module = PipelineModule(
        layers(), num_stages=case["stages"], loss_fn=loss_of, partition_method="uniform"
    )
    parameters = list(module.parameters())
    engine, _, _, _ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
    torch.manual_seed(1)
    x, y = torch.randn(4, 8) * 3, torch.randn(4, 8) * 3
    facts["losses"] = [engine.train_batch(iter([(x, y)])).item() for _ in range(STEPS)]
    facts["plain"] = plain(x, y)


def gather(case: dict[str, Any], facts: dict[str, Any]) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    config = copy.deepcopy(case["config"])
    del config["train_batch_size"]
    config |= {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    engine, _, _, _ = deepspeed.initialize(model=nn.Sequential(*layers()), config=config)
    saver = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, deepspeed_config=case["config"]
    )
    state = Accelerator.get_state_dict(saver, engine)
    facts["shapes"] = {name: list(value.shape) for name, value in (state or {}).items()}


def sequence(case: dict[str, Any], facts: dict[str, Any]) -> None:
    """How far a step moves the weights, over two ranks that share each sequence, and both ranks'
    gradients' sum."""
    config = with_sgd(case, 0.0)
    parts = []
    for rank in range(2):
        torch.manual_seed(1 + rank)
        parts.append((torch.randn(4, 8), torch.randn(4, 8)))
    model = nn.Sequential(*layers())
    torch.stack([loss_of(model(x), y) for x, y in parts]).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in model.parameters()]
    engine, _, _, _ = deepspeed.initialize(model=nn.Sequential(*layers()), config=config)
    x, y = parts[int(sys.argv[2])]
    engine.backward(loss_of(engine(x), y))
    engine.step()
    after = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    moved = torch.cat([(b - a).reshape(-1) for a, b in zip(after, before, strict=True)])
    facts["share"] = (moved.norm() / torch.cat([g.reshape(-1) for g in wanted]).norm()).item()
    groups.mesh_device = None  # the next engine has no sequence ranks


def ulysses(case: dict[str, Any], facts: dict[str, Any]) -> None:
    """The largest difference of a logit from one process's, by how many tokens a layer sees."""
    ids = torch.arange(16).reshape(1, 16) * 5 % 32
    for name, window in (("whole", None), ("window", 4)):
        torch.manual_seed(0)
        config = MistralConfig(**TINY, num_attention_heads=case["ulysses"], sliding_window=window)
        model = MistralForCausalLM._from_config(config, attn_implementation="sdpa")
        wanted = model(input_ids=ids).logits
        own = ALL_ATTENTION_FUNCTIONS["sdpa"]
        try:
            UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, micro_batch_size=1)
            places = torch.arange(16).reshape(1, 16).chunk(2, dim=1)[int(sys.argv[2])]
            logits = model(input_ids=ids[:, places[0]], position_ids=places).logits
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = own
            parallel_state_sp._release_sequence_parallel_groups()
        apart = (logits - wanted[:, places[0]]).abs().max().detach()
        torch.distributed.all_reduce(apart, torch.distributed.ReduceOp.MAX)
        facts[name] = apart.item()


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    kinds = {"sequence": sequence, "gather": gather, "ulysses": ulysses}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            next((run for kind, run in kinds.items() if case.get(kind)), probe)(case, facts)
        return {"error": "", "logs": [], "facts": facts}
    except Exception as raised:
        return {"error": f"{type(raised).__name__}: {raised}", "logs": [], "facts": facts}


if __name__ == "__main__":
    logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    outcomes = [outcome(case) for case in json.load(sys.stdin)]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if sys.argv[2] == "0":
        print(json.dumps(outcomes))
