"""The traced graphs of the shipped configurations: graphs.zip, one member a distinct configuration,
written by `make graphs`. A member is read alone, and only where transformers and torch are those
that it was traced with."""

from __future__ import annotations

import hashlib
import json
import zipfile
from importlib import resources

from shardwright.models.graph_cache import UNREADABLE, graph_from_json
from shardwright.models.model_graph import ModelGraph
from shardwright.utils.optional_packages import installed_version

ARCHIVE = "graphs.zip"
ATTENTION = "auto"
"""The attention that the shipped graphs were traced with; a pinned one is traced."""
VERSIONS = "versions.json"


def catalog_graph(config_text: str, attention: str) -> ModelGraph | None:
    """The graph of exactly this configuration (JSON with sorted keys); None where it is not
    shipped, or not for the installed versions."""
    if attention != ATTENTION:
        return None
    try:
        with (
            resources.files(__package__).joinpath(ARCHIVE).open("rb") as file,
            zipfile.ZipFile(file) as archive,
        ):
            recorded = json.loads(archive.read(VERSIONS))
            # What is not installed cannot disagree, and could not trace either.
            if any(
                version not in (None, recorded.get(name)) for name, version in versions().items()
            ):
                return None
            return graph_from_json(archive.read(member(config_text)))
    except (KeyError, zipfile.BadZipFile, *UNREADABLE):  # KeyError: no such member
        return None


def versions() -> dict[str, str | None]:
    """What a trace depends on outside this package. transformers decides the modules and the
    defaults, in any release; torch only how they compute, which changes with its minor releases.
    None where one is not installed."""
    torch = installed_version("torch")
    return {
        "torch": torch and ".".join(torch.split(".")[:2]),
        "transformers": installed_version("transformers"),
    }


def member(config_text: str) -> str:
    return hashlib.sha256(config_text.encode()).hexdigest()[:32]
