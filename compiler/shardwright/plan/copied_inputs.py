"""Copy the user's files into the compiled folder: tokenizer, hostfile, set-up script,
measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal, refusal
from shardwright.layout.gpu_cluster import Cluster
from shardwright.models.model_files import TOKENIZER_PATTERNS
from shardwright.plan.folder_paths import (
    HOSTFILE,
    MODEL_DIRECTORY,
    SETUP_SCRIPT,
    SPARE_HOSTS,
    TOKENIZER_DIRECTORY,
)
from shardwright.plan.hostfile import read_hostfile
from shardwright.plan.plan import Plan
from shardwright.recipe.measurements import MEASURED_FILE
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.file_io import read_regular_file, read_regular_text_file


def input_files_to_copy(
    recipe: Recipe, cluster: Cluster, tokenizer: Path | None
) -> dict[str, bytes]:
    """Return the content of each file to copy, by its relative path in the compiled folder.

    tokenizer: the folder that holds the tokenizer, where one is needed

    Raises Refusal for files that cannot be read or used.
    """
    files: dict[str, bytes] = {}
    errors: list[Diagnostic] = []
    measured = recipe.cluster.measured
    if measured is not None:
        files[MEASURED_FILE] = measured.content
    readers: tuple[Callable[[], dict[str, bytes]], ...] = (
        lambda: (
            {}
            if tokenizer is None
            else _tokenizer(tokenizer, str(recipe.tokenized()[0][1].tokenizer))
        ),
        lambda: _hostfile(recipe, cluster),
        lambda: _setup_script(recipe),
    )
    for read in readers:
        try:
            files |= read()
        except Refusal as refusal:
            errors.extend(refusal.diagnostics)
    if errors:
        raise Refusal(*errors)
    return files


def pretrained_companion_files(plan: Plan) -> dict[str, bytes]:
    """Return the generation config beside pretrained weights, for the exported model.

    Includes the tokenizer where the data is token ids. Returns {} without pretrained weights.
    """
    if plan.model.weights_path is None:
        return {}
    patterns = (
        "generation_config.json",
        *(TOKENIZER_PATTERNS if plan.data.tokenizer is None else ()),
    )
    found = {
        path
        for pattern in patterns
        for path in Path(plan.model.weights_path).glob(pattern)
        if path.is_file()
    }
    return {f"{MODEL_DIRECTORY}/{path.name}": path.read_bytes() for path in sorted(found)}


def _tokenizer(folder: Path, name: str) -> dict[str, bytes]:
    found = {
        path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern) if path.is_file()
    }
    if found:
        return {f"{TOKENIZER_DIRECTORY}/{path.name}": path.read_bytes() for path in sorted(found)}
    cause = "holds no tokenizer files" if folder.is_dir() else "is not a folder on this machine"
    help = (
        "Save it with `save_pretrained` and give that folder (as ./path), or write "
        "`tokenizer: byte`."
    )
    raise refusal(
        "SW1911", f"data.tokenizer: {name!r} {cause}", help, ("data", "tokenizer"), ("byte",)
    )


def _hostfile(recipe: Recipe, cluster: Cluster) -> dict[str, bytes]:
    """Return the recipe's hostfile, checked and without comments, its spare hosts in a file of
    their own; {} where there is none."""
    path = recipe.launch.hostfile
    if path is None:
        return {}
    try:
        text = read_regular_text_file(path)
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise refusal(
            "SW5204",
            f"launch.hostfile: {path!r} cannot be read: {cause}",
            "Write a text file with a line `name slots=N` for each node.",
            ("launch", "hostfile"),
        ) from None
    recovery = recipe.launch.recovery
    spares = 0 if recovery is None else recovery.spares
    hosts = read_hostfile(path, text, cluster.nodes, cluster.gpus_per_node, spares)
    lines = [f"{host.name} slots={host.slots}\n" for host in hosts]
    files = {HOSTFILE: "".join(lines[: cluster.nodes]).encode("utf-8")}
    if lines[cluster.nodes :]:
        files[SPARE_HOSTS] = "".join(lines[cluster.nodes :]).encode("utf-8")
    return files


def _setup_script(recipe: Recipe) -> dict[str, bytes]:
    path = recipe.launch.setup_script
    if path is None:
        return {}
    try:
        return {SETUP_SCRIPT: read_regular_file(path)}
    except OSError as error:
        why = f"launch.setup_script: {path!r} cannot be read: {error.strerror}"
        raise refusal(
            "SW5204", why, "Give a bash script that you may read.", ("launch", "setup_script")
        ) from None
