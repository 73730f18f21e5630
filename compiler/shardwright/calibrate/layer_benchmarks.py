"""Time the model's layers one by one on a tensor rank: forward, backward and saved activations.

The process group is torch's fake one, whose collectives do nothing; they are timed separately. The
backward graph is cut between layers, as in a pipeline, so that each layer is timed alone.
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
from shardwright.plan.plan import load_plan
from shardwright.recipe.literal_types import Checkpointing

NEVER_LEFT_OUT = 2
"""Micro-batches that are timed even without time left: a line needs two."""


def measure_layers(bench: Stopwatch, job: LayerJob, seconds: float) -> None:
    """Time every micro-batch without checkpointing first; other modes add to these."""
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
    """Open a fake process group of `degree` ranks, of which this is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


class LayerRunner:
    """Build the model of a compiled folder, split for the first tensor rank, with random
    weights."""

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
        self.loss = CausalLoss(group, 0) if plan.tensor_parallel.vocabulary_sizes else CausalLoss()

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
        """Return the host seconds that launching one layer's forward takes on an idle GPU."""
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
        """Run once; return (forward seconds, backward seconds, saved bytes) of the embedding, each
        layer and the head.

        counts: whether to count the bytes, which takes time.
        """
        length, device = self.plan.training.sequence_length, self.bench.device
        ids = torch.randint(
            3, self.plan.model.vocabulary_size - 1, (micro_batch, length), device=device
        )
        self.model.zero_grad(set_to_none=True)
        self.skeleton.begin()
        own = {
            t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())
        }
        state, cuts, timings = State(hidden=ids), [], []

        def forward(
            run: Callable[[], State | torch.Tensor], entering: torch.Tensor | None
        ) -> State | torch.Tensor:
            saved: dict[int, int] = {}
            if entering is not None:
                _count_storage(entering, saved, own)
            watch = (
                saved_tensors_hooks(lambda t: _count_storage(t, saved, own), lambda t: t)
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
            cuts.append((entering, hidden, seconds, sum(saved.values())))
            return out

        state = _state(forward(lambda: self.skeleton.embed(ids, None), None))
        for index in range(len(self.skeleton.layers)):
            entering = state.hidden.detach().requires_grad_()
            entered = replace(state, hidden=entering)
            state = _state(forward(lambda i=index, s=entered: self.skeleton.decode(i, s), entering))  # type: ignore[misc]
        entering = state.hidden.detach().requires_grad_()
        entered = replace(state, hidden=entering)
        forward(lambda s=entered: self.loss(self.skeleton.head(s), ids), entering)  # type: ignore[misc]
        gradient: torch.Tensor | None = None
        for entered_, out, seconds, saved_bytes in reversed(cuts):
            began = self.bench.now()
            torch.autograd.backward([out], [gradient] if gradient is not None else None)
            timings.append((seconds, self.bench.now() - began, saved_bytes))
            gradient = None if entered_ is None else entered_.grad
        return timings[::-1]


def _state(out: State | torch.Tensor) -> State:
    assert isinstance(out, State)
    return out


def _count_storage(tensor: torch.Tensor, saved: dict[int, int], own: set[int]) -> torch.Tensor:
    """Count a saved tensor's storage once, unless it belongs to weights or buffers."""
    storage = tensor.untyped_storage()
    if storage._cdata not in own:
        saved[storage._cdata] = storage.nbytes()
    return tensor


# The engine's own time: steps of its trainer on one rank, with one and two decoder layers, one and
# three micro-batches, and very short sequences.


RATE = 1e-5
LAUNCHES = 10


def measure_short_layers(bench: Stopwatch, folder: Path, seconds: float) -> None:
    """Time the layers without an engine on the same short sequences, and on a GPU the host's time
    to launch a layer."""
    with fake_process_group(1) as group:
        rig = LayerRunner(folder, bench, group)
        for place, found in enumerate(
            time_repeatedly(lambda: [f + b for f, b, _ in rig.once(1, counts=False)], seconds),
        ):
            bench.keep("short layer", {"place": place}, found)
        if bench.device.type == "cuda":
            bench.keep("host floor", {"layers": 1}, [rig.launch_seconds() for _ in range(LAUNCHES)])


def measure_engine(bench: Stopwatch, job: EngineJob, seconds: float) -> None:
    """Time the engine's steps in process groups of one rank; each process copies the folder, as
    building a model writes to it."""
    for compiled in map(Path, job.folders):
        folder = compiled.with_name(f"{compiled.name}-{os.getpid()}")
        shutil.copytree(compiled, folder)
        plan = load_plan(folder)
        trainer = engine_runtime(plan).build_trainer(plan, folder)
        shape = (plan.strategy.micro_batch_size, plan.training.sequence_length)
        batch = []
        for _ in range(plan.strategy.gradient_accumulation_steps):
            ids = torch.randint(3, plan.model.vocabulary_size - 1, shape)
            batch.append(MicroBatch(input_ids=ids, labels=ids.clone(), position_ids=None))
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
