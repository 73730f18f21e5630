"""Reward models: their head in the graph, in costs and in what is split, and what cannot be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from shardwright.cost.layer_shapes import model_shapes
from shardwright.diagnostics import Refusal
from shardwright.layout.tensor_parallel_map import tensor_parallel_map
from shardwright.models.graph_builder import build_model_graph, compare_weights
from shardwright.models.layer_split import NotSplittable
from shardwright.models.model_graph import ModelGraph
from shardwright.models.tasks.sequence_classification import pooled_loss, score_each_token
from shardwright.models.tasks.task_registry import SEQUENCE_CLASSIFICATION
from shardwright.recipe.recipe_types import ModelSection
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA

TIED = {**SMALL_LLAMA, "tie_word_embeddings": True}
SMALL_QWEN3_MOE: dict[str, Any] = {
    **SMALL_LLAMA,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}


def section(config: Any = None, source: Path | None = None) -> ModelSection:
    return ModelSection(
        source=None if source is None else str(source),
        config=config,
        revision="main",
        weights="random" if source is None else "pretrained",
        attention="auto",
        loss="auto",
        task="sequence-classification",
    )


def graph_of(config: Any) -> ModelGraph:
    return build_model_graph(section(config))


def built(config: Any, **more: Any) -> Any:
    document = {**config, **more}
    return AutoConfig.for_model(document.pop("model_type"), **document)


@pytest.mark.parametrize("config", [SMALL_LLAMA, TIED, SMALL_GPT2, SMALL_QWEN3_MOE])
def test_the_graph_is_that_of_transformers_model(config: Any) -> None:
    graph = graph_of(config)
    model = AutoModelForSequenceClassification.from_config(built(config, num_labels=1))
    assert graph.total_parameters == sum(p.numel() for p in model.parameters())
    assert graph.architecture == type(model).__name__
    assert not graph.tied and graph.cut.loss == "pooled" and graph.cut.causal
    head = graph.layers[-1]
    assert [p.name for p in head.parameters][-1] == "score.weight"
    assert head.flops_source == "traced"
    assert head.matmul_flops_per_token == 2 * graph.hidden_size


def test_costs_take_the_head_as_it_is() -> None:
    graph = graph_of(SMALL_LLAMA)
    assert graph.output_width == 1 and graph.vocabulary_size == SMALL_LLAMA["vocab_size"]
    assert [model_shapes(graph, tensor).head_width for tensor in (1, 2)] == [1, 1]
    sharded = tensor_parallel_map(graph, 2)
    styles = {module.module: module.style for module in sharded.modules}
    assert styles["model.embed_tokens"] == "vocabulary_embedding" and not sharded.vocabulary_sizes
    assert styles["score"] == "replicated"


def test_scores_are_those_of_each_last_token() -> None:
    config = built(SMALL_LLAMA, num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    plain = AutoModelForSequenceClassification.from_config(config).eval()
    model = SEQUENCE_CLASSIFICATION.build(config).eval()
    model.load_state_dict(plain.state_dict())
    ids = torch.randint(1, 259, (3, 9))
    ids[0, 4:], ids[1, 7:] = 0, 0
    with torch.no_grad():
        scores = model(input_ids=ids).logits
        pooled = plain(input_ids=ids).logits
    assert scores.shape == (3, 9, 1)
    assert torch.equal(scores[torch.arange(3), torch.tensor([3, 6, 8])], pooled)


def test_a_model_that_pools_another_token_is_found_out() -> None:
    model = SEQUENCE_CLASSIFICATION.build(built(SMALL_LLAMA, num_labels=1)).eval()
    ids = torch.randint(1, 259, (2, 12))
    assert pooled_loss(model, ids) == "pooled"
    pools = type(model).pools
    type(model).pools = lambda self, **more: pools(self, **{**more, "input_ids": ids.flip(1)})
    with pytest.raises(NotSplittable, match="last token before the padding"):
        pooled_loss(model, ids)


def test_a_model_without_the_head_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(built(SMALL_LLAMA))
    score_each_token(model)
    with pytest.raises(NotSplittable, match="no linear named 'score'"):
        pooled_loss(model, torch.ones(1, 4, dtype=torch.long))


def refused(config: Any) -> Any:
    with pytest.raises(Refusal) as refusal:
        graph_of(config)
    return refusal.value.diagnostics[0]


def test_a_type_without_classification_is_refused() -> None:
    codegen = {"model_type": "codegen", "n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50}
    diagnostic = refused(codegen)
    assert diagnostic.code == "SW1245" and "codegen" in diagnostic.message


def test_a_classifier_of_several_classes_is_refused() -> None:
    architectures = ["LlamaForSequenceClassification"]
    diagnostic = refused({**SMALL_LLAMA, "num_labels": 3, "architectures": architectures})
    assert diagnostic.code == "SW1247" and "3 classes" in diagnostic.message
    assert graph_of({**SMALL_LLAMA, "num_labels": 1, "architectures": architectures})


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_models_weights_lack_the_head(tied: bool, tmp_path: Path) -> None:
    config = built(SMALL_LLAMA, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    own = section(source=tmp_path)
    [note] = compare_weights(own, build_model_graph(own))
    assert (note.code, note.severity) == ("SW2022", "note") and "score.weight" in note.message


def test_a_reward_models_weights_are_complete(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(built(SMALL_LLAMA, num_labels=1))
    model.save_pretrained(tmp_path)
    own = section(source=tmp_path)
    assert compare_weights(own, build_model_graph(own)) == ()
