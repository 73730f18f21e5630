"""Under the `deepspeed` launcher: preference training on the real engines, many cases of one world
size.

SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from deepspeed import comm as dist
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from shardwright.checkpoint.checkpoint_saver import save_checkpoint
from shardwright.checkpoint.huggingface_export import export_checkpoint
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.data.sequences import DocumentSequences, ScoredSequences, SequenceDataset
from shardwright.train.reference_scores import with_reference
from shardwright.train.score_blocks import ScoreBlocks
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff
from tests.parity.cases_worker import main
from tests.parity.engine_groups import compile_folder, from_rank_0
from tests.parity.harness import STEPS
from tests.parity.objective_run import ObjectiveRun, trained_run
from tests.parity.plain_training import HELD_OUT
from tests.parity.preference import (
    METRICS,
    PlainRun,
    PreferenceCase,
    plain_run,
    rows,
    write_pairs,
)


class Run(ObjectiveRun):
    """Hold one layout's plan, data with the reference's scores, and trainer."""

    def __init__(self, case: PreferenceCase, folder: Path) -> None:
        if dist.get_rank() == 0:
            write_pairs(case, folder)
        plan = compile_folder(folder)
        if dist.get_rank() == 0:
            prepare(plan, folder, limit_bytes=None)
        dist.barrier()
        self.data = open_dataset(plan, folder)
        super().__init__(plan, folder)
        if plan.training.objective.traits.reads_reference:
            scores = ScoreBlocks(plan, folder, self.data, folder / "run" / "reference")
            assert scores.are_missing
            assert list(scores.compute(self.trainer))
            self.data = with_reference(self.data, scores.finish)


def measure(case: PreferenceCase, folder: Path) -> dict[str, float]:
    found = trained_run(Run, case, folder)
    sequences = found.run.data.train
    wanted = from_rank_0(lambda: plain_run(case, packed_records(sequences)))
    assert found.held_out[1] == wanted.held_out_count
    size = max(1.0, *wanted.trained.losses)  # ipo's are squares
    return found.differences(case, wanted, size) | {
        "metrics": largest_difference(
            abs(step[name] - plain[name])
            for number, (step, plain) in enumerate(zip(found.metrics, wanted.metrics, strict=True))
            for name in METRICS
            # At the first step the model is the reference: rounding ranks the pairs.
            if number or name != "accuracy" or not isinstance(sequences, ScoredSequences)
        ),
        "scores": max_abs_diff(
            torch.from_numpy(sequences.scores), torch.from_numpy(wanted.scores).flatten()
        )
        if isinstance(sequences, ScoredSequences)
        else 0.0,
        "exported": exported_difference(case, found.run, folder, wanted) if case.is_reward else 0.0,
    }


def packed_records(sequences: SequenceDataset) -> list[list[int]] | None:
    """The records of each sequence, None where pairs are not packed."""
    rows = sequences.rows if isinstance(sequences, ScoredSequences) else sequences
    if not isinstance(rows, DocumentSequences):
        return None
    return [
        (rows.members[first:stop:2] // 2).tolist()
        for first, stop in itertools.pairwise(rows.bounds.tolist())
    ]


def exported_difference(case: PreferenceCase, run: Run, folder: Path, wanted: PlainRun) -> float:
    """Return the largest difference of the rewards that transformers computes of the exported
    model, for padded texts."""
    save_checkpoint(run.plan, folder, run.trainer, STEPS)

    def exported() -> float:
        step = folder / run.plan.checkpoint.directory / f"step-{STEPS:08d}"
        export_checkpoint(step, folder / "hf", merge=bool(case.lora_rank))
        models = [AutoModelForSequenceClassification.from_pretrained(folder / "hf")]
        if case.lora_rank and case.pretrained:
            export_checkpoint(step, folder / "adapters")
            base = AutoModelForSequenceClassification.from_pretrained(
                folder / "weights", num_labels=1, pad_token_id=0
            )
            models.append(PeftModel.from_pretrained(base, folder / "adapters"))
        ids = torch.cat([ids for ids, *_ in rows(case)[:HELD_OUT]])
        with torch.no_grad():
            found = torch.stack([model(input_ids=ids).logits.view(-1, 2) for model in models])
        return max_abs_diff(found, torch.from_numpy(wanted.held_out_rewards).expand_as(found))

    return from_rank_0(exported)


if __name__ == "__main__":
    main(measure, PreferenceCase)
