"""Compare Megatron-Core with Hugging Face on a tiny copy of the model, and its ranks with the
plan's.

The ranks are real Megatron modules without memory, on a process group that sends nothing. Reads
{"config": the model's, "plan": plan.json} from standard input and prints one line of JSON: {} where
all agrees.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from shardwright.engines.megatron.megatron_cpu_patches import (
    patch_torch_for_cpu,
    set_megatron_device,
)

RELATIVE_TOLERANCE = 1e-5
"""Limits differences relative to the largest logit and the largest gradient, in fp32."""


def main() -> None:
    question = json.loads(sys.stdin.read())
    warnings.simplefilter("ignore")
    patch_torch_for_cpu()
    from shardwright.engines.megatron.megatron_model_configs import Unsupported

    try:
        found = _compare_tiny_copy(question["config"]) or _compare_ranks(
            question["config"], question["plan"]
        )
    except Unsupported as error:
        found = {"unsupported": str(error)}
    print(json.dumps(found))


def _compare_tiny_copy(document: dict[str, Any]) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch import distributed as dist

    from shardwright.engines.megatron.megatron_model import (
        build_model,
        freeze_padding_row,
        load_parameter_ranges,
        parameter_ranges,
        rotary_frequencies,
        transformer_config,
        weight_mapping,
    )
    from shardwright.engines.megatron.megatron_weight_mapping import hf_config
    from shardwright.models.tasks.task_registry import task_of
    from shardwright.models.tiny_config import shrink
    from shardwright.parallel.model_loading import conv1d_names

    whole = hf_config(document)
    weight_mapping(whole).settings(whole)  # a copy has fewer layers and experts
    config = hf_config(shrink(whole.to_dict()))
    torch.manual_seed(0)
    model = task_of(config).build(config, None)
    stored = set(model.state_dict())
    with (
        torch.no_grad()
    ):  # norms and biases begin at ones and zeros, which would hide what is wrong with them
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in stored and (tensor.ndim == 1 or name.endswith("_bias")):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    ids = task_of(config).example(config)

    rotary = rotary_frequencies(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    first = {id(p): name for name, p in reversed(list(named.items()))}
    tied, transposed = {name: first[id(p)] for name, p in named.items()}, conv1d_names(model)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        other = build_model(config, transformer_config(config), rotary, length=ids.shape[1])
        freeze_padding_row(other, model.get_input_embeddings())
        found = list(parameter_ranges(config, other, tensor_rank=0, tied=tied))
        held = named | buffers
        load_parameter_ranges(
            found, lambda name: held[name].t() if name in transposed else held[name]
        )
        if lost := buffers.keys() - {piece.name for piece in found}:
            return {"apart": f"Megatron-Core's model has no {min(lost)}"}
        return _differences(
            config.vocab_size, ids, model, other, [p for p in found if not p.is_buffer], transposed
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _differences(
    vocabulary: int, ids: Any, model: Any, other: Any, found: list[Any], transposed: frozenset[str]
) -> dict[str, Any]:
    """Compare logits and gradients of two models with the same weights.

    model: Hugging Face's
    other: Megatron's; found: its parameter ranges
    transposed: weights that Hugging Face stores transposed
    """
    import torch

    from shardwright.utils.numeric_difference import max_abs_diff, relative_error

    wanted = model(input_ids=ids).logits
    places = torch.arange(ids.shape[1]).expand_as(ids)
    logits = other(input_ids=ids, position_ids=places, attention_mask=None)[..., :vocabulary]
    covered, total = sum(piece.numel for piece in found), sum(p.numel() for p in model.parameters())
    if covered != total:
        return {"apart": f"Megatron-Core has {covered:,} of {total:,} parameters"}
    if not (off := relative_error(logits, wanted)) <= RELATIVE_TOLERANCE:
        return {"apart": f"logits differ by {off:.1e} of the largest logit"}
    direction = torch.randn_like(wanted)
    wanted.backward(direction)
    logits.backward(direction)
    gradients = {
        name: (p.grad.t() if name in transposed else p.grad)
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None
    }
    largest = max(float(g.abs().max()) for g in gradients.values())
    for piece in found:
        mine = piece.parameter.grad
        if mine is None:
            return {"apart": f"{piece.name} has no gradient under Megatron-Core"}
        theirs = gradients[piece.name].reshape(-1)[piece.start : piece.start + piece.numel]
        off = max_abs_diff(mine.view(-1)[piece.own : piece.own + piece.numel], theirs) / largest
        if not off <= RELATIVE_TOLERANCE:
            differs = f"differs by {off:.1e} of the largest gradient"
            return {"apart": f"the gradient of {piece.name} {differs}"}
    return {}


def _compare_ranks(document: dict[str, Any], plan_document: dict[str, Any]) -> dict[str, Any]:
    """Compare the first and last stages' outer tensor ranks, and a rank of each layer count
    between."""
    import torch

    from shardwright.engines.megatron.megatron_weight_mapping import hf_config
    from shardwright.plan.plan import plan_from_json

    plan = plan_from_json(json.dumps(plan_document))
    config = hf_config(document)
    chosen: dict[Any, int] = {}
    for r in plan.ranks:
        layers = tuple(len(s.layers) for s in plan.stages if s.pipeline_rank == r.pipeline)
        ends = (r.pipeline == 0, r.pipeline == plan.strategy.pipeline - 1)
        tensor = r.tensor if any(ends) and r.tensor in (0, plan.strategy.tensor - 1) else 0
        if r.tensor == tensor:
            chosen.setdefault((layers, ends, tensor), r.rank)
    set_megatron_device(torch.device("meta"))
    for rank in chosen.values():
        try:
            wrong = _rank_difference(plan, config, rank)
        except (AssertionError, ValueError, RuntimeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return {"layout": f"rank {rank}: {wrong}"}
    return {}


def _build_without_deepep() -> None:
    """Let Megatron build a dispatcher whose package this machine lacks: no token is exchanged."""
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher: Any = token_dispatcher
    if dispatcher.fused_dispatch is None:
        dispatcher.fused_dispatch = dispatcher.set_deepep_num_sms = lambda *_: None


def _rank_difference(plan: Any, config: Any, rank: int) -> str:
    """Return how the rank differs from the plan; "" where it agrees."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwright.engines.megatron.megatron_arguments import parallel_settings
    from shardwright.engines.megatron.megatron_model import (
        build_model_chunks,
        parameter_ranges,
        transformer_config,
    )
    from shardwright.engines.megatron.megatron_runtime import group_settings

    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=plan.strategy.world_size
    )
    try:
        parallel_state.initialize_model_parallel(**group_settings(plan))
        model_parallel_cuda_manual_seed(0)
        at = plan.ranks[rank]
        theirs = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        ours = (at.pipeline, at.data, at.context, at.tensor, plan.expert_rank_of(at))
        if theirs != ours:
            return (
                f"the pipeline, data, context, tensor and expert ranks are {theirs}, planned {ours}"
            )
        settings = transformer_config(config, **parallel_settings(plan))
        if plan.strategy.expert_dispatcher == "deepep":
            _build_without_deepep()
        length = plan.training.sequence_length
        chunks = build_model_chunks(
            config, settings, None, length=length, pipeline_rank=at.pipeline
        )
        tied = {alias: group[0] for group in plan.model.tied for alias in group}
        held: dict[str, int] = {}
        size = 0
        for piece in (
            p
            for chunk in chunks
            for p in parameter_ranges(config, chunk, tensor_rank=at.tensor, tied=tied)
        ):
            if piece.is_buffer:
                continue
            held[piece.name] = held.get(piece.name, 0) + piece.numel
            size = piece.parameter.element_size()
        splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
        for name, numel in held.items():
            if numel != (
                planned := splits[name].shard_numel(at.tensor) // plan.expert_shard_count(name)
            ):
                return f"the rank holds {numel:,} elements of {name}, planned {planned:,}"
        if (found := size * sum(held.values())) != at.parameter_bytes:
            return f"the rank holds {found:,} bytes of parameters, planned {at.parameter_bytes:,}"
        return ""
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
