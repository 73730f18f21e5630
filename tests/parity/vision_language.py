"""Models that see, against plain Hugging Face: its own processor, its own forward, a row at a time
without padding."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText

from shardwright.models.image_processor import (
    load_processor,
    processor_files,
    processor_from_config,
)
from tests.parity.harness import BETAS, DECAY, EPS, LR, SEED, WARMUP, train_in_one_process
from tests.parity.reference import Reference

STEPS, BATCH, ROWS = 8, 8, 64
LENGTHS = {"smolvlm": 320}
"""Tokens of a row, where two pictures and what stands around them take more than 160 bytes."""
FEW_STEPS = 4
"""Of what each `make test` runs."""
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 768,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "depth": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
}
QWEN_TOKENS = {
    "image_token_id": 256,
    "video_token_id": 257,
    "vision_start_token_id": 258,
    "vision_end_token_id": 259,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]}
MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "image_token_index": 256,
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "projection_dim": 32},
        "text_config": {"model_type": "llama", **TEXT},
    },
    "qwen2_5_vl": {
        **QWEN_TOKENS,
        "vision_config": {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
        "text_config": {**TEXT, "rope_parameters": SECTIONS},
    },
    "qwen3_vl": {
        **QWEN_TOKENS,
        "vision_config": {
            **QWEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        "text_config": {**TEXT, "rope_parameters": SECTIONS},
    },
    "gemma3": {
        "image_token_index": 256,
        "boi_token_index": 257,
        "eoi_token_index": 258,
        "mm_tokens_per_image": 4,
        "vision_config": {**TOWER, "vision_use_head": True},
        "text_config": {
            **TEXT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "smolvlm": {
        "image_token_id": 256,
        "scale_factor": 2,
        "vision_config": TOWER,
        "text_config": {"model_type": "llama", **TEXT},
    },
    "paligemma": {
        "image_token_index": 256,
        "projection_dim": 48,
        "vision_config": {"model_type": "siglip_vision_model", **TOWER, "projection_dim": 48},
        "text_config": {"model_type": "gemma", **TEXT},
    },
    "paligemma2": {  # its text part has no sdpa, its vision encoder has
        "model_type": "paligemma",
        "image_token_index": 256,
        "projection_dim": 48,
        "vision_config": {"model_type": "siglip_vision_model", **TOWER, "projection_dim": 48},
        "text_config": {"model_type": "gemma2", **TEXT, "query_pre_attn_scalar": 12},
    },
}
QWEN_IMAGE = "<|vision_start|><image><|vision_end|>"
IMAGE = {"gemma3": "<start_of_image>", "qwen2_5_vl": QWEN_IMAGE, "qwen3_vl": QWEN_IMAGE}
"""What a template writes for a picture, where it is not <image>."""


PARTS = {
    "text": ("language_model", "lm_head", "text_model"),
    "vision": ("vision_tower", "visual.[!md]", "vision_model"),
    "projector": ("projector", "merger", "connector"),
}
"""By which the plain run freezes a part: of Qwen's `visual` all but merger and deepstack."""
LORA_RANK, LORA_ALPHA = 4, 12
TOKENS = (TOWER["image_size"] // TOWER["patch_size"]) ** 2
"""That stand for a picture of PaliGemma's."""


@dataclass(frozen=True)
class VlmCase:
    model: str
    pipeline: int = 1
    data: int = 1
    zero_stage: int = 1
    micro: int = 1
    checkpointing: str = "none"
    tied: bool = False
    tensor: int = 1
    freeze: tuple[str, ...] = ()
    lora: bool = False
    tiles: bool = False
    steps: int = STEPS

    """tiles: its processor cuts pictures, and lies in a folder beside the pictures."""

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor


def template(model: str) -> str:
    part = (
        "{% if p.type == 'image' %}"
        + IMAGE.get(model, "<image>")
        + "{% else %}{{ p.text }}{% endif %}"
    )
    each = "<{{ m.role }}>{% for p in m.content %}" + part + "{% endfor %}{{ '\\n' }}"
    return (
        "{% for m in messages %}"
        + each
        + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def config(case: VlmCase) -> dict[str, Any]:
    document = {"model_type": case.model, **MODELS[case.model]}
    text = {**document["text_config"], "tie_word_embeddings": case.tied}
    return {**document, "text_config": text, "tie_word_embeddings": case.tied}


def write_pictures(folder: Path, rows: int = ROWS) -> list[dict[str, Any]]:
    """Conversations about 0, 1 or 2 pictures of several sizes, in data.jsonl; two in the `images`
    convention."""
    (folder / "pictures").mkdir()
    records, sizes = [], ((24, 24), (40, 20), (17, 33), (60, 44))
    for row in range(rows):
        names, parts = [], []
        for place in range((1, 2, 0, 1)[row % 4]):
            width, height = sizes[(3 * row + place) % 4]
            color = tuple((row * 37 + place * 91 + c * 53) % 256 for c in range(3))
            image = Image.new("RGB", (width, height), color)
            shape = "circle" if (row + place) % 3 else "square"
            draw, box = (
                ImageDraw.Draw(image),
                (width // 4, height // 4, 3 * width // 4, 3 * height // 4),
            )
            (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=(255, 255, 255))
            name = f"pictures/{row}-{place}.png"
            image.save(folder / name)
            names.append((name, shape))
            parts.append({"type": "image"} if row % 3 == 0 else {"type": "image", "image": name})
        answer = " and ".join(shape for _, shape in names) or f"nothing in row {row}"
        user = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        assistant = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        record: dict[str, Any] = {"messages": [user, assistant]}
        if row % 3 == 0:
            record["images"] = [name for name, _ in names]
        records.append(record)
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    return records


def write_cutting(folder: Path, model: str = "smolvlm") -> Path:
    """A model's folder without weights, whose processor cuts a picture into up to two by two
    tiles."""
    document = config(VlmCase(model))
    made = AutoConfig.for_model(document.pop("model_type"), **document)
    folder.mkdir()
    for name, content in processor_files(processor_from_config(made), made).items():
        (folder / name).write_bytes(content)
    settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    settings |= {"do_image_splitting": True, "size": {"longest_edge": 2 * TOWER["image_size"]}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    made.save_pretrained(folder)
    return folder


def recipe(case: VlmCase, cutting: Path | None = None) -> dict[str, Any]:
    """cutting: of write_cutting, where the case has tiles."""
    return {
        "version": 1,
        "name": "vlm",
        "model": {
            **({"config": config(case)} if cutting is None else {"source": str(cutting)}),
            "weights": "random",
            "task": "image-text-to-text",
            **({"freeze": list(case.freeze)} if case.freeze else {}),
        },
        "cluster": {"nodes": 1, "gpus_per_node": case.world, "gpu": "cpu"},
        "training": {
            "sequence_length": 768 if case.tiles else LENGTHS.get(case.model, 160),
            "global_batch_size": BATCH,
            "steps": case.steps,
            "precision": "fp32",
            "seed": SEED,
            "optimizer": {
                "name": "adamw",
                "lr": LR,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": DECAY,
            },
            "scheduler": {"name": "cosine", "warmup_steps": WARMUP},
            "gradient_clipping": 0.5,
        },
        "data": {
            "kind": "chat",
            "path": "data.jsonl",
            "template": template(case.model),
            "images": {"per_row": 2, "max_pixels": 1600},
            "packing": False,
            "shuffle": False,
        },
        "parallelism": {
            "tensor": case.tensor,
            "pipeline": case.pipeline,
            "data": case.data,
            "zero_stage": case.zero_stage,
            "micro_batch_size": case.micro,
            "activation_checkpointing": case.checkpointing,
        },
        "checkpoint": {"directory": "checkpoints"},
        **({"lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA}} if case.lora else {}),
    }


@functools.cache
def reference(
    model: str,
    tied: bool,
    folder: Path,
    processor: Path,
    freeze: tuple[str, ...] = (),
    lora: bool = False,
    steps: int = STEPS,
) -> Reference:
    """folder: of write_pictures. processor: of any compiled folder of the model. What it says of
    weights goes by Hugging Face's names, adapters by peft's."""
    document = config(VlmCase(model, tied=tied))
    torch.manual_seed(SEED)
    plain = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(document.pop("model_type"), **document), dtype=torch.float32
    )
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(
            not any(fnmatchcase(name, part) for entry in freeze for part in _patterns(entry))
        )
    if lora:
        _adapt(plain)
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text("utf-8").splitlines()]
    kind = load_processor(processor)
    rows = [_row(kind, record, model, folder) for record in records]
    blocks = [rows[step * BATCH : (step + 1) * BATCH] for step in range(steps)]
    return train_in_one_process(plain, blocks, 0.5, own_loss=False)


def _patterns(entry: str) -> tuple[str, ...]:
    return tuple(f"*{part}*" for part in PARTS[entry]) if entry in PARTS else (entry,)


def _adapt(plain: Any) -> None:
    """Every linear of the decoder layers, drawn from the training's seed."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(SEED)
    paths = [
        name
        for name, module in plain.named_modules()
        if ("language_model.layers." in f"{name}." and isinstance(module, torch.nn.Linear))
        or ("text_model.layers." in f"{name}." and isinstance(module, torch.nn.Linear))
    ]
    inject_adapter_in_model(
        LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=paths), plain
    )


def _row(
    processor: Any, record: dict[str, Any], model: str, folder: Path
) -> dict[str, torch.Tensor]:
    """Return what Hugging Face's processor makes of a conversation; the labels are the answer."""
    given = iter(record.get("images", []))
    parts = record["messages"][0]["content"]
    names = [part.get("image") or next(given) for part in parts if part["type"] == "image"]
    answer = record["messages"][1]["content"][0]["text"]
    text = f"<user>{IMAGE.get(model, '<image>') * len(names)}What is it?\n<assistant>{answer}\n"
    images = [_small(Image.open(folder / name).convert("RGB")) for name in names]
    if model.startswith("paligemma"):
        return _prefixed(processor, text, answer, images)
    inputs = dict(processor(text=[text], images=[images] if images else None, return_tensors="pt"))
    inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[0, -len(answer) - 1 : -1] = inputs["input_ids"][
        0, -len(answer) - 1 : -1
    ]  # a token a byte; a line ends it
    return {**inputs, "labels": labels}


def _prefixed(
    processor: Any, text: str, answer: str, images: list[Image.Image]
) -> dict[str, torch.Tensor]:
    """PaliGemma's question is seen both ways, and the answer and all behind it as a causal suffix.
    Its processor's own call wants a token for the beginning, which bytes have not."""
    ids = processor.tokenizer(text.replace("<image>", "<image>" * TOKENS), return_tensors="pt")[
        "input_ids"
    ]
    places = torch.arange(ids.shape[1])[None]
    suffix = places >= ids.shape[1] - len(answer) - 1
    inputs = {
        "input_ids": ids,
        "token_type_ids": suffix.long(),
        "labels": torch.where(suffix & (places < ids.shape[1] - 1), ids, -100),
    }
    if images:
        inputs["pixel_values"] = processor.image_processor(images, return_tensors="pt")[
            "pixel_values"
        ]
    return inputs


def _small(image: Image.Image) -> Image.Image:
    """images.max_pixels is 1600: 60 x 44 pixels become 46 x 34."""
    return image.resize((46, 34)) if image.size == (60, 44) else image
