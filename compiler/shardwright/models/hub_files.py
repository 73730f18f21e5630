"""A recipe's model -> its config.json; a hub id's from the local Hugging Face cache, else as
shipped, else the hub's.

Only config.json is downloaded here, and only where HF_HUB_OFFLINE is not set. Nothing is executed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, refusal
from shardwright.models.model_catalog import catalog_config, nearest_ids
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.bounded_read import parse_json, read_regular_file, read_regular_text_file
from shardwright.utils.json_types import JsonObject

CONFIG_NAME = "config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SOURCE_KEY: KeyPath = ("model", "source")
# The hub's own default; the shipped configurations are of this one.
_MAIN = "main"


def read_config(section: ModelSection) -> tuple[JsonObject, bool]:
    """The configuration as written, and whether it stands in the recipe itself. No torch and no
    transformers here: what needs them (is the type known? does it run on code of its own?) waits
    until a graph is traced.

    Errors: SW2002 no readable config.json; those of hub_config for a hub id.
    """
    if section.config is not None:
        return section.config, True
    source = section.source or ""
    if Path(source).is_absolute():
        return read_config_file(Path(source, CONFIG_NAME)), False
    return hub_config(source, section.revision), False


def hub_config(model_id: str, revision: str = _MAIN) -> JsonObject:
    """Errors: SW2001 no network, offline, or the hub's answer is of no use; SW2002 a config.json
    that is no object; SW2010 no such model; SW2011 no such revision; SW2012 gated; SW2013 no
    config.json in the repository; SW2015 not a hub id."""
    here = local_config(model_id, revision)
    if here is not None:
        return here
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError

    try:
        found = hub.try_to_load_from_cache(model_id, CONFIG_NAME, revision=revision)
    except HFValidationError:
        raise Refusal(invalid_model_id(model_id)) from None
    if isinstance(found, str):  # should its layout ever change
        return read_config_file(Path(found))
    if hub.is_offline_mode():
        raise Refusal(_hub_unreachable(model_id, "HF_HUB_OFFLINE is set", revision))
    try:
        # Asked once, without the retries of a download, which make a machine with no network wait
        # half a minute.
        hub.get_hf_file_metadata(hub.hf_hub_url(model_id, CONFIG_NAME, revision=revision))
        path = hub.hf_hub_download(model_id, CONFIG_NAME, revision=revision)
    except (
        Exception
    ) as error:  # of its HTTP library, the disk, the hub: all mean "no configuration"
        raise Refusal(hub_error(error, model_id, revision)) from None
    return read_config_file(Path(path))


def local_config(model_id: str, revision: str) -> JsonObject | None:
    """From the cache, else as shipped; None where only the hub can tell. Error: SW2002."""
    cached = cached_config(model_id, revision)
    if cached is not None:
        return read_config_file(cached)
    return catalog_config(model_id) if revision == _MAIN else None


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
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    path = repository / "snapshots" / commit / CONFIG_NAME
    return path if os.path.isfile(path) else None


def local_processor(section: ModelSection) -> tuple[Path, str] | None:
    """(the folder of the model's processor, its settings as text) where they are on this
    machine."""
    source = section.source or ""
    cached = None if Path(source).is_absolute() else cached_config(source, section.revision)
    folder = (
        Path(source) if Path(source).is_absolute() else None if cached is None else cached.parent
    )
    if folder is None:
        return None
    found = []
    for name in PROCESSOR_FILES:
        with suppress(OSError, ValueError):
            found.append(read_regular_text_file(folder / name))
    return (folder, "\n".join(found)) if found else None


def read_config_file(path: Path) -> JsonObject:
    """Error: SW2002, not a readable JSON object."""
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
    """What went wrong on the hub, in the order in which its exceptions derive from each other."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{model_id}"
    if isinstance(error, errors.GatedRepoError):
        return _error(
            "SW2012",
            f"{model_id!r} is gated, and this machine has no access to it",
            f"Accept its terms at {page}, then run `hf auth login` (or set HF_TOKEN) and try "
            "again; or give a local folder as model.source, or the configuration under "
            "model.config.",
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.DisabledRepoError):
        disabled = isinstance(error, errors.DisabledRepoError)
        return _error(
            "SW2010",
            f"{model_id!r} is disabled on the hub"
            if disabled
            else f"the hub has no model {model_id!r}",
            (
                "Check the name. A private model needs `hf auth login` or HF_TOKEN; a local folder "
                "is written ./folder."
            ),
            nearest_ids(model_id),
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return _error(
            "SW2011",
            f"{model_id!r} has no revision {revision!r}",
            f"Give a branch, tag or commit of {page}, or leave model.revision out.",
            key=("model", "revision"),
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return _error(
            "SW2013",
            f"{model_id!r} has no config.json, so it is not a transformers model",
            (
                "Name the repository with the transformers weights (not the original, GGUF or "
                "adapter files)."
            ),
            nearest_ids(model_id),
        )
    cause = " ".join(str(error).split())[:200]
    if isinstance(error, errors.HfHubHTTPError):
        return _hub_unreachable(model_id, f"the hub answered: {cause}", revision)
    if isinstance(error, OSError) and not isinstance(
        error, errors.LocalEntryNotFoundError | ConnectionError
    ):
        return _hub_unreachable(model_id, f"storing it failed: {cause}", revision)
    return _hub_unreachable(
        model_id, f"the hub cannot be reached ({type(error).__name__})", revision
    )


def _hub_unreachable(model_id: str, cause: str, revision: str) -> Diagnostic:
    near = () if catalog_config(model_id) is not None else nearest_ids(model_id)
    what = f"{model_id!r}" if revision == _MAIN else f"{model_id!r} at revision {revision!r}"
    return _error(
        "SW2001",
        (
            f"{what} is neither on this machine nor among the configurations that come with "
            f"shardwright, and {cause}"
        ),
        f"Where there is a network, run `hf download {model_id}{pinned(revision)} config.json`; or "
        "give a local folder as model.source, or the configuration under model.config. "
        f"{_did_you_mean(near)}".rstrip(),
        near,
    )


def pinned(revision: str) -> str:
    """The option of `hf download`."""
    return "" if revision == _MAIN else f" --revision {revision}"


def invalid_model_id(model_id: str) -> Diagnostic:
    near = nearest_ids(model_id)
    return _error(
        "SW2015",
        f"{model_id!r} is neither a folder on this machine nor a name that the hub could have",
        f"A hub id is written org/name, a local folder ./folder. {_did_you_mean(near)}".rstrip(),
        near,
    )


def _did_you_mean(near: tuple[str, ...]) -> str:
    return f"Configurations that come with shardwright: {', '.join(near)}." if near else ""


def _error(
    code: str, message: str, help: str, valid: tuple[str, ...] = (), key: KeyPath = _SOURCE_KEY
) -> Diagnostic:
    return Diagnostic(code=code, message=message, help=help, key=key, valid=valid)
