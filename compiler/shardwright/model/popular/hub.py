"""A hub id -> its config.json: from the local Hugging Face cache, else as shipped, else from the hub.

Only config.json is downloaded here, and only where HF_HUB_OFFLINE is not set. Nothing is executed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal
from shardwright.ir.json_value import JsonObject
from shardwright.model.popular.shipped import nearest_ids, shipped_config
from shardwright.safe_read import parse_json, read_regular

CONFIG_NAME = "config.json"
_KEY: KeyPath = ("model", "source")
# The hub's own default; the shipped configurations are of this one.
_MAIN = "main"


def hub_config(model_id: str, revision: str = _MAIN) -> JsonObject:
    """Errors: SW2001 no network, offline, or the hub's answer is of no use; SW2002 a config.json that is no object;
    SW2010 no such model; SW2011 no such revision; SW2012 gated; SW2013 no config.json in the repository; SW2015 not
    a hub id."""
    cached = cached_config(model_id, revision)
    if cached is not None:
        return read_config_file(cached)
    shipped = shipped_config(model_id) if revision == _MAIN else None
    if shipped is not None:
        return shipped
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        is_offline_mode,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_id, CONFIG_NAME, revision=revision)
    except HFValidationError:
        raise Refusal(no_id(model_id)) from None
    if isinstance(found, str):  # should its layout ever change
        return read_config_file(Path(found))
    if is_offline_mode():
        raise Refusal(_unreachable(model_id, "HF_HUB_OFFLINE is set", revision))
    try:
        # Asked once, without the retries of a download, which make a machine with no network wait half a minute.
        get_hf_file_metadata(hf_hub_url(model_id, CONFIG_NAME, revision=revision))
        path = hf_hub_download(model_id, CONFIG_NAME, revision=revision)
    except Exception as error:  # of its HTTP library, the disk, the hub: all mean "no configuration"
        raise Refusal(hub_problem(error, model_id, revision)) from None
    return read_config_file(Path(path))


def cached_config(model_id: str, revision: str) -> Path | None:
    """What huggingface_hub.try_to_load_from_cache finds, by the documented layout of its cache.

    Its client takes 0.2 s to import, and is kept for what is not here yet.
    """
    from huggingface_hub import constants

    if "--" in model_id:  # no hub id has it: it would name the folder of another one
        return None
    repository = Path(constants.HF_HUB_CACHE, "--".join(("models", *model_id.split("/"))))
    commit = revision
    with suppress(OSError, ValueError):  # no ref of that name: a commit itself
        commit = (repository / "refs" / revision).read_text(encoding="utf-8")
    try:
        if commit not in os.listdir(repository / "snapshots"):
            return None
    except OSError:
        return None
    path = repository / "snapshots" / commit / CONFIG_NAME
    return path if os.path.isfile(path) else None


def read_config_file(path: Path) -> JsonObject:
    """Error: SW2002, not a readable JSON object."""
    try:
        config = parse_json(read_regular(path))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}, not an object")
    except (OSError, ValueError) as error:
        reason = (error.strerror or "") if isinstance(error, OSError) else " ".join(str(error).split())
        raise Refusal(
            Diagnostic(
                code="SW2002",
                message=f"cannot read {str(path)!r}: {reason}",
                help="model.source must be a folder written by save_pretrained, with a config.json in it.",
                key=_KEY,
            )
        ) from None
    return cast(JsonObject, config)


def hub_problem(error: Exception, model_id: str, revision: str) -> Diagnostic:
    """What went wrong on the hub, in the order in which its exceptions derive from each other."""
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"https://huggingface.co/{model_id}"
    if isinstance(error, GatedRepoError):
        return _error(
            "SW2012",
            f"{model_id!r} is gated, and this machine has no access to it",
            f"Accept its terms at {page}, then run `hf auth login` (or set HF_TOKEN) and try again; "
            "or give a local folder as model.source, or the configuration under model.config.",
        )
    if isinstance(error, RepositoryNotFoundError | DisabledRepoError):
        disabled = isinstance(error, DisabledRepoError)
        return _error(
            "SW2010",
            f"{model_id!r} is disabled on the hub" if disabled else f"the hub has no model {model_id!r}",
            "Check the name. A private model needs `hf auth login` or HF_TOKEN; a local folder is written ./folder.",
            nearest_ids(model_id),
        )
    if isinstance(error, RevisionNotFoundError):
        return _error(
            "SW2011",
            f"{model_id!r} has no revision {revision!r}",
            f"Give a branch, tag or commit of {page}, or leave model.revision out.",
            key=("model", "revision"),
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return _error(
            "SW2013",
            f"{model_id!r} has no config.json, so it is not a transformers model",
            "Name the repository with the transformers weights (not the original, GGUF or adapter files).",
            nearest_ids(model_id),
        )
    cause = " ".join(str(error).split())[:200]
    if isinstance(error, HfHubHTTPError):
        return _unreachable(model_id, f"the hub answered: {cause}", revision)
    if isinstance(error, OSError) and not isinstance(error, LocalEntryNotFoundError | ConnectionError):
        return _unreachable(model_id, f"storing it failed: {cause}", revision)
    return _unreachable(model_id, f"the hub cannot be reached ({type(error).__name__})", revision)


def _unreachable(model_id: str, cause: str, revision: str) -> Diagnostic:
    pinned = "" if revision == _MAIN else f" --revision {revision}"
    near = () if shipped_config(model_id) is not None else nearest_ids(model_id)
    what = f"{model_id!r}" if revision == _MAIN else f"{model_id!r} at revision {revision!r}"
    return _error(
        "SW2001",
        f"{what} is neither on this machine nor among the configurations that come with shardwright, and {cause}",
        f"Where there is a network, run `hf download {model_id}{pinned} config.json`; or give a local folder as "
        f"model.source, or the configuration under model.config. {_did_you_mean(near)}".rstrip(),
        near,
    )


def no_id(model_id: str) -> Diagnostic:
    near = nearest_ids(model_id)
    return _error(
        "SW2015",
        f"{model_id!r} is neither a folder on this machine nor a name that the hub could have",
        f"A hub id is written org/name, a local folder ./folder. {_did_you_mean(near)}".rstrip(),
        near,
    )


def _did_you_mean(near: tuple[str, ...]) -> str:
    return f"Configurations that come with shardwright: {', '.join(near)}." if near else ""


def _error(code: str, message: str, help: str, valid: tuple[str, ...] = (), key: KeyPath = _KEY) -> Diagnostic:
    return Diagnostic(code=code, message=message, help=help, key=key, valid=valid)
