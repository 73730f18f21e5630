"""Stage 6: numbers that a recipe leaves open, and bytes per rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.layout.formats import accumulation_dtype
from shardwright.plan.plan import Plan, load_plan, plan_to_json
from shardwright.recipe.literal_types import Precision
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import canonical_hash
from tests.unit.models.factory import write_weights


@pytest.fixture
def plan_of(write_recipe: Callable[..., Path]) -> Callable[..., Plan]:
    return lambda changes=None: compile_recipe(load_recipe(write_recipe(changes))).plan


@pytest.fixture
def codes_of(write_recipe: Callable[..., Path]) -> Callable[..., list[str]]:
    def codes(changes: dict[str, Any]) -> list[str]:
        with pytest.raises(Refusal) as caught:
            compile_recipe(load_recipe(write_recipe(changes)))
        assert all(d.help and "\n" not in d.message for d in caught.value.diagnostics)
        return [d.code for d in caught.value.diagnostics]

    return codes


@pytest.mark.parametrize(
    ("tokens", "steps"), [(8 * 32, 1), (8 * 32 + 1, 2), (1e4, 40), (8 * 32 * 7, 7)]
)
def test_tokens_become_steps_rounded_up(
    plan_of: Callable[..., Plan], tokens: float, steps: int
) -> None:
    assert plan_of({"training.steps": None, "training.tokens": tokens}).training.steps == steps


@pytest.mark.parametrize(
    ("scheduler", "warmup", "min_lr"),
    [
        ({}, 0, 0.0),
        ({"warmup_steps": 3, "min_lr": 1e-5}, 3, 1e-5),
        ({"warmup_ratio": 0.26, "min_lr_ratio": 0.1}, 3, 1e-4),
    ],
)
def test_scheduler_is_resolved(
    plan_of: Callable[..., Plan], scheduler: dict[str, Any], warmup: int, min_lr: float
) -> None:
    changes = {
        "training.scheduler": {"name": "cosine", **scheduler},
        "training.optimizer": {"name": "adamw", "lr": 1e-3},
    }
    plan = plan_of(changes).scheduler
    assert plan.warmup_steps == warmup and plan.min_lr == pytest.approx(min_lr)


@pytest.mark.parametrize(
    ("precision", "given", "expected"),
    [
        ("fp32", None, "fp32"),
        ("bf16", None, "fp32"),
        ("bf16", "bf16", "bf16"),
        ("fp16", None, "fp16"),
    ],
)
def test_accumulation_dtype(
    write_recipe: Callable[..., Path],
    precision: Precision,
    given: Precision | None,
    expected: str,
) -> None:
    training = dataclasses.replace(
        load_recipe(write_recipe()).training, precision=precision, gradient_accumulation_dtype=given
    )
    assert accumulation_dtype(training) == expected


def test_parameter_bytes_of_a_small_llama(plan_of: Callable[..., Plan]) -> None:
    """Counted by hand: hidden 64, heads 4 x 16, kv 2 x 16, feed-forward 96, vocabulary 256, 4
    layers, fp32."""
    layer = (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96) // 2 + 2 * 64  # cut in two, norms whole
    embedding, head = 256 * 64 // 2, 256 * 64 // 2 + 64
    plan = plan_of()
    decoders = [sum("layers" in name for name in stage.layers) for stage in plan.stages]
    assert sum(decoders) == 4
    first, second = embedding + decoders[0] * layer, head + decoders[1] * layer
    assert [r.parameter_bytes for r in plan.ranks] == [4 * first, 4 * first, 4 * second, 4 * second]


def test_zero3_keeps_a_rounded_up_part_of_each_parameter(plan_of: Callable[..., Plan]) -> None:
    def bytes_held(zero: int) -> list[int]:
        layout = {"tensor": 1, "pipeline": 1, "data": 3, "zero_stage": zero, "micro_batch_size": 2}
        return [
            r.parameter_bytes
            for r in plan_of(
                {
                    "cluster": {"nodes": 1, "gpus_per_node": 3, "gpu": "cpu"},
                    "training.global_batch_size": 6,
                    "parallelism": layout,
                }
            ).ranks
        ]

    attention = [64 * 64] * 2 + [64 * 32] * 2
    sizes = [256 * 64, 64, 256 * 64] + 4 * (attention + [64 * 96] * 3 + [64] * 2)
    assert bytes_held(1) == [4 * sum(sizes)] * 3
    assert bytes_held(3) == [4 * sum(-(-size // 3) for size in sizes)] * 3


def test_tied_embedding_counts_on_both_stages_but_once_on_one_rank(
    plan_of: Callable[..., Plan],
) -> None:
    def total(tied: bool, pipeline: int) -> int:
        plan = plan_of(
            {
                "model.config.tie_word_embeddings": tied,
                "cluster": {"nodes": 1, "gpus_per_node": pipeline, "gpu": "cpu"},
                "parallelism": {
                    "tensor": 1,
                    "pipeline": pipeline,
                    "data": 1,
                    "schedule": "1f1b",
                    "micro_batch_size": 2,
                },
            }
        )
        return sum(r.parameter_bytes for r in plan.ranks)

    assert total(tied=True, pipeline=2) == total(tied=False, pipeline=2)
    assert total(tied=True, pipeline=1) == total(tied=False, pipeline=1) - 4 * 256 * 64


def test_recipe_hash_is_of_the_values_not_their_order(write_recipe: Callable[..., Path]) -> None:
    recipe: Recipe = load_recipe(write_recipe())
    text = json.dumps(recipe.document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert compile_recipe(recipe).plan.recipe_hash == hashlib.sha256(text.encode()).hexdigest()
    assert (
        canonical_hash({"a": 1, "b": 2})
        == canonical_hash({"b": 2, "a": 1})
        != canonical_hash({"a": 1, "b": 3})
    )


@pytest.mark.parametrize(
    "directory", ["run", "model", "plan.json", ".", "run/x", "../elsewhere", "./tokenizer"]
)
def test_checkpoint_directory_must_be_its_own(
    codes_of: Callable[..., list[str]], directory: str
) -> None:
    assert codes_of({"checkpoint": {"directory": directory}}) == ["SW5105"]


@pytest.mark.parametrize("directory", ["checkpoints", "a/b", "/scratch/run-7", "models"])
def test_checkpoint_directory_elsewhere(plan_of: Callable[..., Plan], directory: str) -> None:
    assert plan_of({"checkpoint": {"directory": directory}}).checkpoint.directory == directory


def test_byte_tokenizer_needs_256_symbols(
    codes_of: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    data = {"kind": "text", "path": "corpus.txt", "tokenizer": "byte"}
    assert codes_of(
        {
            "model.config.vocab_size": 255,
            "data": data,
            "parallelism.tensor": 1,
            "parallelism.data": 2,
        }
    ) == ["SW1912"]


def test_tokenizer_folder_travels_along(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    folder = tmp_path / "tok"
    folder.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "chat_template.jinja",
        "weights.safetensors",
    ):
        (folder / name).write_text(name)
    data = {"kind": "text", "path": "corpus.txt", "tokenizer": "./tok"}
    compiled = compile_recipe(load_recipe(write_recipe({"data": data})))
    assert compiled.plan.data.tokenizer == "tokenizer"
    copied = {
        name: content for name, content in compiled.files.items() if name.startswith("tokenizer/")
    }
    assert sorted(copied) == [
        "tokenizer/chat_template.jinja",
        "tokenizer/merges.txt",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ]
    assert copied["tokenizer/merges.txt"] == b"merges.txt"


def test_a_tokenizer_that_is_not_in_the_cache_is_refused(
    codes_of: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "corpus.txt").write_text("text")
    assert codes_of({"data": {"kind": "text", "path": "corpus.txt", "tokenizer": "org/name"}}) == [
        "SW1911"
    ]


def test_pretrained_needs_safetensors(
    codes_of: Callable[..., list[str]],
    plan_of: Callable[..., Plan],
    small_recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_recipe["model"]["config"]))
    changes = {"model": {"source": "./weights", "weights": "pretrained"}}
    assert codes_of(changes) == ["SW1913"]
    (folder / "model.safetensors").write_bytes(b"")
    assert codes_of(changes) == ["SW1913"]  # cut off
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    assert codes_of(changes) == ["SW2022"]  # of no model
    write_weights(folder, small_recipe["model"]["config"])
    plan = plan_of(changes)
    assert plan.model.weights_path == str(folder) and plan.model.weights == "pretrained"


def test_plan_verifies_itself(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    plan.verify()
    counts_packed_pairs = dataclasses.replace(plan.training.objective, packed=True)
    for broken in (
        dataclasses.replace(
            plan, training=dataclasses.replace(plan.training, objective=counts_packed_pairs)
        ),
        dataclasses.replace(plan, nodes=2),
        dataclasses.replace(plan, stages=plan.stages[:1]),
        dataclasses.replace(plan, ranks=(plan.ranks[1], plan.ranks[0], *plan.ranks[2:])),
    ):
        with pytest.raises(ValueError):
            broken.verify()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "plan.json has version 2, not 1"),
        ({"version": None}, "plan.json has version None, not 1"),
        ({"experts": ...}, "missing required field `experts`"),
        ({"later": 1}, "unknown key 'later'"),
    ],
)
def test_another_plan_is_refused(
    plan_of: Callable[..., Plan], tmp_path: Path, change: dict[str, object], why: str
) -> None:
    document = json.loads(plan_to_json(plan_of())) | change
    kept = {key: value for key, value in document.items() if value is not ...}
    (tmp_path / "plan.json").write_text(json.dumps(kept))
    with pytest.raises(Refusal) as refused:
        load_plan(tmp_path)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW6001" and why in diagnostic.message
