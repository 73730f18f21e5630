"""Real layers of the model, one at a time, as a rank of a tensor group has them: forward, backward,
and what is kept.

The group is torch's fake one, whose collectives do nothing: what they take is measured apart.
Between layers the graph of the backward pass is cut, as a pipeline cuts it, so that each layer's
passes are timed alone.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwright.calibrate.calibration_file import time_repeatedly
from shardwright.calibrate.device_benchmarks import Stopwatch
from shardwright.calibrate.measurement_job import EngineJob, LayerJob
from shardwright.engines.trainer_protocol import engine_runtime
from shardwright.models.model_skeleton import Skeleton, State
from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.layer_compile_and_recompute import checkpoint_layers
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.model_loading import DTYPES, conv1d_to_linear, open_model
from shardwright.parallel.tensor_parallel import TensorSplitter
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.plan.plan import Plan, load_plan
from shardwright.recipe.literal_types import Checkpointing

NEVER_LEFT_OUT = 2
"""Micro-batches that are timed however late it is: a line needs two."""


def measure_layers(bench: Stopwatch, job: LayerJob, seconds: float) -> None:
    """Every micro-batch without recomputation first: the other checkpointings add to these."""
    with fake_process_group(job.tensor) as group:
        rig = LayerRunner(Path(job.folder), bench, group)
        every = [(size, "none") for size in job.micro_batches]
        every += [
            (size, k) for k in job.checkpointing if k != "none" for size in job.micro_batches[:2]
        ]
        for done, (size, checkpointing) in enumerate(every):
            budget = min(seconds, bench.deadline.left) / (len(every) - done)
            what = f"layers at tensor {job.tensor}, micro-batch {size}, {checkpointing}"
            if bench.deadline.left <= 0 and done >= NEVER_LEFT_OUT:
                bench.skipped.append(f"{what}: out of time")
                continue
            bench.attempt(what, lambda s=size, k=checkpointing, b=budget: _one(rig, job, s, k, b))  # type: ignore[misc]


def _one(
    rig: LayerRunner, job: LayerJob, size: int, checkpointing: Checkpointing, budget: float
) -> None:
    places = (0, *job.places, job.last)
    kept: list[int] = []

    def run() -> list[float]:
        parts = rig.once(size, counts=not kept)
        kept[:] = kept or [bytes_ for _, _, bytes_ in parts]
        return [seconds for forward, backward, _ in parts for seconds in (forward, backward)]

    with rig.recomputing(checkpointing):
        found = time_repeatedly(run, budget)
    for i, place in enumerate(places):
        sizes = {"place": place, "tensor": job.tensor, "micro_batch": size}
        rig.bench.keep(f"layer forward {checkpointing}", sizes, found[2 * i])
        rig.bench.keep(f"layer backward {checkpointing}", sizes, found[2 * i + 1])
        rig.bench.keep(f"layer bytes {checkpointing}", sizes, [float(kept[i])])


@contextmanager
def fake_process_group(degree: int) -> Iterator[dist.ProcessGroup]:
    """A world of so many ranks of which this is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


class LayerRunner:
    """The model of a compiled folder, cut for the first tensor rank and filled with random
    numbers."""

    def __init__(self, folder: Path, bench: Stopwatch, group: dist.ProcessGroup) -> None:
        self.bench, self.plan = bench, load_plan(folder)
        plan, device, dtype = self.plan, bench.device, DTYPES[self.plan.training.precision]
        model, weights = open_model(plan, folder, resumes=True)
        transposed = conv1d_to_linear(model)
        splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
        WeightLoader(model, weights, splits, transposed, 0).fill([""])
        self.skeleton = Skeleton(model, plan.model.cut)
        if plan.tensor_parallel.degree > 1:
            splitter = TensorSplitter(model, plan.tensor_parallel.modules, transposed, group)
            for split in plan.tensor_parallel.modules:
                splitter.split(split)
                self.skeleton.embedding_is_vocabulary_parallel |= (
                    split.style == "vocabulary_embedding"
                )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(
                device, dtype if parameter.is_floating_point() else parameter.dtype
            )
            nn.init.normal_(parameter, std=0.02)
        self.skeleton.release({id(p) for p in model.parameters()}, device, dtype)
        self.model = model
        self.loss = _loss(plan, group)

    @contextmanager
    def recomputing(self, choice: Checkpointing) -> Iterator[None]:
        layers = self.skeleton.layers
        touched = [
            *layers,
            *(layer.get_submodule(self.plan.model.attention_module) for layer in layers),
        ]
        had = [module.__dict__.get("forward") for module in touched]
        checkpoint_layers(layers, choice, self.plan.model.attention_module)
        try:
            yield
        finally:
            for module, forward in zip(touched, had, strict=True):
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward

    def launch_seconds(self) -> float:
        """Of the host, for a forward pass of one layer on a GPU that has nothing to do."""
        ids = torch.zeros(
            (1, self.plan.training.sequence_length), dtype=torch.long, device=self.bench.device
        )
        self.skeleton.begin()
        state = self.skeleton.embed(ids, None)
        torch.cuda.synchronize(self.bench.device)
        began = time.perf_counter()
        self.skeleton.decode(0, state)
        return time.perf_counter() - began

    def once(self, micro_batch: int, *, counts: bool) -> list[tuple[float, float, int]]:
        """Once through: (forward seconds, backward seconds, kept bytes) of the embedding, each
        layer and the head. counts: the bytes, which takes time of its own."""
        length, device = self.plan.training.sequence_length, self.bench.device
        ids = torch.randint(
            3, self.plan.model.vocabulary_size - 1, (micro_batch, length), device=device
        )
        self.model.zero_grad(set_to_none=True)
        self.skeleton.begin()
        own = {
            t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())
        }
        state, cuts, found = State(hidden=ids), [], []

        def forward(
            run: Callable[[], State | torch.Tensor], given: torch.Tensor | None
        ) -> State | torch.Tensor:
            seen: dict[int, int] = {}
            if given is not None:
                _count_storage(given, seen, own)
            watch = (
                saved_tensors_hooks(lambda t: _count_storage(t, seen, own), lambda t: t)
                if counts
                else nullcontext()
            )
            began = self.bench.now()
            with watch:
                out = run()
            seconds, hidden = (
                self.bench.now() - began,
                out.hidden if isinstance(out, State) else out,
            )
            cuts.append((given, hidden, seconds, sum(seen.values())))
            return out

        state = _state(forward(lambda: self.skeleton.embed(ids, None), None))
        for index in range(len(self.skeleton.layers)):
            given = state.hidden.detach().requires_grad_()
            entered = replace(state, hidden=given)
            state = _state(forward(lambda i=index, s=entered: self.skeleton.decode(i, s), given))  # type: ignore[misc]
        given = state.hidden.detach().requires_grad_()
        entered = replace(state, hidden=given)
        forward(lambda s=entered: self.loss(self.skeleton.head(s), ids), given)  # type: ignore[misc]
        gradient: torch.Tensor | None = None
        for given_, out, seconds, kept in reversed(cuts):
            began = self.bench.now()
            torch.autograd.backward([out], [gradient] if gradient is not None else None)
            found.append((seconds, self.bench.now() - began, kept))
            gradient = None if given_ is None else given_.grad
        return found[::-1]


def _state(out: State | torch.Tensor) -> State:
    assert isinstance(out, State)
    return out


def _loss(plan: Plan, group: dist.ProcessGroup) -> CausalLoss:
    return CausalLoss(group, 0) if plan.tensor_parallel.vocabulary_sizes else CausalLoss()


def _count_storage(tensor: torch.Tensor, seen: dict[int, int], own: set[int]) -> torch.Tensor:
    """What autograd keeps of a layer, once a storage; weights and tables are there anyway."""
    storage = tensor.untyped_storage()
    if storage._cdata not in own:
        seen[storage._cdata] = storage.nbytes()
    return tensor


# What the engine itself takes: whole steps of its own trainer on one rank, with one decoder layer
# and with two, one micro-batch and three, of rows so short that little else is in them.


RATE = 1e-5
LAUNCHES = 10


def measure_short_layers(bench: Stopwatch, folder: Path, seconds: float) -> None:
    """The same short rows through the layers without an engine: what is not the engine's own. On a
    GPU also how long the host takes to launch a layer."""
    with fake_process_group(1) as group:
        rig = LayerRunner(folder, bench, group)
        for place, found in enumerate(
            time_repeatedly(lambda: [f + b for f, b, _ in rig.once(1, counts=False)], seconds),
        ):
            bench.keep("short layer", {"place": place}, found)
        if bench.device.type == "cuda":
            bench.keep("host floor", {"layers": 1}, [rig.launch_seconds() for _ in range(LAUNCHES)])


def measure_engine(bench: Stopwatch, job: EngineJob, seconds: float) -> None:
    """Groups of one rank exist. Each process has a copy of the folder: building a model writes into
    it."""
    for compiled in map(Path, job.folders):
        folder = compiled.with_name(f"{compiled.name}-{os.getpid()}")
        shutil.copytree(compiled, folder)
        plan = load_plan(folder)
        trainer = engine_runtime(plan).build_trainer(plan, folder)
        batch = [_micro_batch(plan) for _ in range(plan.strategy.gradient_accumulation_steps)]
        sizes = {
            "zero_stage": job.zero_stage,
            "layers": plan.boundaries[-1] - 2,
            "micro_batches": len(batch),
            "parameters": plan.model.total_parameters,
        }
        (found,) = time_repeatedly(
            lambda t=trainer, b=batch: [bench.seconds(lambda: t.step(b, RATE))],  # type: ignore[misc]
            seconds / len(job.folders),
        )
        bench.keep("engine step", sizes, found)
        del trainer
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _micro_batch(plan: Plan) -> MicroBatch:
    shape = (plan.strategy.micro_batch_size, plan.training.sequence_length)
    ids = torch.randint(3, plan.model.vocabulary_size - 1, shape)
    return MicroBatch(input_ids=ids, labels=ids.clone(), position_ids=None)
