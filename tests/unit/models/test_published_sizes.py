"""Configurations that come with the package, against the sizes that their authors publish."""

from __future__ import annotations

import pytest

from shardwright.models import model_sources
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_sources import catalog_config, catalog_ids
from shardwright.utils.json_values import JsonObject
from tests.unit.models.factory import model_section

# The number of parameters on the model's page (the sum over its safetensors header, or its table),
# a tied head once.
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
    # The pages of OpenAI's count two tables of position numbers too, 127 and 334 integers:
    # 151,277,440, 427,616,847.
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
# Where the page has a rounded number only, or counts something else (StableLM: without the key
# bias; V3: no MTP layer).
ROUNDED: dict[str, float] = {
    "facebook/opt-66b": 66e9,
    "stabilityai/stablelm-2-1_6b": 1_644_417_024,
    "deepseek-ai/DeepSeek-V3": 671e9,
    "mistralai/Mistral-Large-Instruct-2407": 123e9,
}
# What a model may change and still be "like" another one.
MAY_DIFFER = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
    "rms_norm_eps",
}


def entry(model_id: str) -> JsonObject:
    config = catalog_config(model_id)
    assert config is not None
    return config


def own_entries() -> list[str]:
    return [
        model_id
        for model_id in catalog_ids()
        if model_sources.LIKE not in model_sources._entries()[model_id]
    ]


def test_every_own_entry_has_a_published_size() -> None:
    assert set(own_entries()) == EXACT.keys() | ROUNDED.keys()


@pytest.mark.parametrize("model_id", [*EXACT, *ROUNDED])
def test_published_sizes(model_id: str, asked: list[str]) -> None:
    graph = build_model_graph(model_section(None, source=model_id))
    total, plain = graph.total_parameters, graph.config
    if model_id in EXACT:
        assert total == EXACT[model_id]
    else:
        assert total == pytest.approx(ROUNDED[model_id], rel=0.005)
    text = plain.get("text_config")
    plain = text if isinstance(text, dict) else plain  # of a model that sees
    # What a size does not show: a wrong number of heads gives a head dimension that no kernel has.
    heads, hidden = (
        _get(plain, "num_attention_heads", "n_head"),
        _get(plain, "hidden_size", "n_embd"),
    )
    head_dim = plain.get("head_dim") or plain.get("v_head_dim") or hidden / heads
    assert head_dim in (64, 72, 80, 96, 128, 256), head_dim
    assert asked == []


def _get(config: JsonObject, *names: str) -> int:
    return next(value for name in names if isinstance(value := config.get(name), int))


def test_likes_lead_to_an_own_entry_and_change_no_shape() -> None:
    for model_id in set(catalog_ids()) - set(own_entries()):
        base = str(model_sources._entries()[model_id][model_sources.LIKE])
        ours, theirs = entry(model_id), entry(base)
        assert {
            key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)
        } <= MAY_DIFFER


def test_no_entry_tells_of_stored_weights_or_of_its_writer() -> None:
    left_out = {
        "torch_dtype",
        "dtype",
        "architectures",
        "transformers_version",
        "quantization_config",
        "auto_map",
    }
    assert all(not left_out & entry(model_id).keys() for model_id in catalog_ids())
