"""Train a compiled folder on this rank: engine, data, schedule, checkpoints and records.

training_worker.py is one loop over it; `open_session` gives it to users' own loops
(docs/python-api.md).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import distributed as dist

from shardwright.checkpoint.checkpoint_loader import data_changes, load_checkpoint, schedule_changes
from shardwright.checkpoint.checkpoint_saver import prepare_checkpoint_folder, save_checkpoint
from shardwright.checkpoint.memory_copies import MemoryCopies, MemoryCopy
from shardwright.checkpoint.run_attempts import record_memory_resume
from shardwright.checkpoint.run_history import SaveMetadata
from shardwright.data.data_preparation import MAX_UNPREPARED_BYTES, prepare
from shardwright.data.dataset import resolve
from shardwright.diagnostics import refusal
from shardwright.diloco.outer_step import build_outer_step
from shardwright.diloco.outer_store_client import OuterStoreUnreachable
from shardwright.engines.trainer_protocol import ParameterShard, StepResult, engine_runtime
from shardwright.monitor.gradient_noise_scale import read_step_noise
from shardwright.monitor.rank_monitor import RankMonitor
from shardwright.monitor.run_files import (
    MEMORY_COPIES_FILE,
    EvaluationWriter,
    MetricsWriter,
    SaveWriter,
    write_json,
    write_status,
)
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.lora_adapters import planned_adapters
from shardwright.parallel.micro_batches import (
    MicroBatch,
    TrainingBatches,
    ValidationBatches,
    build_image_processor,
)
from shardwright.parallel.tensor_parallel_collectives import seed_dropout
from shardwright.plan.island_plans import select_island_folder
from shardwright.plan.plan import Plan, load_plan
from shardwright.train.experiment_trackers import ExperimentTrackers
from shardwright.train.host_consistency import (
    check_same_data_on_hosts,
    check_same_files_on_hosts,
    check_world,
)
from shardwright.train.noise_scale_meter import NoiseScaleMeasurement, build_noise_scale_meter
from shardwright.train.reference_scores import open_reference, with_reference
from shardwright.train.run_attempt import (
    RANKS,
    Attempt,
    begin_attempt_on_ranks,
    lease_lost,
    new_run_lease,
)
from shardwright.train.score_blocks import ScoreBlocks
from shardwright.train.secret_environment import (
    load_secret_environment,
    remove_secret_environment_file,
)
from shardwright.train.teacher_scores import with_teacher
from shardwright.train.training_metrics import NonfiniteLossGuard, PerformanceSummary
from shardwright.utils.json_values import JsonValue, canonical_hash
from shardwright.utils.run_lease import Lease

# What a rank holds, trains and freezes, compared with the plan before the first step.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedParameter:
    """Describe a parameter that the plan puts on a rank.

    shape: of the rank's part, before ZeRO flattens it
    """

    shape: tuple[int, ...]
    is_trained: bool
    in_low_precision: bool = False


def planned_parameters(
    plan: Plan, rank: int, transposed: frozenset[str]
) -> dict[str, PlannedParameter]:
    """Return the parameters that the plan puts on `rank`, by Hugging Face name; tied ones by the
    first.

    transposed: names of weights that are stored transposed to Hugging Face's
    """
    at = plan.ranks[rank]
    layers = {
        name for stage in plan.stages if stage.pipeline_rank == at.pipeline for name in stage.layers
    }
    outside = {"embedding": plan.model.embedding_modules, "head": plan.model.head_modules}
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    paths = {path for layer in layers for path in outside.get(layer, (layer,))}
    low = plan.low_precision
    converted = frozenset() if low is None else low.weights
    found: dict[str, PlannedParameter] = {}
    for parameter in (p for module in plan.tensor_parallel.modules for p in module.parameters):
        name, shape = parameter.name, parameter.shard_shape(at.tensor)
        parts = name.split(".")
        if not any(".".join(parts[:n]) in paths for n in range(1, len(parts) + 1)):
            continue
        if (cut := plan.expert_shard_count(name)) > 1:
            shape = (shape[0] // cut, *shape[1:])
        shape = shape[::-1] if name in transposed else shape or (1,)
        is_trained = plan.lora is None and not plan.model.is_frozen(name)
        found[first.get(name, name)] = PlannedParameter(
            shape=shape, is_trained=is_trained, in_low_precision=name in converted
        )
    adapters = planned_adapters(plan, transposed)
    return found | {
        name: PlannedParameter(shape=shape, is_trained=True) for name, shape in adapters.items()
    }


def check_parameters(
    plan: Plan, rank: int, held: Mapping[str, ParameterShard], transposed: frozenset[str]
) -> None:
    """Raise Refusal, SW6259, with the first parameters of this rank that differ from the plan."""
    planned = planned_parameters(plan, rank, transposed)
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    live = {
        first.get(name, name): PlannedParameter(
            shape=p.shape or (1,), is_trained=p.is_trained, in_low_precision=p.in_low_precision
        )
        for name, p in held.items()
    }
    differences = [
        f"{name}: {_parameter_text(live.get(name))}, planned {_parameter_text(planned.get(name))}"
        for name in dict.fromkeys((*planned, *live))
        if live.get(name) != planned.get(name)
    ]
    if differences:
        raise refusal(
            "SW6259",
            (
                f"rank {rank}: {len(differences)} of {len(planned)} planned parameters differ in "
                "the model: "
            )
            + "; ".join(differences[:3]),
            "Nothing was trained. Compile again with the packages that are installed on the run's "
            "hosts; if the message stays, report the model type and the recipe.",
        )


def _parameter_text(p: PlannedParameter | None) -> str:
    if p is None:
        return "absent"
    text = f"{'trained' if p.is_trained else 'frozen'} {'x'.join(map(str, p.shape))}"
    return f"{text} in low precision" if p.in_low_precision else text


def parameter_counts(held: Mapping[str, ParameterShard]) -> dict[str, JsonValue]:
    """Return tensors and elements that this rank trains, freezes and, where there are any,
    multiplies in low precision; before ZeRO shards them."""
    kinds = {
        "trained": [p.shape for p in held.values() if p.is_trained],
        "frozen": [p.shape for p in held.values() if not p.is_trained],
        "low_precision": [p.shape for p in held.values() if p.in_low_precision],
    }
    return {
        kind: {"tensors": len(shapes), "elements": sum(math.prod(shape) for shape in shapes)}
        for kind, shapes in kinds.items()
        if shapes or kind != "low_precision"
    }


class Session:
    """Train on one rank; every rank makes the same calls.

    done: optimizer steps that are in the weights
    engine: the engine's own object
    plan: with the number of steps, also where the recipe counts epochs
    """

    def __init__(
        self, plan: Plan, folder: Path, rank: int, attempt: Attempt, lease: Lease | None = None
    ) -> None:
        """Prepare the data, build the trainer and load the checkpoint. The process groups exist.

        lease: rank 0's
        """
        prepare_checkpoint_folder(plan, folder, attempt.number, attempt.step)
        if int(os.environ["LOCAL_RANK"]) == 0:
            prepare(plan, folder, limit_bytes=MAX_UNPREPARED_BYTES)
        dist.barrier()
        self.plan, data = resolve(plan, folder)
        digests = check_same_data_on_hosts(self.plan, folder)
        self.folder, self.rank, self.attempt = folder, rank, attempt.number
        self._lease, resume = lease, attempt.resume
        self._skipped_steps = frozenset(attempt.skipped_steps)
        image_processor = build_image_processor(self.plan, folder, rank)
        objective, own_scores = self.plan.training.objective, None
        if objective.traits.reads_reference and objective.reference is None:
            own_scores = ScoreBlocks(self.plan, folder, data, folder / "run" / "reference")
        elif objective.traits.reads_reference:
            data = with_reference(data, lambda: open_reference(self.plan, folder))
        elif objective.traits.reads_teacher:
            data = with_teacher(self.plan, folder, data)
        scores_missing = own_scores is not None and own_scores.are_missing
        self._copies: MemoryCopies | None = None
        copy: MemoryCopy | None = None
        if self.plan.checkpoint.in_memory:
            self._copies = MemoryCopies(self.plan, folder, attempt.number, attempt.line)
            copy, notes = self._copies.newest(attempt.step)
            for note in notes if rank == 0 else ():
                print(note, flush=True)
        self._trainer = engine_runtime(self.plan).build_trainer(
            self.plan, folder, resumes=bool(resume or copy) and not scores_missing
        )
        self.engine, self.device = self._trainer.engine, self._trainer.device
        held = self._trainer.parameter_shards()
        write_json(folder / "run" / "ranks" / f"rank-{rank:05d}.json", rank_record(held, rank))
        check_parameters(self.plan, rank, held, self._trainer.transposed)
        self.data_rank = self.plan.ranks[rank].data
        if own_scores is not None:
            for _ in own_scores.compute(self._trainer):
                pass
            data = with_reference(data, own_scores.finish)
        self._batches = TrainingBatches(self.plan, data, image_processor)
        seed_dropout(self.plan, rank)
        if self._copies is not None and copy is not None:
            resume, self._saved = str(self._copies.load(copy, self._trainer)), -1
            self.done = copy.step
            if rank == 0:
                record_memory_resume(folder, attempt.number, copy.step)
                print(f"resumes from the copy of step {copy.step} in memory", flush=True)
        else:
            self.done = self._saved = (
                load_checkpoint(self.plan, self._trainer, Path(resume)) if resume else 0
            )
        if self._copies is not None:
            self._copies.remove_others()
        self._outer = build_outer_step(
            self.plan, folder, self._trainer, rank, attempt.number, canonical_hash(dict(digests))
        )
        for caught_up in self._outer.begin(self.done, Path(resume) if resume else None):
            self.done, self._saved = caught_up.done, -1  # the checkpoint lacks it
        self._origin = SaveMetadata(line=attempt.line, rows=data.parts, data=digests)
        if resume and rank == 0:
            changes = data_changes(Path(resume), data.parts, digests)
            for warning in (*changes, *schedule_changes(self.plan, Path(resume), self.done)):
                print(warning, flush=True)
        self._held_out = (
            ValidationBatches(self.plan, data.validation, self.data_rank, image_processor)
            if data.validation
            else None
        )
        self._measured = PerformanceSummary(self.plan, self.device)
        self._divergence = NonfiniteLossGuard(self.plan)
        first = rank == 0
        self._metrics = MetricsWriter(folder, self.attempt, self.done) if first else None
        self._saves = SaveWriter(folder, self.attempt, self.done) if first else None
        self._copy_records = (
            SaveWriter(folder, self.attempt, self.done, MEMORY_COPIES_FILE)
            if first and self._copies is not None
            else None
        )
        self._evaluations = (
            EvaluationWriter(folder, self.attempt, self.done)
            if first and self.plan.validation
            else None
        )
        self._tracking = ExperimentTrackers(self.plan, folder, self.done) if first else None
        self._noise = build_noise_scale_meter(
            self.plan, rank, self._trainer, read_step_noise(folder) if first else []
        )
        # Rank 0 alone has the file, and every rank must know whether the resumed step was
        # evaluated.
        told = [self._evaluations.step if self._evaluations else 0]
        dist.broadcast_object_list(told, src=0)
        self._evaluated = told[0]

    @property
    def _compares_pairs(self) -> bool:
        """Return whether an example is a pair: of an image and its caption, or of completions."""
        return (
            self.plan.model.task_traits.compares_pairs
            or self.plan.training.objective.traits.reads_preferences
        )

    def steps(self) -> range:
        """Return the steps still to train, counted from 1."""
        return range(self.done + 1, self.plan.training.steps + 1)

    def learning_rate(self, step: int) -> float:
        """Return the recipe's learning rate of this update."""
        return learning_rate(
            self.plan.optimizer, self.plan.scheduler, self.plan.training.steps, step
        )

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return this data rank's share of the step's global batch."""
        return self._batches.micro_batches(step, self.data_rank)

    def train(
        self, step: int, micro_batches: list[MicroBatch] | None = None, rate: float | None = None
    ) -> StepResult:
        """Make one optimizer step and record it in run/metrics.jsonl.

        micro_batches: as many and as large as the plan's

        A step whose batch is skipped (launch.recovery.skip_batches) makes no update and returns
        NaN.

        Raises Refusal on every rank: SW6311 after too many non-finite losses in a row; SW6315 where
        the outer store is unreachable, after a checkpoint of this step.
        """
        self._check_lease()
        began = time.perf_counter()
        if step in self._skipped_steps:
            self.done = step
            if self._metrics:
                self._metrics.write_skipped(step, max(time.perf_counter() - began, 1e-6))
            return StepResult(loss=math.nan, grad_norm=math.nan)
        rate = self.learning_rate(step) if rate is None else rate
        batches = self.micro_batches(step) if micro_batches is None else micro_batches
        noise: NoiseScaleMeasurement | None = None
        if self._noise is not None and self._noise.is_due(step):
            result, noise = self._noise.measure(
                step, lambda: self._trainer.step(batches, rate), batches
            )
        else:
            result = self._trainer.step(batches, rate)
        own = self._trainer.objective_metrics()
        seconds = time.perf_counter() - began
        self.done = step
        self._measured.step(result.loss, seconds)
        training = self.plan.training
        if self._metrics and self._tracking:
            tokens = training.tokens_per_step
            # Packed sequences have more pairs or fewer.
            counts_pairs = self._compares_pairs and not training.objective.packed
            pairs = training.global_batch_size if counts_pairs else None
            more: dict[str, JsonValue] = dict(own)
            if noise is not None:
                more["noise_scale"] = noise.line()
            self._metrics.write(
                step, result.loss, result.grad_norm, rate, tokens, seconds, pairs, more
            )
            values = own | {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": rate,
            }
            values |= {} if noise is None else noise.scale.curves()
            self._tracking.log(step, {**values, "tokens_per_second": tokens / seconds})
        lines = self._divergence.step(step, result.loss, result.grad_norm)
        if self._measured.is_due:
            lines.append(self._measured.line())
        for line in lines if self.rank == 0 else ():
            print(line, flush=True)
        try:
            for outer_step in self._outer.after(step):
                self.done = outer_step.done
        except OuterStoreUnreachable as error:
            self.save(last=True)
            raise error.refusal from None
        self._copy_to_memory()
        return result

    def _copy_to_memory(self) -> None:
        """Copy the state to the hosts' memory, where the recipe requires it after this step."""
        every = self.plan.checkpoint.in_memory_every
        if self._copies is None or self._copies.ended or every is None:
            return
        if self.done % every or self.done == self.plan.training.steps:
            return
        began = time.perf_counter()
        origin = replace(self._origin, finite=self._divergence.finite)
        size = self._copies.save(self._trainer, self.done, origin)
        if self._copies.ended and self.rank == 0:
            what = "the state is not copied to memory any more"
            print(f"warning[SW6330]: {what}: {self._copies.ended}", flush=True)
        if size is not None and self._copy_records is not None:
            self._copy_records.write(
                self.done, time.perf_counter() - began, size.total_bytes, size.node_bytes
            )

    @property
    def evaluates(self) -> bool:
        """Return whether the recipe requires an evaluation after the last step, and none was made.

        That includes a run that resumes from a checkpoint whose evaluation failed.
        """
        validation = self.plan.validation
        if validation is None or self._held_out is None or self.done in (0, self._evaluated):
            return False
        return (
            self._is_interval_end(validation.every_steps) or self.done == self.plan.training.steps
        )

    def evaluate(self) -> float:
        """Return the loss over the held-out data and record it in run/evaluation.jsonl.

        The recipe must have `validation`.
        """
        assert self._held_out is not None, "the recipe has no validation"
        began = time.perf_counter()
        loss, predicted = self._trainer.evaluate(self._held_out)
        own = self._trainer.objective_metrics()
        if self._evaluations and self._tracking:
            self._evaluations.write(
                self.done,
                loss,
                predicted,
                time.perf_counter() - began,
                own,
                counts_pairs=self._compares_pairs,
            )
            curves = {"loss": loss, **own}
            self._tracking.log(
                self.done, {f"validation_{name}": value for name, value in curves.items()}
            )
        self._evaluated = self.done
        return loss

    @property
    def saves(self) -> bool:
        """Return whether the recipe requires a checkpoint of the last step."""
        every = self.plan.checkpoint.every_steps
        return every is not None and self._is_interval_end(every)

    def _is_interval_end(self, every_steps: int) -> bool:
        """Return whether an interval's last step is in the weights, its outer step included."""
        at = self.done - self._outer.delay_steps
        return at > 0 and at % every_steps == 0

    def save(self, *, last: bool = False) -> None:
        """Save a checkpoint of the last step and record it in run/saves.jsonl, unless it was saved
        before.

        last: nothing is trained after it, so a failed copy (checkpoint.upload_to) is an error, not
        a warning
        """
        self._check_lease()
        if self._saved != self.done:
            last = last or self.done == self.plan.training.steps
            origin = replace(self._origin, finite=self._divergence.finite)
            began = time.perf_counter()
            self._outer.before_save(self.done)
            trainer = self._outer.trainer_with_states(self.done)
            nodes = save_checkpoint(
                self.plan, self.folder, trainer, self.done, last=last, origin=origin
            )
            if self._saves:
                self._saves.write(self.done, time.perf_counter() - began, sum(nodes), max(nodes))
            self._saved = self.done

    def _check_lease(self) -> None:
        """Raise Refusal where another run has taken the lease over."""
        if self._lease is not None and self._lease.lost is not None:
            raise lease_lost(self._lease.lost, self.folder)

    def finish(self, status: str = "done") -> None:
        """Write run/summary.json and run/status.json.

        status: done | preempted
        """
        self._measured.write(self.folder, status, self.done, self.attempt)
        if self._tracking:
            self._tracking.close()
        dist.barrier()
        self._outer.leave(done=status == "done")
        if self._copies is not None:
            self._copies.remove()
        if self.rank == 0:
            write_status(self.folder, status, self.attempt, step=self.done)
        if self._lease is not None:
            self._lease.release()


def rank_record(held: Mapping[str, ParameterShard], rank: int) -> dict[str, JsonValue]:
    """Return the record of run/ranks/.

    parameter_bytes: resident parameters in the compute dtype (under ZeRO-3, this rank's partitions)
    shapes: Hugging Face name -> the shape of this rank's part, before ZeRO flattens it
    trained, frozen, low_precision: their tensors and elements; the last where linears run in it
    """
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "parameter_bytes": sum(p.resident_bytes for p in held.values()),
        **parameter_counts(held),
        "shapes": {name: list(p.shape) for name, p in held.items()},
    }


def begin_session(
    plan: Plan,
    folder: Path,
    rank: int,
    resume: str | None,
    lease: Lease | None,
    watch: RankMonitor | None = None,
) -> Session:
    """Open the process groups, begin the attempt and prepare to train.

    resume, lease: as begin_attempt_on_ranks takes them
    """
    attempt = open_attempt(plan, folder, rank, resume, lease, watch)
    return Session(plan, folder, rank, attempt, lease)


def open_attempt(
    plan: Plan,
    folder: Path,
    rank: int,
    resume: str | None,
    lease: Lease | None,
    watch: RankMonitor | None = None,
) -> Attempt:
    """Open the process groups and begin the attempt.

    resume, lease: as begin_attempt_on_ranks takes them
    """
    engine_runtime(plan).open_groups(plan)
    remove_secret_environment_file()  # every rank is there
    check_same_files_on_hosts(plan, folder)
    attempt = begin_attempt_on_ranks(plan, folder, rank, resume, lease)
    if watch is not None:
        watch.begin(attempt.number)
        watch.at("reading its data and building its part of the model", 0)
    if rank == 0:
        write_status(folder, "running", attempt.number)
    return attempt


@contextmanager
def open_session(folder: str | os.PathLike[str], resume: str = "auto") -> Iterator[Session]:
    """Open a session in a user's script, started by `deepspeed` or torchrun with the plan's ranks.

    resume: auto (the newest valid checkpoint, else from the start), never, or a step folder

    At the end a checkpoint of the last step is written and the process groups are closed. Raises
    Refusal where the folder, the world or the data differ from the plan's.
    """
    load_secret_environment()
    path = Path(folder).resolve()
    plan, rank = load_plan(path), int(os.environ["RANK"])
    select_island_folder(plan, path, None)
    runtime = engine_runtime(plan)
    runtime.prepare_process(plan, user_training_loop=True)
    check_world(plan)
    lease = new_run_lease(plan, path, RANKS) if rank == 0 else None
    try:
        session = begin_session(plan, path, rank, resume, lease)
        yield session
        session.save(last=True)
        session.finish("done" if session.done == session.plan.training.steps else "preempted")
    finally:
        if lease is not None:
            lease.release()
    runtime.close_groups()
