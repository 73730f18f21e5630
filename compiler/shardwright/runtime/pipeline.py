"""The pipeline module: one LayerSpec for the embedding, each decoder layer and the head, with the plan's own cut.

Hidden states (and integer positions, where documents are packed) are all that crosses stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from shardwright.hf.skeleton import Skeleton
from shardwright.plan.plan import Plan
from shardwright.runtime.recompute import apply_recompute
from shardwright.runtime.tensor_parallel import adjust_head_counts, split_module

Wire = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What crosses stages: hidden states, or (hidden states, position ids)."""


class StageModel:
    """The skeleton and the plan, shared by the pieces of one rank; `group` is set once DeepSpeed's grid exists."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.skeleton = Skeleton(model, plan.model.cut)
        self.group: dist.ProcessGroup | None = None
        self.names: dict[int, str] = {}  # id of a parameter -> its Hugging Face name
        self._split: set[str] = set()

    def own(self, layer: str) -> list[str]:
        """Module paths that hold the parameters of `layer`, cut by tensor parallelism where the plan says so."""
        model, plan = self.skeleton.model, self.plan
        if layer not in ("embedding", "head"):
            self._cut([m for m in plan.tensor_parallel.modules if m.module.startswith(layer + ".")])
            decoder = model.get_submodule(layer)
            if plan.tensor_parallel.degree > 1:
                adjust_head_counts(decoder.get_submodule(plan.model.attention_module), plan.tensor_parallel.degree)
            apply_recompute([decoder], plan.strategy.activation_checkpointing, plan.model.attention_module)
            return [layer]
        modules = plan.model.embedding_modules if layer == "embedding" else plan.model.head_modules
        # The embedding before a head that is tied to it: the head takes the slice that the embedding made.
        self._cut(
            [
                m
                for m in plan.tensor_parallel.modules
                if m.module in modules or (layer == "head" and m.style == "vocabulary_head")
            ]
        )
        return list(modules)

    def _cut(self, splits: list[Any]) -> None:
        for split in splits:
            if self.plan.tensor_parallel.degree > 1 and split.module not in self._split:
                split_module(self.skeleton.model, split, self.group)
                self.skeleton.lookup_is_collective |= split.style == "vocabulary_embedding"
                self._split.add(split.module)


class Piece(nn.Module):
    """One pipeline layer. Its modules are registered under their Hugging Face paths, so state dicts speak HF names."""

    def __init__(self, stage: StageModel, layer: str, index: int) -> None:
        """layer: "embedding", "head" or the decoder layer's path; index: the decoder layer's number."""
        super().__init__()
        self.layer = layer
        self.index = index
        self._stage = [stage]  # in a list: not to be registered
        for path in stage.own(layer):
            _register(self, path, stage.skeleton.model.get_submodule(path))

    def forward(self, wire: Wire) -> Wire:
        skeleton = self._stage[0].skeleton
        x, positions = wire if isinstance(wire, tuple) else (wire, None)
        if self.layer == "head":
            return skeleton.head(x, positions)
        y = skeleton.embed(x, positions) if self.layer == "embedding" else skeleton.decode(self.index, x, positions)
        return y if positions is None else (y, positions)


def _register(piece: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    at = piece
    for name in parents:
        if name not in at._modules:
            at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    at.add_module(leaf, module)


class Stages(PipelineModule):
    """PipelineModule with the plan's partition, Hugging Face's parameter names, and tied parameters by name."""

    def __init__(self, stage: StageModel, loss_fn: Callable[..., torch.Tensor]) -> None:
        plan = stage.plan
        self.__dict__["stage_model"] = stage  # DeepSpeed calls _partition_layers before this class can set attributes
        layers = [name for s in plan.stages for name in s.layers]
        specs = [LayerSpec(Piece, stage, name, i - 1) for i, name in enumerate(layers)]
        strategy = plan.strategy
        topology = PipeModelDataParallelTopology(num_pp=strategy.pipeline, num_mp=strategy.tensor, num_dp=strategy.data)
        super().__init__(layers=specs, topology=topology, loss_fn=loss_fn)

    def _partition_layers(self, method: str = "uniform") -> None:
        # DeepSpeed's methods know no cost but parameters. The grid exists by now: take the tensor group from it.
        stage: StageModel = self.__dict__["stage_model"]
        stage.group = self._grid.get_slice_parallel_group()
        self.parts = list(stage.plan.boundaries)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Hugging Face's names: the piece's number in front is dropped."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield prefix + ("." if prefix else "") + name.split(".", 1)[1], parameter

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Groups over the pipeline ranks that hold a copy of each tied parameter; the first one counts it."""
        plan, comms = self.__dict__["stage_model"].plan, {}
        mine = dict(self.named_parameters())
        embedding, head = self.stage_owner(0), self.stage_owner(len(self._layer_specs) - 1)
        if embedding == head:
            return {}
        for name in plan.model.shared_parameters:
            for data in range(plan.strategy.data):
                for tensor in range(plan.strategy.tensor):
                    ranks = [self._topo.get_rank(pipe=p, data=data, model=tensor) for p in sorted({embedding, head})]
                    group = dist.new_group(ranks=ranks)
                    if self.global_rank in ranks:
                        parameter = mine[name]
                        parameter.ds_pipe_replicated = self.global_rank != ranks[0]  # type: ignore[attr-defined]
                        holder = nn.ParameterList([parameter])  # what PipelineEngine counts
                        comms[name] = {"ranks": ranks, "group": group, "weight_attr": [], "module": holder}
        return comms

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        return [(comm["module"][0], comm["group"]) for comm in self.tied_comms.values()]

    def allreduce_tied_weight_gradients(self) -> None:
        for weight, group in self.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad, group=group)

    def _synchronize_tied_weights(self) -> None:
        for comm in self.tied_comms.values():
            dist.broadcast(comm["module"][0].data, src=min(comm["ranks"]), group=comm["group"])


class DualPipeVStages(DualPipeVModule, Stages):
    """The same, cut into two stages a pipeline rank, for DeepSpeed's DualPipeV schedule."""


def build_pipeline(
    model: nn.Module, plan: Plan, loss_fn: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Stages:
    """The module of this rank; every parameter of other stages is freed."""
    stage = StageModel(model, plan)
    kind = DualPipeVStages if plan.strategy.schedule == "dualpipev" else Stages
    module = kind(stage, loss_fn)
    stage.skeleton.release({id(p) for p in module.parameters()}, device, dtype)
    return module
