"""megatron_args.sh and the rules of `lint --for megatron` against Megatron-LM's own parser and
Megatron-Core."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.code_explanations import megatron_args_explanations
from shardwright.engines.megatron import megatron_equivalence
from shardwright.engines.megatron.megatron_arguments import MissingOption, schedule_options
from shardwright.plan.plan import PlanScheduler
from shardwright.recipe.learning_rate_schedules import scheduled_rate
from shardwright.recipe.recipe_loader import load_recipe
from tools.generate.megatron_argument_parser import OPTIONS, ROOT, unpacked

REFUSED = {
    "SW4921": "should be divisible by vp_size",
    "SW4922": "The remainder of M",
    "SW4923": "not divisible by expert_tensor_model_pipeline_parallel size",
    "SW4924": "sequence parallel",
    "SW4946": "num_attention_heads (12) must be a multiple of tensor_model_parallel_size (8)",
    "SW4947": "selected index k out of range",
}
"""Code of a layout that the parser lets through -> what Megatron-Core says of it."""
PARSER = {"SW4901", "SW4902", "SW4911", "SW4913", "SW4948"} | {f"SW49{n}" for n in range(31, 46)}
"""Codes that the parser itself stands for. SW4912 stops the calculator of micro-batches, which
comes behind it."""
SMALLEST: dict[str, str] = {
    "--num-layers": "32",
    "--hidden-size": "1024",
    "--num-attention-heads": "16",
    "--seq-length": "1024",
    "--max-position-embeddings": "1024",
    "--micro-batch-size": "1",
    "--global-batch-size": "64",
    "--train-iters": "10",
    "--lr": "1e-4",
}
"""What the parser wants beside any example."""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts_per_tok": 2}
MODELS: tuple[dict[str, Any], ...] = (
    LLAMA,
    {**LLAMA, "model_type": "mistral", "sliding_window": 1024},
    {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    {**LLAMA, "model_type": "qwen3", "head_dim": 64},
    {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, **EXPERTS},
    {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 512,
        "head_dim": 64,
        **EXPERTS,
    },
    {
        **LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 2,
    },
    {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 14,
        "n_head": 16,
        "vocab_size": 50257,
        "n_positions": 2048,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
    },
)
PLANS = 30


@pytest.mark.launch
@pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
)
def test_megatron_refuses_what_its_parser_lets_through() -> None:
    """The example of each rule; what is recommended instead gets further."""
    script = Path(__file__).with_name("refused_worker.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == REFUSED.keys()
    for code, (example, instead) in found.items():
        assert REFUSED[code] in example, (code, example)
        assert REFUSED[code] not in instead, (code, instead)


LR, UPDATES, RISING = 3e-4, 41, 7
MEGATRON_SCHEDULES: list[dict[str, Any]] = [
    {"name": "constant"},
    {"name": "constant_with_warmup"},
    {"name": "linear", "min_lr": 3e-5},
    {"name": "cosine", "num_cycles": 0.5},
    {"name": "cosine_with_min_lr", "min_lr": 3e-5},
    {"name": "polynomial"},
    {"name": "polynomial", "lr_end": 2e-5, "power": 1.0},
    {"name": "inverse_sqrt"},
    {"name": "inverse_sqrt", "timescale": RISING},
    {"name": "wsd", "decay_steps": 11, "min_lr": 3e-5},
    {"name": "wsd", "decay_steps": 11, "decay_type": "1-sqrt"},
    {"name": "warmup_stable_decay", "decay_steps": 11, "min_lr": 3e-5},
    {"name": "warmup_stable_decay", "decay_steps": 11, "decay_type": "linear", "num_cycles": 2.0},
]


@pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
)
@pytest.mark.parametrize("keys", MEGATRON_SCHEDULES)
def test_a_schedule_written_for_megatron_has_the_plans_rates(keys: dict[str, Any]) -> None:
    """Megatron-LM counts as transformers does: update k has the rate at k - 1."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = PlanScheduler(
        **{"warmup_steps": RISING, "min_lr": 0.0, "decay_steps": None, "first_step": 0, **keys}
    )
    options: Any = {option: value for option, value in schedule_options(scheduler)}  # noqa: C416
    group: dict[str, Any] = {"params": []}
    theirs = OptimizerParamScheduler(
        cast(Any, SimpleNamespace(param_groups=[group])),
        init_lr=float(options.pop("--lr-warmup-init", 0.0)),
        max_lr=LR,
        min_lr=float(options.pop("--min-lr")),
        lr_warmup_steps=RISING,
        lr_decay_steps=UPDATES,
        lr_decay_style=options.pop("--lr-decay-style"),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=UPDATES,
        wd_incr_style="constant",
        wsd_decay_steps=int(options.pop("--lr-wsd-decay-iters", 0)) or None,
        lr_wsd_decay_style=options.pop("--lr-wsd-decay-style", None),
    )
    assert not options
    for update in range(1, UPDATES + 1):
        ours = scheduled_rate(LR, scheduler, UPDATES, update)
        assert ours == pytest.approx(group["lr"], rel=1e-12, abs=1e-18), update
        theirs.step(1)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"name": "cosine_with_restarts"}, "scheduler.name cosine_with_restarts"),
        ({"name": "cosine", "num_cycles": 1.5}, "scheduler.num_cycles 1.5"),
        ({"name": "polynomial", "power": 2.0}, "scheduler.power 2.0"),
        ({"name": "inverse_sqrt", "timescale": 20}, "scheduler.timescale 20"),
        ({"name": "inverse_sqrt", "warmup_steps": 0}, "scheduler.timescale without a warm-up"),
        ({"name": "wsd", "warmup_type": "cosine"}, "scheduler.warmup_type cosine"),
        (
            {"name": "cosine_warmup_with_min_lr", "warmup_lr_rate": 0.1},
            "scheduler.warmup_lr_rate 0.1",
        ),
        (
            {"name": "warmup_stable_decay", "decay_steps": 11, "num_cycles": 1.5},
            "scheduler.num_cycles 1.5",
        ),
    ],
)
def test_a_schedule_that_megatron_lacks_is_not_written(keys: dict[str, Any], told: str) -> None:
    scheduler = PlanScheduler(
        **{"warmup_steps": RISING, "min_lr": 0.0, "decay_steps": None, **keys}
    )
    with pytest.raises(MissingOption) as found:
        list(schedule_options(scheduler))
    assert str(found.value) == told


def asked(questions: list[dict[str, Any]]) -> list[dict[str, str]]:
    command = [
        sys.executable,
        "-m",
        "tools.generate.megatron_argument_parser",
        str(unpacked()),
        "ask",
    ]
    text = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def whole(example: str) -> list[str]:
    words = shlex.split(example)
    return [
        *(word for name, value in SMALLEST.items() if name not in words for word in (name, value)),
        *words,
    ]


@pytest.mark.prove
def test_the_parser_takes_and_refuses_what_the_rules_say(proved: Callable[..., None]) -> None:
    entries = [e for e in megatron_args_explanations().values() if e.example and e.code != "SW4912"]
    cases = [
        (e.code, which, e.world_size or 16) for e in entries for which in ("example", "instead")
    ]
    told = asked(
        [
            {"world": world, "args": whole(getattr(megatron_args_explanations()[code], which))}
            for code, which, world in cases
        ]
    )
    for (code, which, _), answer in zip(cases, told, strict=True):
        assert bool(answer) == (which == "example" and code in PARSER), (code, which, answer)
    assert {e.code for e in entries} == PARSER | REFUSED.keys()
    proved("megatron-args", "rules", {"examples": len(cases), "let through": len(REFUSED)})


@pytest.mark.prove
def test_the_options_are_those_of_the_parser() -> None:
    before = OPTIONS.read_text(encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "tools.generate.megatron_argument_parser",
        str(unpacked()),
        "options",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, timeout=300)
        assert OPTIONS.read_text(encoding="utf-8") == before
    finally:
        OPTIONS.write_text(before, encoding="utf-8")


@pytest.mark.prove
def test_the_parser_takes_random_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proved: Callable[..., None]
) -> None:
    """Of the layouts that the rules allow, at their world size."""
    questions = [question for question, _, _ in random_plans(tmp_path, monkeypatch)]
    answers = asked(questions)
    assert answers == [{}] * PLANS, [(q, a) for q, a in zip(questions, answers, strict=True) if a]
    worlds = sorted({q["world"] for q in questions})
    proved(
        "megatron-args",
        "plans",
        {"accepted": len(answers), "smallest": worlds[0], "largest": worlds[-1]},
    )


@pytest.mark.prove
def test_the_parser_takes_each_exchange_of_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proved: Callable[..., None]
) -> None:
    """Its own checks and TransformerConfig's, which it builds from the options."""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    document = random_recipe(random.Random(1))
    document["model"]["config"] = MODELS[4]
    document["cluster"]["nodes"], document["training"]["precision"] = 2, "bf16"
    piped = {"pipeline": 2, "virtual_stages": 2, "data": 8}
    layout: dict[str, Any] = {"tensor": 1, "pipeline": 1, "context": 1, "data": 16, "expert": 2}
    layout |= {
        "zero_stage": 1,
        "expert_tensor": "tensor",
        "virtual_stages": 1,
        "micro_batch_size": 1,
    }
    layout |= {"sequence_parallel": False, "activation_checkpointing": "none"}
    choices = itertools.product(("alltoall", "deepep"), (False, True), ({}, piped))
    questions, texts = [], []
    for dispatcher, overlap, ranks in choices:
        chosen = {"expert_dispatcher": dispatcher, "expert_overlap": overlap, **ranks}
        document["parallelism"] = {**layout, **chosen}
        questions.append(asked_of(document, tmp_path)[0])
        texts.append(" ".join(questions[-1]["args"]))
    assert sum("--moe-flex-dispatcher-backend deepep" in text for text in texts) == 4
    assert sum("--overlap-moe-expert-parallel-comm" in text for text in texts) == 4
    answers = asked(questions)
    assert answers == [{}] * 8, answers
    proved("megatron-args", "exchange", {"accepted": len(answers)})


def random_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(what the parser is asked, the model's configuration, plan.json)"""
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    draw = random.Random(17)
    found: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    while len(found) < PLANS:
        document = random_recipe(draw)
        try:
            question, plan = asked_of(document, folder)
        except Refusal:
            continue
        found.append((question, document["model"]["config"], plan))
    return found


def asked_of(document: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the parser is asked of a recipe's plan, plan.json)"""
    (folder / "recipe.yaml").write_text(json.dumps(document))
    made = compile_recipe(load_recipe(folder / "recipe.yaml"))
    text = made.files["megatron_args.sh"].decode()
    body = text.partition("MEGATRON_ARGS=(\n")[2].rpartition(")")[0]
    words = [word for line in body.splitlines() for word in shlex.split(line, comments=True)]
    question = {"world": made.plan.strategy.world_size, "args": words}
    return question, json.loads(made.files["plan.json"])


def random_recipe(draw: random.Random) -> dict[str, Any]:
    nodes, virtual = draw.choice((1, 2, 16)), draw.choice((1, 1, 2))
    tensor, pipeline, context = (
        draw.choice((1, 2, 4, 8)),
        draw.choice((1, 2, 4)),
        draw.choice((1, 1, 2)),
    )
    model = draw.choice(MODELS)
    has_experts = "num_experts_per_tok" in model
    scheduler = {"name": "cosine", "warmup_steps": 10, "min_lr": 0}
    precision = draw.choice(("bf16", "bf16", "fp32"))
    return {
        "version": 1,
        "name": "random",
        "target": "megatron",
        "model": {"config": model, "weights": "random"},
        "cluster": {"nodes": nodes, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        "training": {
            "sequence_length": 1024,
            "global_batch_size": 512,
            "steps": 100,
            "precision": precision,
            "optimizer": {
                "name": "adamw",
                "lr": 3e-4,
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.1,
            },
            "scheduler": draw.choice((scheduler, {**scheduler, "name": "wsd", "decay_steps": 20})),
        },
        "data": {"kind": "synthetic"},
        "parallelism": {
            "tensor": tensor,
            "pipeline": pipeline,
            "context": context,
            "data": nodes * 8 // (tensor * pipeline * context) or 1,
            "expert": draw.choice((1, 2, 4)) if has_experts else 1,
            "expert_tensor": draw.choice(("tensor", 1)) if has_experts else "tensor",
            "zero_stage": draw.choice((0, 1)),
            "micro_batch_size": draw.choice((1, 2)),
            "activation_checkpointing": draw.choice(("none", "selective", "full", {"full": 2})),
            "sequence_parallel": tensor > 1 and draw.random() < 0.7,
            "virtual_stages": virtual if pipeline > 1 else 1,
            "offload": draw.choice(("none", "optimizer")) if precision == "bf16" else "none",
        },
    }
