"""Checks that the files that a recipe names exist and are of the right kind. An estimate needs none
of them, so load_recipe does not."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.recipe.foreign_checkpoints import foreign_checkpoint_error
from shardwright.recipe.recipe_composition import GLOB_KINDS
from shardwright.recipe.recipe_schema import dotted_key, quote_text
from shardwright.recipe.recipe_types import BUILT_IN_DATASETS, DataSection, Recipe
from shardwright.utils.file_io import parse_strict_json, read_regular_file


def check_files(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return an error for each named file or folder that is missing or of the wrong kind."""
    found: list[Diagnostic] = []
    if recipe.model.source is not None:
        found += _model_folder(recipe.model.source)
    for key, data in recipe.dataset_sections():
        found += _data(data, key, recipe.training.sequence_length)
    if recipe.training.objective.teacher is not None:
        found += _teacher(recipe.training.objective.teacher)
    if recipe.training.objective.reference is not None:
        found += _reference(recipe)
    for name in ("hostfile", "setup_script"):
        path = getattr(recipe.launch, name)
        if path is not None:
            found += _file(path, ("launch", name))
    # A tokenizer that follows from model.source has been reported there.
    key = ("data", "tokenizer")
    return tuple(d for d in found if d.key != key or key in recipe.source.locations)


def _teacher(path: str) -> Iterator[Diagnostic]:
    key: KeyPath = ("training", "objective", "teacher")
    if not os.path.exists(path):
        return  # it may be written after the compile: missing_teacher_warning
    how = "Score this recipe's data: `shardwright score RECIPE --weights TEACHER --top 32 -o FILE`."
    try:
        manifest = parse_strict_json(read_regular_file(Path(path, "manifest.json")))
        top = manifest["top"] if isinstance(manifest, dict) else None
    except (OSError, ValueError, KeyError):
        top = None
    if not isinstance(top, int):
        yield _wrong_file(key, path, "is no score file", how)
    elif top == 0:
        yield _wrong_file(key, path, "has the labels' log-probabilities alone", how)


def missing_teacher_warning(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Warn where the teacher's file is not written yet: the plan needs nothing of it."""
    path = recipe.training.objective.teacher
    if path is None or os.path.exists(path):
        return ()
    message = f"the teacher's score file {quote_text(path, 200)} does not exist yet"
    help = "Before `run`: `shardwright score RECIPE --weights TEACHER --top 32 -o FILE`."
    key: KeyPath = ("training", "objective", "teacher")
    return (found("SW1301", key, message, help, severity="warning"),)


def _model_folder(source: str) -> Iterator[Diagnostic]:
    key: KeyPath = ("model", "source")
    if not os.path.isabs(source):
        return  # a hub id: stage 2 asks for it
    if not os.path.isdir(source):
        cause = "is a file, not a folder" if os.path.exists(source) else "does not exist"
        yield _missing(
            key,
            f"the folder {quote_text(source, 200)} {cause}",
            source,
            "A hub id is written org/name.",
        )
    elif not os.path.isfile(os.path.join(source, "config.json")):
        message = f"{dotted_key(key)}: the folder {quote_text(source, 200)} has no config.json"
        other = foreign_checkpoint_error(Path(source), key)
        yield other or found(
            "SW1302", key, message, "Give the folder that `save_pretrained` wrote."
        )


def _reference(recipe: Recipe) -> Iterator[Diagnostic]:
    """Check that the reference is a model's folder or a score file."""
    objective = recipe.training.objective
    section: KeyPath = ("training", "objective")
    for name in ("reference", "reference_model"):
        path: str | None = getattr(objective, name)
        if path is None or os.path.isfile(os.path.join(path, "config.json")):
            continue
        if name == "reference" and os.path.isfile(os.path.join(path, "manifest.json")):
            continue
        key = (*section, name)
        what = "is no folder" if not os.path.isdir(path) else "has no config.json"
        yield found(
            "SW1243",
            key,
            f"{dotted_key(key)}: {quote_text(path, 200)} {what}",
            "Give the folder that `save_pretrained` wrote"
            + (", or a score file." if name == "reference" else "."),
        )


def _data(data: DataSection, section: KeyPath, sequence_length: int) -> Iterator[Diagnostic]:
    kind, path, tokenizer = data.kind, data.path, data.tokenizer
    if isinstance(tokenizer, str) and os.path.isabs(tokenizer) and not os.path.isdir(tokenizer):
        key: KeyPath = (*section, "tokenizer")
        what = f"the folder {quote_text(tokenizer, 200)} does not exist"
        yield _missing(key, what, tokenizer, "Or write `tokenizer: byte`.")
    if not isinstance(path, str) or path in BUILT_IN_DATASETS:
        return
    key = (*section, "path")
    if kind in GLOB_KINDS:
        found_files = filter(os.path.isfile, glob.iglob(path, recursive=True))
        if os.path.isfile(path) or next(found_files, None) is not None:
            return
        if os.path.isdir(path):
            help = f"Name its files: {path}/* for those in it, {path}/** for all below."
            yield _wrong_file(key, path, "is a folder", help, "SW1301")
        else:
            yield _missing(key, f"no file matches {quote_text(path, 200)}", path, "")
    elif kind == "megatron":
        for ending in (".idx", ".bin"):
            yield from _file(path + ending, key)
    elif kind == "tokens":
        yield from (
            _file(path, key) if not os.path.isfile(path) else _tokens(path, key, sequence_length)
        )


def _file(path: str, key: KeyPath) -> Iterator[Diagnostic]:
    if os.path.isdir(path):
        yield _wrong_file(key, path, "is a folder", "Name a file.")
    elif not os.path.exists(path):
        yield _missing(key, f"the file {quote_text(path, 200)} does not exist", path, "")
    elif not os.path.isfile(path):  # reading a pipe or a device might never end
        yield _wrong_file(key, path, "is a pipe or a device", "Name a regular file.")


def _tokens(path: str, key: KeyPath, sequence_length: int) -> Iterator[Diagnostic]:
    import numpy as np

    expected = "integers of shape (samples, sequence_length)"
    problem = ""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        problem = f"is not a .npy array: {' '.join(str(error).split())}"
    else:
        if not isinstance(array, np.ndarray):
            problem = f"holds an .npz archive, not {expected}"
        elif array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            problem = f"holds {array.dtype} of shape {array.shape}, not {expected}"
        elif array.shape[1] != sequence_length:
            problem = (
                f"has sequences of {array.shape[1]} tokens, but training.sequence_length is "
                f"{sequence_length}"
            )
    if problem:
        yield _wrong_file(key, path, problem, f"Save {expected} with numpy.save.")


def _wrong_file(key: KeyPath, path: str, what: str, help: str, code: str = "SW1302") -> Diagnostic:
    return found(code, key, f"{dotted_key(key)}: {quote_text(path, 200)} {what}", help)


def _missing(key: KeyPath, what: str, path: str, help: str) -> Diagnostic:
    """Report a missing path, with the nearest names in the deepest folder that exists."""
    folder, missing = os.path.split(path)
    while folder and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder, missing = os.path.split(folder)
    try:
        close = difflib.get_close_matches(
            missing, sorted(os.listdir(folder))[:2000], n=3, cutoff=0.6
        )
    except OSError:
        close = []
    hints = [
        f"In {folder} there is {', '.join(close)}."
        if close
        else f"{folder} exists, {missing} in it does not."
    ]
    return found(
        "SW1301",
        key,
        f"{dotted_key(key)}: {what}",
        " ".join((*hints, "Relative paths start at the recipe's folder.", help)).strip(),
        tuple(close),
    )
