"""Digest what decides a model's scores of data: weights, tokenizer, chat template, data and how
they are read. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from shardwright.data.data_preparation import prepared_folder
from shardwright.data.data_sources import all_data_sections
from shardwright.data.dataset import files_digest, prepared_files
from shardwright.data.indexed_dataset import read_manifest
from shardwright.plan.plan import Plan, images_without_defaults
from shardwright.recipe.recipe_types import DataSection
from shardwright.utils.json_values import canonical_hash

_DIGEST_CHARACTERS = 32
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def score_digests(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the digests that a score file has, each of a fixed length.

    folder: the compiled one, whose data is prepared
    """
    parts = list(all_data_sections(plan))
    validation = plan.validation
    split = None if validation is None else [validation.fraction, plan.training.seed]
    low_precision = None if plan.low_precision is None else plan.low_precision.format
    found = {
        "weights": weights_digest(plan),
        "tokenizer": [_tokenizer_digest(part, folder) for part in parts],
        "template": [_template_digest(part, folder) for part in parts],
        "data": [_data_digest(plan, part, folder) for part in parts],
        "settings": [
            [plan.training.sequence_length, split],
            [[part.kind, part.joins_documents, part.labelled] for part in parts],
        ],
        "precision": [plan.training.precision, low_precision],
    }
    return {name: canonical_hash(value)[:_DIGEST_CHARACTERS] for name, value in found.items()}


def weights_digest(plan: Plan) -> object:
    """Digest the weights that a plan starts from."""
    if plan.model.weights_path is None:
        return [plan.model.config_hash, plan.training.seed]
    folder = Path(plan.model.weights_path)
    files = [path for name in ("*.safetensors", "*.bin") for path in folder.glob(name)]
    return files_digest(sorted(files), blocks=64)


def _tokenizer_digest(part: DataSection, folder: Path) -> object:
    if part.tokenizer in (None, "byte"):
        return part.tokenizer
    digests = {}
    for path in sorted((folder / str(part.tokenizer)).iterdir()):
        if path.name == TOKENIZER_CONFIG:
            config = json.loads(path.read_text(encoding="utf-8"))
            digests[path.name] = canonical_hash({**config, "chat_template": None})
        elif path.is_file() and path.name not in TEMPLATE_FILES:
            digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def _template_digest(part: DataSection, folder: Path) -> object:
    """Digest `data.template`, else the tokenizer's own."""
    if part.template is not None or part.tokenizer in (None, "byte"):
        return part.template
    here = folder / str(part.tokenizer)
    if (config := here / TOKENIZER_CONFIG).is_file():
        own = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    else:
        own = None
    files = [here / name for name in TEMPLATE_FILES if (here / name).is_file()]
    return [own, [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]]


def _data_digest(plan: Plan, part: DataSection, folder: Path) -> object:
    if part.kind == "synthetic":
        return [plan.training.seed, plan.model.vocabulary_size, max(1024, plan.sequences_per_step)]
    if part.kind == "tokens":
        return files_digest([Path(str(part.path))])
    if part.kind == "megatron":
        return files_digest([Path(f"{part.path}.idx"), Path(f"{part.path}.bin")])
    images = None if part.images is None else images_without_defaults(asdict(part.images))
    here = prepared_folder(part, folder)
    manifest = read_manifest(here)
    own = manifest.digest if manifest is not None else ""
    return [images, own or files_digest(prepared_files(here))]
