"""Digest what decides a model's scores of data: weights, tokenizer, chat template, data and how
they are read. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from shardwright.data.data_preparation import prepared_folder
from shardwright.data.data_sources import all_data_sections
from shardwright.data.dataset import files_digest
from shardwright.data.indexed_dataset import read_manifest
from shardwright.data.score_files import is_score_file
from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import DataSection
from shardwright.utils.json_values import canonical_hash

_DIGEST_CHARACTERS = 32
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def score_digests(plan: Plan, folder: Path, model: str | None = None) -> dict[str, str]:
    """Return the digests that a score file has, each of a fixed length.

    folder: the compiled one, whose data is prepared
    model: the folder of another model than the plan's
    """
    low_precision = None if plan.low_precision is None else plan.low_precision.format
    weights = _weights_digest(plan, model or plan.model.weights_path)
    return {
        **_shortened({"weights": weights}),
        **teacher_digests(plan, folder),
        **_shortened({"precision": [plan.training.precision, low_precision]}),
    }


def teacher_digests(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the digests that the scores of `training.objective.teacher` must have: all but those
    of its own weights and precision."""
    parts = list(all_data_sections(plan))
    validation = plan.validation
    split = None if validation is None else [validation.fraction, plan.training.seed]
    return _shortened(
        {
            "tokenizer": [tokenizer_digest(part, folder) for part in parts],
            "template": [template_digest(part, folder) for part in parts],
            "data": [_data_digest(plan, part, folder) for part in parts],
            "settings": [
                [plan.training.sequence_length, split],
                [[part.kind, part.joins_documents, part.labelled] for part in parts],
            ],
        }
    )


def _shortened(found: Mapping[str, object]) -> dict[str, str]:
    return {name: canonical_hash(value)[:_DIGEST_CHARACTERS] for name, value in found.items()}


def reference_digests(plan: Plan, folder: Path) -> dict[str, str]:
    """Return the digests that the scores of `training.objective.reference` must have."""
    objective = plan.training.objective
    assert objective.reference is not None, "the reference is the recipe's own starting weights"
    is_file = is_score_file(Path(objective.reference))
    model = objective.reference_model if is_file else objective.reference
    return score_digests(plan, folder, model)


def reference_score_file(plan: Plan, folder: Path) -> Path:
    """Return the score file of `training.objective.reference`: itself, or where `run` puts the
    scores of a model."""
    reference = plan.training.objective.reference
    assert reference is not None, "the reference is the recipe's own starting weights"
    if is_score_file(Path(reference)):
        return Path(reference)
    key = canonical_hash(reference_digests(plan, folder))[:_DIGEST_CHARACTERS]
    return folder.absolute() / "run" / "reference" / f"model-{key}"


def check_same_tokenizer(plan: Plan, folder: Path, model: str) -> None:
    """Raise SW6275 where a model's folder has another tokenizer than the data's.

    A folder without a tokenizer, and data of token ids, tell nothing.
    """
    theirs = vocabulary_digest(Path(model))
    for part in all_data_sections(plan):
        if part.tokenizer is None or theirs is None:
            continue
        own = None if part.tokenizer == "byte" else vocabulary_digest(folder / part.tokenizer)
        if own != theirs:
            raise refusal(
                "SW6275",
                f"the reference {model!r} has another tokenizer than the data of {part.path!r}: "
                "its log-probabilities would be of other tokens",
                "Give a reference with the same vocabulary.",
            )


def vocabulary_digest(folder: Path) -> str | None:
    """Digest which token has which id; None for a folder without a tokenizer."""
    path = folder / "tokenizer.json"
    if path.is_file():
        document = json.loads(path.read_text(encoding="utf-8"))
        model, added = document.get("model") or {}, document.get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
        return canonical_hash([model.get("vocab"), model.get("merges"), ids])
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if not files:
        return None
    return canonical_hash([[p.name, hashlib.sha256(p.read_bytes()).hexdigest()] for p in files])


def _weights_digest(plan: Plan, folder: str | None) -> object:
    """Digest a folder's weights and configuration, or those that a plan draws by its seed."""
    if folder is None:
        return [plan.model.config_hash, plan.training.seed]
    names = ("*.safetensors", "*.bin", "config.json")
    files = [path for name in names for path in Path(folder).glob(name)]
    return files_digest(sorted(files), blocks=64)


def tokenizer_digest(part: DataSection, folder: Path) -> object:
    """Digest a data section's tokenizer without its chat template."""
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


def template_digest(part: DataSection, folder: Path) -> object:
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
    images = None if part.images is None else asdict(part.images)
    here = prepared_folder(part, folder)
    manifest = read_manifest(here)
    assert manifest is not None, "prepared_folder has found it"
    return [images, manifest.digest]
