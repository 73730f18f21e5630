"""Every rule: one layout that breaks it, the same layout put right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.diagnostics import KeyPath
from shardwright.diagnostics.code_registry import CODES
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.models.expert_modules import experts_per_layer
from shardwright.models.model_graph import ModelGraph
from shardwright.models.tensor_parallel_plan import proved
from shardwright.recipe.literal_types import Offload, PartialCheckpointing
from shardwright.recipe.recipe_types import DataSection, LoraSection, Recipe, ValidationSection
from shardwright.search.rule_registry import can_be_priced, check_layout, rules_for
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import LLAMA_8B, SMALL_GPT2, SMALL_LLAMA, graph_of, recipe_of

GOOD = Layout(
    tensor=2,
    pipeline=2,
    data=2,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=8,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)


def codes(
    recipe: Recipe, strategy: Layout, config: dict[str, JsonValue] | None = None
) -> dict[str, str]:
    found = check_layout(
        Problem(
            recipe=recipe,
            graph=graph_of(config or SMALL_LLAMA),
            cluster=resolve_cluster(recipe.cluster),
        ),
        strategy,
    )
    for d in found:
        assert "\n" not in d.message and d.help and d.key
    return {d.code: d.severity for d in found}


def change(**changes: Any) -> Layout:
    return dataclasses.replace(GOOD, **changes)


BROKEN_STRATEGIES: dict[str, Layout] = {
    "SW3101": change(data=1, gradient_accumulation_steps=16),
    "SW3102": change(micro_batch_size=3, gradient_accumulation_steps=2),
    "SW3135": change(activation_checkpointing=PartialCheckpointing(full=9)),
    "SW3106": change(tensor=1, pipeline=8, data=1, gradient_accumulation_steps=16),
    "SW3107": change(zero_stage=0),
    "SW3108": change(zero_stage=3),
    "SW3109": change(schedule="dualpipev", micro_batch_size=4, gradient_accumulation_steps=2),
    "SW3110": change(schedule="dualpipev", pipeline=1, data=4, gradient_accumulation_steps=4),
    "SW3114": change(zero_stage=0, pipeline=1, tensor=1, data=8, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("code", BROKEN_STRATEGIES)
def test_a_layout_that_breaks_the_rule(code: str) -> None:
    assert codes(recipe_of(), BROKEN_STRATEGIES[code]) == {code: "error"}


def test_the_degree_that_makes_up_the_world_is_named() -> None:
    """SW3101 is about a pin where there is one, and what it says makes the product the number of
    GPUs."""
    for recipe, key, valid in (
        (recipe_of(), "tensor", ("4",)),
        (recipe_of(parallelism={"data": 1}), "data", ("2",)),
    ):
        problem = Problem(
            recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
        )
        (found,) = check_layout(problem, BROKEN_STRATEGIES["SW3101"])
        assert (found.key, found.valid) == (("parallelism", key), valid)


def test_a_layout_that_breaks_none() -> None:
    assert codes(recipe_of(), GOOD) == {}
    assert codes(recipe_of(), change(schedule="dualpipev")) == {}
    assert (
        codes(recipe_of(), change(zero_stage=3, pipeline=1, data=4, gradient_accumulation_steps=4))
        == {}
    )


def test_several_at_once() -> None:
    assert set(
        codes(recipe_of(), change(zero_stage=2, offload="parameters", schedule="dualpipev", data=1))
    ) == {
        "SW3101",
        "SW3102",
        "SW3108",
        "SW3111",
        "SW3127",
    }


def test_offload_needs_something_that_is_cut() -> None:
    """The optimizer's states from stage 1, the parameters from stage 3 (SW3111)."""
    recipe = recipe_of(cluster={"host_memory_gib": 1000})
    flat = change(pipeline=1, data=4, gradient_accumulation_steps=4)
    assert codes(recipe, change(offload="optimizer")) == {}
    needs: dict[Offload, int] = {"optimizer": 1, "parameters": 3}
    for offload, needed in needs.items():
        for stage in (1, 2, 3):
            layout = dataclasses.replace(flat, offload=offload, zero_stage=stage)
            assert codes(recipe, layout) == ({} if stage >= needed else {"SW3111": "error"})
    single = recipe_of(cluster={"host_memory_gib": 1000}, training={"precision": "fp32"})
    assert codes(single, dataclasses.replace(flat, offload="optimizer", zero_stage=0)) == {
        "SW3111": "error"
    }


def test_offload_fits_in_host_memory() -> None:
    """16 bytes a parameter over the nodes; a warning where the recipe does not say what there is
    (SW3127)."""
    layout = change(
        pipeline=1, data=4, gradient_accumulation_steps=4, zero_stage=3, offload="optimizer"
    )
    total = 16 * graph_of(LLAMA_8B).total_parameters / 2**30
    for gib, expected in ((None, "warning"), (total / 0.89, None), (total / 0.91, "error")):
        recipe = recipe_of(LLAMA_8B, cluster={"host_memory_gib": gib})
        assert codes(recipe, layout, LLAMA_8B).get("SW3127") == expected


def test_timers_of_a_pipeline() -> None:
    """DeepSpeed's engine fails with them (SW3133).

    tests/launch/test_extra_ds_config_keys.py tries every key.
    """
    timed = dataclasses.replace(recipe_of(), extra={"wall_clock_breakdown": True})
    assert codes(timed, GOOD) == {"SW3133": "error"}
    assert codes(timed, change(pipeline=1, data=4, gradient_accumulation_steps=4)) == {}
    assert (
        codes(dataclasses.replace(recipe_of(), extra={"wall_clock_breakdown": False}), GOOD) == {}
    )


ONE_NODE_OF_3: dict[str, object] = {"nodes": 2, "gpus_per_node": 6}


def test_flash_attention() -> None:
    """bf16 or fp16, a GPU with kernels, heads that they take (SW3128)."""
    graph = dataclasses.replace(graph_of(SMALL_LLAMA), attention="flash_attention_2")

    def found(
        graph: ModelGraph = graph, **training: object
    ) -> list[tuple[str, str, KeyPath | None]]:
        gpu = training.pop("gpu", "h100-sxm-80gb")
        recipe = recipe_of(cluster={"gpu": gpu}, training=training)
        diagnostics = check_layout(
            Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster)), GOOD
        )
        return [(d.code, d.severity, d.key) for d in diagnostics if d.code in ("SW3128", "SW3118")]

    refused = [("SW3128", "error", ("model", "attention"))]
    assert found() == found(precision="fp16") == []
    assert found(precision="fp32") == refused
    assert found(gpu="v100-sxm2-32gb", precision="fp16") == refused
    assert found(gpu="cpu") == refused
    assert found(dataclasses.replace(graph, head_dim=320)) == refused
    assert found(dataclasses.replace(graph, attention="sdpa", head_dim=320), precision="fp32") == []


def test_attention_heads() -> None:
    recipe = recipe_of(cluster=ONE_NODE_OF_3)
    wide = change(tensor=3, pipeline=2, data=2)
    assert {"SW3103", "SW3104", "SW3105"} <= set(codes(recipe, wide))
    # The same degree with heads and widths that it divides.
    config = {
        **SMALL_LLAMA,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 192,
    }
    assert codes(recipe, wide, config) == {}


def test_key_value_heads() -> None:
    """They divide over the tensor ranks, or each is held by several."""
    config = {**SMALL_LLAMA, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}
    config |= {"intermediate_size": 192}
    assert codes(recipe_of(), GOOD, config) == {"SW3104": "error"}
    found = check_layout(
        Problem(
            recipe=recipe_of(), graph=graph_of(config), cluster=resolve_cluster(recipe_of().cluster)
        ),
        GOOD,
    )
    assert found[0].valid == ("1", "3", "6")
    copied = change(tensor=8, pipeline=1, data=1, gradient_accumulation_steps=16)
    assert codes(recipe_of(), copied) == {}  # eight ranks, four heads


def test_experts() -> None:
    config = {
        **SMALL_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    without = {"SW3132": "warning"}  # expert parallelism
    assert codes(recipe_of(), GOOD, config) == without
    assert codes(recipe_of(), GOOD, {**config, "intermediate_size": 129}) == {
        "SW3126": "error",
        **without,
    }


def test_the_fallback_asks_nothing_of_the_heads() -> None:
    """It cuts each linear by itself; those that do not divide stay whole."""
    config = {
        **SMALL_LLAMA,
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 60,
        "intermediate_size": 129,
    }
    config |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20}
    graph = graph_of(config)
    assert graph.tensor_parallel_kind == "fallback"
    assert codes(recipe_of(), GOOD, config) == {}


def test_only_the_feed_forward_does_not_divide() -> None:
    assert codes(recipe_of(), GOOD, {**SMALL_LLAMA, "intermediate_size": 129}) == {
        "SW3105": "error"
    }


def test_heads_without_groups_are_reported_once() -> None:
    config = {**SMALL_LLAMA, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3}
    assert codes(recipe_of(), GOOD, config) == {"SW3103": "error"}


def test_tensor_groups_stay_inside_a_node() -> None:
    split = {"nodes": 8, "gpus_per_node": 1}
    assert codes(recipe_of(cluster=split), GOOD) == {"SW3112": "error"}
    assert (
        codes(recipe_of(cluster=split), change(tensor=1, data=4, gradient_accumulation_steps=4))
        == {}
    )


def test_tensor_groups_may_fill_an_nvlink_domain() -> None:
    split = {"nodes": 8, "gpus_per_node": 1, "nvlink_domain_gpus": 4}
    assert codes(recipe_of(cluster=split), GOOD) == {}
    eight = change(tensor=8, pipeline=1, data=1, gradient_accumulation_steps=16)
    wide = {**SMALL_LLAMA, "num_key_value_heads": 8}
    assert codes(recipe_of(wide, cluster=split), eight, wide) == {"SW3112": "error"}


def test_nodes_that_do_not_divide_over_nvlink_domains() -> None:
    layout = change(tensor=1, pipeline=1, data=40, gradient_accumulation_steps=1)
    cluster = {"nodes": 5, "gpus_per_node": 8, "gpu": "gb200-nvl-186gb", "nvlink_domain_gpus": 16}

    def found(**changes: int) -> dict[str, str]:
        training = {"global_batch_size": 40}
        return codes(recipe_of(cluster={**cluster, **changes}, training=training), layout)

    assert found() == {"SW3129": "warning"}
    assert found(nvlink_domain_gpus=8) == found(nvlink_domain_gpus=72) == {}
    assert found(nodes=10, gpus_per_node=4, nvlink_domain_gpus=20) == {}


def test_dropout_runs_everywhere() -> None:
    assert codes(recipe_of(), GOOD, {**SMALL_GPT2, "attn_pdrop": 0.1}) == {}


def test_layers_skipped_at_random() -> None:
    config: dict[str, JsonValue] = {"model_type": "opt", "num_hidden_layers": 4, "layerdrop": 0.1}
    flat = {"tensor": 1, "pipeline": 1, "data": 8, "gradient_accumulation_steps": 2}
    assert "SW3113" in codes(recipe_of(), GOOD, config)
    assert "SW3113" in codes(recipe_of(), change(**flat, zero_stage=3), config)
    assert "SW3113" not in codes(recipe_of(), change(**flat), config)
    assert "SW3113" not in codes(recipe_of(), GOOD, {**config, "layerdrop": 0.0})


@pytest.mark.parametrize(
    "key",
    [
        *({"expert": 2}, {"context": 2}, {"virtual_stages": 2}, {"sequence_parallel": True}),
        *({"expert_dispatcher": "deepep"}, {"expert_overlap": True}),
    ],
)
def test_layout_keys_of_later_versions(key: dict[str, object]) -> None:
    recipe = recipe_of(parallelism=key)
    layout = change(
        **key, **({"data": 1, "gradient_accumulation_steps": 16} if "context" in key else {})
    )
    known = {"context": {}, "expert": {"SW3147": "error"}}  # a dense model has none
    (axis,) = key
    assert codes(recipe, layout) == known.get(axis, {"SW3115": "error"})
    later = recipe_of(parallelism=key, target="megatron")
    assert "SW3115" not in codes(later, layout)
    found = check_layout(
        Problem(
            recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
        ),
        layout,
    )
    assert can_be_priced(layout, found)


def test_ranks_of_a_context_group_count_in_the_world() -> None:
    recipe = recipe_of(parallelism={"context": 2})
    found = check_layout(
        Problem(
            recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
        ),
        change(context=2),
    )
    assert "tensor 2 x pipeline 2 x context 2 x data 2 = 16" in found[0].message


def test_a_mixture_of_experts_is_warned_of() -> None:
    mixture: dict[str, JsonValue] = {**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 4}
    whole = change(tensor=1, data=4, gradient_accumulation_steps=4)
    assert codes(recipe_of(), whole, mixture) == {"SW3132": "warning"}
    assert (
        experts_per_layer(graph_of(mixture)) == 4 and experts_per_layer(graph_of(SMALL_LLAMA)) == 0
    )


def test_the_deepspeed_rules_are_deepspeeds() -> None:
    for code in ("SW3107", "SW3108", "SW3114"):
        assert code not in codes(recipe_of(target="megatron"), BROKEN_STRATEGIES[code])


def test_zero_0_is_for_fp32() -> None:
    split = change(zero_stage=0, pipeline=1, data=4, gradient_accumulation_steps=4)
    for training in ({"precision": "fp16"}, {"precision": "bf16"}):
        assert codes(recipe_of(training=training), split) == {"SW3114": "error"}
    assert codes(recipe_of(training={"precision": "fp32"}), split) == {}


def test_summing_micro_batches_in_half_precision() -> None:
    recipe = recipe_of(training={"gradient_accumulation_dtype": "bf16"})
    assert codes(recipe, GOOD) == {"SW3121": "warning"}
    assert codes(recipe, change(micro_batch_size=8, gradient_accumulation_steps=1)) == {}
    assert codes(recipe_of(training={"gradient_accumulation_dtype": "fp32"}), GOOD) == {}


def test_positions() -> None:
    long = recipe_of(training={"sequence_length": 129})
    assert codes(long, GOOD, SMALL_GPT2) == {"SW3116": "error"}
    assert codes(long, GOOD, SMALL_LLAMA) == {"SW3117": "warning"}
    assert codes(recipe_of(training={"sequence_length": 128}), GOOD, SMALL_GPT2) == {}


def test_precision() -> None:
    old = {"gpu": "v100-sxm2-32gb"}
    assert codes(recipe_of(cluster=old), GOOD) == {"SW3118": "error"}
    assert codes(recipe_of(cluster=old, training={"precision": "fp16"}), GOOD) == {}
    cpu = {"gpu": "cpu"}
    assert codes(recipe_of(cluster=cpu, training={"precision": "fp16"}), GOOD) == {
        "SW3119": "error"
    }
    assert codes(recipe_of(cluster=cpu), GOOD) == {}


def test_zero_3_between_nodes() -> None:
    strategy = change(tensor=1, pipeline=1, data=8, zero_stage=3, gradient_accumulation_steps=2)
    slow: dict[str, object] = {"nodes": 2, "gpus_per_node": 4, "inter_node_gbits_per_second": 100.0}
    assert codes(recipe_of(cluster=slow), strategy) == {"SW3120": "warning"}
    assert codes(recipe_of(cluster={**slow, "inter_node_gbits_per_second": 200.0}), strategy) == {}
    assert codes(recipe_of(cluster={**slow, "nvlink_domain_gpus": 8}), strategy) == {}
    assert codes(recipe_of(), strategy) == {}


def test_every_rule_stands_in_this_folder() -> None:
    from pathlib import Path

    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for code in rules_for("deepspeed"):
        assert code in CODES
        assert f'"{code}"' in text, f"no test names {code}"


STABLELM: dict[str, JsonValue] = {**SMALL_LLAMA, "model_type": "stablelm"}


def test_types_without_a_tensor_map(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = change(tensor=1, data=4, gradient_accumulation_steps=4)
    monkeypatch.setitem(proved(), "stablelm", {"refused": "it loses a head"})
    refused = {**STABLELM, "vocab_size": 261}
    assert codes(recipe_of(), GOOD, refused) == {"SW3123": "error"}
    assert codes(recipe_of(), whole, refused) == {}
    assert codes(recipe_of(), whole, STABLELM) == {}


def test_packed_documents_are_kept_apart() -> None:
    """Only where the probe saw it, and only data that is packed (SW3125)."""
    text = DataSection(
        kind="text", path="python-stdlib", tokenizer="byte", packing=True, shuffle=True
    )
    pairs = dataclasses.replace(text, kind="preference", path="docstrings", packing=True)
    graph = dataclasses.replace(
        graph_of(SMALL_LLAMA), packing="a packed document's logits differ by 1.0 from its own"
    )
    for data, expected in (
        (text, ["SW3125"]),
        (dataclasses.replace(text, packing=False), []),
        (pairs, ["SW3125"]),
        (dataclasses.replace(pairs, packing=False), []),
    ):
        recipe = dataclasses.replace(recipe_of(), data=data)
        found = check_layout(
            Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster)), GOOD
        )
        assert [d.code for d in found] == expected
        assert codes(recipe, GOOD) == {}


def test_packing_of_validation_alone() -> None:
    """The help names the section that packs."""
    text = DataSection(
        kind="text", path="python-stdlib", tokenizer="byte", packing=True, shuffle=True
    )
    graph = dataclasses.replace(
        graph_of(SMALL_LLAMA), packing="a packed document's logits differ by 1.0 from its own"
    )
    held_out = ValidationSection(every_steps=1, fraction=None, data=text)
    recipe = dataclasses.replace(
        recipe_of(), data=dataclasses.replace(text, packing=False), validation=held_out
    )
    (told,) = check_layout(
        Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster)), GOOD
    )
    assert told.code == "SW3125" and told.key == ("validation", "packing")
    assert "under validation:" in str(told.help)


def test_packed_documents_under_a_rope_that_depends_on_the_length() -> None:
    """SW3136: only beyond the switch, and only data that is packed."""
    rope: dict[str, JsonValue] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    longrope = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    dynamic: dict[str, JsonValue] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    text = DataSection(
        kind="text", path="python-stdlib", tokenizer="byte", packing=True, shuffle=True
    )
    for table, most in ((longrope, 64), (dynamic, 32)):
        config = {
            **dict(graph_of(SMALL_LLAMA).config),
            "rope_parameters": table,
            "max_position_embeddings": 32,
        }
        for packing in (True, False):
            for length in (most, most + 1):
                recipe = dataclasses.replace(
                    recipe_of(), data=dataclasses.replace(text, packing=packing)
                )
                training = dataclasses.replace(recipe.training, sequence_length=length)
                recipe = dataclasses.replace(recipe, training=training)
                graph = dataclasses.replace(graph_of(SMALL_LLAMA), config=config)
                found = check_layout(
                    Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster)),
                    GOOD,
                )
                refused = "SW3136" in [d.code for d in found]
                assert refused == (packing and length > most), (table, packing, length, found)


def test_a_chunked_loss_where_the_head_is_proved_to_run_alone() -> None:
    unproved = dataclasses.replace(graph_of(SMALL_LLAMA), model_type="prophetnet")
    chunked = dataclasses.replace(
        recipe_of(), model=dataclasses.replace(recipe_of().model, loss="chunked")
    )
    found = check_layout(
        Problem(recipe=chunked, graph=unproved, cluster=resolve_cluster(chunked.cluster)), GOOD
    )
    assert [(d.code, d.severity, d.key) for d in found if d.code == "SW1431"] == [
        ("SW1431", "error", ("model", "loss"))
    ]
    assert "SW1431" not in codes(chunked, GOOD)


def test_where_lora_runs() -> None:
    everything = LoraSection(rank=8, alpha=16, dropout=0.0, target_modules=None)
    adapted = dataclasses.replace(recipe_of(), lora=everything)
    alone = change(tensor=1, pipeline=1, data=8, gradient_accumulation_steps=2, zero_stage=2)
    assert codes(adapted, alone) == {}
    assert codes(adapted, GOOD) == {"SW1432": "error", "SW1433": "error"}
    misspelt = dataclasses.replace(everything, target_modules=("q_proj", "k_prjo"))
    assert codes(dataclasses.replace(adapted, lora=misspelt), alone) == {"SW1434": "error"}
    head = dataclasses.replace(everything, target_modules=("lm_head",))
    assert codes(dataclasses.replace(adapted, lora=head), alone) == {"SW1434": "error"}


def test_selective_checkpointing_needs_an_attention_module() -> None:
    mamba: dict[str, JsonValue] = {
        "model_type": "mamba",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "vocab_size": 260,
    }
    selective = change(
        tensor=1, data=4, gradient_accumulation_steps=4, activation_checkpointing="selective"
    )
    assert codes(recipe_of(), selective, mamba) == {"SW3124": "error"}
    assert codes(recipe_of(), selective, STABLELM) == {}


def test_what_the_probe_warns_of() -> None:
    bert: dict[str, JsonValue] = {
        **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        "model_type": "bert",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 260,
    }
    whole = change(tensor=1, data=4, gradient_accumulation_steps=4)
    assert codes(recipe_of(), whole, {**bert, "is_decoder": True}) == {}
    assert codes(recipe_of(), whole, bert) == {"SW3130": "warning"}
    smoothed: dict[str, JsonValue] = {
        "model_type": "prophetnet",
        "hidden_size": 64,
        "num_decoder_layers": 4,
    }
    smoothed |= {
        "vocab_size": 260,
        "decoder_ffn_dim": 64,
        "num_decoder_attention_heads": 4,
        "is_decoder": True,
    }
    smoothed |= {
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    assert codes(recipe_of(), whole, {**smoothed, "activation_dropout": 0.0}) == {
        "SW3131": "warning"
    }
