"""A processor whose package is missing names the package, at `check` and at compile."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics import Refusal
from shardwright.models import image_processor
from shardwright.models.graph_trace import trace_model_graph
from shardwright.models.image_processor import (
    MissingPackage,
    ProcessorUnavailable,
    load_processor,
    processor_files,
    processor_from_config,
)
from shardwright.models.model_graph import VisionEncoder
from tests.parity.vision_language import MODELS


class Placeholder:
    """As transformers stands one in for a class whose package is not installed."""

    _backends = ("a_package_that_is_nowhere",)


def test_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace_model_graph({"model_type": "llava", **MODELS["llava"]}, "auto", inline=True)
    config = image_processor._config(graph)
    for name, content in processor_files(processor_from_config(config), config).items():
        (tmp_path / name).write_bytes(content)
    image_processor.check_processor(graph, tmp_path)

    def placeholder(kind: object, backends: object) -> None:
        if backends:
            raise ImportError(
                "\nLlavaProcessor requires the Torchvision library but it was not found."
            )

    monkeypatch.setattr(image_processor, "requires_backends", placeholder)
    # Another test may have imported the package again: the class is read from the module's own.
    monkeypatch.setattr(vars(image_processor)["transformers"], "LlavaProcessor", Placeholder)
    with pytest.raises(MissingPackage, match="torchvision"):
        load_processor(tmp_path)
    with pytest.raises(Refusal) as refused:
        image_processor.check_processor(graph, tmp_path)
    (told,) = refused.value.diagnostics
    assert (
        told.code == "SW2080"
        and "torchvision" in told.message
        and "pip install torchvision" in str(told.help)
    )


PIXTRAL: dict[str, Any] = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}}


@pytest.mark.parametrize("place", ["inline", "folder", "of another class", "not here"])
def test_check_names_the_package_without_transformers(
    place: str,
    tmp_path: Path,
    write_recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchvision" else found(name)
    )
    model: dict[str, Any] = {"source": "./model", "weights": "random"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(PIXTRAL))
    if place == "inline":
        model = {"config": PIXTRAL, "weights": "random"}
    elif place != "not here":
        kind = "PixtralProcessor" if place == "folder" else "Idefics3Processor"
        (tmp_path / "model" / "processor_config.json").write_text(
            json.dumps({"processor_class": kind})
        )
    data = {"kind": "synthetic"}
    exits = main(["check", str(write_recipe({"model": model, "data": data, "parallelism": {}}))])
    told, is_refused = capsys.readouterr().err, place in ("inline", "folder")
    assert (exits == 1) == is_refused, told
    assert ("error[SW2080]" in told) == is_refused and ("warning[SW2080]" in told) == (
        place == "not here"
    )
    assert place == "of another class" or "PixtralProcessor needs torchvision" in told


def test_check_refuses_a_model_type_that_is_no_word(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": ["gpt2"], "n_embd": 64})
    )
    model = {"source": "./model", "weights": "random"}
    assert main(["check", str(write_recipe({"model": model, "parallelism": {}}))]) == 1
    assert "error[SW2" in capsys.readouterr().err


def test_only_what_a_processor_raises_leaves_images_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of our own is no type whose processor cannot be asked."""
    config = image_processor._config(
        trace_model_graph({"model_type": "llava", **MODELS["llava"]}, "auto", inline=True)
    )
    vision = VisionEncoder(
        patch=4, patches=16, patches_per_token=4.0, layers=(), tower=(), projector=()
    )

    def raises(error: Exception) -> Callable[..., Any]:
        def called(*args: object, **kwargs: object) -> Any:
            raise error

        return called

    monkeypatch.setattr(image_processor, "max_tiles", raises(ProcessorUnavailable("it has none")))
    assert image_processor.with_usual_tiles(vision, config, inline=False) is vision
    monkeypatch.setattr(image_processor, "max_tiles", raises(TypeError("a mistake of ours")))
    with pytest.raises(TypeError):
        image_processor.with_usual_tiles(vision, config, inline=False)
