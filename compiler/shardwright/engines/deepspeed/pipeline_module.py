"""Build the PipelineModule: a LayerSpec for the embedding, each decoder layer and the head.

Layers of one stage pass a State; StagePacker turns it into what crosses to the next stage.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from shardwright.layout.parameter_sharding import ModuleSharding
from shardwright.models.mixture_of_experts import SEQUENCE_LENGTHS
from shardwright.models.model_skeleton import Batch, OutputHead, Skeleton, State, patch_forwards
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.dummy_images import DummyImage, inputs_on_device
from shardwright.parallel.expert_parallel import ExpertSharder, splits_of_local_experts
from shardwright.parallel.layer_compile_and_recompute import (
    apply_activation_checkpointing,
    compile_layers,
)
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.model_loading import DTYPES
from shardwright.parallel.tensor_parallel import TensorSplitter
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.plan.plan import Plan

# What crosses stages, as PipelineEngine requires it: tensors of constant shapes.
#
# Hidden states cross alone, or with the position ids where documents are packed. A model's payload
# is packed with them into two flat tensors, one floating and one integer: the engine requires a
# gradient of every floating tensor and runs one backward pass for each (pipe/engine.py,
# _exec_backward_pass), and the payload's rotary tables have none.


StageTensors = torch.Tensor | tuple[torch.Tensor, ...]
STATE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)


class StatePacker:
    """Pack what enters or leaves a stage; shapes are read from the first micro-batch."""

    def __init__(self) -> None:
        self._header: torch.Tensor | None = None
        self._layout: list[tuple[torch.dtype, tuple[int, ...]] | None] | None = None

    def pack(self, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (floating, integer) tensors.

        The floating tensor has the widest dtype of its parts, so that no bit is lost. The integer
        tensor begins with a header: its length, and per part its dtype, number of dimensions and
        shape (dtype -1: absent).
        """
        parts = (state.hidden, state.position_ids, *state.payload)
        if self._header is None:
            numbers: list[int] = []
            for part in parts:
                numbers += (
                    (-1,)
                    if part is None
                    else (STATE_DTYPES.index(part.dtype), part.ndim, *part.shape)
                )
            self._header = torch.tensor([len(numbers) + 1, *numbers], device=state.hidden.device)
        there = [part for part in parts if part is not None]
        floating = [part for part in there if part.is_floating_point()]
        widest = max((part.dtype for part in floating), key=lambda dtype: torch.finfo(dtype).bits)
        integers = [part.reshape(-1).long() for part in there if not part.is_floating_point()]
        return (
            torch.cat([part.reshape(-1).to(widest) for part in floating]),
            torch.cat([self._header, *integers]),
        )

    def unpack(self, floating: torch.Tensor, integers: torch.Tensor) -> State:
        if self._layout is None:
            numbers = integers[: int(integers[0])].tolist()
            self._length, self._layout = len(numbers), _layout(numbers[1:])
        at = {True: 0, False: self._length}
        parts: list[torch.Tensor | None] = []
        for part in self._layout:
            if part is None:
                parts.append(None)
                continue
            dtype, shape = part
            flat, first = (
                (floating if dtype.is_floating_point else integers),
                at[dtype.is_floating_point],
            )
            at[dtype.is_floating_point] = first + math.prod(shape)
            parts.append(flat[first : first + math.prod(shape)].view(shape).to(dtype))
        hidden, position_ids, *payload = parts
        assert hidden is not None
        return State(hidden=hidden, position_ids=position_ids, payload=tuple(payload))


def _layout(numbers: list[int]) -> list[tuple[torch.dtype, tuple[int, ...]] | None]:
    rest, layout = iter(numbers), []
    for dtype in rest:
        shape = () if dtype < 0 else tuple(itertools.islice(rest, next(rest)))
        layout.append(None if dtype < 0 else (STATE_DTYPES[dtype], shape))
    return layout


# The batches of a vision-language model in a pipeline.
#
# Every pipeline rank has the batch of its data rank. A micro-batch's number crosses with the hidden
# states, and each stage finds the ids and the images' places by it.


class PipelineImageBatches:
    """Hold the micro-batches whose numbers cross stages now, the same on every stage."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.batches: list[MicroBatch] = []
        self._blank = DummyImage(model)
        self._device = torch.device(get_accelerator().current_device_name())
        self._dtype = DTYPES[plan.training.precision]
        self._current: MicroBatch | None = None
        self._shown: tuple[MicroBatch, Batch] | None = None

    def batch(self, number: torch.Tensor) -> Batch:
        """Return the integer inputs of a micro-batch, on the device.

        number: (1,)
        """
        self._current = micro_batch = self.batches[int(number.item())]
        if self._shown is None or self._shown[0] is not micro_batch:
            integers = {
                n: v for n, v in (micro_batch.beside or {}).items() if not v.is_floating_point()
            }
            moved = inputs_on_device(
                {"input_ids": micro_batch.input_ids, **integers}, self._device, self._dtype
            )
            assert moved is not None
            self._shown = micro_batch, moved
        return self._shown[1]

    def embed(self, skeleton: Skeleton, state: State) -> State:
        """Embed text and images; `state` holds token ids in the place of hidden states."""
        micro_batch = self._current
        assert micro_batch is not None
        beside = inputs_on_device(micro_batch.beside, self._device, self._dtype)
        with self._blank.shown(
            inputs_on_device(micro_batch.blank, self._device, self._dtype)
        ) as picture:
            return skeleton.embed(state.hidden, None, {**(beside or {}), **picture})


class StageBuilder:
    """Share the skeleton and the plan between the pipeline layers of one rank.

    group: the tensor-parallel group, set once DeepSpeed's grid exists
    """

    def __init__(
        self, model: nn.Module, plan: Plan, filler: WeightLoader, experts: ExpertSharder
    ) -> None:
        self.plan, self.filler, self.experts = plan, filler, experts
        tokens = (
            plan.training.sequences_of(plan.strategy.micro_batch_size),
            plan.training.sequence_length // plan.strategy.context,
        )
        self.skeleton = Skeleton(model, plan.model.cut, tokens)
        self.skeleton.keywords = CONTEXT_PARALLEL.keywords
        self.seen = PipelineImageBatches(model, plan) if plan.model.task_traits.has_images else None
        self.lengths = SequenceLengthQueue()
        self.tail = OutputHead(model) if plan.model.loss == "chunked" else None
        self.group: dist.ProcessGroup | None = None
        self.names: dict[int, str] = {}  # id of a parameter -> its Hugging Face name
        self._splits = splits_of_local_experts(plan)
        self._split: set[str] = set()
        self._splitter: TensorSplitter | None = None

    def own(self, layer: str) -> list[str]:
        """Load and shard a pipeline layer; return the paths of its modules and bare parameters."""
        model, plan = self.skeleton.model, self.plan
        if layer not in ("embedding", "head"):
            self.filler.fill([layer])
            self.experts.cut(layer)
            self._cut([m for m in self._splits if m.module.startswith(layer + ".")])
            self.experts.dispatch(layer)
            compile_layers(model, plan, [layer])
            apply_activation_checkpointing(model, plan, [layer])
            return [layer]
        modules = plan.model.embedding_modules if layer == "embedding" else plan.model.head_modules
        self.filler.fill(modules)
        # The embedding comes before a head that is tied to it, which takes the embedding's shard.
        self._cut(
            [m for m in self._splits if m.module in modules or m.style == f"vocabulary_{layer}"]
        )
        apply_activation_checkpointing(model, plan, [layer])
        return list(modules)

    def _cut(self, splits: list[ModuleSharding]) -> None:
        if self.plan.tensor_parallel.degree == 1:
            return
        if self._splitter is None:
            assert self.group is not None
            self._splitter = TensorSplitter(
                self.skeleton.model, self._splits, self.filler.transposed, self.group
            )
        for split in splits:
            if split.module not in self._split:
                self._splitter.split(split)
                self.skeleton.embedding_is_vocabulary_parallel |= (
                    split.style == "vocabulary_embedding"
                )
                self._split.add(split.module)


class SequenceLengthQueue:
    """Hold the sequence lengths of a step's micro-batches, for each stage that this rank runs.

    A stage takes the micro-batches of its data rank in order, so it finds them by counting.
    """

    def __init__(self) -> None:
        self._of_batches: list[torch.Tensor | None] = []
        self._taken: Counter[int] = Counter()

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._of_batches, self._taken = [m.lengths for m in micro_batches], Counter()

    def enter(self, stage: int) -> None:
        """Set the lengths of the next micro-batch for the stage that begins with layer `stage`."""
        at = self._taken[stage]
        self._taken[stage] += 1
        SEQUENCE_LENGTHS.current = self._of_batches[at] if self._of_batches else None


class PipelineLayer(nn.Module):
    """Hold one pipeline layer.

    Its modules are registered under their Hugging Face paths, so state dicts have HF names.
    """

    def __init__(self, stage: StageBuilder, layer: str, index: int) -> None:
        """Load the layer's modules.

        layer: "embedding", "head" or the decoder layer's path
        index: the decoder layer's number
        """
        super().__init__()
        self.layer = layer
        self.index = index
        self._stage = [stage]  # in a list: not to be registered
        for path in stage.own(layer):
            _register(self, path, stage.skeleton.model)

    def forward(self, state: State) -> State | torch.Tensor:
        """Run the layer.

        The embedding takes token ids as hidden states. The head returns logits, or the base model's
        hidden states where the loss computes logits chunk by chunk.
        """
        skeleton, tail, seen = self._stage[0].skeleton, self._stage[0].tail, self._stage[0].seen
        if self.layer == "embedding" and seen is not None:
            return seen.embed(skeleton, state)
        if self.layer == "embedding":
            return skeleton.embed(state.hidden, state.position_ids)
        if self.layer == "head":
            return (
                skeleton.head(state) if tail is None else tail.hidden(lambda: skeleton.head(state))
            )
        return skeleton.decode(self.index, state)


def _register(piece: nn.Module, path: str, model: nn.Module) -> None:
    """Register the model's module or parameter at `path` under the same path of `piece`."""
    *parents, leaf = path.split(".")
    owner = model.get_submodule(".".join(parents))
    at = piece
    for name in parents:
        if name not in at._modules:
            at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    if leaf in owner._parameters:
        at.register_parameter(leaf, owner._parameters[leaf])
    else:
        at.add_module(leaf, owner.get_submodule(leaf))


class HfPipelineModule(PipelineModule):
    """Build a PipelineModule with the plan's partition and Hugging Face's names for parameters.

    Tied parameters are found by name.
    """

    def __init__(self, stage: StageBuilder, loss_fn: Callable[..., torch.Tensor]) -> None:
        plan = stage.plan
        self.__dict__["stage_model"] = (
            stage  # DeepSpeed calls _partition_layers before this class can set attributes
        )
        layers = [name for s in plan.stages for name in s.layers]
        specs = [LayerSpec(PipelineLayer, stage, name, i - 1) for i, name in enumerate(layers)]
        strategy = plan.strategy
        topology = PipeModelDataParallelTopology(
            num_pp=strategy.pipeline, num_mp=strategy.tensor, num_dp=strategy.zero_world_size
        )
        super().__init__(layers=specs, topology=topology, loss_fn=loss_fn)
        self._last_spec = len(specs)
        self._packings: dict[tuple[str, int], StatePacker] = {}

    def forward(self, forward_input: StageTensors) -> StageTensors:
        stage: StageBuilder = self.__dict__["stage_model"]
        cut, first, last = stage.plan.model.cut, self._local_start, self._local_stop
        crossing = bool(cut.payload or cut.carried)
        stage.skeleton.begin()
        stage.lengths.enter(first)
        if crossing and first > 0:
            state = self._packing("in").unpack(*forward_input)
        else:
            hidden, positions = (
                forward_input if isinstance(forward_input, tuple) else (forward_input, None)
            )
            state = State(hidden=hidden, position_ids=positions)
        number = None if stage.seen is None else state.position_ids
        if stage.seen is not None and number is not None:
            state = replace(state, position_ids=None, batch=stage.seen.batch(number))
        out = super().forward(state)
        if last == self._last_spec:
            return out  # type: ignore[no-any-return]
        if not out.hidden.requires_grad and torch.is_grad_enabled():
            # Nothing before this stage is trained, but DeepSpeed requires a gradient of what
            # crosses.
            out = replace(out, hidden=out.hidden.detach().requires_grad_())
        if number is not None:
            out = replace(out, position_ids=number)
        if crossing:
            return self._packing("out").pack(out)
        return out.hidden if out.position_ids is None else (out.hidden, out.position_ids)

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the micro-batches that this rank's stages take from now on, in order."""
        self.__dict__["stage_model"].lengths.begin(micro_batches)

    def train(self, mode: bool = True) -> HfPipelineModule:
        """Switch the whole model between training and evaluation.

        No pipeline layer holds the modules without parameters or the base model, whose forward may
        have dropout of its own.
        """
        super().train(mode)
        self.__dict__["stage_model"].skeleton.model.train(mode)
        return self

    def register_image_batches(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Set the micro-batches whose numbers cross stages now; return DeepSpeed's inputs."""
        seen: PipelineImageBatches = self.__dict__["stage_model"].seen
        seen.batches = list(micro_batches)
        return [(m.input_ids, torch.tensor([number])) for number, m in enumerate(micro_batches)]

    @property
    def tail(self) -> OutputHead | None:
        return self.__dict__["stage_model"].tail  # type: ignore[no-any-return]

    def _packing(self, way: str) -> StatePacker:
        """Return the packer of one direction; DualPipeV has two stages a rank, so the key has the
        stage."""
        return self._packings.setdefault((way, self._local_start), StatePacker())

    def _partition_layers(self, method: str = "uniform") -> None:
        # DeepSpeed's methods know no cost but parameters. The grid exists by now, and has the
        # tensor group.
        stage: StageBuilder = self.__dict__["stage_model"]
        stage.group = self._grid.get_slice_parallel_group()
        self.parts = list(stage.plan.boundaries)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by Hugging Face's names, without the pipeline layer's number."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield prefix + ("." if prefix else "") + name.split(".", 1)[1], parameter

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Build groups over the pipeline ranks that hold a copy of each tied parameter.

        The first rank of a group counts the parameter.
        """
        plan, comms = self.__dict__["stage_model"].plan, {}
        mine = dict(self.named_parameters())
        embedding, head = self.stage_owner(0), self.stage_owner(len(self._layer_specs) - 1)
        if embedding == head:
            return {}
        for name in plan.model.shared_parameters:
            for data in range(plan.strategy.zero_world_size):
                for tensor in range(plan.strategy.tensor):
                    ranks = [
                        self._topo.get_rank(pipe=p, data=data, model=tensor)
                        for p in sorted({embedding, head})
                    ]
                    group = dist.new_group(ranks=ranks)
                    if self.global_rank in ranks:
                        parameter = mine[name]
                        parameter.ds_pipe_replicated = self.global_rank != ranks[0]  # type: ignore[attr-defined]
                        holder = nn.ParameterList([parameter])  # what PipelineEngine counts
                        comms[name] = {
                            "ranks": ranks,
                            "group": group,
                            "weight_attr": [],
                            "module": holder,
                        }
        return comms

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        return [(comm["module"][0], comm["group"]) for comm in self.tied_comms.values()]

    def allreduce_tied_weight_gradients(self) -> None:
        for weight, group in self.get_tied_weights_and_groups():
            dist.all_reduce(weight.grad, group=group)

    def _synchronize_tied_weights(self) -> None:
        for comm in self.tied_comms.values():
            dist.broadcast(comm["module"][0].data, src=min(comm["ranks"]), group=comm["group"])


class HfDualPipeVModule(DualPipeVModule, HfPipelineModule):
    """Split the model into two stages a pipeline rank, for DeepSpeed's DualPipeV schedule."""


def build_pipeline(
    model: nn.Module,
    plan: Plan,
    loss_fn: Callable[..., torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    filler: WeightLoader,
    experts: ExpertSharder,
) -> HfPipelineModule:
    """Build this rank's module; parameters of other stages are freed."""
    patch_forwards(model)
    stage = StageBuilder(model, plan, filler, experts)
    kind = HfDualPipeVModule if plan.strategy.schedule == "dualpipev" else HfPipelineModule
    module = kind(stage, loss_fn)
    stage.skeleton.release({id(p) for p in module.parameters()}, device, dtype)
    return module
