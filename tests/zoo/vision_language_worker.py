"""Under the `deepspeed` launcher: many types that see in one launch, each on the real engine,
against a plain process.

The environment is pipeline_worker.py's. Each step has two micro-batches of two rows, which hold
pictures of different number and, where the type's may differ, size; one micro-batch holds none.
"""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm as dist
from transformers import AutoConfig, AutoModelForImageTextToText

from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.models import graph_trace
from shardwright.models.byte_tokenizer import byte_tokenizer
from shardwright.models.model_graph import PipelineSplit, VisionEncoder
from shardwright.models.tasks.vision_language import find_image_sequences
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.train.training_session import check_parameters
from shardwright.utils.numeric_difference import largest_difference
from shardwright.verify.reference_run import mean_loss
from tests.figures import training_apart
from tests.parity.engine_groups import compile_folder, from_rank_0
from tests.parity.reference import Reference, train
from tests.zoo.pipeline_worker import (
    BETAS,
    CLIPPING,
    LAYOUT,
    STEPS,
    clipped,
    first_moments,
    main,
    of_a_range,
)
from tests.zoo.vision_language_configs import build_vlm, vlm_config

ROWS = (
    (((1,), (2,)), ((), (2, 1))),
    (((), ()), ((1,), (1,))),
    (((1, 2), (1,)), ((2,), ())),
)
"""For each step two micro-batches, for each of their rows its pictures, by width."""
TEXT = 250
SECONDS = 240
"""A type takes 3 where nothing else runs."""
IGNORE_INDEX = -100

MicroBatches = list[list[dict[str, dict[str, torch.Tensor]]]]
"""For each step its micro-batches: inputs of the forward with their labels, and of a blank
picture."""


def micro_batches(model_type: str) -> MicroBatches:
    torch.manual_seed(1)
    model = build_vlm(model_type)
    made = find_image_sequences(model, TEXT)
    longest = max(made.rows(rows)[0].shape[1] for step in ROWS for rows in step)
    steps: MicroBatches = []
    for step in ROWS:
        steps.append([])
        for rows in step:
            ids, beside = made.rows(rows, longest)
            labels = torch.where(ids == made.token, IGNORE_INDEX, ids)
            labels[:, :2] = IGNORE_INDEX
            blank = {} if any(rows) else made.make(made.tower, ((1,),))
            steps[-1].append(
                {"inputs": {"input_ids": ids, "labels": labels, **beside}, "blank": blank}
            )
    return steps


def recipe(folder: Path, length: int) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "zoo",
        "model": {
            "source": str(folder / "weights"),
            "weights": "pretrained",
            "task": "image-text-to-text",
        },
        "cluster": {"nodes": 1, "gpus_per_node": dist.get_world_size(), "gpu": "cpu"},
        "training": {
            "sequence_length": length,
            "global_batch_size": 4,
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {
                "name": "adamw",
                "lr": 1e-3,
                "betas": list(BETAS),
                "eps": 1e-3,
                "weight_decay": 0.1,
            },
            "scheduler": {"name": "cosine", "warmup_steps": 2},
            "gradient_clipping": CLIPPING,
        },
        "data": {
            "kind": "chat",
            "path": str(folder / "data.jsonl"),
            "template": "{{ messages[0].content }}",
            "images": {"per_row": 2, "max_pixels": 4096},
            "packing": False,
            "shuffle": False,
        },
        "parallelism": LAYOUT,
    }


def measure(model_type: str, folder: Path) -> dict[str, Any]:
    """Differences from the plain run, or the refusal. Ranks that wait for each other end the
    launch, and say where."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        return _measured(model_type, folder)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _measured(model_type: str, folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    if rank == 0:
        folder.mkdir(parents=True)
        build_vlm(model_type).save_pretrained(folder / "weights")
        AutoConfig.for_model(**vlm_config(model_type)).save_pretrained(folder / "weights")
        byte_tokenizer().save(str(folder / "weights" / "tokenizer.json"))
        (folder / "weights" / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
        (folder / "data.jsonl").write_text("")  # its rows are made here
        steps = micro_batches(model_type)
        torch.save(steps, folder / "steps.pt")
        length = steps[0][0]["inputs"]["input_ids"].shape[1]
        (folder / "recipe.yaml").write_text(json.dumps(recipe(folder, length)))
    plan = compile_folder(folder)
    steps = torch.load(folder / "steps.pt")
    trainer = build_trainer(plan, folder)
    check_parameters(plan, dist.get_rank(), trainer.parameter_shards(), trainer.transposed)
    results, moments = [], []
    for k, step in enumerate(steps, 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, k)
        results.append(
            trainer.step(
                [_batch(m) for m in step[plan.ranks[rank].data :: plan.strategy.data]], rate
            )
        )
        moments += first_moments(trainer.owned_shards()) if k == 1 else []
    wanted, gradients = from_rank_0(
        lambda: plain_run(folder, [[m["inputs"] for m in step] for step in steps])
    )
    trained = [
        f for f in trainer.owned_shards() if "fp32" in f.states and f.name not in wanted.unused
    ]
    gradient = [
        of_a_range(moment / (1 - BETAS[0]), start, gradients[name])
        for name, start, moment in moments
        if name not in wanted.unused and name in gradients
    ]
    return {
        **training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted),
        "weights": largest_difference(
            of_a_range(f.states["fp32"], f.start, wanted.weights[f.name]) for f in trained
        ),
        "gradient": largest_difference(gradient),
        "unused": len(wanted.unused),
        "sharded": 0.0,
        "payload": [
            *plan.model.cut.payload,
            *(f"output {place}" for place in plan.model.cut.carried),
        ],
        "tokens": plan.training.sequence_length,
        "beside": sorted(
            name for name in steps[0][0]["inputs"] if name not in ("input_ids", "labels")
        ),
    }


def _batch(made: dict[str, dict[str, torch.Tensor]]) -> MicroBatch:
    inputs = dict(made["inputs"])
    ids, labels = inputs.pop("input_ids"), inputs.pop("labels")
    return MicroBatch(
        input_ids=ids, labels=labels, position_ids=None, beside=inputs, blank=made["blank"] or None
    )


def plain_run(
    folder: Path, blocks: list[list[dict[str, torch.Tensor]]]
) -> tuple[Reference, dict[str, torch.Tensor]]:
    """One process over all steps; and the gradients of the first one, clipped."""

    def model() -> Any:
        return AutoModelForImageTextToText.from_pretrained(
            folder / "weights", dtype=torch.float32
        ).train()

    first = model()
    mean_loss(first, blocks[0], own_loss=False).backward()
    wanted = train(
        model(),
        blocks,
        lr=1e-3,
        betas=BETAS,
        eps=1e-3,
        weight_decay=0.1,
        warmup=2,
        clipping=CLIPPING,
        own_loss=False,
    )
    return wanted, clipped(first)


def untraced(model: torch.nn.Module, cut: PipelineSplit) -> VisionEncoder:
    """What the tower costs is no matter here."""
    return VisionEncoder(
        patch=1,
        patches=0,
        patches_per_token=1.0,
        layers=(),
        tower=(),
        projector=(),
        untraced="not here",
    )


if __name__ == "__main__":
    patch.object(graph_trace, "trace_vision_encoder", untraced).start()
    os.environ["SHARDWRIGHT_CACHE"] = str(Path(os.environ["SHARDWRIGHT_ZOO_OUT"]) / "graphs")
    main(measure)
