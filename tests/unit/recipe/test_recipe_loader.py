"""What a good recipe becomes: numbers, JSON, defaults, layers, paths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from shardwright.diagnostics import Refusal, Source
from shardwright.diagnostics.diagnostic_rendering import location_of
from shardwright.layout.gpu_cluster import catalogue
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import recipe_schema, schema_properties
from shardwright.recipe.recipe_tree import yaml_scalar_value
from shardwright.recipe.recipe_types import AttentionRates, InlineGpu, Recipe
from shardwright.utils.json_values import JsonValue
from tests.unit.recipe.test_bad_input import GOOD, JSON

FULL = (
    GOOD.replace(
        "steps: 20",
        "tokens: 1e12\n  optimizer: {lr: 2e-5}\n  scheduler: {name: wsd, decay_steps: 3}",
    )
    + """\
data: {mixture: [{kind: text, path: a/*.txt, weight: 2}, {kind: chat, path: b, template: t, weight: 1}]}
validation: {fraction: 0.01}
parallelism: {tensor: 2, memory_headroom: 0.1}
launch: {env: {NCCL_DEBUG: WARN}, env_from: [HF_TOKEN], hostfile: hosts, slurm: {account: a, time: 48:00:00}}
checkpoint: {every_steps: 500}
"""  # noqa: E501
)


def load(text: str, folder: Path, *overrides: str, name: str = "recipe.yaml") -> Recipe:
    (folder / name).write_text(text, encoding="utf-8")
    return load_recipe(folder / name, overrides)


def without_source(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, source=Source(file=""))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1e12", 1e12),
        ("-.5", -0.5),
        ("+7", 7),
        ("0o17", 15),
        ("0xff", 255),
        ("017", 17),
        ("true", True),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("no", "no"),
        ("1_000", "1_000"),
        ("48:00:00", "48:00:00"),
        ("2026-01-01", "2026-01-01"),
        ("0b1", "0b1"),
        ("nUll", "nUll"),
    ],
)
def test_core_schema(text: str, value: object) -> None:
    assert yaml_scalar_value(text) == value and type(yaml_scalar_value(text)) is type(value)


def test_numbers(tmp_path: Path) -> None:
    training = load(FULL, tmp_path).training
    assert training.tokens == 10**12 and type(training.tokens) is int
    assert training.optimizer.lr == 2e-5
    most = load(GOOD.replace("steps: 20", "tokens: 9007199254740992"), tmp_path).training
    assert most.tokens == 2**53
    whole = load(GOOD.replace("steps: 20", "steps: 20.0\n  gradient_clipping: 1"), tmp_path)
    assert type(whole.training.steps) is int and type(whole.training.gradient_clipping) is float


def test_json_is_a_recipe(tmp_path: Path) -> None:
    plain = load(JSON, tmp_path)
    assert plain.training.steps == 20
    odd = "\ufeff" + JSON.replace("  ", "\t").replace(
        '"llama"', '"\\u006clama", "note": "\\ud83d\\ude00\\/"'
    )
    odd = odd.replace('"note"', f'"{"k" * 2000}": 1, "note"')
    config = load(odd, tmp_path).model.config
    assert config is not None and (config["model_type"], config["note"]) == ("llama", "\U0001f600/")
    for text in (json.dumps(json.loads(JSON)), JSON.replace("\n", "\r\n")):
        assert load(text, tmp_path).document == plain.document


def test_json_keeps_places(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        load(JSON.replace('"steps": 20', '"steps" :\t"20"'), tmp_path)
    place = location_of(caught.value.diagnostics[0], caught.value.source)
    assert place is not None and (place.line, place.column, place.length) == (6, 74, 4)


@pytest.mark.parametrize("text", [GOOD, JSON, FULL])
def test_the_document_is_complete_and_loads_to_the_same_recipe(text: str, tmp_path: Path) -> None:
    first = load(text, tmp_path)
    again = load(json.dumps(first.document), tmp_path, name="again.json")
    assert without_source(again) == without_source(first)
    assert json.dumps(again.document) == json.dumps(first.document)


def test_the_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    shuffled = json.dumps(dict(reversed(json.loads(JSON).items())))
    assert json.dumps(load(shuffled, tmp_path).document) == json.dumps(
        load(JSON, tmp_path).document
    )


def test_defaults(tmp_path: Path) -> None:
    recipe = load(GOOD + "data: {kind: text, path: python-stdlib}\nlaunch:\n", tmp_path)
    optimizer, scheduler, data = recipe.training.optimizer, recipe.training.scheduler, recipe.data
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (
        3e-4,
        (0.9, 0.95),
        1e-8,
        0.1,
    )
    assert (scheduler.name, scheduler.warmup_steps, scheduler.min_lr) == ("cosine", 0, 0.0)
    assert (
        recipe.model.weights == "random"
        and recipe.parallelism.tensor is None
        and recipe.launch.slurm is None
    )
    assert data is not None and (data.path, data.tokenizer, data.packing) == (
        "python-stdlib",
        "byte",
        True,
    )
    source = load(
        GOOD.replace("config: {model_type: llama, hidden_size: 64}", "source: org/name"), tmp_path
    ).model
    assert (source.source, source.weights) == ("org/name", "pretrained")


def test_inline_gpu(tmp_path: Path) -> None:
    gpu = "{memory_gib: 80, hbm_gbytes_per_second: 3350, peak_tflops: {bf16: 989}}"
    found = load(GOOD.replace("gpu: cpu", f"gpu: {gpu}"), tmp_path).cluster.gpu
    assert found == InlineGpu(
        memory_gib=80.0, hbm_gbytes_per_second=3350.0, peak_tflops={"bf16": 989.0}
    )
    more = "fp8: 1979}, watts: 350, compute_units: 114, cache_mib: 50, attention: "
    gpu = gpu.replace("}}", ", " + more + "{forward_tflops: 340, backward_tflops: 250}}")
    found = load(GOOD.replace("gpu: cpu", f"gpu: {gpu}"), tmp_path).cluster.gpu
    assert found == InlineGpu(
        memory_gib=80.0,
        hbm_gbytes_per_second=3350.0,
        peak_tflops={"bf16": 989.0, "fp8": 1979.0},
        watts=350.0,
        compute_units=114,
        cache_mib=50.0,
        attention=AttentionRates(forward_tflops=340.0, backward_tflops=250.0),
    )


@pytest.mark.parametrize(
    "data",
    [
        "{kind: text, path: a}",
        "{kind: jsonl, path: a, field: body}",
        "{kind: parquet, path: a}",
        "{kind: chat, path: a, messages: turns, train_on: all}",
        "{kind: tokens, path: a.npy, tokenizer: byte, packing: false, shuffle: false}",
        "{kind: megatron, path: a}",
        "{kind: synthetic}",
    ],
)
def test_every_kind_of_data(data: str, tmp_path: Path) -> None:
    assert load(f"{GOOD}data: {data}\n", tmp_path).data is not None


def test_anything_goes_in_a_path_that_a_shell_would_mind(tmp_path: Path) -> None:
    data = load(GOOD + """data: {kind: tokens, path: "a b/'$(reboot)';\\".npy"}\n""", tmp_path).data
    assert data is not None and data.path == f"{tmp_path}/a b/'$(reboot)';\".npy"


def test_paths_start_at_the_file_that_holds_them(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    (base / "weights").mkdir(parents=True)
    run.mkdir()
    (base / "base.yaml").write_text(
        GOOD.replace("config: {model_type: llama, hidden_size: 64}", "source: weights")
        + "data: {kind: text, path: corpus/*.txt}\nlaunch: {hostfile: hosts}\n"
    )
    recipe = load("extends: ../base/base.yaml\nlaunch: {setup_script: env.sh}\n", run)
    assert recipe.model.source == f"{base}/weights" and recipe.directory == str(run)
    assert recipe.data is not None and recipe.data.path == f"{base}/corpus/*.txt"
    assert (recipe.launch.hostfile, recipe.launch.setup_script) == (
        f"{base}/hosts",
        f"{run}/env.sh",
    )
    again = load(json.dumps(recipe.document), run, name="again.json")
    assert without_source(again) == without_source(recipe)


def test_a_folder_named_like_a_glob(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]"
    folder.mkdir()
    data = load(GOOD + "data: {kind: text, path: '*.txt'}\n", folder).data
    assert data is not None and data.path == f"{tmp_path}/a[[]1]/*.txt"


def test_a_name_may_be_auto(tmp_path: Path) -> None:
    """`auto` is a choice of the compiler's only where the schema says so."""
    text = GOOD + "launch: {slurm: {account: auto, partition: auto, mem: auto}}\n"
    slurm = load(text, tmp_path).launch.slurm
    assert slurm is not None and (slurm.account, slurm.partition, slurm.mem) == (
        "auto",
        "auto",
        "0",
    )


def test_extends(tmp_path: Path) -> None:
    (tmp_path / "root.yaml").write_text(GOOD + "launch: {env: {A: a, B: b}, env_from: [X]}\n")
    (tmp_path / "middle.yaml").write_text(
        "extends: root.yaml\ntraining: {seed: 7}\nlaunch: {env: {B: c}}\n"
    )
    recipe = load(
        "extends: middle.yaml\nname: top\ntraining: {tokens: 4096}\nlaunch: {env_from: []}\n",
        tmp_path,
    )
    assert (recipe.name, recipe.training.seed, recipe.training.steps, recipe.training.tokens) == (
        "top",
        7,
        None,
        4096,
    )
    assert dict(recipe.launch.env) == {"A": "a", "B": "c"} and recipe.launch.env_from == ()
    assert "extends" not in recipe.document


def test_a_diagnostic_points_into_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(GOOD.replace("steps: 20", "steps: many"))
    with pytest.raises(Refusal) as caught:
        load("extends: base.yaml\nname: a b\n", tmp_path)
    places = [location_of(d, caught.value.source) for d in caught.value.diagnostics]
    assert [(Path(p.file).name, p.line) for p in places if p] == [
        ("recipe.yaml", 2),
        ("base.yaml", 12),
    ]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("extends: recipe.yaml\n", "SW1021", "recipe.yaml -> recipe.yaml"),
        ("extends: loop.yaml\n", "SW1021", "recipe.yaml -> loop.yaml -> recipe.yaml"),
        ("extends: none.yaml\n", "SW1022", "No such file"),
        ("extends: .\n", "SW1022", "folder"),
        ("extends: bad.yaml\n", "SW1005", "YAML"),
        ("extends: [a, b]\n", "SW1102", "expected text"),
    ],
)
def test_bad_bases(text: str, code: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").write_text("extends: recipe.yaml\n")
    (tmp_path / "bad.yaml").write_text("a: [\n")
    with pytest.raises(Refusal) as caught:
        load(text, tmp_path)
    found = [d for d in caught.value.diagnostics if d.code == code]
    assert found and words in found[0].message
    if code in ("SW1021", "SW1022"):  # what is missing may stand in the base
        assert all(d.code == code for d in caught.value.diagnostics)


def test_set(tmp_path: Path) -> None:
    recipe = load(
        GOOD,
        tmp_path,
        "training.tokens=1e6",
        "launch.env={A: x}",
        "launch.env.B=y",
        "name=b",
        "data=null",
    )
    assert (recipe.training.steps, recipe.training.tokens, recipe.name) == (None, 10**6, "b")
    assert dict(recipe.launch.env) == {"A": "x", "B": "y"}
    with pytest.raises(Refusal) as caught:
        load(GOOD, tmp_path, "name=a", 'training.steps="8"')
    place = location_of(caught.value.diagnostics[0], caught.value.source)
    assert place is not None and (place.file, place.line, place.column) == ("--set", 2, 16)


def test_what_set_leaves_missing_is_shown_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        load(GOOD.replace("  gpu: cpu\n", ""), tmp_path, "cluster.nodes=2")
    place = location_of(caught.value.diagnostics[0], caught.value.source)
    assert place is not None and (Path(place.file).name, place.line) == ("recipe.yaml", 5)


def test_standard_input() -> None:
    recipe = load_recipe(Path("-"), stdin_text=GOOD)
    assert recipe.name == "tiny" and recipe.directory == str(Path.cwd())


def test_the_schema_is_one_and_says_every_key_and_default() -> None:
    schema = recipe_schema()
    Draft202012Validator.check_schema(dict(schema))

    def walk(sub: object, path: str) -> int:
        assert isinstance(sub, dict)
        count = 0
        samples: list[dict[str, JsonValue]] = [
            {},
            {"kind": "jsonl"},
            {"kind": "chat"},
            {"mixture": []},
        ]
        for sample in samples:
            for key, below in schema_properties(sub, sample).items():
                assert any(
                    "title" in part and "description" in part for part in (below, *_referred(below))
                ), f"{path}{key}"
                default = below.get("default", "none")
                if default != "none":
                    resolver = {"$defs": schema["$defs"], **below}
                    assert Draft202012Validator(resolver).is_valid(default), f"{path}{key}"
                count += 1 + walk(below, f"{path}{key}.")
        return count

    def _referred(sub: Mapping[str, Any]) -> list[dict[str, Any]]:
        definitions: Any = schema["$defs"]
        return [definitions[sub["$ref"].removeprefix("#/$defs/")]] if "$ref" in sub else []

    assert walk(schema, "") > 80


def test_the_schema_lists_the_catalogue() -> None:
    """An editor completes a GPU's name from it."""
    schema: Any = recipe_schema()
    named, _ = schema["properties"]["cluster"]["properties"]["gpu"]["anyOf"]
    assert named["examples"] == list(catalogue()["gpus"])
