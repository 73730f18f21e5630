"""docs/rules.md: the rules about layouts, from the registry, each with what it says where it is
broken."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from shardwright.diagnostics import Diagnostic
from shardwright.diagnostics.code_registry import CODES
from shardwright.diagnostics.diagnostic_rendering import render_diagnostics
from shardwright.engines.engine_table import ENGINES
from shardwright.engines.megatron.megatron_capabilities import (
    MEGATRON,
    REFUSED_KEYS,
    SUPPORTED_KEYS,
)
from shardwright.layout.axes import AXES
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Candidate, Layout, Rule
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.objectives import ObjectiveSection
from shardwright.recipe.recipe_types import (
    DataSection,
    LoraSection,
    NoiseScaleSection,
    Recipe,
    with_resolved_kernels,
)
from shardwright.search.rule_registry import GENERAL_RULES, rules_for
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA, graph_of, model_section, recipe_of

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "openai-community/gpt2",
    "mistralai/Mixtral-8x7B-v0.1",
    "bigscience/bloom-560m",
)
MAMBA: dict[str, JsonValue] = {
    "model_type": "mamba",
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "vocab_size": 50280,
}
LAYERDROP: dict[str, JsonValue] = {
    "model_type": "opt",
    "num_hidden_layers": 4,
    "layerdrop": 0.1,
}
BERT: dict[str, JsonValue] = {
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 260,
}
PROPHETNET: dict[str, JsonValue] = {
    "model_type": "prophetnet",
    "hidden_size": 64,
    "num_decoder_layers": 4,
    "vocab_size": 260,
    "decoder_ffn_dim": 64,
    "num_decoder_attention_heads": 4,
    "is_decoder": True,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
}
PLAIN = Layout(
    tensor=1,
    pipeline=1,
    data=16,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=4,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)
GLOBAL_BATCH_SIZE = 64
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    *({"tensor": t, "data": 16 // t if 16 % t == 0 else 1} for t in (2, 3, 5, 8, 16)),
    *({"pipeline": 4, "data": 4, "zero_stage": z} for z in (0, 1, 3)),
    {"zero_stage": 0},
    {"zero_stage": 3},
    {"pipeline": 64, "data": 1},
    {"pipeline": 4, "data": 4, "schedule": "dualpipev", "micro_batch_size": 4},
    {"schedule": "dualpipev"},
    {"micro_batch_size": 3},
    {"expert": 2},
    {"expert": 3},
    {"expert": 16},
    {"expert": 2, "zero_stage": 0},
    {"virtual_stages": 2},
    {"pipeline": 4, "data": 4, "activation_checkpointing": PartialCheckpointing(full=32)},
    {"activation_checkpointing": ("mlp", "moe")},
    {"zero_stage": 1, "offload": "parameters"},
    {"zero_stage": 3, "offload": "parameters"},
    {"context": 2, "data": 8},
    {"context": 3, "data": 5},
    {"sequence_parallel": True},
    {"virtual_stages": 2},
    {"expert_overlap": True},
    {"expert": 2, "expert_dispatcher": "deepep"},
    {"expert": 3, "expert_dispatcher": "deepep"},
    {"expert": 2, "expert_overlap": True, "pipeline": 4, "data": 4},
    {"data": 1, "micro_batch_size": 64, "gradient_accumulation_steps": 1},
    {"zero_stage": 0, "offload": "optimizer"},
)
NOISE = NoiseScaleSection(every_steps=50, rows=32)
TEXT = DataSection(kind="text", path="corpus/*.txt", tokenizer="byte", packing=True, shuffle=True)


def page() -> str:
    lines = [
        "# The rules about layouts",
        "",
        "<!-- made by `make generated` from compiler/shardwright/search/rule_registry.py -->",
        "",
        "`plan` omits layouts that break a rule with severity error; warnings and notes reject "
        "nothing. `estimate` prints the code and prices such a layout all the same, unless the "
        "degrees do not multiply to the number of GPUs (SW3101) or the batch does not divide "
        "(SW3102): `estimate --json` then has no `strategy`, `memory` and `time`. `shardwright "
        "explain RECIPE --why-not tensor=8,pipeline=2` names the rule that rejects a layout.",
        "",
        "Each entry below is one rule: its code, title and severity, the reason, the keys that "
        "decide it, and an example of its message. The keys are those of the layout, and the one "
        "that the message is about; other keys of the recipe can matter, as the reason says. "
        "`= valid:` lists values of that key near the one that is refused. *Verified* means that "
        "losses, gradient norms and weights were compared with those of one process "
        "([proof.md](proof.md)).",
    ]
    ours = {
        code: rule for code, rule in rules_for("deepspeed").items() if code not in GENERAL_RULES
    }
    groups = (
        ("For every engine", GENERAL_RULES),
        ("For DeepSpeed (`target: deepspeed`)", ours),
        ("For plain PyTorch (`target: reference`)", ENGINES["reference"].rules),
        ("For Megatron-Core (`target: megatron`)", ENGINES["megatron"].rules),
    )
    for title, rules in groups:
        lines += ["", f"## {title}"]
        for code in sorted(rules):
            lines += _rule(code, rules[code])
    shown = {code for _, rules in groups for code in rules}
    lines += _megatron_keys()
    lines += [
        "",
        "## Memory and the search",
        "",
        "| code | problem |",
        "|---|---|",
        *(
            f"| {code} | {title} |"
            for code, title in CODES.items()
            if code.startswith("SW32") and code not in shown
        ),
    ]
    return "\n".join(lines) + "\n"


def _megatron_keys() -> list[str]:
    """The table of every key under `target: megatron` that no rule about layouts decides."""
    refused = [
        (
            f"| `{name}` | "
            f"{', '.join(f'`{v}`' for v in key.allowed if v is not None) or 'left out'} | SW1922: "
            f"{key.why} |"
        )
        for name, key in REFUSED_KEYS.items()
    ]
    for name, values in MEGATRON.trained_values().items():
        why = MEGATRON.refusal_reasons.get(name, "no other one is implemented")
        shown = ", ".join(f"`{v}`" for v in values)
        refused.append(f"| `{name}` | {shown} | {MEGATRON.refusal_code}: {why} |")
    return [
        "",
        "### Keys of a recipe under `target: megatron`",
        "",
        "Supported: "
        + ", ".join(f"`{name}`" for name in SUPPORTED_KEYS)
        + ". Keys of `parallelism` are decided by the rules above. The other keys support only "
        + "some values:",
        "",
        "| key | supported values | error for other values |",
        "|---|---|---|",
        *refused,
    ]


def _rule(code: str, rule: Rule) -> list[str]:
    found = examples().get(code)
    severity = "" if found is None else f" ({found.severity})"
    lines = ["", f"### {code}: {CODES[code]}{severity}", ""]
    reads = [
        f"`{axis.section}.{axis.name}`" for axis in AXES if axis.name in rule.reads and axis.section
    ]
    if found is not None and found.key and (key := ".".join(map(str, found.key))):
        reads += [f"`{key}`"] * (f"`{key}`" not in reads)
    doc = " ".join((inspect.getdoc(rule.check) or "").split())
    lines += [f"{doc}\n"] if doc else []
    lines += [f"Keys that decide it, beside the model: {', '.join(reads)}."] if reads else []
    if found is not None:
        lines += [
            "",
            "```text",
            *render_diagnostics((found,), None, color=False).splitlines(),
            "```",
        ]
    return lines


@functools.cache
def examples() -> dict[str, Diagnostic]:
    """What each rule says of the first of these layouts that breaks it."""
    found: dict[str, Diagnostic] = {}
    for subject in itertools.chain(subjects(), further_subjects()):
        for code, rule in {
            **rules_for("deepspeed"),
            **rules_for("reference"),
            **rules_for("megatron"),
        }.items():
            if code not in found and (diagnostic := rule.check(subject)) is not None:
                found[code] = diagnostic
    return found


def subjects() -> Iterator[Candidate]:
    sections = (*(model_section(source=source) for source in MODELS), model_section(config=MAMBA))
    for section, recipe, change in itertools.product(sections, recipes(), CHANGES):
        sequences = change.get("micro_batch_size", 1) * change.get("data", PLAIN.data)
        accumulation = {"gradient_accumulation_steps": max(1, GLOBAL_BATCH_SIZE // sequences)}
        strategy = dataclasses.replace(PLAIN, **{**accumulation, **change})
        pins = dataclasses.replace(recipe.parallelism, expert=strategy.expert)
        graph, pinned = build_model_graph(section), recipe.model.attention
        yield Candidate(
            recipe=dataclasses.replace(recipe, parallelism=pins),
            graph=graph if pinned == "auto" else dataclasses.replace(graph, attention=pinned),
            cluster=resolve_cluster(recipe.cluster),
            strategy=strategy,
        )


def further_subjects() -> Iterator[Candidate]:
    """One layout for each rule that wants a model or a key of its own."""
    plain = recipe_of(
        cluster={"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"},
        training={"sequence_length": 1024, "global_batch_size": GLOBAL_BATCH_SIZE},
    )
    llama = graph_of(SMALL_LLAMA)
    packed = dataclasses.replace(plain, data=TEXT)
    images = dataclasses.replace(llama, task="image-text-to-text")
    pairs = dataclasses.replace(llama, task="contrastive")
    mixtral: dict[str, JsonValue] = {
        **SMALL_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    gpt_oss = graph_of({**mixtral, "model_type": "gpt_oss", "head_dim": 8})
    dynamic: JsonValue = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    falling = dataclasses.replace(
        plain.training.scheduler, name="linear", warmup_steps=0, warmup_ratio=None, min_lr=None
    )
    muon = dataclasses.replace(
        plain.training.optimizer, name="muon", momentum=0.95, ns_steps=5, adamw_lr=3e-4
    )

    def with_training(**changes: Any) -> Recipe:
        return dataclasses.replace(plain, training=dataclasses.replace(plain.training, **changes))

    def with_model(**changes: Any) -> Recipe:
        return dataclasses.replace(plain, model=dataclasses.replace(plain.model, **changes))

    cases: tuple[tuple[ModelGraph, Recipe, dict[str, Any]], ...] = (
        (images, plain, {"pipeline": 4, "data": 4, "schedule": "dualpipev"}),
        (pairs, plain, {"tensor": 2, "data": 8}),
        (pairs, plain, {"activation_checkpointing": "selective"}),
        (dataclasses.replace(llama, model_type="prophetnet"), with_model(loss="chunked"), {}),
        (
            dataclasses.replace(llama, config={**llama.config, "rope_parameters": dynamic}),
            packed,
            {},
        ),
        (graph_of(MAMBA), plain, {"activation_checkpointing": "selective"}),
        (graph_of(LAYERDROP), plain, {"zero_stage": 3}),
        (graph_of(BERT), plain, {}),
        (graph_of(PROPHETNET), plain, {}),
        (
            graph_of({**mixtral, "output_router_logits": True, "router_aux_loss_coef": 0.02}),
            plain,
            {},
        ),
        (llama, with_training(scheduler=falling, steps=2), {}),
        (
            llama,
            dataclasses.replace(plain, target="megatron"),
            {"activation_checkpointing": ("shared_experts",)},
        ),
        (gpt_oss, plain, {"tensor": 2, "data": 8, "sequence_parallel": True}),
        (
            graph_of(mixtral),
            plain,
            {"tensor": 4, "data": 4, "sequence_parallel": True, "expert_tensor": 2},
        ),
        (gpt_oss, with_training(optimizer=muon), {}),
        (
            graph_of({**SMALL_LLAMA, "model_type": "phi3", "pad_token_id": 0}),
            plain,
            {"tensor": 2, "data": 8},
        ),
        (
            llama,
            dataclasses.replace(
                with_model(transformer_engine="on"),
                cluster=dataclasses.replace(plain.cluster, gpu="cpu"),
            ),
            {},
        ),
        (
            llama,
            with_training(low_precision="fp8_blockwise", low_precision_keep=("*.o_proj",)),
            {},
        ),
        (
            llama,
            dataclasses.replace(
                with_training(low_precision="fp8_blockwise"),
                model=dataclasses.replace(plain.model, transformer_engine="off"),
            ),
            {},
        ),
    )
    for graph, recipe, change in cases:
        accumulation = {"gradient_accumulation_steps": GLOBAL_BATCH_SIZE // change.get("data", 16)}
        yield Candidate(
            recipe=recipe,
            graph=graph,
            cluster=resolve_cluster(recipe.cluster),
            strategy=dataclasses.replace(PLAIN, **{**accumulation, **change}),
        )


def recipes() -> tuple[Recipe, ...]:
    cluster = {"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"}
    training = {"sequence_length": 1024, "global_batch_size": GLOBAL_BATCH_SIZE}
    plain = recipe_of(cluster=cluster, training=training)
    single = recipe_of(cluster=cluster, training={**training, "precision": "fp32"})
    half = recipe_of(cluster={**cluster, "gpu": "cpu"}, training={**training, "precision": "fp16"})
    return (
        plain,
        dataclasses.replace(plain, cluster=dataclasses.replace(plain.cluster, islands=2)),
        dataclasses.replace(
            single, model=dataclasses.replace(single.model, attention="flash_attention_2")
        ),
        with_resolved_kernels(plain, "compile"),
        dataclasses.replace(plain, data=TEXT),
        dataclasses.replace(
            plain, lora=LoraSection(rank=8, alpha=16.0, dropout=0.0, target_modules=("c_attn",))
        ),
        *(
            dataclasses.replace(
                plain,
                model=dataclasses.replace(plain.model, freeze=(entry,)),
                lora=LoraSection(rank=8, alpha=16.0, dropout=0.0, target_modules=None)
                if adapted
                else None,
            )
            for entry, adapted in (("vision", False), ("*", False), ("model.embed_tokens", True))
        ),
        *(
            recipe_of(
                cluster={**cluster, "gpu": gpu},
                training={**training, "low_precision": name, "low_precision_keep": keep},
            )
            for gpu, name, keep in (
                ("a100-sxm4-80gb", "fp8_rowwise", ()),
                ("h100-sxm-80gb", "fp8_tensorwise", ()),
                ("h100-sxm-80gb", "fp8_rowwise", ("oproj",)),
                ("h100-sxm-80gb", "fp8_rowwise", ("*",)),
            )
        ),
        recipe_of(
            cluster={**cluster, "gpu": "h100-sxm-80gb"},
            training={**training, "low_precision": "fp8_rowwise", "precision": "fp16"},
        ),
        dataclasses.replace(plain, extra={"wall_clock_breakdown": True}),
        recipe_of(cluster=cluster, training={**training, "sequence_length": 262_144}),
        recipe_of(cluster=cluster, training={**training, "gradient_accumulation_dtype": "bf16"}),
        recipe_of(cluster={**cluster, "gpu": "v100-sxm2-32gb"}, training=training),
        dataclasses.replace(half, model=dataclasses.replace(half.model, router_aux_loss=0.001)),
        recipe_of(cluster={**cluster, "inter_node_gbits_per_second": 50.0}, training=training),
        dataclasses.replace(plain, tracking=dataclasses.replace(plain.tracking, noise_scale=NOISE)),
        dataclasses.replace(
            plain,
            tracking=dataclasses.replace(plain.tracking, noise_scale=NOISE),
            training=dataclasses.replace(
                plain.training, objective=ObjectiveSection(name="dpo", beta=0.1)
            ),
        ),
        recipe_of(
            cluster=cluster,
            training={
                **training,
                "optimizer": dataclasses.replace(
                    plain.training.optimizer, name="muon", momentum=0.95, ns_steps=5, adamw_lr=3e-4
                ),
            },
        ),
        recipe_of(
            cluster=cluster,
            training={
                **training,
                "optimizer": dataclasses.replace(plain.training.optimizer, name="adamw_8bit"),
            },
        ),
        recipe_of(
            cluster={
                "nodes": 5,
                "gpus_per_node": 4,
                "gpu": "b200-sxm-180gb",
                "nvlink_domain_gpus": 16,
            },
            training=training,
        ),
    )
