"""A graph is traced once: what is read back is what was traced, and nothing that happens to the
files can hurt."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.models import graph_builder, graph_trace
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import LLAMA_405B, SMALL_GPT2, SMALL_LLAMA, model_section


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and nothing remembered in this process."""
    graph_builder._KNOWN.clear()
    monkeypatch.setenv(graph_builder.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model type of each trace that really happens."""
    types: list[str] = []
    real = graph_trace.trace_model_graph

    def trace(config: dict[str, JsonValue], *rest: Any) -> ModelGraph:
        types.append(str(config["model_type"]))
        return real(config, *rest)

    monkeypatch.setattr(graph_trace, "trace_model_graph", trace)
    return types


def built(config: dict[str, JsonValue], **changes: str) -> ModelGraph:
    """As a new process would build it."""
    graph_builder._KNOWN.clear()
    return graph_builder.build_model_graph(model_section(config, **changes))


def only_file(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


@pytest.mark.parametrize(
    "config", [SMALL_LLAMA, SMALL_GPT2, LLAMA_405B], ids=["llama", "gpt2", "405b"]
)
def test_the_second_one_is_read_and_is_the_same(
    config: dict[str, JsonValue], folder: Path, traced: list[str]
) -> None:
    first, second = built(config), built(config)
    assert len(traced) == 1
    assert second == first
    # 1, 1.0 and True are equal in Python, and so are tuples of them: the text tells them apart.
    assert graph_builder.graph_to_json(second) == graph_builder.graph_to_json(first)
    assert only_file(folder).stat().st_size < 30_000


def test_what_belongs_to_another_graph_is_not_read(
    folder: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert built(SMALL_LLAMA).attention == "sdpa"
    assert built(SMALL_LLAMA, attention="eager").attention == "eager"
    assert built({**SMALL_LLAMA, "num_hidden_layers": 3}).decoder_layers == 3
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    graph_builder._KNOWN.clear()
    graph_builder.build_model_graph(
        model_section(None, source=str(tmp_path))
    )  # the same text, outside a recipe
    assert len(traced) == 4
    for package in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(
                graph_builder,
                "installed_version",
                lambda name, other=package: "1" if name == other else "0",
            )
            built(SMALL_LLAMA)
    assert len(traced) == 6
    monkeypatch.setattr(graph_builder, "GRAPH_VERSION", -1)
    built(SMALL_LLAMA)
    assert len(traced) == 7
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 7


@pytest.mark.parametrize(
    "edited",
    ["models/graph_trace.py", "models/layer_split.py", "models/new.py", "models/model_graph.py"],
)
def test_an_edit_of_the_tracing_code_makes_a_new_key(edited: str, tmp_path: Path) -> None:
    package = Path(graph_builder.__file__).parent.parent
    copied = tmp_path / "shardwright"
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    assert graph_builder.tracing_source_hash(copied) == graph_builder.tracing_source_hash(package)
    with (copied / edited).open("a") as file:
        file.write("# edited\n")
    graph_builder.tracing_source_hash.cache_clear()
    assert graph_builder.tracing_source_hash(copied) != graph_builder.tracing_source_hash(package)


def _other(content: bytes) -> bytes:
    document = json.loads(gzip.decompress(content))
    del document["layers"]
    return gzip.compress(json.dumps(document).encode())


def _contradicting(content: bytes) -> bytes:
    document = json.loads(gzip.decompress(content))
    document["layers"].reverse()
    document["layers"].pop()
    return gzip.compress(json.dumps(document).encode())


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:40] + bytes([content[40] ^ 255]) + content[41:],
        lambda content: b"not a compressed file",
        lambda content: gzip.compress(b"\xff\xfe{"),
        lambda content: gzip.compress(b"null"),
        lambda content: gzip.compress(b"[" * 100_000),
        _other,
        _contradicting,
    ],
    ids=["empty", "cut", "flipped", "foreign", "no text", "null", "deep", "a key gone", "no head"],
)
def test_a_damaged_file_is_written_anew(
    damage: Callable[[bytes], bytes], folder: Path, traced: list[str]
) -> None:
    first = built(SMALL_LLAMA)
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert built(SMALL_LLAMA) == first
    assert len(traced) == 2
    assert only_file(folder).read_bytes() == whole


def test_no_file_can_be_written_or_read(
    folder: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built(SMALL_LLAMA)
    path = only_file(folder)
    path.unlink()
    path.mkdir()  # as unreadable as can be, for root too
    assert built(SMALL_LLAMA) == first
    assert list(folder.rglob("*")) == [path.parent, path]  # nothing unfinished is left
    (folder / "file").touch()
    monkeypatch.setenv(graph_builder.VARIABLE, str(folder / "file"))
    assert built(SMALL_LLAMA) == first
    assert len(traced) == 3


def test_readers_see_whole_files_while_others_write(folder: Path) -> None:
    first = built(LLAMA_405B)
    key = only_file(folder).name.removesuffix(".json.gz")

    def write_and_read(_: int) -> ModelGraph | None:
        graph_builder.store_graph(key, first)
        return graph_builder.cached_graph(key)

    with ThreadPoolExecutor(8) as pool:
        assert all(found == first for found in pool.map(write_and_read, range(40)))
    only_file(folder)


def test_off_traces_and_writes_nothing(
    traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(graph_builder.VARIABLE, "off")
    graph_builder._KNOWN.clear()
    graph_builder.build_model_graph(model_section(None, source="openai-community/gpt2"))
    built(SMALL_LLAMA)
    built(SMALL_LLAMA)
    assert traced == ["gpt2", "llama", "llama"]
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_not_kept(folder: Path, traced: list[str]) -> None:
    """It may be a package that is missing, and installed a minute later."""
    for _ in range(2):
        with pytest.raises(Refusal):
            built({**SMALL_LLAMA, "num_key_value_heads": 3})
    assert len(traced) == 2 and not folder.exists()


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for own, base, expected in [
        ("", "", "/home/me/.cache/shardwright"),
        ("", "relative", "/home/me/.cache/shardwright"),
        ("", "/base", "/base/shardwright"),
        ("/own", "/base", "/own"),
    ]:
        monkeypatch.setenv(graph_builder.VARIABLE, own)
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert graph_builder.cache_folder() == Path(expected)
    monkeypatch.setenv(graph_builder.VARIABLE, "off")
    assert graph_builder.cache_folder() is None


@pytest.mark.parametrize(
    "model",
    [{"source": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}, {"config": SMALL_GPT2}],
    ids=["hub id", "inline"],
)
def test_compile_gives_the_same_bytes_from_the_trace_the_cache_and_the_package(
    model: dict[str, Any],
    folder: Path,
    traced: list[str],
    write_recipe: Callable[[dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_recipe({"model": {**model, "weights": "random"}, "cluster.gpu": "h100-sxm-80gb"})

    def files() -> dict[str, bytes]:
        graph_builder._KNOWN.clear()
        return dict(compile_recipe(load_recipe(path)).files)

    with monkeypatch.context() as patch:
        patch.setenv(graph_builder.VARIABLE, "off")
        from_trace = files()
    with monkeypatch.context() as patch:
        patch.setattr(graph_builder, "catalog_graph", lambda *key: None)
        assert files() == from_trace
        assert len(traced) == 2
        assert files() == from_trace
    assert files() == from_trace
    assert len(traced) == 2
