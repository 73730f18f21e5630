"""Weights and tokenizers of a hub id: from the cache, whole or not at all. No hub is asked."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.models.model_files import INDEX, WeightsLocation
from shardwright.models.model_sources import locate_weights, weights_problem
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE
from tests.unit.models.factory import model_section, write_weights

HTTP: Any = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = SMALL_RECIPE["model"]["config"]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def snapshot(cache: Path, model_id: str, commit: str = COMMIT, revision: str = "main") -> Path:
    """An empty snapshot as huggingface_hub lays it out."""
    repository = cache / f"models--{model_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def section(source: str = "org/name", revision: str = "main") -> Any:
    return dataclasses.replace(
        model_section(None, source=source, revision=revision), weights="pretrained"
    )


def refusal(source: str = "org/name", revision: str = "main") -> Diagnostic:
    with pytest.raises(Refusal) as caught:
        locate_weights(section(source, revision))
    (diagnostic,) = caught.value.diagnostics
    assert "\n" not in diagnostic.message and diagnostic.help
    return diagnostic


def tensors(path: Path) -> None:
    save_file({"a": torch.zeros(3)}, path)


def test_a_whole_snapshot_is_used_at_its_commit(cache: Path) -> None:
    folder = snapshot(cache, "org/name")
    tensors(folder / "model.safetensors")
    assert locate_weights(section()) == WeightsLocation(path=str(folder), revision=COMMIT)
    assert locate_weights(section(revision=COMMIT)) == WeightsLocation(
        path=str(folder), revision=COMMIT
    )
    assert locate_weights(dataclasses.replace(section(), weights="random")) is None
    other = snapshot(cache, "org/name", commit="f" * 40, revision="v2")
    tensors(other / "model.safetensors")
    assert locate_weights(section(revision="v2")) == WeightsLocation(
        path=str(other), revision="f" * 40
    )
    assert refusal(revision="v3").code == "SW1913"


def test_shards_are_counted(cache: Path) -> None:
    folder = snapshot(cache, "org/name")
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {f"p{i}": name for i, name in enumerate(names)}})
    )
    tensors(folder / names[0])
    diagnostic = refusal()
    assert (
        diagnostic.code == "SW1913" and f"{names[1]} is missing, with 1 more" in diagnostic.message
    )
    assert "HF_HUB_OFFLINE" in diagnostic.message and "hf download org/name`" in diagnostic.help
    tensors(folder / names[1])
    tensors(folder / names[2])
    assert locate_weights(section()) is not None
    (folder / INDEX).write_text("{")
    assert "cannot be read" in refusal().message


def test_a_file_that_was_cut_off(cache: Path) -> None:
    folder = snapshot(cache, "org/name")
    whole = folder / "model.safetensors"
    tensors(whole)
    content = whole.read_bytes()
    for part in (
        b"",
        content[:4],
        content[:20],
        content[:-1],
        content + b"x",
        b"\0" * 8 + content[8:],
    ):
        whole.write_bytes(part)
        assert "is not a complete safetensors file" in weights_problem(folder), len(part)
    whole.write_bytes(content)
    assert weights_problem(folder) == ""
    whole.unlink()
    whole.symlink_to(folder / "blob-that-is-gone")
    assert "has no model.safetensors" in weights_problem(folder)


def test_pickles_are_not_weights(cache: Path) -> None:
    folder = snapshot(cache, "org/name")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    diagnostic = refusal()
    assert "pytorch_model.bin" in diagnostic.message and "save_pretrained" in diagnostic.help


@pytest.mark.parametrize("name", ["a/b/c", "x y"])
def test_what_cannot_be_a_hub_id(name: str, cache: Path) -> None:
    assert refusal(name).code == "SW2015"


def test_a_local_folder(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    folder.mkdir()
    assert refusal(str(folder)).code == "SW1913"
    tensors(folder / "model.safetensors")
    assert locate_weights(section(str(folder))) == WeightsLocation(path=str(folder), revision=None)


def online(
    monkeypatch: pytest.MonkeyPatch, cache: Path, published: list[str]
) -> list[tuple[str, tuple[str, ...]]]:
    """A hub that has these files: what was asked of it, as (revision, patterns)."""
    asked: list[tuple[str, tuple[str, ...]]] = []
    real = huggingface_hub.snapshot_download

    def download(
        model_id: str, *, revision: str, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        if local_files_only:
            return real(
                model_id, revision=revision, local_files_only=True, allow_patterns=allow_patterns
            )
        asked.append((revision, tuple(allow_patterns)))
        folder = snapshot(cache, model_id)
        for name in published:
            if name == INDEX and INDEX in allow_patterns:
                shards = [n for n in published if n.endswith(".safetensors")]
                (folder / name).write_text(json.dumps({"weight_map": {n: n for n in shards}}))
            elif name in allow_patterns:
                tensors(folder / name)
        return str(folder)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_what_is_missing_is_downloaded_and_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    asked = online(monkeypatch, cache, [INDEX, *shards, "modeling_x.py", "consolidated.pth"])
    found = locate_weights(section())
    assert found is not None and found.revision == COMMIT
    assert [revision for revision, _ in asked] == ["main", COMMIT]
    assert not any(
        "*.safetensors" in p or p.endswith((".py", ".bin", ".pth")) for _, ps in asked for p in ps
    )
    assert asked[1][1] == tuple(shards)
    assert locate_weights(section()) == found and len(asked) == 2  # the second time nobody is asked


def test_a_repository_without_safetensors(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, cache, ["pytorch_model.bin"])
    diagnostic = refusal()
    assert diagnostic.code == "SW1913" and "no model.safetensors" in diagnostic.message


def answer(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = HTTP.Request("HEAD", "https://huggingface.co/org/name/resolve/main/config.json")
    return kind(
        f"{status} the hub's own text\nin two lines",
        response=HTTP.Response(status, request=request),
    )


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (answer(errors.GatedRepoError, 403), "SW2012", "hf auth login"),
        (answer(errors.RepositoryNotFoundError, 401), "SW2010", "HF_TOKEN"),
        (answer(errors.RevisionNotFoundError, 404), "SW2011", "model.revision"),
        (answer(errors.HfHubHTTPError, 503), "SW1913", "hf download"),
        (HTTP.ConnectError("no route to host"), "SW1913", "hf download"),
        (OSError(28, "No space left on device"), "SW1913", "hf download"),
    ],
)
def test_the_hubs_refusals(
    error: Exception, code: str, word: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of a gated model comes with shardwright: its weights do not."""

    def refuse(url: str) -> None:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    diagnostic = refusal("meta-llama/Llama-3.1-8B")
    assert diagnostic.code == code and word in diagnostic.help


def test_the_plan_locks_the_commit_and_the_tokenizer_comes_along(
    cache: Path, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    folder = snapshot(cache, "org/name")
    write_weights(folder, CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "corpus.txt").write_text("text")
    data = {"kind": "text", "path": "corpus.txt"}  # the tokenizer is the model's own
    recipe = write_recipe({"model": {"source": "org/name"}, "data": data})
    compiled = compile_recipe(load_recipe(recipe))
    assert (compiled.plan.model.weights_path, compiled.plan.model.revision) == (str(folder), COMMIT)
    assert compiled.files["tokenizer/tokenizer.json"] == b"{}"
    assert compiled.files == compile_recipe(load_recipe(recipe)).files
    # A config.json of another commit does not mix with these weights: main moves on, its weights
    # are not here.
    snapshot(cache, "org/name", commit="e" * 40)
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(recipe))
    assert [d.code for d in caught.value.diagnostics] == ["SW1913"]


def test_a_tokenizer_that_is_nowhere(
    cache: Path, write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    for source in ("org/name", "x y"):
        data = {"kind": "text", "path": "corpus.txt", "tokenizer": source}
        with pytest.raises(Refusal) as caught:
            compile_recipe(load_recipe(write_recipe({"data": data})))
        (diagnostic,) = caught.value.diagnostics
        assert diagnostic.code == ("SW1911" if source == "org/name" else "SW2015")
        assert diagnostic.key == ("data", "tokenizer")
