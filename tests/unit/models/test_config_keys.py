"""What `check` says of a model without transformers: every planted mistake, and never of what
compiles."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwright.cli.main import main
from shardwright.diagnostics import Refusal
from shardwright.models.config_schema import (
    config_errors,
    matches_installed_transformers,
    type_keys,
    vocabulary_size,
)
from shardwright.models.hf_config import resolve_config
from shardwright.models.model_sources import catalog_config, catalog_ids
from shardwright.models.model_support import METADATA_KEYS
from tests.conftest import SMALL_RECIPE
from tests.zoo.configs import RUNNABLE, TYPES, tiny_config
from tests.zoo.overrides import IMPOSSIBLE
from tools.generate.transformers_config_keys import SAMPLES, builds

LLAMA: dict[str, Any] = SMALL_RECIPE["model"]["config"]
KEY = ("model", "config")


def codes(config: dict[str, Any]) -> list[str]:
    return [found.code for found in config_errors(config, KEY, inline=True)]


def test_the_table_is_of_the_installed_transformers() -> None:
    assert matches_installed_transformers(), "run `make generated`"
    without = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if type_keys(name) is None]
    assert len(without) <= 4, without


def test_shipped_configurations_are_right() -> None:
    for model_id in catalog_ids():
        config = catalog_config(model_id)
        assert config is not None and config_errors(config, ("model", "source"), inline=False) == ()
        assert config_errors(config, KEY, inline=True) == (), model_id
        assert vocabulary_size(config) == config.get("vocab_size", vocabulary_size(config))


@pytest.mark.parametrize("part", range(4))
def test_every_configuration_of_the_zoo_is_right(part: int) -> None:
    for model_type in TYPES[part::4]:
        if model_type in IMPOSSIBLE:
            continue
        config = json.loads(json.dumps(tiny_config(model_type)))
        assert config_errors(config, ("model", "source"), inline=False) == (), model_type
        if codes(config):  # keys of a part of the configuration
            with pytest.raises(Refusal):
                resolve_config(config, KEY, inline=True)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"model_type": "lama"}, "SW2003", "lama"),
        ({"model_type": None}, "SW2003", ""),
        ({"model_type": "vit"}, "SW2004", "vit"),
        ({"model_type": "t5"}, "SW2017", "t5"),
        ({"hiden_size": 64}, "SW2005", "hiden_size"),
        ({"n_embd": 64}, "SW2005", "n_embd"),
        ({"num_hidden_layers": "4"}, "SW2006", "'4' is not an integer"),
        ({"num_hidden_layers": 0}, "SW2006", "positive"),
        ({"num_hidden_layers": 100_000}, "SW2006", "2048"),
        ({"attention_dropout": 1.5}, "SW2006", "probability"),
        ({"hidden_act": 3}, "SW2006", "text"),
        ({"num_attention_heads": 5}, "SW2007", "64 is not divisible by 5"),
    ],
)
def test_a_planted_mistake_is_found(
    change: dict[str, Any],
    code: str,
    words: str,
    write_recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By `check`, in words that name it; and `compile` would refuse the same."""
    config = {**LLAMA, **change}
    path = write_recipe({"model.config": config, "parallelism": {}})
    if change.get("model_type", "") is None:
        assert codes(config) == [code]  # the schema says it first
        return
    assert main(["check", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"error[{code}]" in err and words in err and "recipe.json:" in err, err
    with pytest.raises(Refusal) as refusal:
        resolve_config(config, KEY, inline=True)
    assert {d.code for d in refusal.value.diagnostics} <= {code, "SW2006", "SW2007"}


PUBLISHED: dict[str, dict[str, Any]] = {
    entry["name"]: entry["config"]
    for entry in map(
        json.loads,
        Path(__file__).with_name("published_configs.jsonl").read_text("utf-8").splitlines(),
    )
}
UNREAD: dict[str, set[str]] = {
    "mimo-v2-flash": {"hybrid_layer_pattern", "swa_rope_theta", "topk_method"},
    "smollm2": {"is_llama_config", "rope_interleaved"},
    "qwen2.5-mrope": {"use_mrope"},
    "llava-1.5": {"vocab_size"},  # the text part's counts
}
"""Keys that nothing in transformers reads, of some of them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_pasted_into_a_recipe_is_what_it_is_in_a_folder(
    name: str,
) -> None:
    """Both by the table and by the class. What neither reads is one warning that names it."""
    config = PUBLISHED[name]
    assert {"architectures", "transformers_version"} & config.keys() and len(PUBLISHED) >= 40
    told = config_errors(config, KEY, inline=True)
    assert [(d.code, d.severity) for d in told] in ([], [("SW2005", "warning")]), told
    unread = {key for key in config if told and repr(key) in told[0].message}
    assert UNREAD.get(name, set()) <= unread and (not told) == (not unread)
    pasted = resolve_config(config, KEY, inline=True).to_dict()
    in_folder = {
        key: value for key, value in config.items() if key != "auto_map"
    }  # remote_code.py settles that key
    assert pasted == resolve_config(in_folder, KEY, inline=False).to_dict()

    # Deleted, none of these changes anything else: nothing in transformers reads them.
    rest = {key: value for key, value in config.items() if key not in unread}
    without = resolve_config(rest, KEY, inline=True).to_dict()
    assert without == {key: value for key, value in pasted.items() if key not in unread}


@pytest.mark.parametrize(
    ("name", "change", "nearest"),
    [
        ("nemotron-h", {"hybrid_overide_pattern": "M-"}, "hybrid_override_pattern"),
        ("llama-3.1", {"num_key_values_heads": 8}, "num_key_value_heads"),
        ("minimax-m2", {"rotary_dims": 64}, "rotary_dim"),
        ("qwen2.5-vl", {"num_hidden_layer": 36}, "num_hidden_layers"),
        ("mistral-small-3.1", {"vision_configs": {}}, "vision_config"),
    ],
)
def test_a_misspelt_key_of_a_published_configuration_is_refused(
    name: str, change: dict[str, Any], nearest: str
) -> None:
    config = {key: value for key, value in PUBLISHED[name].items() if key != nearest} | change
    errors = [d for d in config_errors(config, KEY, inline=True) if d.severity == "error"]
    assert [d.code for d in errors] == ["SW2005"] and nearest in errors[0].valid
    with pytest.raises(Refusal):
        resolve_config(config, KEY, inline=True)
    # Without the marks of a program a configuration was typed by hand: each unknown key is an
    # error.
    typed = {
        key: value
        for key, value in PUBLISHED["smollm2"].items()
        if key in {*LLAMA, "is_llama_config"}
    }
    assert codes(typed) == ["SW2005"]
    # Nobody means a key that says how files are stored.
    (told,) = config_errors({**LLAMA, "qk_norm_type": "x"}, KEY, inline=True)
    assert not set(told.valid) & METADATA_KEYS


@pytest.mark.parametrize(
    ("name", "key", "attribute", "value"),
    [
        ("nemotron-h", "hybrid_override_pattern", "layers_block_type.1", "mlp"),
        ("minimax-m2", "rotary_dim", "rope_parameters.partial_rotary_factor", 0.5),
        ("deepseek-v4", "compress_ratios", "layer_types.2", "compressed_sparse_attention"),
        ("deepseek-v4", "num_hash_layers", "mlp_layer_types.1", "hash_moe"),
        ("mimo-v2-flash", "sliding_window_size", "sliding_window", 129),
        ("pythia", "rotary_pct", "rope_parameters.partial_rotary_factor", 0.25),
        ("bloom", "n_embed", "hidden_size", 1024),
        ("qwen2.5-vl", "hidden_size", "text_config.hidden_size", 2048),
        ("lfm2", "block_ff_dim", "intermediate_size", 6656),
        (
            "gemma-3-1b",
            "rope_local_base_freq",
            "rope_parameters.sliding_attention.rope_theta",
            10000,
        ),
    ],
)
def test_keys_of_older_files_are_converted(name: str, key: str, attribute: str, value: Any) -> None:
    config = {**PUBLISHED[name]}
    found: Any = resolve_config(config, KEY, inline=True).to_dict()
    for part in attribute.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    assert key in config and found == value


def test_nothing_is_refused_that_the_classes_take() -> None:
    """Odd values for odd keys of forty types: what is an error here, transformers refuses too."""
    rng = random.Random(5)
    refused = 0
    for model_type in rng.sample(RUNNABLE, 40):
        known = type_keys(model_type)
        if known is None:
            continue
        tiny = json.loads(json.dumps(tiny_config(model_type)))
        for _ in range(12):
            name = rng.choice(sorted(known.keys))
            value = rng.choice([v for values in SAMPLES.values() for v in values])
            config = {**tiny, name: value}
            if name == "model_type" or not codes(config):
                continue
            refused += 1
            try:
                resolve_config(config, KEY, inline=True)
            except Refusal:
                continue
            assert codes(config) == ["SW2007"] and not builds(model_type, config), (
                model_type,
                name,
                value,
            )
    assert refused > 50


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "no such data": (
        {"data": {"kind": "text", "path": "none/*.txt", "tokenizer": "byte"}},
        "SW1301",
    ),
    "no such tokenizer folder": (
        {"data": {"kind": "text", "path": "a.txt", "tokenizer": "./none"}},
        "SW1301",
    ),
    "a folder without a tokenizer": (
        {"data": {"kind": "text", "path": "a.txt", "tokenizer": "./empty"}},
        "SW1911",
    ),
    "no such model folder": ({"model": {"source": "./none", "weights": "random"}}, "SW1301"),
    "a model without weights": (
        {"model": {"source": "./model", "weights": "pretrained"}},
        "SW1913",
    ),
    "no name of the hub": ({"model": {"source": "no $(name)", "weights": "random"}}, "SW2015"),
    "a small vocabulary": (
        {
            "data": {"kind": "text", "path": "a.txt", "tokenizer": "byte"},
            "model.config.vocab_size": 128,
        },
        "SW1912",
    ),
    "half precision on a CPU": ({"training.precision": "fp16"}, "SW3119"),
    "two tokenizers": (
        {
            "data": {"kind": "text", "path": "a.txt", "tokenizer": "byte"},
            "validation": {"kind": "text", "path": "a.txt", "tokenizer": "./words"},
        },
        "SW1401",
    ),
    "a key that DeepSpeed has not": ({"extra": {"zero_optimisation": {}}}, "SW1216"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_tokenizers_and_precisions(
    name: str, tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    changes, code = FILES[name]
    (tmp_path / "a.txt").write_text("text")
    for folder in ("empty", "model", "words"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "words" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert main(["check", str(write_recipe({**changes, "parallelism": {}}))]) == 1
    assert f"error[{code}]" in capsys.readouterr().err


def test_what_only_the_hub_knows_is_a_note(
    write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"kind": "synthetic"}
    path = write_recipe(
        {"model": {"source": "Qwen/Qwen9-8B", "weights": "random"}, "data": data, "parallelism": {}}
    )
    assert main(["check", str(path)]) == 0
    captured = capsys.readouterr()
    assert (
        "note[SW2001]" in captured.err
        and "Qwen/Qwen3-8B" in captured.err
        and captured.out.startswith("ok ")
    )


def test_a_tokenizer_with_more_ids_than_the_model(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning: published fine-tunes add tokens that no text holds."""
    (tmp_path / "words").mkdir()
    vocabulary = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 256}]}
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps(vocabulary))
    (tmp_path / "a.txt").write_text("text")
    path = write_recipe({"data": {"kind": "text", "path": "a.txt", "tokenizer": "./words"}})
    assert main(["check", str(path)]) == 0
    assert "warning[SW1912]" in capsys.readouterr().err


def test_ready_recipes_and_golden_cases_pass(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).resolve().parents[3]
    paths = [
        str(p) for p in (*root.glob("recipes/*.yaml"), *root.glob("tests/cases/*/recipe.yaml"))
    ]
    assert len(paths) > 40 and main(["check", *paths]) == 0
    assert "error" not in capsys.readouterr().err


def test_a_model_with_code_of_its_own_is_refused_as_plan_refuses_it(
    tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A type that transformers has itself needs none of the code that came with it."""
    own = {"auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_recipe(
        {
            "model": {"source": "./model", "weights": "random"},
            "data": {"kind": "synthetic"},
            "parallelism": {},
        }
    )
    for model_type, code in (("tiny-own", 1), ("llama", 0)):
        (folder / "config.json").write_text(json.dumps({**LLAMA, **own, "model_type": model_type}))
        assert main(["check", str(path)]) == code
        assert ("error[SW2014]" in capsys.readouterr().err) == bool(code)
