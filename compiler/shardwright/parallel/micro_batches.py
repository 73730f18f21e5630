"""Choose each step's sequences for a rank; tensor and pipeline ranks share their data rank's
batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers

from shardwright.data.data_sources import all_data_sections, data_sections, uses_packing
from shardwright.data.dataset import Dataset, validation_batches
from shardwright.data.image_captions import ContrastiveProcessor
from shardwright.data.image_decoder import ImageDecoders, decoder_processes_per_rank
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.sequences import SequenceBatch, SequenceDataset
from shardwright.models.model_skeleton import Batch
from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.plan.plan import Plan

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Hold one micro-batch.

    input_ids, labels: (B, S) int64; labels are the inputs, which the loss shifts
    position_ids: (B, S) where documents are packed, else None
    shifted: labels are aligned with their predictions, as in a context-parallel shard
    beside: a vision-language model's other inputs; None for other models
    blank: the dummy image's inputs where no sequence has an image
    lengths: (B,) tokens of each sequence before its padding; None without padding
    completions_per_example: neighbouring completions of an example; None where labels are what
        counts
    tokens: (N,) labels of each completion in its whole sequence; None where labels are what counts
    completions: (B, S) which of the N completions each token belongs to, aligned as the labels;
        None where each sequence is one
    reference: (N,) log-probabilities of the completions under the reference model; None where the
        objective reads none
    desirable: (B,) bool of labelled completions; None for other data
    teacher: (B, S, K) ids of the teacher's most probable tokens in each token's place, and their
        log-probabilities; None without a teacher
    scored: a label is the token whose score is read, and stays with it, not with its prediction
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    shifted: bool = False
    beside: Batch | None = None
    blank: Batch | None = None
    lengths: torch.Tensor | None = None
    completions_per_example: int | None = None
    tokens: torch.Tensor | None = None
    completions: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    desirable: torch.Tensor | None = None
    teacher: tuple[torch.Tensor, torch.Tensor] | None = None
    scored: bool = False

    @property
    def predicted(self) -> int:
        """Count what the loss is a mean over: labels, or examples that have a label in each
        completion."""
        if self.tokens is None or self.completions_per_example is None:
            labels = self.labels if self.shifted else self.labels[:, 1:]
            return int((labels != IGNORE_INDEX).sum())
        has_labels = self.tokens.reshape(-1, self.completions_per_example) > 0
        return int(has_labels.all(dim=1).sum())

    def labels_and_scores(
        self, device: torch.device = CPU
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return what the loss takes beside the logits: the labels; where it reads them, how many
        each completion has and which completion a token is of, the reference's scores, which
        completions are desirable, and what the teacher says."""
        of_completions = self.tokens, self.completions, self.reference, self.desirable
        read = (*of_completions, *(self.teacher or ()))
        beside = [x.to(device) for x in read if x is not None]
        labels = self.labels.to(device)
        return (labels, *beside) if beside else labels

    def sequences_at(self, place: int) -> MicroBatch:
        """Return the sequences at one place of each example."""
        each = self.completions_per_example or 1

        def own(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[place::each]

        return replace(
            self,
            input_ids=self.input_ids[place::each],
            labels=self.labels[place::each],
            lengths=own(self.lengths),
            tokens=own(self.tokens),
            reference=own(self.reference),
            desirable=own(self.desirable),
            completions_per_example=1,
        )

    def without_labels(self, sequences: npt.NDArray[np.bool_]) -> MicroBatch:
        """Return the micro-batch whose sequences (B,) that are marked have no label."""
        labels = self.labels.clone()
        labels[torch.from_numpy(sequences)] = IGNORE_INDEX
        tokens = None if self.tokens is None else label_counts(labels, self.completions)
        return replace(self, labels=labels, tokens=tokens)


def label_counts(labels: torch.Tensor, completions: torch.Tensor | None) -> torch.Tensor:
    """Return the labels of each sequence (B,), or of each completion (N,) of packed ones.

    labels, completions: (B, S), of whole sequences
    """
    is_label = labels[:, 1:] != IGNORE_INDEX
    if completions is None:
        return is_label.sum(dim=1)
    return torch.bincount(completions[:, 1:][is_label], minlength=int(completions.max()) + 1)


def label_mask(plan: Plan, block: SequenceBatch) -> npt.NDArray[np.bool_]:
    """Return which tokens (B, S) are labels."""
    labels = _micro_batch(block, uses_packing(plan)).labels
    labels[:, 0] = IGNORE_INDEX  # nothing precedes a sequence's first token
    return (labels != IGNORE_INDEX).numpy()


def rows_per_example(plan: Plan) -> int | None:
    """Return the sequences that the data has for an example, which batch sizes count; None where
    labels are what counts."""
    each = completions_per_example(plan)
    return 1 if each is not None and plan.training.objective.packed else each


def completions_per_example(plan: Plan) -> int | None:
    """Return the completions that the loss reads together; None where labels are what counts."""
    if not plan.training.objective.traits.reads_preferences:
        return None
    return data_sections(plan.data)[0].documents_per_example


class TrainingBatches:
    """Split the dataset's order over the islands and the data ranks of each.

    waits: steps after the first whose images were not ready in time
    """

    def __init__(
        self,
        plan: Plan,
        data: Dataset,
        image_processor: ImageProcessor | ContrastiveProcessor | None = None,
    ) -> None:
        self.data, self.image_processor = data, image_processor
        self._ahead: tuple[tuple[int, int], Future[list[MicroBatch]]] | None = None
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="batches")
            if image_processor is not None
            else None
        )
        self._steps = data.steps
        s = plan.strategy
        self.shape = (-1, s.gradient_accumulation_steps, s.data, s.micro_batch_size)
        self.island = plan.island
        self.packed, self._completions = uses_packing(plan), completions_per_example(plan)
        self.scored = plan.training.objective.traits.scores_sequences
        self.waits = 0

    def micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        """Return the micro-batches of `data_rank` in `step` (from 1).

        Micro-batch m takes examples [(m * data + rank) * B, ... + B) of the island's part of the
        global batch, which is split into equal parts by island.
        """
        if self._thread is None:
            return self._build_micro_batches(step, data_rank)
        self.waits += self._ahead is not None and not self.ready(step, data_rank)
        made = (
            self._ahead[1].result() if self._ahead and self._ahead[0] == (step, data_rank) else None
        )
        found = self._build_micro_batches(step, data_rank) if made is None else made
        # Prepare the next step's images while this one trains, and no more, to save memory.
        following = (step + 1, data_rank)
        self._ahead = (
            (following, self._thread.submit(self._build_micro_batches, *following))
            if step < self._steps
            else None
        )
        return found

    def ready(self, step: int, data_rank: int) -> bool:
        """Return whether micro_batches returns without waiting."""
        return (
            self._ahead is not None
            and self._ahead[0] == (step, data_rank)
            and self._ahead[1].done()
        )

    def _build_micro_batches(self, step: int, data_rank: int) -> list[MicroBatch]:
        indices = self.data.order.indices(step).reshape(self.shape)[self.island, :, data_rank]
        return [
            _micro_batch(
                self.data.train.read(i),
                self.packed,
                self.image_processor,
                self._completions,
                scored=self.scored,
            )
            for i in indices
        ]


class ValidationBatches:
    """Split the held-out sequences over data ranks, with equally many micro-batches on each.

    Sequences that only fill up a micro-batch have no labels. Each pass reads the data again,
    because it may exceed memory.

    numbers: (micro-batches, B) of the held-out examples; -1 where there is none
    at_once: micro-batches that pass through the pipeline together; their number is a multiple of it
    examples: held-out examples of all data ranks
    """

    def __init__(
        self,
        plan: Plan,
        rows: SequenceDataset,
        data_rank: int,
        image_processor: ImageProcessor | ContrastiveProcessor | None = None,
    ) -> None:
        s = plan.strategy
        # DeepSpeed numbers DualPipeV's buffers by the training's micro-batches: as many at once, or
        # its engine fails. Pictures of all held-out rows may be more than memory holds.
        at_once = (
            s.gradient_accumulation_steps
            if s.pipeline_schedule.groups_messages or image_processor is not None
            else None
        )
        # An interleaved schedule takes as many as there are pipeline ranks, or a multiple.
        multiple = at_once or (s.pipeline if s.virtual_stages > 1 else 1)
        numbers = validation_batches(len(rows), s.data * s.micro_batch_size, multiple)
        self._rows, self.rows_per_example = rows, rows_per_example(plan)
        self._completions = completions_per_example(plan)
        self._scored = plan.training.objective.traits.scores_sequences
        self.numbers = numbers.reshape(-1, s.data, s.micro_batch_size)[:, data_rank]
        self.at_once = at_once or len(self.numbers)
        self.examples = len(rows)
        self._packed, self._image_processor = uses_packing(plan), None
        self.predicted = sum(m.predicted for m in self)  # does not decode images
        self._image_processor = image_processor

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[MicroBatch]:
        for numbers in self.numbers:
            batch = _micro_batch(
                self._rows.read(np.maximum(numbers, 0)),
                self._packed,
                self._image_processor,
                self._completions,
                scored=self._scored,
            )
            yield batch.without_labels(np.repeat(numbers < 0, self.rows_per_example or 1))


def build_image_processor(
    plan: Plan, folder: Path, rank: int | None = None
) -> ImageProcessor | ContrastiveProcessor | None:
    """Build the image processor of a vision-language model.

    folder: a compiled folder or a checkpoint
    rank: in a run; a process beside the rank decodes images, and only for the first stage
    """
    part = next((part for part in all_data_sections(plan) if part.images is not None), None)
    if not plan.model.task_traits.has_images or part is None or part.images is None:
        return None
    if plan.model.task_traits.compares_pairs:
        at_work = (
            None if rank is None else ImageDecoders(decoder_processes_per_rank(plan.gpus_per_node))
        )
        return ContrastiveProcessor(folder / str(part.tokenizer), part.images, decoders=at_work)
    takes = inspect.signature(getattr(transformers, plan.model.architecture).forward).parameters
    later = rank is not None and plan.ranks[rank].pipeline > 0
    decoders = (
        None
        if rank is None or later
        else ImageDecoders(decoder_processes_per_rank(plan.gpus_per_node))
    )
    return ImageProcessor(
        folder / str(part.tokenizer),
        part.images,
        frozenset(takes),
        skip_decoding=later,
        decoders=decoders,
    )


def _micro_batch(
    block: SequenceBatch,
    packed: bool,
    image_processor: ImageProcessor | ContrastiveProcessor | None = None,
    completions_per_example: int | None = None,
    *,
    scored: bool = False,
) -> MicroBatch:
    """Build a micro-batch.

    packed: add position ids even where this block needs none, because stages exchange fixed shapes
    completions_per_example, scored: as MicroBatch has them
    """
    input_ids = torch.from_numpy(block.tokens.astype(np.int64))
    labels = input_ids.clone()
    if block.loss_mask is not None:
        labels[torch.from_numpy(~block.loss_mask)] = IGNORE_INDEX
    if image_processor is not None:
        beside = image_processor.inputs(
            block.tokens.astype(np.int64), block.loss_mask, block.pictures
        )
        blank = None if any(block.pictures) else image_processor.blank
        return MicroBatch(
            input_ids=input_ids, labels=labels, position_ids=None, beside=beside, blank=blank
        )
    lengths = None if block.lengths is None else torch.from_numpy(block.lengths)
    teacher = None
    if block.teacher is not None:
        ids, log_probabilities = block.teacher
        teacher = torch.from_numpy(ids), torch.from_numpy(log_probabilities)
    position_ids = None
    if packed:
        starts = torch.from_numpy(
            np.zeros(block.tokens.shape, dtype=np.bool_) if block.starts is None else block.starts
        )
        labels[starts] = IGNORE_INDEX
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        position_ids = places - torch.where(starts, places, 0).cummax(dim=1).values
    completions = None
    if block.completions is not None:
        completions = torch.from_numpy(block.completions)
        counts = completions.max(dim=1).values + 1
        completions = completions + (counts.cumsum(dim=0) - counts)[:, None]
    counts_labels = completions_per_example is None
    reference, desirable = (
        None if x is None else torch.from_numpy(x) for x in (block.reference, block.desirable)
    )
    return MicroBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        lengths=lengths,
        completions_per_example=completions_per_example,
        tokens=None if counts_labels else label_counts(labels, completions),
        completions=None if counts_labels else completions,
        reference=reference,
        desirable=desirable,
        teacher=teacher,
        scored=scored,
    )
