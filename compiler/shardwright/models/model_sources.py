"""Find a model's configuration, weights and code: catalog, local folder, Hugging Face cache or hub.

The catalog (popular/*.json) maps hub ids to published configurations. An entry with "like" repeats
another entry except for its own keys (hub redirects, instruct models). Keys about storage or
authorship (torch_dtype, architectures, quantization, ...) are left out.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, found, refusal
from shardwright.models.model_files import (
    INDEX,
    SINGLE,
    TOKENIZER_PATTERNS,
    WeightsLocation,
    weight_file_names,
)
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.file_io import parse_json, read_regular_file, read_regular_text_file
from shardwright.utils.json_values import JsonObject

LIKE = "like"


def catalog_ids() -> tuple[str, ...]:
    """Return every hub id of the catalog, sorted."""
    return tuple(sorted(_entries()))


def catalog_config(model_id: str) -> JsonObject | None:
    """Return the configuration of `model_id` at revision main, None where the catalog lacks it."""
    entry = _entries().get(model_id)
    if entry is None:
        return None
    own = {key: value for key, value in entry.items() if key != LIKE}
    if LIKE not in entry:
        return own
    base = catalog_config(str(entry[LIKE]))
    if base is None:
        raise ValueError(f"{model_id} is like {entry[LIKE]}, which is not shipped")
    return {**base, **own}


@functools.cache
def published_keys(model_type: str) -> frozenset[str]:
    """Return every key of the catalog's configurations of this type; modeling code reads some that
    no class lists."""
    configs = [catalog_config(model_id) or {} for model_id in catalog_ids()]
    return frozenset(
        key for config in configs if config.get("model_type") == model_type for key in config
    )


def match_catalog_id(text: str) -> str | None:
    """Return the hub id that `text` means: the id itself, or its last part where only one id ends
    in it."""
    if text in _entries():
        return text
    matches = [
        model_id
        for model_id in catalog_ids()
        if model_id.rpartition("/")[2].lower() == text.lower()
    ]
    return matches[0] if len(matches) == 1 else None


def nearest_ids(text: str) -> tuple[str, ...]:
    """Return up to three ids that look like `text`, from any publisher, nearest first."""
    short = {model_id.lower(): model_id for model_id in catalog_ids()}
    by_id = difflib.get_close_matches(text.lower(), short, n=3, cutoff=0.6)
    tails: dict[str, str] = {}
    for model_id in catalog_ids():
        tails.setdefault(model_id.rpartition("/")[2].lower(), model_id)
    by_name = difflib.get_close_matches(text.rpartition("/")[2].lower(), tails, n=3, cutoff=0.6)
    return tuple(dict.fromkeys([*(short[f] for f in by_id), *(tails[t] for t in by_name)]))[:3]


@functools.cache
def _entries() -> Mapping[str, JsonObject]:
    entries: dict[str, JsonObject] = {}
    files = (
        f
        for f in resources.files("shardwright.models.popular").iterdir()
        if f.name.endswith(".json")
    )
    for file in sorted(files, key=lambda f: f.name):
        table = cast("dict[str, JsonObject]", json.loads(file.read_text("utf-8")))
        twice = entries.keys() & table.keys()
        if twice:
            raise ValueError(f"{file.name} repeats {sorted(twice)}")
        entries |= table
    return entries


# Reading config.json: from the local cache, else the catalog, else the hub (unless HF_HUB_OFFLINE
# is set). Nothing is executed.


CONFIG_NAME = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SOURCE_KEY: KeyPath = ("model", "source")
# The hub's default revision, which the catalog's configurations are of.
_MAIN = "main"


def read_config(section: ModelSection) -> tuple[JsonObject, bool]:
    """Return the configuration as written, and whether it is in the recipe itself; without torch.

    Raises SW2002 (no readable config.json) and, for a hub id, the errors of hub_config.
    """
    if section.config is not None:
        return section.config, True
    source = section.source or ""
    if Path(source).is_absolute():
        return read_config_file(Path(source, CONFIG_NAME)), False
    return hub_config(source, section.revision), False


def hub_config(model_id: str, revision: str = _MAIN) -> JsonObject:
    """Return a hub model's configuration.

    Raises SW2001 (no network, offline, or a useless answer), SW2002 (not a JSON object), SW2010 (no
    such model), SW2011 (no such revision), SW2012 (gated), SW2013 (no config.json), SW2015 (not a
    hub id).
    """
    here = local_config(model_id, revision)
    if here is not None:
        return here
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError

    try:
        cached = hub.try_to_load_from_cache(model_id, CONFIG_NAME, revision=revision)
    except HFValidationError:
        raise Refusal(invalid_model_id(model_id)) from None
    if isinstance(cached, str):  # in case the cache's layout changes
        return read_config_file(Path(cached))
    if hub.is_offline_mode():
        raise Refusal(_hub_unreachable(model_id, "HF_HUB_OFFLINE is set", revision))
    try:
        # One request without retries: a download's make an offline machine wait half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(model_id, CONFIG_NAME, revision=revision))
        path = hub.hf_hub_download(model_id, CONFIG_NAME, revision=revision)
    except Exception as error:  # from the HTTP library, the disk or the hub
        raise Refusal(hub_error(error, model_id, revision)) from None
    return read_config_file(Path(path))


def local_config(model_id: str, revision: str) -> JsonObject | None:
    """Return the configuration from the cache or the catalog, None where only the hub has it.
    Raises SW2002."""
    cached = cached_config(model_id, revision)
    if cached is not None:
        return read_config_file(cached)
    return catalog_config(model_id) if revision == _MAIN else None


def cached_config(model_id: str, revision: str) -> Path | None:
    """Find config.json in the Hugging Face cache by its documented layout.

    huggingface_hub.try_to_load_from_cache does the same, but takes 0.2 s to import.
    """
    from huggingface_hub import constants

    if "--" in model_id:  # not in any hub id: it separates the parts of a cache folder's name
        return None
    repository = Path(constants.HF_HUB_CACHE, "--".join(("models", *model_id.split("/"))))
    commit = revision
    with suppress(OSError, ValueError):  # no ref of that name: a commit itself
        commit = (repository / "refs" / revision).read_text(encoding="utf-8")
    try:
        if commit not in os.listdir(repository / "snapshots"):
            return None
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    path = repository / "snapshots" / commit / CONFIG_NAME
    return path if os.path.isfile(path) else None


def local_processor(section: ModelSection) -> tuple[Path, str] | None:
    """Return the folder of the model's processor and its settings as text, where it is on this
    machine."""
    folder = Path(section.source or "")
    if not folder.is_absolute():
        cached = cached_config(section.source or "", section.revision)
        if cached is None:
            return None
        folder = cached.parent
    texts = []
    for name in PROCESSOR_FILES:
        with suppress(OSError, ValueError):
            texts.append(read_regular_text_file(folder / name))
    return (folder, "\n".join(texts)) if texts else None


def read_config_file(path: Path) -> JsonObject:
    """Read a config.json. Raises SW2002 where it is not a readable JSON object."""
    try:
        config = parse_json(read_regular_file(path))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}, not an object")
    except (OSError, ValueError) as error:
        reason = (
            (error.strerror or "") if isinstance(error, OSError) else " ".join(str(error).split())
        )
        help = "model.source must be a folder written by save_pretrained, with a config.json in it."
        raise refusal("SW2002", f"cannot read {str(path)!r}: {reason}", help, _SOURCE_KEY) from None
    return cast(JsonObject, config)


def hub_error(error: Exception, model_id: str, revision: str) -> Diagnostic:
    """Build the diagnostic of a hub exception. Subclasses are tested before their base classes."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{model_id}"
    if isinstance(error, errors.GatedRepoError):
        return found(
            "SW2012",
            _SOURCE_KEY,
            f"{model_id!r} is gated, and this machine has no access",
            f"Accept its terms at {page}, then run `hf auth login` (or set HF_TOKEN) and try "
            "again; or give a local folder as model.source, or the configuration under "
            "model.config.",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.DisabledRepoError):
        disabled = isinstance(error, errors.DisabledRepoError)
        return found(
            "SW2010",
            _SOURCE_KEY,
            f"{model_id!r} is disabled on the hub"
            if disabled
            else f"the hub has no model {model_id!r}",
            "Check the name. A private model needs `hf auth login` or HF_TOKEN; a local folder "
            "is written ./folder.",
            nearest_ids(model_id),
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return found(
            "SW2011",
            ("model", "revision"),
            f"{model_id!r} has no revision {revision!r}",
            f"Give a branch, tag or commit of {page}, or leave model.revision out.",
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return found(
            "SW2013",
            _SOURCE_KEY,
            f"{model_id!r} has no config.json, so it is not a transformers model",
            "Name the repository with the transformers weights (not the original, GGUF or "
            "adapter files).",
            nearest_ids(model_id),
        )
    cause = " ".join(str(error).split())[:200]
    if isinstance(error, errors.HfHubHTTPError):
        return _hub_unreachable(model_id, f"the hub answered: {cause}", revision)
    if isinstance(error, OSError) and not isinstance(
        error, errors.LocalEntryNotFoundError | ConnectionError
    ):
        return _hub_unreachable(model_id, f"writing config.json failed: {cause}", revision)
    return _hub_unreachable(
        model_id, f"the hub cannot be reached ({type(error).__name__})", revision
    )


def _hub_unreachable(model_id: str, cause: str, revision: str) -> Diagnostic:
    near = () if catalog_config(model_id) is not None else nearest_ids(model_id)
    what = f"{model_id!r}" if revision == _MAIN else f"{model_id!r} at revision {revision!r}"
    return found(
        "SW2001",
        _SOURCE_KEY,
        f"{what} is neither on this machine nor among the configurations that come with "
        f"shardwright, and {cause}",
        f"Where there is a network, run `hf download {model_id}{pinned(revision)} config.json`; or "
        "give a local folder as model.source, or the configuration under model.config. "
        f"{_did_you_mean(near)}".rstrip(),
        near,
    )


def pinned(revision: str) -> str:
    """Return the `--revision` option of `hf download`."""
    return "" if revision == _MAIN else f" --revision {revision}"


def invalid_model_id(model_id: str) -> Diagnostic:
    """Build SW2015."""
    near = nearest_ids(model_id)
    return found(
        "SW2015",
        _SOURCE_KEY,
        f"{model_id!r} is neither a folder on this machine nor a name that the hub could have",
        f"A hub id is written org/name, a local folder ./folder. {_did_you_mean(near)}".rstrip(),
        near,
    )


def _did_you_mean(near: tuple[str, ...]) -> str:
    return f"Configurations that come with shardwright: {', '.join(near)}." if near else ""


# Weights, tokenizers and code of a hub id: a complete cached snapshot is used as it is, else the
# missing files are downloaded. Python files only where the recipe trusts them; never pickles.


_WEIGHTS_KEY: KeyPath = ("model", "weights")


def locate_weights(section: ModelSection) -> WeightsLocation | None:
    """Return where the weights are, None where they are random.

    Raises SW1913 (missing or incomplete weights) and the hub's SW2010 to SW2012 and SW2015.
    """
    if section.weights != "pretrained" or section.source is None:
        return None
    if Path(section.source).is_absolute():
        local = Path(section.source)
        # check_files reports a missing folder.
        if local.is_dir() and (problem := weights_problem(local)):
            help = "Give a folder that `save_pretrained` wrote (safetensors), or `weights: random`."
            raise _no_weights(repr(section.source), problem, help)
        return WeightsLocation(path=section.source, revision=None)
    model_id, revision = section.source, section.revision
    folder = _cached(model_id, revision)
    code = ["*.py"] if section.trust_remote_code is not None else []
    problem = "they are not on this machine" if folder is None else weights_problem(folder)
    if folder is not None and not problem and code and not next(folder.glob("*.py"), None):
        problem = "its code is not on this machine"
    if problem:
        small = ["config.json", "generation_config.json", INDEX, *TOKENIZER_PATTERNS, *code]
        folder = _download(model_id, revision, small, problem, _WEIGHTS_KEY)
        # Pin the commit: the branch may move between the two downloads.
        with suppress(OSError, ValueError):  # weights_problem reports the index
            names = list(weight_file_names(folder))
            folder = _download(model_id, folder.name, names, problem, _WEIGHTS_KEY)
        problem = weights_problem(folder)
    assert folder is not None
    if problem:
        raise _files_unreachable(model_id, revision, problem, _WEIGHTS_KEY)
    return WeightsLocation(path=str(folder), revision=folder.name)


def tokenizer_folder(name: str, revision: str, key: KeyPath) -> Path:
    """Return the tokenizer's folder, downloaded for a hub id; it may hold no tokenizer.

    Raises, at `key`, SW1911, SW2010 to SW2012 and SW2015.
    """
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
    """Return the folder of a trusted model's Python files. Raises SW2001 and SW2010 to SW2012."""
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
    """Return why the safetensors files of `folder` cannot be loaded, or ""."""
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        return f"it has {pickles[0]}, and no {SINGLE}" if pickles else f"it has no {SINGLE}"
    try:
        names = weight_file_names(folder)
    except (OSError, ValueError):
        return f"{INDEX} cannot be read"
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        return f"{missing[0][:200]} is missing" + (
            f", with {len(missing) - 1} more" if len(missing) > 1 else ""
        )
    from safetensors import SafetensorError, safe_open

    for name in names:
        # A file is as long as its header says: a download that broke off is shorter.
        try:
            with safe_open(folder / name, framework="np"):
                pass
        except (OSError, SafetensorError):
            return f"{name} is not a complete safetensors file"
    return ""


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
        # One request without retries: a download's make an offline machine wait half a minute.
        # A repository of a tokenizer has no config.json.
        with contextlib.suppress(RemoteEntryNotFoundError):
            get_hf_file_metadata(hf_hub_url(model_id, "config.json", revision=revision))
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # from the HTTP library, the disk or the hub
        why = hub_error(error, model_id, revision)
        if why.code == "SW2001":
            cause = f"the hub cannot be reached ({type(error).__name__})"
            if isinstance(error, OSError) and error.errno is not None:
                cause = f"storing them failed: {' '.join(str(error).split())[:120]}"
            raise _files_unreachable(model_id, revision, f"{problem}, and {cause}", key) from None
        raise Refusal(why) from None


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
