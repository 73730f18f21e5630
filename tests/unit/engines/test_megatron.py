"""What target: megatron refuses, and how Megatron-Core's parameters are made of Hugging Face's.
Nothing of it is imported here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwright.compile.recipe_compiler import compile_recipe, estimate_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines import engine_table
from shardwright.engines.megatron import (
    megatron_equivalence,
    megatron_model_configs,
)
from shardwright.engines.megatron.megatron_capabilities import (
    MEGATRON,
    REFUSED_KEYS,
    RULES,
    SUPPORTED_KEYS,
)
from shardwright.engines.megatron.megatron_weight_mapping import (
    RankHeads,
    copied_rows,
    fused_qkv_rows,
    grouped_qkv_rows,
    stacked_rows,
)
from shardwright.launch.preflight_checks import compiles_cpu_adam
from shardwright.layout.axes import AXES
from shardwright.layout.layout import Layout
from shardwright.layout.parameter_sharding import padded_shard_sizes
from shardwright.lint.megatron_lint import lint_arguments
from shardwright.lint.megatron_script import read_arguments
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import recipe_schema, schema_properties
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.search.layout_search import search
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.rule_registry import check_layout
from shardwright.search.step_time_bound import StepTimeBound
from shardwright.search.training_rules import engine_recipe_errors
from tests.conftest import SMALL_RECIPE
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of

HEADS = RankHeads(query=6, groups=2, size=4)
NO_MORE_RECOMPUTE: dict[str, dict[str, Any]] = {
    "training.precision": {"training.precision": "fp16"},
    "model.loss": {"model.loss": "chunked"},
    "model.kernels": {"model.kernels": "compile"},
    "model.router_aux_loss": {"model.router_aux_loss": 0.001},
    "model.freeze": {"model.freeze": ["model.layers.0.*"]},
    "model.task": {"model.task": "image-text-to-text"},
    "model.attention": {"model.attention": "flash_attention_2", "training.precision": "bf16"},
    "training.outer": {
        "cluster.nodes": 2,
        "cluster.islands": 2,
        "cluster.inter_island_gbits_per_second": 1,
    },
    "lora": {"lora": {"rank": 4}},
    "extra": {"extra": {"memory_breakdown": True}},
}
LAYOUT = {"tensor": 1, "pipeline": 1, "data": 4, "zero_stage": 1, "micro_batch_size": 2}
ILLEGAL: dict[str, dict[str, Any]] = {
    "SW3151": {"zero_stage": 2},
    "SW3152": {"tensor": 4, "data": 1},
    "SW3153": {"sequence_parallel": True},
    "SW3154": {"schedule": "dualpipev", "pipeline": 2, "data": 2},
    "SW3155": {"offload": "parameters"},
    "SW3177": {"offload": "optimizer", "zero_stage": 0},
    "SW3157": {"virtual_stages": 2},
    "SW3156": {"tensor": 2, "data": 2},
    "SW3164": {"context": 3, "data": 1},
    "SW3165": {"expert": 3},
    "SW3166": {"tensor": 2, "data": 2, "sequence_parallel": True},
    "SW3167": {"tensor": 4, "data": 1, "sequence_parallel": True, "expert_tensor": 2},
    "SW3163": {"expert_overlap": True},
    "SW3176": {"tensor": 2, "data": 2},
    "SW3170": {"expert": 2, "expert_dispatcher": "deepep"},
    "SW3174": {"expert": 2, "expert_dispatcher": "deepep"},
    "SW3175": {"expert": 2, "expert_overlap": True},
}
EXPERTS = {**SMALL_RECIPE["model"]["config"], "model_type": "mixtral", "num_local_experts": 4}


def test_every_key_of_a_recipe_has_its_answer() -> None:
    """It runs, it is refused by name, or it is an axis, which the rules know."""
    axes = {f"{axis.section}.{axis.name}" for axis in AXES}
    declared = [key.removesuffix(".name") for key in MEGATRON.trained_values()]
    schema = recipe_schema()
    for section, value in schema_properties(schema, {}).items():
        keys = [f"{section}.{key}" for key in schema_properties(value, {})] or [section]
        for key in keys:
            known = [*SUPPORTED_KEYS, *REFUSED_KEYS, *axes, *declared]
            assert key in known or section in known, key
    assert set(NO_MORE_RECOMPUTE) == {*REFUSED_KEYS, "training.precision", "model.task"}


@pytest.mark.parametrize(("key", "changes"), NO_MORE_RECOMPUTE.items(), ids=NO_MORE_RECOMPUTE)
def test_a_key_that_does_not_run(
    key: str, changes: dict[str, Any], write_recipe: Callable[..., Path]
) -> None:
    recipe = load_recipe(write_recipe({"target": "megatron", **changes}))
    errors = engine_recipe_errors(MEGATRON, recipe)
    assert [(d.code, ".".join(map(str, d.key or ()))) for d in errors] == [("SW1922", key)]
    plain = load_recipe(write_recipe({"target": "megatron"}))
    assert engine_recipe_errors(MEGATRON, plain) == ()


@pytest.mark.parametrize(("code", "changes"), ILLEGAL.items(), ids=ILLEGAL)
def test_a_layout_that_it_does_not_run(
    code: str, changes: dict[str, Any], write_recipe: Callable[..., Path]
) -> None:
    config = {
        "SW3166": {**EXPERTS, "model_type": "gpt_oss"},
        "SW3156": EXPERTS,
        "SW3176": {**SMALL_RECIPE["model"]["config"], "model_type": "phi3", "pad_token_id": 0},
        **dict.fromkeys(("SW3165", "SW3167", "SW3163", "SW3170", "SW3174", "SW3175"), EXPERTS),
    }.get(code, SMALL_RECIPE["model"]["config"])
    recipe = load_recipe(write_recipe({"target": "megatron", "model.config": config}))
    problem = problem_of(recipe, graph_of(config))

    def codes(layout: dict[str, Any]) -> set[str]:
        plain = {"schedule": "1f1b", "offload": "none", "activation_checkpointing": "none"}
        strategy = Layout(
            **{**plain, "gradient_accumulation_steps": 8 // (2 * layout["data"]), **layout}
        )
        return {d.code for d in check_layout(problem, strategy) if d.severity == "error"} & set(
            RULES
        )

    elsewhere = {"SW3168", "SW3169", "SW3178", "SW3179", "SW3237", "SW3238"}
    assert set(ILLEGAL) | elsewhere == set(RULES)
    assert code in codes({**LAYOUT, **changes}) and code not in codes(LAYOUT)


def test_a_gpu_is_said_not_to_have_run_it(write_recipe: Callable[..., Path]) -> None:
    untested = {name for name, row in engine_table.ENGINES.items() if not row.tested_on_gpus}
    warned = {name for name, row in engine_table.ENGINES.items() if "SW3168" in row.rules}
    assert untested == warned == {"megatron"}
    for gpu, said in ("cpu", False), ("h100-sxm-80gb", True):
        changes = {"target": "megatron", "cluster.gpu": gpu, "parallelism": LAYOUT}
        _, estimate = estimate_recipe(load_recipe(write_recipe(changes)))
        told = [d for d in estimate.diagnostics if d.code == "SW3168"]
        assert [d.severity for d in told] == ["warning"] * said
        assert all(
            "not tested on GPUs" in d.message and "Transformer Engine" in d.help for d in told
        )


def test_a_dense_model_has_no_experts_to_share_out(write_recipe: Callable[..., Path]) -> None:
    for key, code in (
        ({"expert": 2}, "SW3165"),
        ({"tensor": 2, "data": 2, "expert_tensor": 1}, "SW3167"),
    ):
        recipe = load_recipe(write_recipe({"target": "megatron", "parallelism": {**LAYOUT, **key}}))
        with pytest.raises(Refusal) as caught:
            compile_recipe(recipe)
        assert code in [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("tensor", "apart", "expert"), [(2, 2, 2), (2, 1, 2), (2, 1, 4), (1, 1, 2), (2, 1, 1)]
)
def test_who_holds_which_experts(
    tensor: int,
    apart: int,
    expert: int,
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neighbours among the ranks that do not cut an expert, each place as often as any."""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())
    layout = {
        **LAYOUT,
        "tensor": tensor,
        "data": 4 // tensor,
        "expert": expert,
        "sequence_parallel": tensor > 1,
    }
    layout["expert_tensor"] = apart
    plan = compile_recipe(
        load_recipe(
            write_recipe({"target": "megatron", "model.config": EXPERTS, "parallelism": layout})
        )
    ).plan
    places = [plan.expert_coordinates(rank) for rank in plan.ranks]
    wanted = [(rank // apart % expert, rank // (apart * expert)) for rank in range(4)]
    assert places == wanted
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (split,) = (p for m in plan.tensor_parallel.modules for p in m.parameters if p.name == name)
    assert (split.dimension is None) == (apart == 1) and plan.expert_shard_count(name) == expert


@pytest.mark.parametrize(
    ("wanted", "said"), [("no-such-package", "is not installed"), ("numpy", "was not tested")]
)
def test_a_package_that_is_not_there(
    wanted: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dataclasses.replace(engine_table.ENGINES["megatron"], packages={wanted: "<0.1"})
    (told,) = engine_table.package_errors(engine)
    assert (
        told.code == "SW1923"
        and said in told.message
        and "shardwright[megatron]" in (told.help or "")
    )


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("0.16.1", True),
        ("0.19.2", True),
        ("0.16.0", False),
        ("0.17.0", False),
        ("0.18.3", False),
        ("0.20.0", False),
    ],
)
def test_minors_of_megatron_core(
    version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constructors' signatures change between minors: a compile refuses those that nobody
    tried."""
    have = {"megatron-core": version, "deepspeed": "0.19.8"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: have[name])
    told = engine_table.package_errors(engine_table.ENGINES["megatron"])
    assert [d.code for d in told] == ([] if is_tested else ["SW1923"])
    assert is_tested or f"megatron-core {version} was not tested" in told[0].message


def test_rows_of_fused_parameters() -> None:
    """Each way there and back: the rows of a rank's shards, put together as Megatron reads them."""
    q, k, v = (torch.arange(rows) + start for rows, start in ((24, 0), (8, 100), (8, 200)))
    shards = {"q": q, "k": k, "v": v, "qkv": torch.cat([q, k, v])}

    def made(source: Any, rows: int) -> torch.Tensor:
        out = torch.full((rows,), -1)
        for part in source(rows, HEADS):
            out[part.own : part.own + part.count] = shards[part.name][
                part.hf_start : part.hf_start + part.count
            ]
        return out

    # Megatron's own reading of linear_qkv (megatron/core/transformer/attention.py,
    # get_query_key_value_tensors).
    groups = made(grouped_qkv_rows("q", "k", "v"), 40).view(2, 5, 4)
    assert torch.equal(groups[:, :3].reshape(-1), q)
    assert torch.equal(groups[:, 3].reshape(-1), k) and torch.equal(groups[:, 4].reshape(-1), v)
    assert torch.equal(made(fused_qkv_rows("qkv"), 40), made(grouped_qkv_rows("q", "k", "v"), 40))
    assert torch.equal(made(stacked_rows("k", "v"), 16), torch.cat([k, v]))
    assert torch.equal(made(copied_rows("q"), 24), q)


@pytest.mark.parametrize(("total", "degree"), [(257, 4), (256, 4), (5, 4), (9, 2)])
def test_a_padded_vocabulary(total: int, degree: int) -> None:
    sizes = padded_shard_sizes(total, degree)
    assert sum(sizes) == total and len(sizes) == degree
    each = -(-total // degree)  # what each rank of a padded table has
    assert all(size == max(0, min(each, total - rank * each)) for rank, size in enumerate(sizes))


def test_rows_behind_the_last_token_are_zero() -> None:
    """Also where no weights are loaded, because a checkpoint comes next."""
    pytest.importorskip("megatron")
    from shardwright.engines.megatron.megatron_model import ParameterRange, zero_padding

    table, whole, unused = (nn.Parameter(torch.full((3, 2), torch.nan)) for _ in range(3))
    pieces = [(table, 0, 4), (whole, 0, 2), (whole, 2, 4), (unused, 0, 0)]
    zero_padding(
        ParameterRange(name="w", start=0, parameter=parameter, own=own, numel=numel)
        for parameter, own, numel in pieces
    )
    assert not table.any() and not unused.any() and whole.isnan().all()


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"unsupported": "rope_type yarn"}, "SW2051"),
        ({"apart": "logits differ by 1e-2"}, "SW2052"),
        ({"failed": "it broke"}, "SW2052"),
        ({"layout": "rank 3: it holds 7 bytes"}, "SW2053"),
        ({}, None),
    ],
)
def test_what_the_proof_says(
    told: dict[str, str],
    code: str | None,
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The compile is refused with what the other process found; a proof that held is not asked for
    again."""
    asked: list[Any] = []

    def answer(question: object) -> dict[str, str]:
        asked.append(json.dumps(question))
        return told

    monkeypatch.setattr(
        megatron_equivalence, "cache_folder", lambda: tmp_path / "cache"
    )  # other cases run at the same time
    monkeypatch.setattr(megatron_equivalence, "_run_check_process", answer)
    monkeypatch.setattr(engine_table, "package_errors", lambda engine: ())
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())
    layout = {"tensor": 2, "pipeline": 1, "data": 2, "zero_stage": 1, "micro_batch_size": 2}
    recipe = load_recipe(write_recipe({"target": "megatron", "parallelism": layout}))
    if code is None:
        plans = [compile_recipe(recipe).plan for _ in range(2)]
        assert len(asked) == 1 and plans[0].zero == {"stage": 1, "distributed_optimizer": True}
        # The tiny copy is made by models/tiny_config.py: other code there is another proof.
        monkeypatch.setattr(
            megatron_equivalence, "tracing_source_hash", lambda package: "of other code"
        )
        compile_recipe(recipe)
        assert len(asked) == 2
        return
    with pytest.raises(Refusal) as caught:
        compile_recipe(recipe)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code and next(iter(told.values())) in diagnostic.message


def test_one_expert_a_token_is_refused_in_words() -> None:
    """Where its weight is scaled to 1 Megatron-Core raises a ValueError about an option of its
    own."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 1}
    with pytest.raises(
        megatron_model_configs.Unsupported, match=r"num_experts_per_tok 1: .*norm_topk_prob: false"
    ):
        megatron_model_configs.qwen3_moe(
            AutoConfig.for_model("qwen3_moe", **sizes, norm_topk_prob=True)
        )
    made = megatron_model_configs.qwen3_moe(
        AutoConfig.for_model("qwen3_moe", **sizes, norm_topk_prob=False)
    )
    assert made["moe_router_pre_softmax"] and made["moe_router_topk"] == 1
    with pytest.raises(megatron_model_configs.Unsupported, match=r"2 or more experts a token$"):
        megatron_model_configs.mixtral(AutoConfig.for_model("mixtral", num_experts_per_tok=1))


def test_what_a_failed_proof_says_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for last, said in (
        ("[rank0]: ValueError: it is 3.", "it is 3."),
        ("RuntimeError: no", "no"),
        ("killed", "killed"),
    ):
        done = subprocess.CompletedProcess([], 1, "", f"Traceback\n{last}\n")
        monkeypatch.setattr(subprocess, "run", lambda *args, done=done, **options: done)
        assert megatron_equivalence._run_check_process({}) == {"failed": said}


def test_dropout_is_refused(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())
    config = {**SMALL_LLAMA, "attention_dropout": 0.1}
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(write_recipe({"target": "megatron", "model.config": config})))
    assert [d.code for d in caught.value.diagnostics] == ["SW2054"]


def arguments(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, list[str]]:
    """(megatron_args.sh, the warnings' codes)"""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())
    made = compile_recipe(load_recipe(recipe))
    file = made.files.get("megatron_args.sh")
    return None if file is None else file.decode(), [w.code for w in made.warnings]


H100 = {"target": "megatron", "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}}
PIPED = {
    "tensor": 2,
    "pipeline": 2,
    "data": 2,
    "zero_stage": 1,
    "micro_batch_size": 1,
    "sequence_parallel": True,
}
VIRTUAL = {**PIPED, "virtual_stages": 2, "activation_checkpointing": {"full": 2}}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ("--swiglu --disable-bias-linear --group-query-attention --rotary-base "
        "--use-distributed-optimizer")),
        ({"parallelism": VIRTUAL}, "--recompute-num-layers"),
        ({"model.config": {**SMALL_LLAMA, "model_type": "qwen3", "tie_word_embeddings": True}}, "--qk-layernorm"),  # noqa: E501
        ({"model.config": EXPERTS}, "--num-experts --moe-router-topk --sequence-parallel"),
        (
            {"model.config": {**SMALL_LLAMA, "rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 8192}}},  # noqa: E501
            "--use-rope-scaling --rope-scaling-factor",
        ),
    ],
    ids=["llama", "virtual", "qwen3", "mixtral", "llama3"],
)  # fmt: skip
def test_arguments_of_megatrons_own_script(
    changes: dict[str, Any],
    wanted: str,
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are options of its parser and stand by the rules of `lint`; a shell reads the file
    without complaint."""
    path = write_recipe({**H100, "parallelism": PIPED, **changes})
    text, warnings = arguments(path, monkeypatch)
    assert text is not None and "SW2055" not in warnings
    read = read_arguments("megatron_args.sh", text, 8)
    assert lint_arguments(read) == ()
    assert {given.name for given in read.given} >= set(wanted.split())
    assert read.integer("--pipeline-model-parallel-size") == 2 and read.has(
        "--pipeline-model-parallel-layout"
    )
    counted = 'source /dev/stdin; echo "${#MEGATRON_ARGS[@]}"'
    shell = subprocess.run(["bash", "-c", counted], input=text, capture_output=True, text=True)
    assert (
        int(shell.stdout) == sum(1 + len(given.values) for given in read.given) and not shell.stderr
    )
    tied = bool(changes.get("model.config", {}).get("tie_word_embeddings"))
    assert read.has("--untie-embeddings-and-output-weights") != tied


HOST: dict[str, Any] = {
    "target": "megatron",
    "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "h100-sxm-80gb"},
    "parallelism": {**PIPED, "data": 1, "offload": "optimizer"},
}
HOST_OPTIONS = (
    *("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--use-distributed-optimizer"),
    "--overlap-cpu-optimizer-d2h-h2d",
)


def test_the_optimizer_in_host_memory(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one data rank, too, it is the distributed optimizer's; nothing else is compiled for it."""
    path = write_recipe({**HOST, "training.precision": "bf16"})
    text, warnings = arguments(path, monkeypatch)
    assert text is not None and "SW2055" not in warnings
    read = read_arguments("megatron_args.sh", text, 4)
    assert lint_arguments(read) == ()
    assert {given.name for given in read.given} >= set(HOST_OPTIONS)
    assert "  --optimizer-offload-fraction 1.0\n" in text
    plan = compile_recipe(load_recipe(path)).plan
    assert plan.zero == {"stage": 1, "distributed_optimizer": True}
    assert not compiles_cpu_adam(plan)
    assert compiles_cpu_adam(dataclasses.replace(plan, target="deepspeed"))
    kept = {**HOST, "parallelism": {**HOST["parallelism"], "offload": "none"}}
    without, _ = arguments(write_recipe(kept), monkeypatch)
    assert without is not None and not any(option in without for option in HOST_OPTIONS)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**SMALL_LLAMA, "model_type": "gemma", "head_dim": 16}, "scaled by the square root"),
        (
            {**SMALL_LLAMA, "rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 32}},
            "original_max",
        ),
        ({**SMALL_LLAMA, "rope_theta": 10000.5}, "rope_theta 10000.5"),
        ({**SMALL_LLAMA, "hidden_act": "gelu"}, "gelu"),
    ],
    ids=["gemma", "llama3", "theta", "gelu"],
)
def test_what_its_script_has_no_option_for(
    config: dict[str, Any],
    said: str,
    write_recipe: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said in a warning: train.py runs it all the same."""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    monkeypatch.setattr("shardwright.compile.recipe_compiler.package_errors", lambda engine: ())
    made = compile_recipe(
        load_recipe(write_recipe({**H100, "parallelism": PIPED, "model.config": config}))
    )
    (told,) = (w for w in made.warnings if w.code == "SW2055")
    assert "megatron_args.sh" not in made.files and said in told.message


def test_its_script_keeps_no_fp32_weights_on_the_host(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-Core builds that optimizer where autograd records the shards' views."""
    path = write_recipe({**HOST, "training.precision": "fp32"})
    text, warnings = arguments(path, monkeypatch)
    assert text is None and "SW2055" in warnings


def test_cpu_ranks_have_no_arguments_file(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, warnings = arguments(write_recipe({"target": "megatron"}), monkeypatch)
    assert text is None and "SW2055" not in warnings


AUTO = {"virtual_stages": None, "sequence_parallel": None}


def searched(target: str, **pins: object) -> tuple[list[Layout], list[Layout]]:
    """(every layout that a search tries, those that it ranks), of eight layers' worth of work on
    eight GPUs."""
    config = {**SMALL_LLAMA, "num_hidden_layers": 6}
    recipe = dataclasses.replace(recipe_of(config, parallelism={**AUTO, **pins}), target=target)
    problem = problem_of(recipe, graph_of(config))
    return list(candidate_layouts(problem)), [e.strategy for e in search(problem).ranked]


def test_auto_virtual_stages_and_sequence_parallelism_are_searched() -> None:
    """Where the engine has them and the pins leave room; every layout that is ranked stands by its
    rules."""
    tried, ranked = searched(
        "megatron", tensor=2, zero_stage=1, micro_batch_size=1, activation_checkpointing="none"
    )
    found = {(s.pipeline, s.virtual_stages, s.sequence_parallel) for s in tried}
    assert {
        (1, 1, False),
        (1, 1, True),
        (2, 1, False),
        (2, 2, True),
        (2, 4, True),
        (4, 2, True),
    } <= found
    assert all(v == 1 for p, v, _ in found if p == 1) and max(p * v for p, v, _ in found) <= 8
    kinds = {(s.virtual_stages > 1, s.sequence_parallel) for s in ranked}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    assert all(
        s.virtual_stages == 1 or s.gradient_accumulation_steps % s.pipeline == 0 for s in ranked
    )
    assert {
        (s.virtual_stages, s.sequence_parallel) for s in searched("deepspeed", tensor=2)[0]
    } == {(1, False)}
    pinned = searched("megatron", tensor=2, virtual_stages=2, sequence_parallel=False, pipeline=2)[
        0
    ]
    assert {(s.virtual_stages, s.sequence_parallel) for s in pinned} == {(2, False)}


def test_chunks_of_an_interleaved_pipeline_are_placed_and_bounded() -> None:
    """What a rank holds is every p-th part of the model; no layout takes less than its bound; a
    part of the layers is recomputed in each chunk alike, as the engine counts them."""
    config = {**SMALL_LLAMA, "num_hidden_layers": 14}
    recipe = dataclasses.replace(
        recipe_of(config, parallelism={**AUTO, "tensor": 1}), target="megatron"
    )
    problem = problem_of(recipe, graph_of(config))
    found = [e for e in search(problem).ranked if e.strategy.virtual_stages > 1]
    bound = StepTimeBound(problem)
    assert len(found) > 10
    for e in found:
        s = e.strategy
        assert len(e.boundaries) == s.pipeline * s.virtual_stages + 1
        layout, again = price_planned_layout(problem, s, e.boundaries)
        assert again.time == e.time and again.memory == e.memory
        held = [[(b.start, b.stop) for b in blocks] for blocks in layout.ranks]
        cut = list(itertools.pairwise(e.boundaries))
        assert held == [cut[rank :: s.pipeline] for rank in range(s.pipeline)]
        if isinstance(s.activation_checkpointing, PartialCheckpointing):
            assert s.activation_checkpointing.full % s.virtual_stages == 0
        else:
            assert bound.least_seconds(s) <= e.time.step_seconds


BACKWARD = """
import torch
from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        print(torch.ones(1).is_cuda, torch.ones(1, device="cuda").device.type)
        return gradient * 2

patch_torch_for_cpu()
Recomputed.apply(torch.ones(2, requires_grad=True)).sum().backward()
"""


def test_what_is_recomputed_in_a_backward_pass_runs_on_the_cpu_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BACKWARD], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["True", "cpu"], done.stderr
