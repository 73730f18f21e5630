"""CLIP and SigLIP against plain Hugging Face: its own processor, its own loss (return_loss) over
the whole batch in one process."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModel, AutoProcessor

from shardwright.engines.reference.reference_optimizer import ReferenceOptimizer
from shardwright.verify.reference_run import Reference, cosine
from tests.parity.harness import BETAS, DECAY, EPS, LR, SEED, WARMUP

STEPS, LENGTH, BATCH, ROWS, CLIPPING = 8, 24, 16, 64, 0.5
SIDE = 16
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "clip": {
        "projection_dim": 24,
        "text_config": {**TEXT, "bos_token_id": 256, "eos_token_id": 257},
        "vision_config": TOWER,
    },
    "siglip": {
        "text_config": {**TEXT, "bos_token_id": 256, "eos_token_id": 257},
        "vision_config": TOWER,
    },
}


@dataclass(frozen=True)
class PairCase:
    model: str
    data: int = 2
    zero_stage: int = 1
    checkpointing: str = "none"
    precision: str = "fp32"
    freeze: tuple[str, ...] = ()
    steps: int = STEPS

    @property
    def world(self) -> int:
        return self.data


def write_pairs(folder: Path, rows: int = ROWS) -> list[dict[str, str]]:
    """Captions of several lengths, some longer than a row, with a picture each, in data.jsonl."""
    (folder / "pictures").mkdir()
    records, sizes = [], ((24, 24), (40, 20), (17, 33), (16, 16))
    for row in range(rows):
        shape, size = ("circle", "square")[row % 2], sizes[row % 4]
        color = tuple((row * 37 + c * 53) % 256 for c in range(3))
        image = Image.new("RGB", size, color)
        draw, box = (
            ImageDraw.Draw(image),
            tuple(x * side // 4 for x, side in zip((1, 1, 3, 3), size * 2, strict=True)),
        )
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=(255, 255, 255))
        image.save(folder / "pictures" / f"{row}.png")
        caption = f"{shape} {row}" + " on a coloured ground" * (row % 3)
        records.append({"caption": caption, "image": f"pictures/{row}.png"})
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    return records


def recipe(case: PairCase) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "pairs",
        "model": {
            "config": {"model_type": case.model, **MODELS[case.model]},
            "weights": "random",
            **({"freeze": list(case.freeze)} if case.freeze else {}),
        },
        "cluster": {"nodes": 1, "gpus_per_node": case.world, "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "steps": case.steps,
            "precision": case.precision,
            "seed": SEED,
            "optimizer": {
                "name": "adamw",
                "lr": LR,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": DECAY,
            },
            "scheduler": {"name": "cosine", "warmup_steps": WARMUP},
            "gradient_clipping": CLIPPING,
        },
        "data": {
            "kind": "jsonl",
            "path": "data.jsonl",
            "field": "caption",
            "images": {"per_row": 1, "max_pixels": 4096},
            "packing": False,
            "shuffle": False,
        },
        "parallelism": {
            "data": case.data,
            "zero_stage": case.zero_stage,
            "activation_checkpointing": case.checkpointing,
        },
        "checkpoint": {"directory": "checkpoints"},
    }


@functools.cache
def reference(
    model: str, folder: Path, processor: Path, steps: int = STEPS, freeze: tuple[str, ...] = ()
) -> Reference:
    """folder: of write_pairs. processor: of any compiled folder of the model."""
    document = copy.deepcopy(MODELS[model])
    torch.manual_seed(SEED)
    plain = AutoModel.from_config(AutoConfig.for_model(model, **document), dtype=torch.float32)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not any(name.startswith(path) for path in freeze))
    plain.train()
    optimizer = ReferenceOptimizer(
        plain, betas=BETAS, eps=EPS, weight_decay=DECAY, clipping=CLIPPING
    )
    kind = AutoProcessor.from_pretrained(processor, local_files_only=True)
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text("utf-8").splitlines()]
    losses, norms, rates = [], [], []
    for step in range(1, steps + 1):
        rows = [records[(step - 1) * BATCH % ROWS + n] for n in range(BATCH)]
        inputs = kind(
            text=[row["caption"] for row in rows],
            images=[Image.open(folder / row["image"]).convert("RGB") for row in rows],
            padding="max_length",
            truncation=True,
            max_length=LENGTH,
            return_tensors="pt",
        )
        if (
            model == "siglip"
        ):  # it has learned to read what fills a row up: no mask (transformers, SiglipTokenizer)
            inputs.pop("attention_mask", None)
        loss = plain(**inputs, return_loss=True).loss
        loss.backward()
        optimizer.accumulate_master_gradients()
        rate = LR * step / WARMUP if step <= WARMUP else cosine(LR, step, WARMUP, steps)
        norms.append(optimizer.step(rate))
        losses.append(float(loss.detach()))
        rates.append(rate)
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    return Reference(losses, norms, rates, weights, optimizer.unused)


def without_gradient(name: str) -> bool:
    """Keys' biases add the same to all scores of a query, which softmax takes away: their gradient
    is rounding alone, and AdamW makes steps of it."""
    return name.endswith("k_proj.bias")
