"""A hub id -> a folder of the local Hugging Face cache with its weights or tokenizer, at one
commit.

Offline first: what the cache has whole is used as it is, and the hub is asked only for what is
missing. Downloaded are config.json, safetensors files and the tokenizer's files, Python files where
the recipe trusts them by name; never pickles.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.diagnostics import KeyPath, Refusal, refusal
from shardwright.models.hub_files import hub_error, invalid_model_id, pinned
from shardwright.models.weights_location import TOKENIZER_PATTERNS, WeightsLocation
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.bounded_read import parse_json, read_regular_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHTS_KEY: KeyPath = ("model", "weights")


def locate_weights(section: ModelSection) -> WeightsLocation | None:
    """None where the weights are random. Errors: SW1913 none, or not all of them, and those of the
    hub: SW2010 to SW2012, SW2015."""
    if section.weights != "pretrained" or section.source is None:
        return None
    if Path(section.source).is_absolute():
        local = Path(section.source)
        if local.is_dir() and (
            problem := weights_problem(local)
        ):  # a missing one has been told already
            help = "Give a folder that `save_pretrained` wrote (safetensors), or `weights: random`."
            raise _no_weights(repr(section.source), problem, help)
        return WeightsLocation(path=section.source, revision=None)
    model_id, revision = section.source, section.revision
    folder = _cached(model_id, revision)
    code = ["*.py"] if section.trust_remote_code is not None else []
    problem = "they are not on this machine" if folder is None else _problem(folder, code)
    if problem:
        small = ["config.json", "generation_config.json", INDEX, *TOKENIZER_PATTERNS, *code]
        folder = _download(model_id, revision, small, problem, _WEIGHTS_KEY)
        # By its commit from here on: the branch may move in between.
        folder = _download(
            model_id, folder.name, list(_weight_files(folder)), problem, _WEIGHTS_KEY
        )
        problem = weights_problem(folder)
    assert folder is not None
    if problem:
        raise _files_unreachable(model_id, revision, problem, _WEIGHTS_KEY)
    return WeightsLocation(path=str(folder), revision=folder.name)


def _problem(folder: Path, code: list[str]) -> str:
    missing_code = code and not next(folder.glob("*.py"), None)
    return weights_problem(folder) or ("its code is not on this machine" if missing_code else "")


def tokenizer_folder(name: str, revision: str, key: KeyPath) -> Path:
    """The folder itself, or the cache's of a hub id; it may hold no tokenizer. Errors, all at
    `key`: SW1911, SW2010 to SW2012, SW2015."""
    if Path(name).is_absolute():
        return Path(name)
    try:
        folder = _cached(name, revision)
        if folder is not None and any(
            next(folder.glob(pattern), None) for pattern in TOKENIZER_PATTERNS
        ):
            return folder
        return _download(name, revision, list(TOKENIZER_PATTERNS), "it is not on this machine", key)
    except Refusal as refusal:
        raise Refusal(*(replace(d, key=key) for d in refusal.diagnostics)) from None


def code_folder(model_id: str, revision: str) -> Path:
    """The model's Python files, of a model that the recipe trusts by name. Errors: SW2001, SW2010
    to SW2012."""
    folder = _cached(model_id, revision)
    if folder is not None and next(folder.glob("*.py"), None):
        return folder
    return _download(
        model_id,
        revision,
        ["config.json", "*.py"],
        "its code is not on this machine",
        ("model", "source"),
    )


def weights_problem(folder: Path) -> str:
    """Why the safetensors files of `folder` cannot be loaded, or ""."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        return f"it has {pickles[0]}, and no {SINGLE}" if pickles else f"it has no {SINGLE}"
    try:
        names = _weight_files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} cannot be read"
    missing = [
        name for name in names if not os.path.isfile(folder / name)
    ]  # False, too, for what can be no name
    if missing:
        return f"{missing[0][:200]} is missing" + (
            f", with {len(missing) - 1} more" if len(missing) > 1 else ""
        )
    cut = [name for name in names if not _is_whole(folder / name)]
    return f"{cut[0]} is not a whole safetensors file" if cut else ""


def _weight_files(folder: Path) -> tuple[str, ...]:
    """As from_pretrained looks for them: one file, else those of the index."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return (SINGLE,)
    index: Any = parse_json(read_regular_file(folder / INDEX))
    return tuple(sorted({str(name) for name in index["weight_map"].values()}))


def _is_whole(path: Path) -> bool:
    """By the header, which says where the last tensor ends: a download or copy that was cut off is
    shorter."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return True
    except (OSError, SafetensorError):
        return False


def _cached(model_id: str, revision: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(
                model_id, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except HFValidationError:
        raise Refusal(invalid_model_id(model_id)) from None
    except Exception:  # the hub library has several names for "not here"
        return None


def _download(
    model_id: str, revision: str, patterns: list[str], problem: str, key: KeyPath
) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode, snapshot_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    if is_offline_mode():
        raise _files_unreachable(model_id, revision, f"{problem}, and HF_HUB_OFFLINE is set", key)
    try:
        # Asked once, without the retries of a download, which make a machine with no network wait
        # half a minute.
        with contextlib.suppress(
            RemoteEntryNotFoundError
        ):  # the repository may be a tokenizer's alone
            get_hf_file_metadata(hf_hub_url(model_id, "config.json", revision=revision))
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of its HTTP library, the disk, the hub: all mean "no weights"
        why = hub_error(error, model_id, revision)
        if why.code == "SW2001":
            raise _files_unreachable(
                model_id, revision, f"{problem}, and {_cause(error)}", key
            ) from None
        raise Refusal(why) from None


def _cause(error: Exception) -> str:
    first = " ".join(str(error).split())[:120]
    if isinstance(error, OSError) and error.errno is not None:
        return f"storing them failed: {first}"
    return f"the hub cannot be reached ({type(error).__name__})"


def _files_unreachable(model_id: str, revision: str, why: str, key: KeyPath) -> Refusal:
    fetch = f"Where there is a network, run `hf download {model_id}{pinned(revision)}`"
    if key == _WEIGHTS_KEY:
        help = (
            "Load it once with transformers, write it with `save_pretrained`, and give that "
            "folder as model.source"
        )
        if ".bin" not in why:  # no pickles to load
            help = f"{fetch}, or give a local folder"
        return _no_weights(
            f"the weights of {model_id!r}", why, f"{help}; or write `weights: random`."
        )
    if key == ("model", "source"):
        return refusal("SW2001", f"{model_id!r}: {why}", f"{fetch}, or give a local folder.", key)
    help = (
        f"{fetch}; or give a folder that `save_pretrained` wrote (as ./path), or `tokenizer: byte`."
    )
    return refusal(
        "SW1911", f"data.tokenizer: {model_id!r} cannot be used: {why}", help, key, ("byte",)
    )


def _no_weights(what: str, why: str, help: str) -> Refusal:
    return refusal(
        "SW1913",
        f"model.weights: pretrained, but {what} cannot be loaded: {why}",
        help,
        _WEIGHTS_KEY,
    )
