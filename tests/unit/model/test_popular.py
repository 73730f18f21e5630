"""The shipped configurations against the published sizes, and how a hub id finds its configuration. No hub is asked."""

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
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.compile import compile_recipe, estimate_recipe
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.json_value import JsonObject
from shardwright.model.build import build_model_graph
from shardwright.model.popular import shipped
from shardwright.model.popular.hub import cached_config, hub_config
from shardwright.model.popular.shipped import nearest_ids, shipped_config, shipped_ids, shipped_name
from shardwright.recipe.load import load_recipe
from tests.unit.model.factory import model_section

# The HTTP library of the installed huggingface_hub: httpx, or httpx2 after it.
HTTP: Any = importlib.import_module(errors.HTTPError.__module__)

# The number of parameters on the model's page (the sum over its safetensors header, or its table), a tied head once.
EXACT: dict[str, int] = {
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-1b1": 1_065_314_304,
    "bigscience/bloom-1b7": 1_722_408_960,
    "bigscience/bloom-3b": 3_002_557_440,
    "bigscience/bloom-7b1": 7_069_016_064,
    "bigscience/bloom": 176_247_271_424,
    "CohereForAI/c4ai-command-r-v01": 34_980_831_232,
    "CohereForAI/c4ai-command-r-plus": 103_810_674_688,
    "CohereForAI/aya-23-8B": 8_028_033_024,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "tiiuae/falcon-7b": 6_921_720_704,
    "tiiuae/falcon-40b": 41_303_293_952,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "distilbert/distilgpt2": 81_912_576,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "ibm-granite/granite-3.0-2b-base": 2_533_531_648,
    "ibm-granite/granite-3.0-8b-base": 8_170_848_256,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "codellama/CodeLlama-7b-hf": 6_738_546_688,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "deepseek-ai/deepseek-llm-7b-base": 6_910_365_696,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-34B": 34_388_917_248,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/phi-1_5": 1_418_270_720,
    "microsoft/phi-2": 2_779_683_840,
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-1.5B": 1_543_714_304,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "stabilityai/stablelm-3b-4e1t": 2_795_443_200,
    # The pages of OpenAI's count two tables of position numbers too, 127 and 334 integers: 151,277,440, 427,616,847.
    "openai/clip-vit-base-patch32": 151_277_440 - 127,
    "openai/clip-vit-large-patch14": 427_616_847 - 334,
    "google/siglip-base-patch16-224": 203_155_970,
    "google/siglip-so400m-patch14-384": 877_960_498,
    "bigcode/starcoder2-3b": 3_030_371_328,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "HuggingFaceTB/SmolVLM-256M-Instruct": 256_484_928,
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "google/gemma-3-27b-it": 27_432_406_640,
}
# Where the page has a rounded number only, or counts something else (StableLM: without the key bias; V3: no MTP layer).
ROUNDED: dict[str, float] = {
    "facebook/opt-66b": 66e9,
    "stabilityai/stablelm-2-1_6b": 1_644_417_024,
    "deepseek-ai/DeepSeek-V3": 671e9,
    "mistralai/Mistral-Large-Instruct-2407": 123e9,
}
# What a model may change and still be "like" another one.
MAY_DIFFER = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "rms_norm_eps"}


def entry(model_id: str) -> JsonObject:
    config = shipped_config(model_id)
    assert config is not None
    return config


def own_entries() -> list[str]:
    return [model_id for model_id in shipped_ids() if shipped.LIKE not in shipped._entries()[model_id]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache and a hub without a network; the list of what the hub was asked for."""
    requests: list[str] = []

    def no_network(url: str, *args: object, **kwargs: object) -> None:
        requests.append(url)
        raise HTTP.ConnectError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    return requests


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


UNCUT: tuple[str, ...] = ()
"""Models that the probe cannot take apart yet."""


def test_every_own_entry_has_a_published_size() -> None:
    assert set(own_entries()) == EXACT.keys() | ROUNDED.keys()


@pytest.mark.parametrize("model_id", [*EXACT, *ROUNDED])
def test_published_sizes(model_id: str, asked: list[str]) -> None:
    config = dict(entry(model_id))
    model_type = str(config.pop("model_type"))
    if model_id not in UNCUT:
        graph = build_model_graph(model_section(None, source=model_id))
        total = graph.total_parameters
        plain: JsonObject = graph.config
    else:
        assert refusal(model_id).code == "SW2016"
        built = CONFIG_MAPPING[model_type](**config)
        with torch.device("meta"):
            total = sum(p.numel() for p in AutoModelForCausalLM.from_config(built, dtype=torch.float32).parameters())
        plain = built.to_dict()
    if model_id in EXACT:
        assert total == EXACT[model_id]
    else:
        assert total == pytest.approx(ROUNDED[model_id], rel=0.005)
    text = plain.get("text_config")
    plain = text if isinstance(text, dict) else plain  # of a model that sees
    # What a size does not show: a wrong number of heads gives a head dimension that no kernel has.
    heads, hidden = _get(plain, "num_attention_heads", "n_head"), _get(plain, "hidden_size", "n_embd")
    head_dim = plain.get("head_dim") or plain.get("v_head_dim") or hidden / heads
    assert head_dim in (64, 72, 80, 96, 128, 256), head_dim
    assert asked == []


def _get(config: JsonObject, *names: str) -> int:
    return next(value for name in names if isinstance(value := config.get(name), int))


def test_likes_lead_to_an_own_entry_and_change_no_shape() -> None:
    for model_id in set(shipped_ids()) - set(own_entries()):
        base = str(shipped._entries()[model_id][shipped.LIKE])
        ours, theirs = entry(model_id), entry(base)
        assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} <= MAY_DIFFER


def test_no_entry_tells_of_stored_weights_or_of_its_writer() -> None:
    left_out = {"torch_dtype", "dtype", "architectures", "transformers_version", "quantization_config", "auto_map"}
    assert all(not left_out & entry(model_id).keys() for model_id in shipped_ids())


def test_rope_parameters_arrive() -> None:
    graph = build_model_graph(model_section(None, source="meta-llama/Llama-3.2-1B"))
    rope = graph.config["rope_parameters"]
    assert isinstance(rope, dict)
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 500000.0)
    assert graph.max_positions == 131072 and graph.tied


def test_names() -> None:
    assert shipped_name("qwen3-32b") == "Qwen/Qwen3-32B"
    assert shipped_name("gpt2") == "gpt2"
    assert shipped_name("Qwen/Qwen3-32B") == "Qwen/Qwen3-32B"
    assert shipped_name("qwen/qwen3-320b") is None
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
    section = dataclasses.replace(model_section(None, source="openai-community/gpt2"), revision="v2")
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
        *(("org/name", revision) for revision in ("main", "v2", "refs/pr/1", commit, "v3", "0" * 40)),
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
    assert diagnostic.code == "SW2001" and "'v3'" in diagnostic.message and "--revision v3" in diagnostic.help
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
    return kind(f"{status} the hub's own text\nin two lines", response=HTTP.Response(status, request=request))


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


def test_config_json_alone_is_downloaded(asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    downloads: list[tuple[object, ...]] = []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))

    def download(repository: str, name: str, *, revision: str) -> str:
        downloads.append((repository, name, revision))
        return str(tmp_path / "config.json")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    graph = build_model_graph(dataclasses.replace(model_section(None, source="org/name"), revision="v1"))
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
    path = write_recipe({"model": model, "parallelism": {}})  # weights: pretrained is the default for a source
    recipe = load_recipe(path)
    _, estimate = estimate_recipe(recipe)
    assert recipe.model.weights == "pretrained" and estimate.memory.peak_bytes > 0
    assert asked == []
    with pytest.raises(Refusal) as caught:
        compile_recipe(recipe)
    assert [d.code for d in caught.value.diagnostics] == ["SW1913"]
    assert "hf download openai-community/gpt2" in caught.value.diagnostics[0].help
    assert asked.pop().endswith("/openai-community/gpt2/resolve/main/config.json")  # once, for the weights
    compiled = compile_recipe(load_recipe(write_recipe({"model": {**model, "weights": "random"}, "parallelism": {}})))
    assert compiled.plan.model.total_parameters == EXACT["openai-community/gpt2"]
    assert compiled.plan.model.weights_path is None
    assert asked == []
