"""How a hub id finds its configuration. No hub is asked."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from shardwright.compile.recipe_compiler import compile_recipe, estimate_recipe
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_sources import (
    cached_config,
    hub_config,
    match_catalog_id,
    nearest_ids,
)
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.models.factory import model_section

# The HTTP library of the installed huggingface_hub: httpx, or httpx2 after it.
HTTP: Any = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__)


def cached(folder: Path, model_id: str, config: object, revision: str = "main") -> None:
    """What `hf download model_id config.json` leaves in the cache."""
    repository = folder / "hub" / f"models--{model_id.replace('/', '--')}"
    commit = f"{abs(hash(revision)):040x}"[:40]
    (repository / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps(config))


def refusal(model_id: str, revision: str = "main") -> Diagnostic:
    with pytest.raises(Refusal) as caught:
        build_model_graph(dataclasses.replace(model_section(), source=model_id, revision=revision))
    (diagnostic,) = caught.value.diagnostics
    assert "\n" not in diagnostic.message and diagnostic.help
    return diagnostic


def test_rope_parameters_arrive() -> None:
    graph = build_model_graph(model_section(None, source="meta-llama/Llama-3.2-1B"))
    rope = graph.config["rope_parameters"]
    assert isinstance(rope, dict)
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 500000.0)
    assert graph.max_positions == 131072 and graph.tied


def test_names() -> None:
    assert match_catalog_id("qwen3-32b") == "Qwen/Qwen3-32B"
    assert match_catalog_id("gpt2") == "gpt2"
    assert match_catalog_id("Qwen/Qwen3-32B") == "Qwen/Qwen3-32B"
    assert match_catalog_id("qwen/qwen3-320b") is None
    assert nearest_ids("meta-llama/Llama-3.1-80B")[0] == "meta-llama/Llama-3.1-8B"
    assert "Qwen/Qwen2.5-7B" in nearest_ids("Qwen2.5-7")
    assert nearest_ids("zzz/no-such-thing-at-all") == ()


def test_the_cache_comes_first_at_its_revision(asked: list[str], tmp_path: Path) -> None:
    cached(tmp_path, "openai-community/gpt2", {"model_type": "gpt2", "n_layer": 3})
    cached(tmp_path, "openai-community/gpt2", {"model_type": "gpt2", "n_layer": 5}, revision="v2")
    assert hub_config("openai-community/gpt2")["n_layer"] == 3
    assert hub_config("openai-community/gpt2", "v2")["n_layer"] == 5
    assert hub_config("openai-community/gpt2-xl")["n_layer"] == 48
    assert asked == []
    section = dataclasses.replace(
        model_section(None, source="openai-community/gpt2"), revision="v2"
    )
    assert build_model_graph(section).decoder_layers == 5


def test_the_cache_is_read_as_the_hubs_client_reads_it(asked: list[str], tmp_path: Path) -> None:
    cached(tmp_path, "org/name", {"model_type": "gpt2"})
    cached(tmp_path, "org/name", {"model_type": "gpt2", "n_layer": 5}, revision="v2")
    cached(tmp_path, "org/name", {"model_type": "gpt2", "n_layer": 6}, revision="refs/pr/1")
    cached(tmp_path, "gpt2", {"model_type": "gpt2"})
    commit = (tmp_path / "hub/models--org--name/refs/v2").read_text()
    (tmp_path / "hub/models--org--empty/refs").mkdir(parents=True)
    found = 0
    for model_id, revision in [
        *(
            ("org/name", revision)
            for revision in ("main", "v2", "refs/pr/1", commit, "v3", "0" * 40)
        ),
        *(("gpt2", "main"), ("org/empty", "main"), ("org/other", "main")),
    ]:
        theirs = huggingface_hub.try_to_load_from_cache(model_id, "config.json", revision=revision)
        ours = cached_config(model_id, revision)
        assert (ours and str(ours)) == theirs, (model_id, revision)
        found += ours is not None
    assert found == 5
    assert cached_config("org--name", "main") is None


def test_shipped_configurations_are_of_main_only(asked: list[str]) -> None:
    diagnostic = refusal("openai-community/gpt2", "v3")
    assert (
        diagnostic.code == "SW2001"
        and "'v3'" in diagnostic.message
        and "--revision v3" in diagnostic.help
    )
    assert len(asked) == 1


def test_a_broken_cached_file(asked: list[str], tmp_path: Path) -> None:
    cached(tmp_path, "org/name", ["no object"])
    assert refusal("org/name").code == "SW2002"


def test_without_a_network(asked: list[str]) -> None:
    diagnostic = refusal("meta-llama/Llama-3.1-80B")
    assert (diagnostic.code, diagnostic.key) == ("SW2001", ("model", "source"))
    assert "ConnectError" in diagnostic.message
    assert "meta-llama/Llama-3.1-8B" in diagnostic.valid and "hf download" in diagnostic.help
    assert len(asked) == 1


def test_offline_asks_nobody(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    diagnostic = refusal("org/name")
    assert diagnostic.code == "SW2001" and "HF_HUB_OFFLINE" in diagnostic.message
    assert asked == []


@pytest.mark.parametrize("name", ["", "a/b/c", "x y", "org/", "-org/name", "org/na--me"])
def test_what_cannot_be_a_hub_id(name: str, asked: list[str]) -> None:
    assert refusal(name).code == "SW2015"
    assert asked == []


def _answer(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = HTTP.Request("HEAD", "https://huggingface.co/org/name/resolve/main/config.json")
    return kind(
        f"{status} the hub's own text\nin two lines",
        response=HTTP.Response(status, request=request),
    )


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (_answer(errors.GatedRepoError, 403), "SW2012", "hf auth login"),
        (_answer(errors.RepositoryNotFoundError, 401), "SW2010", "HF_TOKEN"),
        (_answer(errors.DisabledRepoError, 403), "SW2010", "Check the name"),
        (_answer(errors.RevisionNotFoundError, 404), "SW2011", "model.revision"),
        (_answer(errors.RemoteEntryNotFoundError, 404), "SW2013", "GGUF"),
        (_answer(errors.HfHubHTTPError, 503), "SW2001", "hf download"),
        (errors.LocalEntryNotFoundError("gone"), "SW2001", "hf download"),
        (HTTP.ReadTimeout("slow"), "SW2001", "hf download"),
        (OSError(28, "No space left on device"), "SW2001", "hf download"),
    ],
)
def test_the_hubs_refusals(
    error: Exception, code: str, word: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    diagnostic = refusal("Qwen/Qwen3-33B")
    assert diagnostic.code == code
    assert word in diagnostic.help
    if code in ("SW2010", "SW2013"):
        assert "Qwen/Qwen3-32B" in diagnostic.valid


def test_config_json_alone_is_downloaded(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    downloads: list[tuple[object, ...]] = []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))

    def download(repository: str, name: str, *, revision: str) -> str:
        downloads.append((repository, name, revision))
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    graph = build_model_graph(
        dataclasses.replace(model_section(None, source="org/name"), revision="v1")
    )
    assert graph.decoder_layers == 2
    assert downloads == [("org/name", "config.json", "v1")]


def test_code_of_its_own_is_refused_and_never_needed_for_a_type_that_transformers_has(
    asked: list[str], tmp_path: Path
) -> None:
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
    cached(tmp_path, "org/foreign", {"model_type": "my_own_type", **own})
    diagnostic = refusal("org/foreign")
    assert diagnostic.code == "SW2014" and "trust_remote_code" in diagnostic.help
    cached(tmp_path, "org/native", {"model_type": "gpt2", "n_layer": 2, **own})
    assert "auto_map" not in build_model_graph(model_section(None, source="org/native")).config
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "my_own_type", **own}))
    assert refusal(str(folder)).code == "SW2014"


def test_a_shipped_model_is_estimated_and_compiled_with_random_weights_only(
    asked: list[str], write_recipe: Callable[[dict[str, Any]], Path]
) -> None:
    model = {"source": "openai-community/gpt2"}
    path = write_recipe(
        {"model": model, "parallelism": {}}
    )  # weights: pretrained is the default for a source
    recipe = load_recipe(path)
    _, estimate = estimate_recipe(recipe)
    assert recipe.model.weights == "pretrained" and estimate.memory.peak_bytes > 0
    assert asked == []
    with pytest.raises(Refusal) as caught:
        compile_recipe(recipe)
    assert [d.code for d in caught.value.diagnostics] == ["SW1913"]
    assert "hf download openai-community/gpt2" in caught.value.diagnostics[0].help
    assert asked.pop().endswith(
        "/openai-community/gpt2/resolve/main/config.json"
    )  # once, for the weights
    compiled = compile_recipe(
        load_recipe(write_recipe({"model": {**model, "weights": "random"}, "parallelism": {}}))
    )
    assert compiled.plan.model.total_parameters == 124_439_808
    assert compiled.plan.model.weights_path is None
    assert asked == []
