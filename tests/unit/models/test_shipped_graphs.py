"""The shipped graphs are those that a trace gives now: here of some types, in `make prove` of every
model. `make generated` writes them anew."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest

from shardwright.models import graph_builder
from shardwright.models.model_sources import catalog_ids
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.installation import recipes_folder
from tests.unit.models.factory import model_section
from tools.generate.traced_graphs import (
    PATH,
    archive_of,
    config_text,
    inline_task_texts,
    recipe_config_texts,
    recipe_task_texts,
    trace,
)

SAMPLE = (
    "openai-community/gpt2",
    "google/gemma-2-9b-it",
    "deepseek-ai/DeepSeek-V2-Lite",
    "llava-hf/llava-1.5-7b-hf",
)


def assert_shipped_as_traced(text: str, inline: bool = False) -> None:
    shipped, traced = graph_builder.catalog_graph(text, "auto", inline), trace(text, inline)
    assert shipped is not None, "make generated"
    assert dataclasses.asdict(shipped) == dataclasses.asdict(traced), "make generated"
    assert graph_builder.graph_to_json(shipped) == graph_builder.graph_to_json(traced), (
        "make generated"
    )


@pytest.mark.parametrize("model_id", SAMPLE)
def test_a_sample_is_as_traced(model_id: str) -> None:
    assert_shipped_as_traced(config_text(model_id))


@pytest.mark.prove
def test_every_model_is_as_traced() -> None:
    for model_id in catalog_ids():
        assert_shipped_as_traced(config_text(model_id))
    for text in recipe_task_texts():
        assert_shipped_as_traced(text)
    for text in (*recipe_config_texts(), *inline_task_texts()):
        assert_shipped_as_traced(text, inline=True)


def test_the_configuration_of_a_shipped_recipe_is_as_traced() -> None:
    smallest = min(recipe_config_texts(), key=lambda text: json.loads(text).get("hidden_size", 9e9))
    assert_shipped_as_traced(smallest, inline=True)


def test_no_shipped_recipe_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(graph_builder, "_trace", None)
    monkeypatch.setenv(graph_builder.VARIABLE, str(tmp_path))
    graph_builder._KNOWN.clear()
    recipes = [load_recipe(path) for path in sorted(recipes_folder().glob("*.yaml"))]
    for recipe in recipes:
        graph = graph_builder.build_model_graph(recipe.model)
        assert recipe.model.task in ("auto", graph.task)
    texts = recipe_config_texts()
    assert len(recipes) > 50 and len(texts) > 9 and len(recipe_task_texts()) > 0
    # One that stands in a recipe is checked more strictly than a file: none is taken for another.
    assert not any(graph_builder.catalog_graph(text, "auto") for text in texts)


def test_the_archive_holds_each_configuration_once_and_no_more() -> None:
    texts = {config_text(model_id) for model_id in catalog_ids()}
    with zipfile.ZipFile(PATH) as archive:
        assert archive.testzip() is None
        in_recipes = sum(
            map(len, (recipe_task_texts(), recipe_config_texts(), inline_task_texts()))
        )
        assert len(archive.namelist()) == len(texts) + in_recipes + 1
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert PATH.stat().st_size < 1_000_000
    assert all(graph_builder.catalog_graph(text, "auto") is not None for text in texts)


def test_the_same_graphs_are_the_same_bytes() -> None:
    texts = [config_text(model_id) for model_id in ("openai-community/gpt2", "Qwen/Qwen3-32B")]
    shipped = {(text, False): graph_builder.catalog_graph(text, "auto") for text in texts}
    found = {key: graph for key, graph in shipped.items() if graph}
    assert len(found) == 2
    assert archive_of(found) == archive_of(dict(reversed(found.items())))


@pytest.mark.parametrize(
    ("torch", "transformers", "used"),
    [
        ("same", "same", True),
        ("same.9", "same", True),  # another patch release
        ("same.9+cu130", "same", True),
        ("1.0.0", "same", False),
        ("same", "1.0.0", False),
        (None, None, True),  # a laptop that plans and never trains
    ],
)
def test_versions(
    torch: str | None, transformers: str | None, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(PATH) as archive:
        recorded = json.loads(archive.read("versions.json"))
    installed = {"torch": torch, "transformers": transformers}
    installed = {
        name: text and text.replace("same", recorded[name]) for name, text in installed.items()
    }
    monkeypatch.setattr(graph_builder, "installed_version", installed.get)
    assert (graph_builder.catalog_graph(config_text("Qwen/Qwen3-32B"), "auto") is not None) == used


def test_what_is_not_exactly_a_shipped_configuration_is_traced() -> None:
    text = config_text("Qwen/Qwen3-32B")
    assert graph_builder.catalog_graph(text, "eager") is None
    assert (
        graph_builder.catalog_graph(
            text.replace('"num_hidden_layers": 64', '"num_hidden_layers": 63'), "auto"
        )
        is None
    )


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_without_a_readable_archive_the_models_are_traced(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "graphs.zip").write_bytes(content)
    monkeypatch.setattr(graph_builder, "ARCHIVE", str(tmp_path / "graphs.zip"))
    monkeypatch.setenv(graph_builder.VARIABLE, str(tmp_path / "cache"))
    graph_builder._KNOWN.clear()
    assert (
        graph_builder.build_model_graph(
            model_section(None, source="openai-community/gpt2")
        ).decoder_layers
        == 12
    )
